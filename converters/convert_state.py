"""Saved states from one cache type to another, in windows: memory does not grow with the file.

A window of cells is read, decoded, brought from one domain into the other, encoded, and written to its place in the new file.
Places are known beforehand, so that threads share nothing. Encoders and decoders are those of the installed llama.cpp.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from converters.conversion_plan import Plan, Request, SideJob, plan_conversion
from converters.state_bytes import FileSource, Source, StateError
from converters.state_layout import SideLayout, StateLayout, read_layout
from kvfmt.build.fetch import require_space
from kvfmt.build.files import asked_file, check_place
from kvfmt.ggml_cpu import Encoders, installed_folder

#: Values of a window: its floats and their copies stay in a core's cache. Bytes that are copied at a time.
WINDOW, COPY = 1 << 18, 4 << 20

Update = Callable[[int, int], None]


@dataclass(frozen=True)
class Converted:
    """What was there, what was written, and how long it took from the first byte read to the file in its place."""

    before: StateLayout
    after: StateLayout
    seconds: float


class _Target:
    """The file that is written, at any place, by several threads."""

    def __init__(self, file: int) -> None:
        self._file = file

    def write(self, at: int, data: bytes | memoryview) -> None:
        left = memoryview(data).cast("B")
        while left.nbytes:
            n = os.pwrite(self._file, left, at)
            left, at = left[n:], at + n


class _Converter:
    def __init__(self, source: Source, target: _Target, encoders: Encoders) -> None:
        self.source, self.target, self.encoders = source, target, encoders

    def copy(self, begin: int, to: int, n: int) -> int:
        self.target.write(to, self.source.read(begin, n, "the state"))
        return n

    def window(self, job: SideJob, first: int, cells: int) -> int:
        """Converts cells [first, first + cells). Returns the bytes of the source that are done."""
        rows = self._read(job.source, first, cells)
        if job.before != job.after:
            rows = job.after.store(job.before.restore(rows))
        self._write(job.target, first, rows)
        return cells * job.source.row_bytes

    def _read(self, side: SideLayout, first: int, cells: int) -> np.ndarray:
        """float32 [cells, values]."""
        kind, size = side.type, side.type.size
        if not side.transposed:
            row = side.row_bytes
            data = self.source.read(side.at + first * row, cells * row, "the cache")
        elif cells == side.cells:
            data = self.source.read(side.at, side.nbytes, "the cache")
        else:
            data = b"".join(self.source.read(side.at + (i * side.cells + first) * size, cells * size, "the cache") for i in range(side.values))
        floats = self.encoders.decode(kind, np.frombuffer(data, np.uint8))
        return np.ascontiguousarray(floats.reshape(side.values, cells).T) if side.transposed else floats.reshape(cells, side.values)

    def _write(self, side: SideLayout, first: int, rows: np.ndarray) -> None:
        data = self.encoders.encode(side.type, np.ascontiguousarray(rows.T) if side.transposed else rows)
        if not side.transposed:
            self.target.write(side.at + first * side.row_bytes, data)
        elif len(rows) == side.cells:
            self.target.write(side.at, data)
        else:
            for i, line in enumerate(data):
                self.target.write(side.at + (i * side.cells + first) * side.type.size, line)


def convert_state(
    source: Path, target: Path, request: Request, threads: Optional[int] = None, update: Update = lambda done, of: None
) -> Converted:
    """Writes ``source`` as a context of what is requested would have saved it; whole or not at all. ``update`` is told bytes of the source.

    Raises StateError for a source that is damaged, foreign or does not fit what is requested, MissingTool before `kvfmt build`,
    NoSpace, and KvfmtError if the file cannot be written.
    """
    began = time.monotonic()
    source, target = Path(source), Path(target)
    with FileSource(source) as opened:
        layout = read_layout(opened)
        plan = plan_conversion(layout, request)
        encoders = Encoders(installed_folder())
        for kind in {side.type for job in plan.jobs for side in (job.source, job.target)}:
            encoders.decoder(kind)  # a build with another version of a format is refused before anything is written
        check_place(target, "the converted state")
        require_space(target.parent, plan.target.size, "The converted state")
        with asked_file(target, "the converted state") as partial:
            with open(partial, "wb") as file:
                os.ftruncate(file.fileno(), plan.target.size)
                _run(plan, _Converter(opened, _Target(file.fileno()), encoders), threads or os.cpu_count() or 1, update)
            with FileSource(partial) as written:
                if read_layout(written) != plan.target:
                    raise StateError("what was written does not read back as it was planned", "Is another program writing to the file?")
    return Converted(layout, plan.target, time.monotonic() - began)


def _run(plan: Plan, converter: _Converter, threads: int, update: Update) -> None:
    for at, data in plan.literals:
        converter.target.write(at, data)
    total = sum(n for _, _, n in plan.copies) + sum(job.source.nbytes for job in plan.jobs)
    done = 0
    waiting: deque[Future[int]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for function, *arguments in _pieces(plan, converter):
                # No more are handed out than are soon worked on: a failure is known at once.
                if len(waiting) >= 2 * threads:
                    done += waiting.popleft().result()
                    update(done, total)
                waiting.append(pool.submit(function, *arguments))
            while waiting:
                done += waiting.popleft().result()
                update(done, total)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise


def _pieces(plan: Plan, converter: _Converter) -> Iterator[tuple]:
    for begin, to, n in plan.copies:
        for at in range(0, n, COPY):
            yield converter.copy, begin + at, to + at, min(COPY, n - at)
    for job in plan.jobs:
        if job.same:
            for at in range(0, job.source.nbytes, COPY):
                yield converter.copy, job.source.at + at, job.target.at + at, min(COPY, job.source.nbytes - at)
            continue
        cells = max(1, WINDOW // job.source.values)
        for first in range(0, job.source.cells, cells):
            yield converter.window, job, first, min(cells, job.source.cells - first)
