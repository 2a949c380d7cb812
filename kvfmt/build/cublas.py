"""What ggml-cuda is linked with where the toolkit lacks it: cuBLAS of NVIDIA's Python packages, and a stub of the driver.

Packages have their libraries without the name that a linker looks for, and nothing of the driver. Standard library only, as flags.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvfmt.build.toolkit import folders, home_of
from kvfmt.errors import BuildFailed, MissingTool

#: Names of the libraries, as a linker has them.
LINKED = ("cudart", "cublas", "cublasLt", "cuda")
#: What every function of the stub returns: CUDA_ERROR_STUB_LIBRARY, so that a program that runs with it finds no GPU and says why.
STUB_ERROR = 34


def lacking(nvcc: Path) -> list[str]:
    """Those of ``LINKED`` that neither the toolkit of this nvcc nor the linker's own folders have under the name ``lib<name>.so``."""
    places = [place / below for place in folders(nvcc) for below in ("", "stubs")]

    def there(name: str) -> bool:
        file = f"lib{name}.so"
        return any((place / file).exists() for place in places) or os.path.isabs(_of_linker(file))

    return [name for name in LINKED if not there(name)]


def _compiler() -> list[str]:
    return (os.environ.get("CXX") or "c++").split()


def _of_linker(file: str) -> str:
    """The path of a library in the compiler's own folders; the name alone if it has none."""
    try:
        return subprocess.run([*_compiler(), f"-print-file-name={file}"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return file


def of_packages(major: int, places: Iterable[str | Path]) -> Path | None:
    """The folder with ``lib`` and ``include`` of a package of cuBLAS for this major version of CUDA, below one of the places."""
    for place in map(Path, places):
        for home in (place / "nvidia" / f"cu{major}", place / "nvidia" / "cublas"):
            if (home / "lib" / f"libcublas.so.{major}").exists() and (home / "include" / "cublas_v2.h").exists():
                return home
    return None


def flags(nvcc: Path, cublas: Path | None, folder: Path) -> tuple[str, ...]:
    """What CMake is told so that it finds what is lacking; links to it, and the stub, are made in the folder.

    ``cublas`` is a folder as :func:`of_packages` gives. What is not in it either is left for CMake to name. Raises BuildFailed.
    """
    missing = lacking(nvcc)
    if not missing:
        return ()
    folder.mkdir(parents=True, exist_ok=True)
    places = [*folders(nvcc), *([cublas / "lib"] if cublas else [])]
    for name in missing:
        if name == "cuda":
            _make_stub(nvcc, folder / "stubs")
        elif found := [file for place in places for file in sorted(place.glob(f"lib{name}.so.*"))]:
            link = folder / f"lib{name}.so"
            link.unlink(missing_ok=True)
            link.symlink_to(found[0].resolve())
    own = (f"-DCMAKE_LIBRARY_PATH={folder}",)
    return (*own, f"-DCMAKE_CUDA_STANDARD_INCLUDE_DIRECTORIES={cublas / 'include'}") if cublas else own


def stub_source(header: str) -> str:
    """C++ of a library that has every function that cuda.h names, under all the names that its macros give them."""
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    return "".join(f'extern "C" int {name}() {{ return {STUB_ERROR}; }}\n' for name in names)


def _make_stub(nvcc: Path, folder: Path) -> None:
    """libcuda.so in the folder, and libcuda.so.1, the name that programs load. Remade when cuda.h is another."""
    header = home_of(nvcc) / "include" / "cuda.h"
    if not header.exists():
        raise MissingTool(f"the CUDA toolkit of {nvcc} has no include/cuda.h", "Install the whole toolkit.")
    folder.mkdir(exist_ok=True)
    text = stub_source(header.read_text(errors="replace"))
    source, library = folder / "libcuda.cpp", folder / "libcuda.so"
    if not (library.exists() and source.exists() and source.read_text() == text):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch)
            (made / source.name).write_text(text)
            command = [*_compiler(), "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(made / library.name)]
            done = subprocess.run([*command, str(made / source.name)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildFailed(f"a stub of libcuda does not compile:\n{done.stderr[-1500:]}", f"The command was: {' '.join(command)}")
            os.replace(made / library.name, library)
            os.replace(made / source.name, source)
    link = folder / "libcuda.so.1"
    if not link.is_symlink():
        link.symlink_to(library.name)
