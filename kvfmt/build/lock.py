"""Keeps two processes from working in one folder at the same time."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from kvfmt.errors import Busy


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Holds `folder`/.lock. The system drops it when the process ends, however it ends.

    Raises Busy if another process holds it and `wait` is false.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise Busy(
                f"another process (id {owner}) is at work in {folder}",
                "Wait for it to finish, or end it, and run the same command again: it resumes.",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
