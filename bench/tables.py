"""What the measurements print when they are done."""

from __future__ import annotations

from typing import Callable, Iterable

from rich import box
from rich.table import Table

from bench.records import Metric, Row
from kvfmt.build.console import console

Column = tuple[str, Callable[[Row], str]]


def announce(row: Row) -> None:
    """One line when a row is there."""
    figure = next(iter(n for n in ("kld", "match_50", "recall", "decode_ratio") if n in row.metrics), None)
    text = f"{figure} {plain(row.metrics[figure])}" if figure else ""
    console.print(f"  {row.method}: {row.bits_per_value:.3f} bits/value  {text}")


def plain(metric: Metric, digits: int = 4) -> str:
    """"0.0123 ± 0.0004"; without an error, the figure alone."""
    error = "" if metric.error is None else f" ± {metric.error:.{digits}f}"
    return f"{metric.value:.{digits}f}{error}"


def percent(metric: Metric) -> str:
    """A share, in percent; the column says so."""
    return plain(Metric(100 * metric.value, None if metric.error is None else 100 * metric.error), 1)


def table(rows: Iterable[Row], columns: list[Column]) -> Table:
    """Rows of one kind; the first columns say what was measured."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column("cache (K/V)", no_wrap=True)
    out.add_column("bits,\nalloc.", justify="right")
    for title, _ in columns:
        out.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(row.method, f"{row.bits_per_value:.3f}", *(cell(row) for _, cell in columns))
    return out


def metric(name: str, digits: int = 4) -> Callable[[Row], str]:
    return lambda row: plain(row.metrics[name], digits)


def share(name: str) -> Callable[[Row], str]:
    return lambda row: percent(row.metrics[name])


def quality(rows: list[Row]) -> Table:
    columns: list[Column] = [
        ("mean KLD", metric("kld")), ("99.9 %\nKLD", metric("kld_999", 3)), ("same top\ntoken, %", share("same_top")),
        ("PPL ratio", metric("ppl_ratio", 3)),
    ]
    kinds = {(row.provenance.text, row.provenance.n_ctx) for row in rows}
    if len(kinds) > 1:
        columns.insert(0, ("text, context", lambda row: f"{row.provenance.text}, {row.provenance.n_ctx}"))
    return table(rows, columns)
