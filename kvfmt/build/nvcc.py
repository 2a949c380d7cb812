"""The CUDA compiler: an installed toolkit, or the pinned packages of requirements-cuda.txt, which need no GPU and no driver."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvfmt.build import console
from kvfmt.build.fetch import require_space
from kvfmt.build.lock import locked
from kvfmt.build.paths import ROOT, cache_dir
from kvfmt.build.toolkit import OLDEST, installed, release
from kvfmt.errors import DownloadFailed, MissingTool

REQUIREMENTS = ROOT / "requirements-cuda.txt"
INSTALLED_BYTES = 500_000_000


def packaged() -> Path:
    """nvcc from the pinned packages, installed into a folder of the cache named after the pins.

    Raises DownloadFailed, NoSpace, MissingTool where they have no nvcc for this system.
    """
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    home = cache_dir() / "nvcc"
    target = home / digest
    with locked(home, wait=True):
        if not target.exists():
            require_space(home, INSTALLED_BYTES, "Installing nvcc")
            with tempfile.TemporaryDirectory(dir=home, prefix="install-") as scratch:
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
                done = subprocess.run(
                    [*command, "--target", f"{scratch}/cuda", "-r", str(REQUIREMENTS)], capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise DownloadFailed(
                        f"pip could not install nvcc:\n{done.stderr[-1500:]}",
                        f"Check the network, or install the CUDA toolkit ({OLDEST} or later) so that nvcc is on PATH.",
                    )
                os.replace(f"{scratch}/cuda", target)
            console.step(f"installed nvcc into {target}")
    found = next(target.glob("nvidia/*/bin/nvcc"), None)
    if found is None or release(found) is None:
        raise MissingTool(
            f"the packages of {REQUIREMENTS.name} have no nvcc that runs on this system",
            f"Install the CUDA toolkit ({OLDEST} or later) so that nvcc is on PATH.",
        )
    return found


def ensure_nvcc() -> Path:
    """The installed one, else the packaged one. Raises what :func:`packaged` raises."""
    return installed() or packaged()
