"""One look for everything that the build prints: a bar on a terminal, a line per step elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(highlight=False)

Update = Callable[[int, int], None]


def step(text: str) -> None:
    """Says that a step is done or was done before."""
    console.print(f"[green]✓[/green] {text}")


@contextmanager
def progress(title: str, total: int, unit: str = "steps") -> Iterator[Update]:
    """Yields update(done, total). `unit` is "steps" or "bytes"."""
    if not console.is_terminal:
        console.print(f"… {title}")
        shown = 0

        def report(done: int, of: int) -> None:
            nonlocal shown
            tenth = 10 * done // of if of else 0
            if tenth > shown and unit == "steps":
                shown = tenth
                console.print(f"  {title}: {done}/{of}")

        yield report
        return
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("  {task.description}"), BarColumn(), count, TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total or None)
        yield lambda done, of: bar.update(task, completed=done, total=of or None)
