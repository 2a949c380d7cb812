"""What tests compile, kept in a folder of the cache under a digest of all that it is made of. Two processes that want the same make it once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from kvfmt.build.files import whole_file


def kept(folder: Path, name: str, most: int, make: Callable[[Path], None]) -> Path:
    """``folder``/``name``, a "<what>-<digest>.<kind>": if it is not there, ``make`` writes it to the path that it is given.

    Of the folder, the ``most`` files that were used last stay.
    """
    target = folder / name
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / name.rsplit("-", 1)[0], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            os.utime(target)
            return target
        with whole_file(target) as partial:
            make(partial)
    _prune(folder, most)
    return target


def _prune(folder: Path, most: int) -> None:
    ages = {}
    for path in folder.iterdir():
        try:
            if path.is_file():
                ages[path] = path.stat().st_mtime
        except FileNotFoundError:
            pass  # another process was first
    for old in sorted(ages, key=ages.__getitem__, reverse=True)[most:]:
        old.unlink(missing_ok=True)
