"""Compiles the patched tree with CMake and ninja: the tools, upstream's tests, and the libraries of the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

from kvfmt.build import console
from kvfmt.build.cuda import CudaBuild, measured
from kvfmt.build.fetch import require_space
from kvfmt.build.flags import FLAGS, NATIVE, PORTABLE, SANITIZED_FLAGS
from kvfmt.build.paths import build_dir
from kvfmt.build.pins import Pin
from kvfmt.errors import BuildFailed, MissingTool

TOOLS = (
    "llama-cli",
    "llama-completion",
    "llama-server",
    "llama-perplexity",
    "llama-bench",
    "llama-batched-bench",
    "ggml-rpc-server",
)
TESTS = ("test-quantize-fns", "test-backend-ops", "test-gguf", "test-save-load-state")
LIBRARIES = ("llama", "mtmd", "ggml", "ggml-base", "ggml-cpu", "ggml-rpc")

#: The library that a CUDA build has beside those.
CUDA_LIBRARY = "ggml-cuda"
#: Below a CUDA build's folder: what it was linked with where no toolkit has it.
LIBRARIES_BESIDE = "libraries"

# About 0.5 GB for both trees, objects and programs, measured; the rest is room for the compilers and for growth.
FIRST_BUILD_BYTES = 2_000_000_000
REBUILD_BYTES = 500_000_000
#: Of a CUDA build, for each architecture: 165 objects of 0.4 to 1.1 MB and the library, with room; not measured as a whole.
CUDA_BYTES = 500_000_000
STAMP = ".kvfmt-configured.json"

_STATUS = re.compile(r"^\[(\d+)/(\d+)\] ")


def program(name: str) -> str:
    """The path of cmake or ninja: the one installed beside this Python, else the system's. Raises MissingTool."""
    own = os.path.join(sys.prefix, "bin")
    found = shutil.which(name, path=own + os.pathsep + os.environ.get("PATH", ""))
    if not found:
        raise MissingTool(f"{name} is not installed", f"Run `make setup`, or: pip install {name}")
    return found


def check_compilers() -> None:
    """Raises MissingTool unless a C and a C++ compiler answer."""
    for variable, language, names in (("CC", "C", ("cc", "gcc", "clang")), ("CXX", "C++", ("c++", "g++", "clang++"))):
        chosen = os.environ.get(variable)
        candidates = (chosen.split()[0],) if chosen else names
        if not any(_answers(name) for name in candidates):
            said = f"{variable}={chosen} does not run" if chosen else f"none of {', '.join(names)} runs"
            raise MissingTool(
                f"no {language} compiler: {said}",
                "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; "
                f"macOS: xcode-select --install), or set {variable} to the one you have.",
            )


def _answers(compiler: str) -> bool:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def build_tools(
    pin: Pin, targets: tuple[str, ...], *, jobs: int | None = None, cuda: CudaBuild | None = None, portable: bool = False
) -> Path:
    """Configures if need be, compiles the targets, returns the folder with programs and libraries.

    A CUDA build has a folder of its own. A ``portable`` one runs on other processors than the one at hand. An interrupted compilation
    goes on where it was.
    Raises MissingTool, NoSpace, BuildFailed.
    """
    home = build_dir(pin.name)
    folder = home / ("cmake-cuda" if cuda else "cmake-cpu")
    check_compilers()
    first = not (folder / "bin").exists()
    needed = FIRST_BUILD_BYTES if first else REBUILD_BYTES
    if first and cuda:
        needed += CUDA_BYTES * len(cuda.architectures.split(";"))
    require_space(home, needed, "Compiling llama.cpp")
    _configure(home / "src" / "vendor" / "llama.cpp", folder, (*FLAGS, *(PORTABLE if portable else NATIVE)), cuda)
    _ninja(folder, targets, jobs)
    if cuda:
        for line in measured(folder).lines():
            console.step(line)
    return folder / "bin"


def build_sanitized(pin: Pin, *, jobs: int | None = None) -> Path:
    """libllama under AddressSanitizer, in a folder of its own; returns the folder with the libraries. Raises what ``build_tools`` raises."""
    home = build_dir(pin.name)
    folder = home / "cmake-asan"
    check_compilers()
    require_space(home, REBUILD_BYTES, "Compiling llama.cpp with AddressSanitizer")
    _configure(home / "src" / "vendor" / "llama.cpp", folder, SANITIZED_FLAGS)
    _ninja(folder, ("llama",), jobs)
    return folder / "bin"


def _environment(folder: Path) -> dict[str, str]:
    # llama.cpp stamps the commit of the git repository around it into every build; that would be kvfmt's own,
    # and each of its commits would compile again.
    chosen = {"GIT_DIR": os.devnull, "NINJA_STATUS": "[%f/%t] "}
    # Where ccache is installed, llama.cpp uses it. Paths relative to this folder let checkouts share what it holds.
    return {"CCACHE_BASEDIR": str(folder.parent), **os.environ, **chosen}


def _configure(source: Path, folder: Path, flags: tuple[str, ...], cuda: CudaBuild | None = None) -> None:
    command = [program("cmake"), "-S", str(source), "-B", str(folder), "-G", "Ninja", *flags, *(cuda.flags(folder / LIBRARIES_BESIDE) if cuda else ())]
    command.append(f"-DCMAKE_MAKE_PROGRAM={program('ninja')}")
    wanted = json.dumps({"command": command, "cc": os.environ.get("CC"), "cxx": os.environ.get("CXX")})
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted and (folder / "build.ninja").exists():
        return
    if stamp.exists() and json.loads(stamp.read_text())["command"][0] != command[0]:
        (folder / "CMakeCache.txt").unlink(missing_ok=True)  # another cmake does not accept it
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(folder))
    if done.returncode:
        lacking = sorted(set(re.findall(r"^\s+CUDA::(\w+)$", done.stderr, re.MULTILINE)))
        if cuda and lacking:
            raise MissingTool(
                f"the CUDA toolkit of {cuda.nvcc} has no {', '.join(lacking)}",
                "Install the whole toolkit: nvcc alone compiles, but ggml-cuda links with cuBLAS and the driver (or the toolkit's stub of it).",
            )
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise BuildFailed(f"CMake could not configure llama.cpp:\n{tail}", f"The command was: {' '.join(command)}")
    stamp.write_text(wanted)
    console.step("configured")


def _ninja(folder: Path, targets: tuple[str, ...], jobs: int | None) -> None:
    command = [program("ninja"), "-C", str(folder), *([f"-j{jobs}"] if jobs else []), *targets]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=_environment(folder))
    since_failure: list[str] = []
    recent: deque[str] = deque(maxlen=40)
    done = 0
    try:
        with console.progress("compile", 0) as update:
            for line in process.stdout:
                if status := _STATUS.match(line):
                    done = int(status[1])
                    update(done, int(status[2]))
                    if since_failure and not line.startswith("FAILED"):
                        continue
                elif line.startswith("FAILED"):
                    since_failure.append(line)
                elif since_failure and len(since_failure) < 200:
                    since_failure.append(line)
                else:
                    recent.append(line)
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode < 0:
        raise BuildFailed(f"ninja was ended by signal {-process.returncode}", "Run the same command again: it goes on where it stopped.")
    if process.returncode:
        # A command line of ninja's is longer than what the compiler says; cut it.
        lines = [line.rstrip()[:400] for line in since_failure or recent][:60]
        raise BuildFailed(
            "the compilation stopped:\n" + "\n".join(lines),
            f"Once the cause is gone, run the same command again: it goes on where it stopped. "
            f"By hand: {' '.join(command)}",
        )
    console.step(f"compiled ({done} steps)" if done else "compiled before, nothing to do")
