"""Bytes of a saved state at a place that was asked for, out of a file or out of memory. Nothing is read twice or kept."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from kvfmt.errors import KvfmtError


class StateError(KvfmtError):
    """A saved state that is damaged, or of another kind than was expected."""


class Source:
    """``size`` bytes under a ``name``. ``read`` may be called by several threads at once."""

    name: str
    size: int

    def _read(self, at: int, n: int) -> bytes | memoryview:
        raise NotImplementedError

    def read(self, at: int, n: int, what: str) -> bytes | memoryview:
        """``n`` bytes from ``at`` on. Raises StateError that says what they were, if they are not there."""
        if n > self.size - at:
            raise StateError(
                f"the state ends at byte {self.size}, within {what}: {n} bytes were to follow byte {at}",
                "It was cut off, or is not a saved state. Save it again.",
            )
        data = self._read(at, n)
        if len(data) != n:
            raise StateError(f"{what} at byte {at}: {len(data)} of {n} bytes could be read", "The file became shorter meanwhile. Save it again.")
        return data


class BytesSource(Source):
    """A state in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "the state") -> None:
        self.name, self._data = name, memoryview(data).cast("B")
        self.size = len(self._data)

    def _read(self, at: int, n: int) -> memoryview:
        return self._data[at : at + n]


class FileSource(Source):
    """A file, a context manager. Only what is asked for is read: it may be larger than memory."""

    def __init__(self, path: Path) -> None:
        """Raises StateError if there is no such file or it cannot be read."""
        path = Path(path)
        self.name = path.name
        if not path.is_file():
            raise StateError(f"no file {path}", "Check the name.")
        try:
            self._file = open(path, "rb", buffering=0)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise StateError(f"{path.name} cannot be read: {error.strerror}", "Check the file and its rights.") from None

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _read(self, at: int, n: int) -> bytes:
        found = bytearray()
        try:
            # One call gives at most 2 GiB; the windows here are far smaller, a signal may still cut one short.
            while len(found) < n and (part := os.pread(self._file.fileno(), n - len(found), at + len(found))):
                if len(part) == n:
                    return part
                found += part
        except OSError as error:
            raise StateError(f"{self.name} cannot be read at byte {at}: {error.strerror}", "Check the disk.") from None
        return bytes(found)
