"""Downloads packages into the cache through pip, and lets nothing in whose sha256 is not the pinned one.

pip is the client because it knows the user's index, proxy and certificates.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvfmt.build import console
from kvfmt.build.lock import locked
from kvfmt.build.paths import cache_dir
from kvfmt.errors import ChecksumMismatch, DownloadFailed, NoSpace

CHUNK = 1 << 20
SPARE_BYTES = 200 << 20


def sha256_of(file: Path) -> str:
    """The file's sha256 in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_sha256(file: Path, expected: str, what_to_do: str) -> None:
    """Raises ChecksumMismatch, with both sums, unless the file has the expected one."""
    found = sha256_of(file)
    if found != expected:
        raise ChecksumMismatch(f"{file.name} has sha256 {found}, expected {expected}", what_to_do)


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """Raises NoSpace unless `needed` bytes are free where `folder` is or will be."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise NoSpace(
            f"{purpose} needs {needed / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free",
            "Free some space, or put it elsewhere: KVFMT_CACHE names the folder of the downloads, "
            "KVFMT_BUILD that of the build.",
        )


def fetch(package: str, version: str, filename: str, sha256: str, size: int, *, source: bool = False) -> Path:
    """The checked file of that package, from the cache or downloaded into it.

    `size` in bytes is for the progress bar and the space check. An interrupted download leaves no file behind.
    Raises ChecksumMismatch, DownloadFailed, NoSpace.
    """
    folder = cache_dir() / "downloads"
    target = folder / filename
    with locked(folder, wait=True):
        # Under the lock, whatever lies in the staging folder was left by a process that was killed.
        staging_root = folder / "staging"
        shutil.rmtree(staging_root, ignore_errors=True)
        if target.exists():
            check_sha256(target, sha256, f"The cached copy is damaged. Delete {target} and run the same command again.")
            return target
        # pip unpacks a source distribution to read its metadata.
        require_space(folder, (6 if source else 2) * size + SPARE_BYTES, f"Downloading {filename}")
        staging_root.mkdir(parents=True)
        try:
            staging = Path(tempfile.mkdtemp(dir=staging_root))
            _pip_download(package, version, staging, size, filename, source)
            found = staging / filename
            if not found.exists():
                names = ", ".join(p.name for p in staging.iterdir()) or "nothing"
                raise DownloadFailed(
                    f"{package}=={version} gave {names} instead of {filename}",
                    "The package index serves something else than this version of kvfmt was made for.",
                )
            check_sha256(
                found,
                sha256,
                f"The download was not kept. Run the same command again; if it stays the same, the index serves "
                f"another file than the pinned {package}=={version}: do not use it.",
            )
            os.replace(found, target)
        finally:
            shutil.rmtree(staging_root, ignore_errors=True)
    return target


def _pip_download(package: str, version: str, folder: Path, size: int, filename: str, source: bool) -> None:
    # Without build isolation, pip takes the metadata of a source distribution with the installed build
    # backend instead of installing one first, which costs more than a minute.
    kind = ["--no-binary", package, "--no-build-isolation"] if source else ["--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", f"{package}=={version}", *kind, "--no-deps", "--dest", str(folder)]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    # pip writes to TMPDIR while it downloads: pointed into the staging folder, it is cleaned up with it, and shows
    # how far pip is.
    scratch = folder / "tmp"
    scratch.mkdir()
    with tempfile.TemporaryFile("w+") as output:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            with console.progress(f"download {filename}", size, "bytes") as update:
                while process.poll() is None:
                    update(_bytes_of(filename, folder), size)
                    time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if not line.startswith("WARNING")]
            raise DownloadFailed(
                f"pip could not download {package}=={version}:\n  " + "\n  ".join(lines[-5:]),
                "Check the network and pip's index settings (pip config list), then run the same command again.",
            )
    shutil.rmtree(scratch, ignore_errors=True)


def _bytes_of(filename: str, folder: Path) -> int:
    """How much of the file pip has, wherever below the folder it keeps it."""
    sizes = [0]
    for place, _, files in os.walk(folder):
        if filename in files:
            try:
                sizes.append(os.path.getsize(os.path.join(place, filename)))
            except OSError:  # pip moves files while we look
                pass
    return max(sizes)
