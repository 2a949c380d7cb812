"""The CPU backend of a build with its kvq files compiled for another instruction set.

Only our files are compiled again; the rest is linked as it is. Needs the compile_commands.json of the build.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-3000:]}"


def relink(build: Path, march: str, libdir: Path) -> list[str]:
    """Fill ``libdir`` with libggml-base.so of ``build`` (a CMake folder) and a libggml-cpu.so for -march=``march``.

    Returns the names of the files that were compiled again.
    """
    libdir.mkdir(parents=True, exist_ok=True)
    objects, again, compiler = [], [], "c++"
    for entry in json.loads((build / "compile_commands.json").read_text()):
        command = [word for word in shlex.split(entry["command"]) if not word.endswith("ccache")]
        place = command.index("-o") + 1
        if "/ggml-cpu.dir/" not in command[place]:
            continue
        source = Path(entry["file"])
        if source.name.startswith("kvq"):
            again.append(source.name)
            command[place] = str(libdir / f"{source.name}.o")
            command = [word for word in command if not word.startswith(("-march=", "-mavx", "-mfma", "-mf16c", "-mbmi"))]
            command.insert(1, f"-march={march}")
            place = command.index("-o") + 1
            _run(command, Path(entry["directory"]))
        if source.suffix == ".cpp":
            compiler = command[0]
        objects.append(str(Path(entry["directory"]) / command[place]))
    for library in (build / "bin").glob("libggml-base.so*"):
        shutil.copy(library, libdir)
    _run([compiler, "-shared", "-fopenmp", "-o", "libggml-cpu.so", *objects, "-L.", "-lggml-base", "-lpthread"], libdir)
    return sorted(again)
