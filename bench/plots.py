"""The report's figures, from rows. Each function returns a matplotlib Figure, or None if the rows are not there."""

from __future__ import annotations

from typing import Optional, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from bench.records import Row
from kvfmt import registry

OURS, STOCK, GREY = "#1f6fb4", "#c2571a", "#777777"
FAMILIES = {"kvfmt": OURS, "stock": STOCK, "baseline": "#222222", "study": "#8a5fb0", "KIVI": "#2f8f5b", "calibrated": "#d99a00"}
#: A KLD below this cannot be told from none on a logarithmic axis.
FLOOR = 1e-5


def is_ours(row: Row) -> bool:
    """Whether K or V is one of our formats."""
    return any(fmt.spec.name in (row.k, row.v) for fmt in registry.all_formats())


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points than which none has both fewer bits and a lower KLD, by bits."""
    best, found = float("inf"), []
    for bits, kld in sorted(points):
        if kld < best:
            best = kld
            found.append((bits, kld))
    return found


def spread_labels(axis, points: list[tuple[float, float, str]], size: float = 7.5) -> None:
    """Writes a name beside each point, moved up or down until it overlaps none that is there."""
    figure = axis.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    taken = []
    at = axis.transData.transform([(x, y) for x, y, _ in points]) if points else []
    dots = [matplotlib.transforms.Bbox.from_bounds(px - 4, py - 4, 8, 8) for px, py in at]
    left, right = axis.get_window_extent().x0, axis.get_window_extent().x1
    for (x, y, name), (px, _) in sorted(zip(points, at), key=lambda p: -p[1][1]):
        away = (0, 8, -8, 16, -16, 24, -24, 32, -32, 40, -40)
        options = sorted([(7, d, "left") for d in away] + [(-7, d, "right") for d in away], key=lambda o: (abs(o[1]) > 8, abs(o[1]), o[0] < 0))
        for dx, dy, side in options:
            text = axis.annotate(
                name, (x, y), xytext=(dx, dy), textcoords="offset points", fontsize=size, ha=side, va="center",
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "#aaaaaa"} if abs(dy) > 7 else None,
            )
            # Of the words alone: an arrow may cross others. Its place is not known before it is asked for.
            text.update_positions(renderer)
            box = matplotlib.text.Text.get_window_extent(text, renderer)
            if left <= box.x0 and box.x1 <= right and not any(box.overlaps(other) for other in (*taken, *dots)):
                taken.append(box)
                break
            text.remove()
        else:
            axis.annotate(name, (x, y), xytext=(7, 0), textcoords="offset points", fontsize=size, va="center")


def pareto(rows: list[Row], title: str) -> Optional[Figure]:
    """Mean KLD against allocated bits of caches that llama.cpp itself ran; the line joins the best at each rate."""
    rows = [r for r in rows if r.bits_per_value < 15.9]
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for ours, colour, marker, label in ((False, STOCK, "s", "llama.cpp's own types"), (True, OURS, "o", "kvfmt")):
        chosen = [r for r in rows if is_ours(r) == ours]
        axis.errorbar(
            [r.bits_per_value for r in chosen], [max(FLOOR, r.metrics["kld"].value) for r in chosen],
            yerr=[r.metrics["kld"].error or 0 for r in chosen], fmt=marker, color=colour, ms=6, capsize=2, label=label,
        )
    best = front([(r.bits_per_value, max(FLOOR, r.metrics["kld"].value)) for r in rows])
    axis.plot(*zip(*best), color=GREY, lw=1, zorder=0, label="best at its size")
    _logarithmic(axis, title)
    spread_labels(axis, [(r.bits_per_value, max(FLOOR, r.metrics["kld"].value), r.method) for r in rows])
    axis.legend(fontsize=8, loc="upper right")
    return figure


def _logarithmic(axis, title: str) -> None:
    axis.set_yscale("log")
    axis.set_xlabel("allocated bits per value (f16: 16)")
    axis.set_ylabel("mean KLD from the f16 cache, nats")
    axis.set_title(title, fontsize=10)
    axis.grid(True, which="major", alpha=0.3)
    axis.margins(x=0.06, y=0.08)


def lab_scatter(rows: list[Row], title: str) -> Optional[Figure]:
    """The lab's methods, a panel for each kind of context, coloured by where they come from."""
    settings = list(dict.fromkeys(r.setup["setting"] for r in rows))
    if not settings:
        return None
    figure, axes = plt.subplots(len(settings), 1, figsize=(10, 7 * len(settings)), squeeze=False, layout="constrained")
    for axis, setting in zip(axes[:, 0], settings):
        points = []
        for family, colour in FAMILIES.items():
            chosen = [r for r in rows if r.setup["setting"] == setting and r.setup["family"] == family and r.method != "f16"]
            pairs = [(r.bits_per_value, max(FLOOR, r.metrics["kld"].value), r.method) for r in chosen]
            if pairs:
                axis.plot([p[0] for p in pairs], [p[1] for p in pairs], "o", color=colour, ms=5, label=family)
                points += pairs
        best = front([p[:2] for p in points])
        if best:
            axis.plot(*zip(*best), color=GREY, lw=1, zorder=0)
        row = next(r for r in rows if r.setup["setting"] == setting)
        _logarithmic(axis, f"{title}, {setting}: {row.setup['prompt']} prompt + {row.setup['decoded']} decoded tokens")
        axis.set_xlim(right=17.5)
        spread_labels(axis, points, 6.5)
        axis.legend(fontsize=8, loc="upper right")
    return figure


def layers(rows: list[Row], title: str) -> Optional[Figure]:
    """Heat map: KLD when only K or only V of one layer is quantized; a line a codec and side."""
    if not rows:
        return None
    codecs = list(dict.fromkeys(r.method.split(",")[0] for r in rows))
    n = rows[0].setup["layers"]
    labels = [(codec, side) for codec in codecs for side in "kv"]
    grid = np.full((len(labels), n), np.nan)
    for r in rows:
        grid[labels.index((r.method.split(",")[0], r.setup["side"])), r.setup["layer"]] = max(FLOOR / 100, r.metrics["kld"].value)
    figure, (axis, bars) = plt.subplots(2, 1, figsize=(9, 4.6), height_ratios=[len(labels) * 0.5, 2.2], layout="constrained")
    image = axis.imshow(grid, aspect="auto", norm=LogNorm(np.nanmin(grid), np.nanmax(grid)), cmap="magma")
    axis.set_yticks(range(len(labels)), [f"{codec}, {side.upper()}" for codec, side in labels], fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.set_xticks([])
    figure.colorbar(image, ax=axis, label="KLD, nats")
    worst = codecs[-1]
    width = 0.4
    for shift, side, colour in ((-width / 2, "k", OURS), (width / 2, "v", STOCK)):
        bars.bar(np.arange(n) + shift, grid[labels.index((worst, side))], width, color=colour, label=side.upper())
    bars.set_xlim(-0.5, n - 0.5)
    bars.set_xlabel("layer")
    bars.set_ylabel(f"KLD, {worst}", fontsize=8)
    bars.legend(fontsize=8)
    return figure


def by_position(rows: list[Row], title: str, label: str) -> Optional[Figure]:
    """KLD along the context, one line a row."""
    rows = [r for r in rows if r.detail.get("by_position") and r.metrics["kld"].value > 0]
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    colours = plt.get_cmap("tab10")
    for i, r in enumerate(rows):
        at = [(b["from"] + b["to"]) / 2 for b in r.detail["by_position"]]
        axis.plot(at, [max(FLOOR, b["kld"]) for b in r.detail["by_position"]], "o", ls=("-", "--", ":")[i // 10 % 3], ms=3, lw=1.2, color=colours(i % 10), label=r.method)
    axis.set_yscale("log")
    axis.set_xlabel(label)
    axis.set_ylabel("mean KLD, nats")
    axis.set_title(title, fontsize=10)
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def growth(rows: list[Row], title: str) -> Optional[Figure]:
    """Allocated bits per value against the length of the context, where nearly all of it is the prompt or little is."""
    chosen, seen = [], set()
    for r in rows:
        lines = r.detail["growth"]
        moves = max(abs(line[-1] - line[0]) for line in lines.values())
        if r.method not in seen and (moves > 0.5 or r.method in ("int8", "NF4/g64")):
            chosen.append(r)
            seen.add(r.method)
    if not chosen:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("short prompt", "long prompt")):
        for i, r in enumerate(chosen):
            axis.plot(
                r.detail["growth_at"], r.detail["growth"][kind], marker="o", ms=3, lw=1.2, label=r.method,
                color=plt.get_cmap("tab20")(i % 20), ls=("-", "--")[i // 10 % 2],
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(chosen[0].detail["growth_at"], [str(n) for n in chosen[0].detail["growth_at"]])
        axis.set_xlabel("tokens in the context")
        axis.set_title(f"{title}: {'a prompt of 64 tokens' if kind == 'short prompt' else 'all but 64 tokens are the prompt'}", fontsize=9)
        axis.grid(True, alpha=0.3)
    axes[0].set_ylabel("allocated bits per value")
    axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def positions(rows: list[Row], title: str) -> Optional[Figure]:
    """KLD when only one group of old tokens is quantized."""
    if not rows:
        return None
    kinds = [k for k in ("age", "attention", "error", "random") if any(r.setup["by"] == k for r in rows)]
    figure, axes = plt.subplots(1, len(kinds), figsize=(11, 3.4), sharey=True, layout="constrained", squeeze=False)
    sink = next((r for r in rows if r.setup["by"] == "sink"), None)
    ends = {"age": ("newest", "oldest"), "attention": ("least", "most"), "error": ("least", "most"), "random": ("", "")}
    for axis, kind in zip(axes[0], kinds):
        chosen = sorted((r for r in rows if r.setup["by"] == kind), key=lambda r: r.setup["group"])
        axis.bar(
            range(len(chosen)), [r.metrics["kld"].value for r in chosen], yerr=[r.metrics["kld"].error or 0 for r in chosen],
            color=GREY if kind == "random" else OURS, capsize=2,
        )
        low, high = ends[kind]
        names = [f"{low}\n1", *map(str, range(2, len(chosen))), f"{high}\n{len(chosen)}"]
        axis.set_xticks(range(len(chosen)), [n.strip() for n in names], fontsize=8)
        axis.set_title({"age": "by age", "attention": "by attention received", "error": "by quantizer error", "random": "at random"}[kind], fontsize=9)
        if sink:
            axis.axhline(sink.metrics["kld"].value, color=STOCK, lw=1, ls="--", label="the first 4 tokens alone")
    axes[0][0].set_ylabel("KLD, nats")
    if sink:
        axes[0][-1].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    return figure


def loci(rows: list[Row], title: str) -> Optional[Figure]:
    """KLD of each codec at each place, side by side; f16's bars are what the way there and back costs."""
    if not rows:
        return None
    codecs = list(dict.fromkeys(r.k for r in rows))
    places = list(dict.fromkeys(r.setup["locus"] for r in rows))
    figure, axis = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
    width = 0.8 / len(places)
    for i, place in enumerate(places):
        found = [next((r for r in rows if r.k == codec and r.setup["locus"] == place), None) for codec in codecs]
        axis.bar(
            np.arange(len(codecs)) + (i - (len(places) - 1) / 2) * width,
            [max(FLOOR / 10, r.metrics["kld"].value) if r else np.nan for r in found], width,
            label=place, color=(OURS, "#2f8f5b", STOCK)[i] if len(places) == 3 else (OURS, STOCK)[i],
        )
    axis.set_yscale("log")
    axis.set_xticks(range(len(codecs)), codecs, fontsize=8)
    axis.set_ylabel("mean KLD, nats")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    axis.grid(True, axis="y", alpha=0.3)
    return figure


def speed(rows: list[Row], title: str) -> Optional[Figure]:
    """Speed as a ratio to f16 in the same run: bars with their spread."""
    names = [n for n in dict.fromkeys(n for r in rows for n in r.metrics) if n.endswith("ratio") or "ratio_" in n]
    if not rows or not names:
        return None
    depths = lambda r: " ".join(f"{k} {v}" for k, v in r.setup.items() if k in ("depth", "n_depth"))  # noqa: E731
    labels = [f"{r.method}{', ' if depths(r) else ''}{depths(r)}" for r in rows]
    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 0.8 + 0.3 * len(rows)), sharey=True, squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names):
        found = [r.metrics.get(name) for r in rows]
        axis.barh(
            range(len(rows)), [m.value if m else 0 for m in found], xerr=[(m.error or 0) if m else 0 for m in found],
            color=[OURS if is_ours(r) else STOCK for r in rows], capsize=2,
        )
        axis.axvline(1, color=GREY, lw=1)
        axis.set_yticks(range(len(rows)), labels, fontsize=8)
        axis.set_xlabel(f"{name.replace('_', ' ')} (1 = as fast as f16)")
    axes[0][0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    return figure
