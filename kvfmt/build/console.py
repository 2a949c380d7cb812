"""One look for everything that the build prints: a bar on a terminal, a line per step elsewhere.

Steps and titles name files, which may look like rich's markup: they are printed as they are.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

console = Console(highlight=False)

Update = Callable[[int, int], None]


def step(text: str) -> None:
    """Says that a step is done or was done before."""
    console.print("[green]✓[/green]", Text(text))


def duration(seconds: float) -> str:
    """"40 s", "12 min", "3.5 h"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress(title: str, total: int, unit: str = "steps") -> Iterator[Update]:
    """Yields update(done, total). `unit` is "steps" or "bytes"."""
    if not console.is_terminal:
        console.print(f"… {title}", markup=False)
        shown = 0
        # What was done before this run says nothing about its speed.
        began: tuple[float, int] | None = None

        def report(done: int, of: int) -> None:
            nonlocal shown, began
            began = began or (time.monotonic(), done)
            tenth = 10 * done // of if of else 0
            if tenth > shown and unit == "steps":
                shown = tenth
                left = (time.monotonic() - began[0]) * (of - done) / max(done - began[1], 1)
                console.print(f"  {title}: {done}/{of}" + (f", about {duration(left)} left" if left >= 60 else ""), markup=False)

        yield report
        return
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("  {task.description}", markup=False), BarColumn(), count, TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total or None)
        yield lambda done, of: bar.update(task, completed=done, total=of or None)
