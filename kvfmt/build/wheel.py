"""Packs llama-cpp-python around the libraries that were compiled for the tools, and installs it.

Nothing is compiled a second time: the package's own CMake build is switched off.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from kvfmt.build.compile import LIBRARIES
from kvfmt.build.console import step
from kvfmt.build.fetch import sha256_of
from kvfmt.build.paths import build_dir
from kvfmt.build.pins import Pin
from kvfmt.errors import BuildFailed

# What a wheel is made of, besides llama_cpp/ itself.
PROJECT_FILES = ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE.md")


def wheel_version(pin: Pin, series_hash: str, patched: bool, cuda: bool = False) -> str:
    """The version with its local part: kvfmt.<series>.h<hash>, or kvfmt.stock without patches; then .cuda if that is in it."""
    own = f"kvfmt.{pin.series}.h{series_hash[:8]}" if patched else "kvfmt.stock"
    return f"{pin.version}+{own}{'.cuda' if cuda else ''}"


def build_wheel(pin: Pin, libraries: Path, version: str, names: tuple[str, ...] = LIBRARIES) -> Path:
    """The wheel of that version around the libraries of those names in that folder; made only if anything in it changed.

    Raises BuildFailed.
    """
    home = build_dir(pin.name)
    source = home / "src"
    inputs = [p for p in sorted((source / "llama_cpp").rglob("*")) if p.is_file() and p.suffix != ".pyc"]
    inputs += [source / name for name in PROJECT_FILES] + [_library(libraries, name) for name in names]
    digest = hashlib.sha256(version.encode())
    for file in inputs:
        digest.update(f"{file.name} {sha256_of(file)}\n".encode())
    folder = home / "wheel"
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == digest.hexdigest() and (made := list(folder.glob("*.whl"))):
        return made[0]
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "source"
    shutil.copytree(source / "llama_cpp", work / "llama_cpp", ignore=shutil.ignore_patterns("__pycache__", "lib"))
    for name in PROJECT_FILES:
        shutil.copy2(source / name, work / name)
    (work / "llama_cpp" / "lib").mkdir()
    for name in names:
        shutil.copy2(_library(libraries, name).resolve(), work / "llama_cpp" / "lib" / _library(libraries, name).name)
    init = work / "llama_cpp" / "__init__.py"
    text, count = re.subn(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', init.read_text("utf-8"))
    if count != 1:
        raise BuildFailed(f"{init} has no single __version__ line", "The pin names a version that kvfmt does not know how to pack.")
    init.write_text(text, "utf-8")
    command = [sys.executable, "-m", "pip", "wheel", str(work), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    command += ["--disable-pip-version-check", "--no-input", "-Ccmake.define.LLAMA_BUILD=OFF", "-Ccmake.define.LLAVA_BUILD=OFF"]
    _run(command, "pip could not build the wheel")
    shutil.rmtree(work)
    stamp.write_text(digest.hexdigest())
    (made,) = folder.glob("*.whl")
    step(f"packed {made.name}")
    return made


def install_wheel(wheel: Path, version: str) -> None:
    """Installs the wheel into the running Python's environment unless this very file is installed. Raises BuildFailed."""
    marker = Path(sys.prefix) / ".kvfmt-wheel"
    identity = f"{wheel} {sha256_of(wheel)}"
    if _installed_version() == version and marker.exists() and marker.read_text() == identity:
        step(f"llama-cpp-python {version} is installed")
        return
    marker.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", "--no-index"]
    _run([*command, "--disable-pip-version-check", "--no-input", str(wheel)], "pip could not install the wheel")
    marker.write_text(identity)
    step(f"installed llama-cpp-python {version}")


def _installed_version() -> str | None:
    try:
        return metadata.version("llama_cpp_python")
    except metadata.PackageNotFoundError:
        return None


def _library(folder: Path, name: str) -> Path:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return folder / f"lib{name}.{suffix}"


def _run(command: list[str], message: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise BuildFailed(f"{message}:\n{tail}", f"The command was: {' '.join(command)}")
