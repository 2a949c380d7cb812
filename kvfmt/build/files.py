"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from kvfmt.errors import KvfmtError


def check_place(path: Path, what: str = "the file") -> None:
    """Raises KvfmtError if ``what`` cannot be at ``path``, where a folder is, or none for it."""
    if path.is_dir():
        raise KvfmtError(f"{path} is a folder, and {what} was to be written there", "Name a file in it.")
    if not path.parent.is_dir():
        raise KvfmtError(f"no folder {path.parent} for {what}", "Make it, or name another file.")


@contextmanager
def whole_file(path: Path, what: str = "the file") -> Iterator[Path]:
    """A hidden file beside ``path`` to write to. It becomes ``path`` when the block ends well, and is taken away otherwise.

    Raises as ``check_place``.
    """
    check_place(path, what)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def asked_file(path: Path, what: str) -> Iterator[Path]:
    """``whole_file`` for what somebody asked for: where the system does not let it be written, that is a KvfmtError too."""
    try:
        with whole_file(path, what) as partial:
            yield partial
    except OSError as error:
        raise KvfmtError(f"{what} was not written: {error}", "Is there room and the right to write?") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file of which a reader never sees half. Text is UTF-8; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
