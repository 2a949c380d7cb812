"""The CPU backend of a build with its kvq files compiled for another instruction set.

Only our files are compiled again, once for all that they include; the rest is linked as it is. Needs the compile_commands.json of the build.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

from build_cache import kept
from cuda_sources import digest

from kvfmt.build.paths import cache_dir

#: So many objects stay in the cache.
KEPT = 60


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-3000:]}"
    return done.stdout


def _compiled(command: list[str], folder: Path, march: str) -> Path:
    """The object of a compiler's ``command`` for -march=``march``, from the cache if the preprocessed text, the options and the compiler are the same."""
    command = [word for word in command if not word.startswith(("-march=", "-mavx", "-mfma", "-mf16c", "-mbmi"))]
    command.insert(1, f"-march={march}")
    out, source = command.index("-o") + 1, Path(command[command.index("-c") + 1])
    text = _run([*command[: out - 1], *command[out + 1 :], "-E", "-P"], folder)
    options = [word for i, word in enumerate(command) if i != out and not word.startswith("-I") and word != str(source)]
    name = f"{source.name}-{digest(_run([command[0], '--version'], folder), options, text)}.o"

    def compile_to(partial: Path) -> None:
        _run([*command[:out], str(partial), *command[out + 1 :]], folder)

    return kept(cache_dir() / "simd", name, KEPT, compile_to)


def relink(build: Path, march: str, libdir: Path) -> list[str]:
    """Fill ``libdir`` with libggml-base.so of ``build`` (a CMake folder) and a libggml-cpu.so for -march=``march``.

    Returns the names of the files that were compiled for it.
    """
    libdir.mkdir(parents=True, exist_ok=True)
    objects, again, compiler = [], [], "c++"
    for entry in json.loads((build / "compile_commands.json").read_text()):
        command = [word for word in shlex.split(entry["command"]) if not word.endswith("ccache")]
        made = command[command.index("-o") + 1]
        if "/ggml-cpu.dir/" not in made:
            continue
        source, folder = Path(entry["file"]), Path(entry["directory"])
        if source.name.startswith("kvq"):
            again.append(source.name)
            objects.append(str(_compiled(command, folder, march)))
        else:
            objects.append(str(folder / made))
        if source.suffix == ".cpp":
            compiler = command[0]
    for library in (build / "bin").glob("libggml-base.so*"):
        shutil.copy(library, libdir)
    _run([compiler, "-shared", "-fopenmp", "-o", "libggml-cpu.so", *objects, "-L.", "-lggml-base", "-lpthread"], libdir)
    return sorted(again)
