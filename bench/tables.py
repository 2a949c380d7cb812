"""The columns of the tables of measurements, on the terminal when they are done and in the report."""

from __future__ import annotations

from typing import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench.records import Metric, Row
from kvfmt.build.console import console

Column = tuple[str, Callable[[Row], str]]


def announce(row: Row) -> None:
    """One line when a row is there."""
    figure = next(iter(n for n in ("kld", "match_50", "recall", "decode_ratio") if n in row.metrics), None)
    text = f"{figure} {plain(row.metrics[figure])}" if figure else ""
    console.print(f"  {row.method}: {row.bits_per_value:.3f} bits/value  {text}")


def plain(metric: Metric, digits: int = 4, sign: str = "±") -> str:
    """"0.0123±0.0004"; without an error, the figure alone."""
    error = "" if metric.error is None else f"{sign}{metric.error:.{digits}f}"
    return f"{metric.value:.{digits}f}{error}"


def percent(metric: Metric, sign: str = "±") -> str:
    """A share, in percent; the column says so."""
    return plain(Metric(100 * metric.value, None if metric.error is None else 100 * metric.error), 1, sign)


def show(out: Table) -> None:
    """On a terminal within its width; into a file or a pipe as wide as it is."""
    if console.is_terminal:
        console.print(out)
    else:
        Console(width=200, highlight=False).print(out)


def table(rows: Sequence[Row], columns: Sequence[Column], caption: str = "") -> Table:
    """Rows of one kind; the first columns say what was measured."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
    out.add_column("cache (K/V)", no_wrap=True)
    out.add_column("bits,\nalloc.", justify="right")
    for title, _ in columns:
        out.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(row.method, f"{row.bits_per_value:.3f}", *(cell(row) for _, cell in columns))
    out.caption = caption or None
    return out


def metric(name: str, digits: int = 4) -> Callable[[Row], str]:
    """A column; empty in a row that an earlier version wrote without that figure."""
    return lambda row: plain(row.metrics[name], digits) if name in row.metrics else ""


def share(name: str) -> Callable[[Row], str]:
    return lambda row: percent(row.metrics[name]) if name in row.metrics else ""


def quality(rows: Sequence[Row]) -> list[Column]:
    columns: list[Column] = [
        ("mean KLD", metric("kld")), ("99.9 %\nKLD", metric("kld_999", 3)), ("same top\ntoken, %", share("same_top")),
        ("PPL ratio", metric("ppl_ratio", 3)),
    ]
    kinds = {(row.provenance.text, row.provenance.n_ctx) for row in rows}
    if len(kinds) > 1:
        columns.insert(0, ("text, context", lambda row: f"{row.provenance.text}, {row.provenance.n_ctx}"))
    return columns


def generate(rows: Sequence[Row]) -> list[Column]:
    columns: list[Column] = [("set", lambda row: f"{row.setup['set']}")]
    horizons = sorted({int(n.removeprefix("match_")) for row in rows for n in row.metrics if n.startswith("match_")})
    columns += [(f"first {h}\nequal, %", share(f"match_{h}")) for h in horizons]
    return [*columns, ("tokens\nequal", metric("prefix", 1)), ("loops, %", share("loops"))]


def retrieval(rows: Sequence[Row]) -> list[Column]:
    return [
        ("tokens", lambda row: str(row.setup["length"])), ("recall, %", share("recall")), ("f16's, %", share("recall_f16")),
        ("lost, %", share("lost")), ("NLL rise,\nnats a token", metric("nll_rise", 3)),
    ]


def speed(rows: Sequence[Row]) -> list[Column]:
    def spread(name: str) -> Callable[[Row], str]:
        ends = metric(f"{name}_low", 2), metric(f"{name}_high", 2)
        return lambda row: "–".join(end(row) for end in ends)

    return [
        ("depth", lambda row: str(row.setup["depth"])), ("decode,\nof f16's", metric("decode_ratio", 2)), ("decode,\nspread", spread("decode")),
        ("prefill,\nof f16's", metric("prefill_ratio", 2)), ("prefill,\nspread", spread("prefill")),
    ]


def roofline(rows: Sequence[Row]) -> list[Column]:
    def scaled(name: str, factor: float, digits: int) -> Callable[[Row], str]:
        return lambda row: f"{row.metrics[name].value * factor:.{digits}f}" if name in row.metrics else ""

    return [
        ("depth", lambda row: str(row.setup["depth"])), ("decode,\ntok/s", scaled("decode_rate", 1, 1)),
        ("prefill,\ntok/s", scaled("prefill_rate", 1, 1)), ("cache,\nMiB", scaled("cache_bytes", 2**-20, 1)),
        ("with\nbuffers", scaled("context_bytes", 2**-20, 1)), ("KV read\nMiB/tok", scaled("kv_bytes", 2**-20, 2)),
        ("at least\nms/tok", scaled("kv_floor", 1e3, 3)), ("measured\nms/tok", scaled("decode_seconds", 1e3, 2)),
    ]


def bandwidth(rows: Sequence[Row]) -> str:
    """What the least times of ``roofline`` were reckoned with; empty if nothing was."""
    found = {row.metrics["bandwidth"].value for row in rows if "bandwidth" in row.metrics}
    return f"Memory of this machine: {' to '.join(f'{b / 1e9:.1f}' for b in sorted({min(found), max(found)}))} GB/s read." if found else ""
