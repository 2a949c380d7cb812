"""How much text calibration needs, of which kind and how long a context: maps made from one, held against the statistics of another.

The figure is the expected gain over a plain Hadamard in dB (mean over layers and KV heads; 6 dB is one bit) for noise that is
the same in every slot. One pass over each text and length gives the statistics at one context, two, four ...; with several
lengths one more pass takes them by turns. Maps are made for contexts of up to --reach tokens, as `kvfmt calibrate` makes them; what they
are used on is what was seen.

    python -m bench.calibration --model smollm2 --text docs --text cpp --n-ctx 1024 --n-ctx 4096 --tokens 16384
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence

import numpy as np
import typer

from kvfmt.blas import one_thread
from kvfmt.build.console import console, progress
from kvfmt.calibrate import Collector, Context, contexts_of, default_reach
from kvfmt.cli import plain_errors
from kvfmt.geometry import key_maps, logit_error
from kvfmt.moments import LayerStatistics
from kvfmt.runtime import LoadedModel
from kvfmt.subjects import Text, find_model, find_text

Statistics = Mapping[int, LayerStatistics]


@dataclass(frozen=True)
class Point:
    """Maps from ``tokens`` of one pass on the statistics of another: mean and least gain over heads, in dB. A pass: "docs@1024"."""

    made_from: str
    tokens: int
    used_on: str
    mean: float
    least: float


def growing(
    model: LoadedModel, text: Text, lengths: Sequence[int], tokens: int, on_tokens: Callable[[int], None] = lambda n: None, reach: int = 0
) -> dict[int, tuple[Statistics, Statistics]]:
    """By tokens taken, after one context of each length, two, four and so on, all from one pass over about ``tokens``: the statistics
    for contexts of up to ``reach`` tokens, and those of what was seen.

    Raises what ``contexts_of`` raises.
    """
    turns = rounds(lengths, tokens)
    by_length = [contexts_of(model, text, n, turns) for n in lengths]
    # Each beginning of this order is spread over the whole text.
    bits = max(1, (turns - 1).bit_length())
    order = sorted(range(turns), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    found: dict[int, Statistics] = {}
    collector = Collector()
    with one_thread(), Context(model, max(lengths), collector) as context:
        for done, index in enumerate(order, 1):
            for pieces in by_length:
                context.feed(pieces[index], on_tokens)
            if done & (done - 1) == 0 or done == turns:
                found[done * sum(lengths)] = (collector.statistics(reach), collector.statistics())
    return found


def rounds(lengths: Sequence[int], tokens: int) -> int:
    """How many contexts of each length make about ``tokens``, at least one."""
    return max(1, tokens // sum(lengths))


def sources(texts: Sequence[Text], lengths: Sequence[int]) -> list[tuple[str, Text, tuple[int, ...]]]:
    """(name, text, context lengths) of every pass."""
    chosen = [(n,) for n in lengths] + ([tuple(lengths)] if len(lengths) > 1 else [])
    return [(f"{text.name}@{'+'.join(map(str, n))}", text, n) for text in texts for n in chosen]


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


def curve(
    model: LoadedModel, texts: Sequence[Text], lengths: Sequence[int], tokens: int, on_tokens: Callable[[int], None] = lambda n: None, reach: int = 0
) -> list[Point]:
    """The maps of every pass at every size, on the statistics of every pass of one length at its largest."""
    passes = sources(texts, lengths)
    measured = {name: growing(model, text, n, tokens, on_tokens, reach) for name, text, n in passes}
    points = []
    for made_from, sizes in measured.items():
        for size, (statistics, _) in sizes.items():
            for used_on, others in measured.items():
                if "+" not in used_on:
                    found = gain(statistics, others[max(others)][1])
                    points.append(Point(made_from, size, used_on, float(found.mean()), float(found.min())))
    return points


@plain_errors
def main(
    model: str = typer.Option("smollm2", help="a name of `kvfmt models list`, or a GGUF file"),
    text: list[str] = typer.Option(["docs", "cpp"], help="'docs', 'cpp' or a text file; at least two, to use one on another"),
    n_ctx: list[int] = typer.Option([1024], min=2, help="may be given several times"),
    tokens: int = typer.Option(16384, min=1, help="of each pass"),
    reach: Optional[int] = typer.Option(None, min=0, help="tokens of the longest context that maps are for; default: that of `kvfmt calibrate`"),
    threads: Optional[int] = typer.Option(None, min=1),
) -> None:
    subject, texts = find_model(model), [find_text(name) for name in text]
    passes = sources(texts, n_ctx)
    done, total = 0, sum(rounds(n, tokens) * sum(n) for _, _, n in passes)
    with LoadedModel(Path(subject.path), threads) as loaded, progress(f"{subject.name}, {len(passes)} passes", total) as update:

        def count(n: int) -> None:
            nonlocal done
            done += n
            update(done, total)

        points = curve(loaded, texts, n_ctx, tokens, count, default_reach(loaded) if reach is None else reach)
    for point in points:
        console.print(f"{point.made_from:>14} {point.tokens:6} tokens, used on {point.used_on:10} {point.mean:6.2f} dB, least {point.least:6.2f}")


if __name__ == "__main__":
    typer.run(main)
