"""What it costs in C to store one token of a 7B-shaped model: ``python -m bench.encode_token``.

K and V rows of 32 layers, 8 KV heads of 128, go through the from_float of the built libggml-cpu on one core, as
set_rows calls it. The candidates take turns; the table gives the median and the range over the turns.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import typer
from rich import box
from rich.table import Table

from kvfmt.ggml_cpu import Encoders
from kvfmt.build.console import console, progress
from kvfmt.errors import KvfmtError
from kvfmt.policy import CacheType, parse_kv

LAYERS, KV_HEADS, HEAD = 32, 8, 128
SIDE_VALUES = LAYERS * KV_HEADS * HEAD
DEFAULT = "kvq3/kvq2 kve8_3/kve8_2 q4_0 q8_0"
#: No token is encoded twice in a turn: a branch predictor would learn it.
TOKENS = 8
SEED = 20240817
#: What a decoder at 100 tokens/s does not notice: a fifth of a token's 10 ms.
BUDGET_MS = 2.0


def encode_tokens(encoders: Encoders, pair: tuple[CacheType, CacheType], tokens: np.ndarray, room: np.ndarray) -> float:
    """Seconds a token. ``tokens`` float32 [n, 2, values of a side], K first; ``room`` uint8 holds a side of any type."""
    # Blocks do not span rows and the rows lie one after the other, so that one call serves all layers of a side.
    calls = [(encoders.encoder(kind), tokens[t, side].ctypes.data) for t in range(len(tokens)) for side, kind in enumerate(pair)]
    target, n = room.ctypes.data, tokens.shape[2]
    began = time.perf_counter()
    for encode, source in calls:
        encode(source, target, n)
    return (time.perf_counter() - began) / len(tokens)


def measure(encoders: Encoders, pairs: list[str], turns: int) -> dict[str, list[float]]:
    """Seconds a token, a list of turns for each pair."""
    tokens = np.random.default_rng(SEED).standard_normal((TOKENS, 2, SIDE_VALUES)).astype(np.float32)
    kinds = {name: parse_kv(name) for name in pairs}
    room = np.empty(4 * SIDE_VALUES, np.uint8)
    for pair in kinds.values():
        encode_tokens(encoders, pair, tokens, room)  # pages and tables settle; not counted
    found: dict[str, list[float]] = {name: [] for name in pairs}
    with progress("turns", turns) as update:
        for turn in range(turns):
            for name, pair in kinds.items():
                found[name].append(encode_tokens(encoders, pair, tokens, room))
            update(turn + 1, turns)
    return found


def report(found: dict[str, list[float]]) -> Table:
    """One row a pair."""
    table = Table(
        title=f"One token's K and V: {LAYERS} layers, {KV_HEADS} KV heads of {HEAD}, one core", title_justify="left",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )
    for heading in ("K/V", "ms a token", "least", "greatest", "ns a value", f"under {BUDGET_MS:g} ms"):
        table.add_column(heading, justify="left" if heading == "K/V" else "right", no_wrap=True)
    for name, times in found.items():
        median = statistics.median(times)
        table.add_row(
            name, f"{median * 1e3:.3f}", f"{min(times) * 1e3:.3f}", f"{max(times) * 1e3:.3f}", f"{median * 1e9 / (2 * SIDE_VALUES):.2f}",
            "yes" if median * 1e3 < BUDGET_MS else "[red]no[/red]",
        )
    return table


def main(
    pairs: str = typer.Option(DEFAULT, help="K/V types, separated by blanks"),
    turns: int = typer.Option(21, min=1),
) -> None:
    """Time to encode one token's K and V in C."""
    try:
        encoders = Encoders()
        console.print(report(measure(encoders, pairs.split(), turns)))
        console.print(f"{encoders.folder}; {turns} turns of {TOKENS} tokens", soft_wrap=True)
    except KvfmtError as error:
        console.print(f"[bold red]error:[/bold red] {error}")
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
