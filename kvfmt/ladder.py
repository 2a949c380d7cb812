"""The ladder: every format's squared error on known sources and on real K and V, against the rate-distortion bound."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
from rich import box
from rich.table import Table

from . import registry
from .build.files import check_place, write_whole
from .codec import Format
from .distortion import N_VALUES, SEED, Distortion, block_errors, decibel_above_bound
from .errors import KvfmtError

#: Shannon's lower bound for a Laplacian of unit variance is this much of a Gaussian's 2**(-2 R):
#: exp(2 h) / (2 pi e) with the differential entropy h = 1 + ln(sqrt 2). No code is below it; at 2 bits and
#: more the rate-distortion function itself (Noll and Zelinski 1978) is within 0.02 dB of it.
LAPLACE = np.e / np.pi

LEGEND = (
    "Upper line: mean squared error with each block at its best scale, which is what the codes are worth; of K and V "
    "relative to each row's mean square, in llama.cpp's rotation. Second line: dB of that above 2**(-2 bits) at the "
    "allocated bits, for the Laplacian above its own Shannon lower bound, e/pi of that. 6.02 dB is one bit. Third line, "
    "where it differs: the error as stored. kvq2 and kve8_2 store the scale that does not shrink values on average, "
    "which costs error in one value and spares it in the mean of many. Mv/s: million values a second, Numba reference, one core."
)

#: The error as stored is printed where a source has it at more than this much of the error at the best scale.
WORTH_A_LINE = 1.01

TIMED_VALUES = 64 * 4096
TURNS = 5


@dataclass(frozen=True)
class Source:
    """Rows to store. ``rows`` float32 [n, a multiple of the block], ``power``: mean square that an error is measured
    against, one for all or one a row; ``bound``: least error at rate 0 that the bound 2**(-2 R) is multiplied with."""

    title: str
    rows: np.ndarray
    power: float | np.ndarray = 1.0
    bound: float = 1.0


@dataclass(frozen=True)
class Rung:
    """What one format does. ``mse``: by source title, relative to the source's power, at each block's best scale;
    ``stored``: the same at the stored scale; ``db``: of ``mse`` above its bound at the allocated bits; throughput in
    values/s on one core."""

    name: str
    bits: float
    mse: dict[str, float]
    stored: dict[str, float]
    db: dict[str, float]
    encode: float
    decode: float


def known_sources(n_values: int = N_VALUES, seed: int = SEED) -> list[Source]:
    """Independent values of unit variance, Gaussian and Laplacian."""
    rng = np.random.default_rng(seed)
    shape = (max(1, n_values // 64), 64)
    gauss = rng.standard_normal(shape).astype(np.float32)
    laplace = rng.laplace(scale=2**-0.5, size=shape).astype(np.float32)
    return [Source("Gauss", gauss), Source("Laplace", laplace, bound=LAPLACE)]


def rows_source(title: str, rows: np.ndarray) -> Source:
    """A head's vectors, float32 [n, head]. Errors count against each row's own mean square, so that no layer with large
    keys outweighs the others; rows of zeros are left out. Raises KvfmtError if nothing remains."""
    power = np.mean(rows.astype(np.float64) ** 2, axis=1)
    kept = power > 0
    if not kept.any():
        raise KvfmtError(f"{title}: all {len(rows)} rows are zero", "There is nothing to measure an error against.")
    return Source(title, rows[kept], power[kept])


def relative_mse(fmt: Format, source: Source) -> Distortion:
    """Mean over rows of the squared error of encode + decode, relative to the source's power."""
    if source.rows.shape[-1] % fmt.spec.block:
        raise KvfmtError(
            f"{source.title}: rows of {source.rows.shape[-1]} values are not whole blocks of {fmt.spec.name}, {fmt.spec.block} each",
            "This model's head size cannot be stored in it.",
        )
    n = source.rows.shape[-1]
    return Distortion(*(float(np.mean(error.sum(axis=1) / n / source.power)) for error in block_errors(fmt, source.rows)))


def throughput(formats: Iterable[Format], n_values: int = TIMED_VALUES, turns: int = TURNS) -> dict[str, tuple[float, float]]:
    """(encode, decode) in values/s on one core by format name: the median of turns that the formats take one by one."""
    x = np.random.default_rng(SEED).standard_normal(n_values).astype(np.float32)
    packed = {fmt.spec.name: fmt.encode(x) for fmt in formats}
    times: dict[tuple[str, str], list[float]] = {}
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        for _ in range(turns):
            for fmt in formats:
                name = fmt.spec.name
                for what, call, data in (("encode", fmt.encode, x), ("decode", fmt.decode, packed[name])):
                    began = time.perf_counter()
                    call(data)
                    times.setdefault((name, what), []).append(time.perf_counter() - began)
    finally:
        numba.set_num_threads(before)
    speed = {key: n_values / statistics.median(found) for key, found in times.items()}
    return {name: (speed[name, "encode"], speed[name, "decode"]) for name in packed}


def climb(sources: list[Source], update: Callable[[int, int], None] = lambda done, of: None) -> list[Rung]:
    """A rung for every format that needs no profile: of unequal bits a mean error says nothing. ``update(done, total)`` is called after each format and source."""
    formats = registry.plain_formats()
    speed = throughput(formats)
    rungs, done = [], 0
    for fmt in formats:
        mse, stored = {}, {}
        for source in sources:
            found = relative_mse(fmt, source)
            mse[source.title], stored[source.title] = found.codes, found.stored
            done += 1
            update(done, len(formats) * len(sources))
        bits = fmt.spec.bits_per_value
        db = {s.title: decibel_above_bound(mse[s.title] / s.bound, bits) for s in sources}
        rungs.append(Rung(fmt.spec.name, bits, mse, stored, db, *speed[fmt.spec.name]))
    return rungs


def ladder_table(rungs: list[Rung]) -> Table:
    """Lines of a format: the error at the best scale, its distance from the bound, and the error as stored where it differs."""
    table = Table(title="Squared error and dB above the rate-distortion bound", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("format\nbits", no_wrap=True)
    for title in rungs[0].mse:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("enc.\nMv/s", justify="right", no_wrap=True)
    table.add_column("dec.\nMv/s", justify="right", no_wrap=True)
    for rung in rungs:
        head = f"{rung.name}\n[dim]{rung.bits:g}[/dim]"
        cells = [f"{rung.mse[t]:.5f}".lstrip("0") + f"\n[dim]{rung.db[t]:.2f}[/dim]" for t in rung.mse]
        if any(rung.stored[t] > WORTH_A_LINE * rung.mse[t] for t in rung.mse):
            head += "\nstored"
            cells = [cell + f"\n{rung.stored[t]:.5f}".replace("\n0.", "\n.") for cell, t in zip(cells, rung.mse)]
        table.add_row(head, *cells, f"{rung.encode / 1e6:.3g}", f"{rung.decode / 1e6:.0f}")
    return table


def plot_ladder(rungs: list[Rung], target: Path) -> None:
    """Left the distance from the bound by source, right the throughput, a line a format. Written to a temporary file first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    check_place(target, "the plot")
    titles = list(rungs[0].db)
    models = list(dict.fromkeys(t.split()[0] for t in titles if " " in t))
    colours = dict(zip(models, plt.get_cmap("tab10").colors))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.6 + 0.62 * len(rungs)), gridspec_kw={"width_ratios": [2.2, 1]}, sharey=True, layout="constrained"
    )
    places = np.arange(len(rungs))[::-1]
    for index, title in enumerate(titles):
        model, _, side = title.partition(" ")
        offset = 0.3 - 0.6 * index / max(1, len(titles) - 1)
        colour = colours.get(model, "black") if side else "black"
        shape = {"K": "o", "V": "s"}.get(side, "D" if title == "Gauss" else "X")
        left.scatter(
            [r.db[title] for r in rungs], places + offset, s=34, marker=shape, color=colour, label=title, zorder=3,
            facecolors="white" if side == "V" else colour,
        )
    left.set_yticks(places, [f"{r.name}\n{r.bits:g} bits" for r in rungs])
    for place in places[:-1]:
        left.axhline(place - 0.5, color="#dddddd", linewidth=0.8)
    left.set_xlabel("dB above the rate-distortion bound at the allocated bits (6.02 dB is one bit; left is better)")
    left.grid(True, axis="x", alpha=0.3)
    left.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=len(titles), fontsize=8, frameon=False, columnspacing=1, handletextpad=0.2)
    for sign, what, colour in ((1, "encode", "#1f6fb4"), (-1, "decode", "#9ac7e8")):
        speed = [getattr(r, what) / 1e6 for r in rungs]
        bars = right.barh(places + 0.19 * sign, speed, height=0.34, color=colour, label=what)
        right.bar_label(bars, [f"{s:,.0f}" if s >= 100 else f"{s:.2g}" for s in speed], fontsize=8, padding=3)
    right.set_xscale("log")
    right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.set_xlim(right=right.get_xlim()[1] * 3)
    right.set_xlabel("million values a second\n(Numba reference, one core)")
    right.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)
    image = io.BytesIO()
    figure.savefig(image, dpi=110, format=target.suffix.lstrip(".") or "png")
    plt.close(figure)
    write_whole(target, image.getvalue())
