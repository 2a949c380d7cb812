"""How much text calibration needs, and of which kind: maps made from one text, held against the statistics of another.

The figure is the expected gain over a plain Hadamard in dB (mean over layers and KV heads; 6 dB is one bit) for noise that is
the same in every slot. One pass over each text gives the statistics at 1,024, 2,048, 4,096 ... tokens.

    python -m bench.calibration --model smollm2 --text docs --text cpp --tokens 16384
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Optional

import numpy as np
import typer

from kvfmt.blas import one_thread
from kvfmt.build.console import console, progress
from kvfmt.calibrate import Collector, Context, contexts_of
from kvfmt.cli import plain_errors
from kvfmt.geometry import key_maps, logit_error
from kvfmt.moments import LayerStatistics
from kvfmt.runtime import LoadedModel
from kvfmt.subjects import Text, find_model, find_text

Statistics = Mapping[int, LayerStatistics]


@dataclass(frozen=True)
class Point:
    """Maps from ``tokens`` of one text on the statistics of another: mean and least gain over heads, in dB."""

    made_from: str
    tokens: int
    used_on: str
    mean: float
    least: float


def growing(model: LoadedModel, text: Text, n_ctx: int, tokens: int, on_tokens: Callable[[int], None] = lambda n: None) -> dict[int, Statistics]:
    """Statistics after ``n_ctx`` tokens, twice as many and so on, all from one pass. Raises what ``contexts_of`` raises."""
    pieces = contexts_of(model, text, n_ctx, max(1, tokens // n_ctx))
    # Each beginning of this order is spread over the whole text.
    bits = max(1, (len(pieces) - 1).bit_length())
    order = sorted(range(len(pieces)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    found: dict[int, Statistics] = {}
    collector = Collector()
    with one_thread(), Context(model, n_ctx, collector) as context:
        for done, index in enumerate(order, 1):
            context.feed(pieces[index], on_tokens)
            if done & (done - 1) == 0 or done == len(order):
                found[done * n_ctx] = collector.statistics()
    return found


def gain(made_from: Statistics, used_on: Statistics, kind: str = "full") -> np.ndarray:
    """dB of each KV head of all layers, float64 [heads]; mean keys that moved count as error. ``kind``: one of geometry.MAPS."""
    found = []
    for layer, statistics in made_from.items():
        maps, other = key_maps(statistics, kind=kind), used_on[layer]
        unit = np.eye(other.k_size)
        for head in range(other.heads):
            moved = other.k_mean[head] - (0 if maps.mean is None else maps.mean[head])
            seen = other.k_cov[head] + np.outer(moved, moved)
            plain = logit_error(unit, unit, other.k_moment()[head], other.q_moment[head])
            found.append(10 * np.log10(plain / logit_error(maps.key[head], maps.query[head], seen, other.q_moment[head])))
    return np.array(found)


def curve(model: LoadedModel, texts: list[Text], n_ctx: int, tokens: int, on_tokens: Callable[[int], None] = lambda n: None) -> list[Point]:
    """Every text's maps at every size, on every text's statistics at the largest."""
    measured = {text.name: growing(model, text, n_ctx, tokens, on_tokens) for text in texts}
    points = []
    for made_from, sizes in measured.items():
        for size, statistics in sizes.items():
            for used_on, others in measured.items():
                found = gain(statistics, others[max(others)])
                points.append(Point(made_from, size, used_on, float(found.mean()), float(found.min())))
    return points


@plain_errors
def main(
    model: str = typer.Option("smollm2", help="a name of `kvfmt models list`, or a GGUF file"),
    text: list[str] = typer.Option(["docs", "cpp"], help="'docs', 'cpp' or a text file; at least two, to use one on another"),
    n_ctx: int = typer.Option(1024, min=2),
    tokens: int = typer.Option(16384, min=1, help="of each text"),
    threads: Optional[int] = typer.Option(None, min=1),
) -> None:
    subject, texts = find_model(model), [find_text(name) for name in text]
    done, total = 0, len(texts) * max(1, tokens // n_ctx) * n_ctx
    with LoadedModel(Path(subject.path), threads) as loaded, progress(f"{subject.name} on {len(texts)} texts", total) as update:

        def count(n: int) -> None:
            nonlocal done
            done += n
            update(done, total)

        points = curve(loaded, texts, n_ctx, tokens, count)
    for point in points:
        console.print(f"{point.made_from:>8} {point.tokens:6} tokens, used on {point.used_on:8} {point.mean:6.2f} dB, least {point.least:6.2f}")


if __name__ == "__main__":
    typer.run(main)
