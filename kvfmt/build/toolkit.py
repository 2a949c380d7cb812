"""An installed CUDA toolkit: its compiler, and where its libraries lie. Standard library only, as flags.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

OLDEST = 12
#: Where toolkits are when no variable and no PATH says so.
USUAL_HOMES = ("/usr/local/cuda", "/opt/cuda")

_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_TOP = re.compile(r"^#\$ TOP=(\S.*?)\s*$", re.MULTILINE)


def release(nvcc: Path) -> tuple[int, int] | None:
    """(13, 0) for CUDA 13.0; None if it does not run or does not say."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = _RELEASE.search(done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def installed() -> Path | None:
    """nvcc of an installed toolkit of CUDA 12 or later: $CUDACXX, below $CUDA_HOME or $CUDA_PATH, on PATH, or at a usual place."""
    homes = [*(os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")), *USUAL_HOMES]
    beside = [shutil.which("nvcc", path=os.path.join(home, "bin")) for home in homes if home]
    for nvcc in filter(None, [os.environ.get("CUDACXX"), *beside[: -len(USUAL_HOMES)], shutil.which("nvcc"), *beside]):
        if (found := release(Path(nvcc))) and found[0] >= OLDEST:
            return Path(nvcc)
    return None


def home_of(nvcc: Path) -> Path:
    """The toolkit's folder, also where nvcc is a link to the toolkit's, or a script that calls it, such as /usr/local/bin/nvcc."""
    try:
        # prints what it would do, and its own folder, without looking at the file
        done = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False)
    except OSError:
        said = None
    else:
        said = _TOP.search(done.stderr + done.stdout)
    return Path(said[1]).resolve() if said else Path(shutil.which(nvcc) or nvcc).resolve().parent.parent


def folders(nvcc: Path) -> list[Path]:
    """Folders of the toolkit of this nvcc that may hold libraries."""
    home = home_of(nvcc)
    return [place for place in (home / "lib64", home / "lib", *sorted(home.glob("targets/*/lib"))) if place.is_dir()]


def library_folders(nvcc: Path) -> list[Path]:
    """Folders of the toolkit of this nvcc that hold cuBLAS or the runtime to link with."""
    with_libraries = [place.resolve() for place in folders(nvcc) if any(place.glob("libcublas.so*")) or any(place.glob("libcudart.so*"))]
    return list(dict.fromkeys(with_libraries))


def flags(nvcc: Path, architectures: str, more: tuple[Path, ...] = ()) -> tuple[str, ...]:
    """What CMake is told of a CUDA build; architectures are separated by semicolons.

    The toolkit's libraries, and those in ``more`` folders, are found where they were linked: not every toolkit is among the system's own
    folders, and the build's programs otherwise look beside themselves alone.
    """
    return (
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={architectures}",
        # Only of use with several GPUs, and found or not by chance.
        "-DGGML_CUDA_NCCL=OFF",
        f"-DCMAKE_INSTALL_RPATH={';'.join(['$ORIGIN', *map(str, (*library_folders(nvcc), *more))])}",
    )


def not_found(library: Path) -> list[str]:
    """Names of the libraries that the loader does not find for this one. Empty where there is no ldd to say it."""
    try:
        done = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False)
    except OSError:
        return []
    return re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE)
