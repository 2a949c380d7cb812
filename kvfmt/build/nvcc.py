"""The CUDA compiler and cuBLAS from pinned packages, which need no GPU and no driver, where no toolkit has them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kvfmt.build import console
from kvfmt.build.cublas import of_packages
from kvfmt.build.fetch import require_space
from kvfmt.build.lock import locked
from kvfmt.build.paths import ROOT, cache_dir
from kvfmt.build.toolkit import OLDEST, installed, release
from kvfmt.errors import DownloadFailed, MissingTool

NVCC = ROOT / "requirements-cuda.txt"
CUBLAS = ROOT / "requirements-cublas.txt"
#: What each takes at most while it is installed: pip keeps what it downloads beside what it unpacks.
NVCC_BYTES, CUBLAS_BYTES = 500_000_000, 1_800_000_000


def packaged() -> Path:
    """nvcc from the pinned packages, installed into a folder of the cache named after the pins.

    Raises DownloadFailed, NoSpace, MissingTool where they have no nvcc for this system.
    """
    hint = f"Check the network, or install the CUDA toolkit ({OLDEST} or later) so that nvcc is on PATH."
    target = _install(NVCC, NVCC_BYTES, "nvcc (104 MB)", hint)
    found = next(target.glob("nvidia/*/bin/nvcc"), None)
    if found is None or release(found) is None:
        raise MissingTool(f"the packages of {NVCC.name} have no nvcc that runs on this system", hint)
    home = found.parent.parent
    with contextlib.suppress(FileExistsError):
        # where nvcc looks for what every program is linked with; the packages have it in lib
        (home / "lib64").symlink_to("lib")
    return found


def cublas_major() -> int:
    """The major version of CUDA that the packaged cuBLAS is of."""
    return int(re.search(r"nvidia-cublas==(\d+)", CUBLAS.read_text())[1])


def packaged_cublas() -> Path:
    """Folder with ``lib`` and ``include`` of the pinned cuBLAS, installed as nvcc is. Raises DownloadFailed, NoSpace, MissingTool."""
    hint = f"Check the network, or install the whole CUDA toolkit ({OLDEST} or later), with cuBLAS, so that nvcc is on PATH."
    found = of_packages(cublas_major(), [_install(CUBLAS, CUBLAS_BYTES, "cuBLAS (about half a gigabyte)", hint)])
    if found is None:
        raise MissingTool(f"the packages of {CUBLAS.name} have no cuBLAS", hint)
    return found


def ensure_nvcc() -> Path:
    """The installed one, else the packaged one. Raises what :func:`packaged` raises."""
    return installed() or packaged()


def _install(requirements: Path, size: int, what: str, hint: str) -> Path:
    """The folder that these packages were installed into, under nvcc/ in the cache."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    home = cache_dir() / "nvcc"
    target = home / digest
    with locked(home, wait=True):
        if target.exists():
            return target
        require_space(home, size, f"Installing {what}")
        with tempfile.TemporaryDirectory(dir=home, prefix="install-") as scratch, console.progress(f"install {what}", 0):
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
            done = subprocess.run(
                [*command, "--target", f"{scratch}/cuda", "-r", str(requirements)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise DownloadFailed(f"no CUDA toolkit has {what.split()[0]} here, and pip could not install it:\n{done.stderr[-1500:]}", hint)
            os.replace(f"{scratch}/cuda", target)
        console.step(f"installed {what.split()[0]} into {target}")
    return target
