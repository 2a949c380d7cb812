"""``kvfmt bench report``: one HTML page with its figures inside, and a Markdown table, from rows of results."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterable, Optional, Sequence

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from bench import plots, tables
from bench.claims import Verdict, judge
from bench.records import Metric, Results, Row
from kvfmt.build.files import write_whole
from kvfmt.errors import KvfmtError

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Table:
    """A table: ``head`` and rows of ready text. The first column is left-aligned, the others right, but for ``text``."""

    head: list[str]
    rows: list[list[str]]
    text: tuple[int, ...] = (0,)

    def markdown(self) -> str:
        rule = ["---" if i in self.text else "---:" for i in range(len(self.head))]
        lines = [self.head, rule, *[[cell.replace("|", "\\|") for cell in row] for row in self.rows]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass
class Section:
    """A heading, paragraphs that say what is seen, tables and figures (name, image, description)."""

    title: str
    words: list[str]
    tables: list[Table] = field(default_factory=list)
    figures: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, figure: Optional[Figure], name: str, description: str) -> None:
        if figure is not None:
            self.figures.append((name, _inline(figure), description))


def _inline(figure: Figure) -> str:
    import matplotlib.pyplot as plt

    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def number(metric: Optional[Metric], digits: int = 4) -> str:
    return "" if metric is None else tables.plain(metric, digits, " ± ")


def percent(metric: Optional[Metric]) -> str:
    return "" if metric is None else tables.percent(metric, " ± ") + " %"


Column = tuple[str, Callable[[Row], str]]


def table(rows: Iterable[Row], columns: Sequence[Column], text: tuple[int, ...] = (0,)) -> Table:
    return Table([name for name, _ in columns], [[cell(r) for _, cell in columns] for r in rows], text)


METHOD: Column = ("cache (K/V)", lambda r: r.method)
BITS: Column = ("bits/value, allocated", lambda r: f"{r.bits_per_value:.2f}")
KLD: Column = ("mean KLD", lambda r: number(r.metrics.get("kld")))


def caches_table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """Caches that llama.cpp itself ran, with the columns that the terminal shows."""
    return table(rows, [METHOD, BITS, *((" ".join(title.split()), cell) for title, cell in columns)])


def lab_table(rows: Sequence[Row]) -> Table:
    """One line a method, short and long prompts side by side, the bits' way with the context last."""
    pairs: dict[str, dict[str, Row]] = {}
    for r in rows:
        pairs.setdefault(r.method, {})[r.setup["setting"]] = r
    head = ["method", "what is kept, and in what"]
    for setting in ("short", "long"):
        head += [f"bits, {setting}", f"KLD, {setting}", f"same top, {setting}", f"50 tokens, {setting}"]
    head += ["recall", "bits at 32k, short prompt", "bits at 32k, long prompt"]
    lines = []
    for method, found in pairs.items():
        any_row = next(iter(found.values()))
        kept = "" if any_row.setup["kept"] == "nothing" else f"{any_row.setup['kept']}: {any_row.setup['keeper']}"
        line = [method, kept]
        for setting in ("short prompt", "long prompt"):
            r = found.get(setting)
            m = r.metrics if r else {}
            line += [f"{r.bits_per_value:.2f}" if r else "", number(m.get("kld")), percent(m.get("same_top")), percent(m.get("agreement"))]
        last = found.get("long prompt", any_row)
        lines.append([*line, percent(last.metrics.get("recall")), *(f"{last.detail['growth'][k][-1]:.2f}" for k in ("short prompt", "long prompt"))])
    return Table(head, lines, (0, 1))


def loci_table(rows: Sequence[Row]) -> Table:
    places = list(dict.fromkeys(r.setup["locus"] for r in rows))
    by = {(r.k, r.setup["locus"]): r for r in rows}
    lines = [
        [k, *(number(by[k, p].metrics["kld"], 5) if (k, p) in by else "" for p in places)] for k in dict.fromkeys(r.k for r in rows)
    ]
    return Table(["codec of K (V in f16)", *(f"KLD, {p}" for p in places)], lines)


def claims_table(verdicts: Sequence[Verdict]) -> Table:
    return Table(["claim", "model", "measured here", "verdict"], [[v.claim, v.model, v.measured, v.verdict] for v in verdicts], (0, 1, 2, 3))


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows that differ only in build, format versions or machine, the last: older ones measured older code."""
    found: dict[tuple, Row] = {}
    for r in rows:
        p = r.provenance
        key = (r.kind, r.method, r.protect, p.model, p.text, p.n_ctx, p.seed, tuple(sorted((k, str(v)) for k, v in r.setup.items())))
        found[key] = r
    return list(found.values())


def _probe_words(rows: Sequence[Row]) -> str:
    drift = {}
    for r in rows:
        if r.method.startswith("int2"):
            drift[(r.setup["layer"], r.setup["side"].upper())] = r.metrics["kld"].value
    if not drift:
        return ""
    top = sorted(drift, key=drift.get, reverse=True)[:3]
    return "Most sensitive to 2 bits: " + ", ".join(f"{side} of layer {layer} (KLD {drift[layer, side]:.3f})" for layer, side in top) + "."


def sections(rows: Sequence[Row]) -> list[Section]:
    """The page's sections, one set a model."""
    found = []
    for model in dict.fromkeys(r.provenance.model for r in rows):
        own = [r for r in rows if r.provenance.model == model]

        def pick(kind: str, what: str | None = None) -> list[Row]:
            return [r for r in own if r.kind == kind and (what is None or r.setup.get("what") == what)]

        if quality := pick("quality"):
            texts = dict.fromkeys((r.provenance.text, r.provenance.n_ctx) for r in quality)
            part = Section(
                f"{model}: how close llama.cpp's caches stay to f16",
                ["Each cache was run by llama.cpp itself, from the first token on. The lower left corner is where one wants to be: "
                 "few bits, and next-token predictions like those of the 16-bit cache."],
                [caches_table(quality, tables.quality(quality))],
            )
            for text, n_ctx in texts:
                chosen = [r for r in quality if (r.provenance.text, r.provenance.n_ctx) == (text, n_ctx)]
                part.add(plots.pareto(chosen, f"{model} on {text}, contexts of {n_ctx} tokens"), f"{model}-pareto-{text}-{n_ctx}", "KLD against bits")
                part.add(
                    plots.by_position(chosen, f"{model} on {text}: KLD by position", "tokens in the cache"),
                    f"{model}-position-{text}-{n_ctx}", "KLD by position",
                )
            found.append(part)
        for kind, title, words in (
            ("generate", "generated text", "How long greedy text stays that of the f16 cache."),
            ("retrieval", "retrieval", "Facts stated early in the context, asked for at its end."),
            ("speed", "speed", "Against the f16 cache, in turns in the same run."),
        ):
            if chosen := pick(kind):
                part = Section(f"{model}: {title}", [words], [caches_table(chosen, getattr(tables, kind)(chosen))])
                if kind == "speed":
                    part.words.append(tables.bandwidth(chosen))
                    part.tables.append(caches_table(chosen, tables.roofline(chosen)))
                    part.add(plots.speed(chosen, f"{model}: speed against f16"), f"{model}-speed", "speed ratios")
                found.append(part)
        if methods := pick("lab", "method"):
            part = Section(
                f"{model}: the lab's methods",
                ["The lab makes every cache with 16-bit arithmetic, changes only what is stored, and scores what the model predicts "
                 "next. Errors do not pile up while the cache is built, and the scored tokens themselves are stored in f16: figures are "
                 "lower than those of a cache that runs in llama.cpp, and only to be compared with one another.",
                 "Bits are what storing would allocate, with scales, orders of channels and everything kept. Where a method keeps the "
                 "prompt, they depend on how much of the context is prompt: the last two columns are at 32,768 tokens with a prompt of "
                 "64 and with all but 64 tokens prompt.",
                 "The noise floor is what a change without meaning does, the last bit of one stored value in 1,000: llama.cpp rounds "
                 "activations to 8 bits, which makes small differences larger. Nothing can be told from f16 below it.",
                 f"Recall is the share of {_asked()} values hidden in documents that greedy decoding gives back, with its standard error; "
                 "50 tokens is the share of 50 greedy tokens before the first that is another than the f16 cache's."],
                [lab_table(methods)],
            )
            part.add(plots.lab_scatter(methods, model), f"{model}-lab", "methods, KLD against bits")
            part.add(plots.growth(methods, model), f"{model}-growth", "how bits grow with context")
            wanted = ("int8", "q4_0, Hadamard", "kvq4, Hadamard", "NF4/g64", "NF4/g64 + window 64", "int2 sorted", "KIVI-like 2-bit", "KIVI-like 2-bit + window 128")
            lines = [r for name in wanted for r in methods if r.method == name and r.setup["setting"] == "long prompt"]
            part.add(plots.by_position(lines, f"{model}: KLD by distance from the changed cache", "tokens after its end"), f"{model}-lab-position", "KLD by position")
            found.append(part)
        if places := pick("lab", "locus"):
            norm = places[0].setup["key_norm"]
            part = Section(
                f"{model}: where keys are quantized",
                ["The same codec on W_k's output and on the key that is stored, after RoPE. These are different objects: RoPE mixes "
                 "pairs of channels by an angle that grows with position, so that channels with large, constant offsets lose them. "
                 + ("This model norms its keys between W_k and RoPE: the key before RoPE is a third object." if norm else
                    "This model has no key norm: before RoPE, the key is W_k's output with its bias."),
                 "The row of f16 is what going there and back costs by itself."],
                [loci_table(places)],
            )
            part.add(plots.loci(places, f"{model}: the same codec at different places"), f"{model}-loci", "loci")
            found.append(part)
        if layers := pick("probe", "layer"):
            part = Section(
                f"{model}: sensitivity of each layer",
                ["Only K or only V of one layer is quantized; everything else stays f16. " + _probe_words(layers)],
            )
            part.add(plots.layers(layers, f"{model}: KLD when only that layer is quantized"), f"{model}-layers", "per-layer heat map")
            found.append(part)
        if groups := pick("probe", "positions"):
            part = Section(
                f"{model}: which old tokens matter",
                ["One quarter of the stored tokens is put through a 2-bit codec, all others stay f16. If a ranking predicted "
                 "harm, its bars would rise from left to right more than those of the random quarters differ. Attention is that of "
                 "the scored tokens, which no policy knows beforehand. The first 4 tokens are a group of their own."],
                [table(groups, [
                    ("tokens quantized", lambda r: r.method), KLD,
                    ("attention they get", lambda r: percent(r.metrics.get("attention_share"))),
                    ("codec's relative squared error", lambda r: number(r.metrics.get("relative_error"), 3)),
                ])],
            )
            part.add(plots.positions(groups, f"{model}: KLD when only one group of old tokens is quantized"), f"{model}-positions", "old tokens")
            found.append(part)
    if verdicts := judge(rows):
        found.insert(0, Section(
            "What became of the claims",
            ["Claims of earlier studies, decided by the rows below by the rule that each claim states; some were retracted by "
             "those who made them."],
            [claims_table(verdicts)],
        ))
    return found


def _asked() -> str:
    from bench.lab.experiment import ASKED, DOCUMENTS

    return str(ASKED * len(DOCUMENTS))


def provenance_table(rows: Sequence[Row]) -> Table:
    """What was measured with what."""
    seen = dict.fromkeys(
        (r.provenance.model, r.provenance.model_sha256[:12], r.provenance.text, r.provenance.text_sha256[:12], r.provenance.build, r.provenance.machine)
        for r in rows
    )
    return Table(["model", "sha256", "text", "sha256", "build", "machine"], [list(x) for x in seen], tuple(range(6)))


def html(rows: Sequence[Row], found: Sequence[Section]) -> str:
    """The page; images are inside."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html.j2").render(sections=found, provenance=provenance_table(rows))


def markdown(rows: Sequence[Row], found: Sequence[Section]) -> str:
    """The tables alone, with their headings."""
    parts = ["# Results", "KLD is in nats against the f16 cache; bits per value are what is allocated. Figures with ± have their standard error."]
    for section in found:
        if section.tables:
            parts += [f"## {section.title}", *section.words, *(t.markdown() for t in section.tables)]
    return "\n\n".join([*parts, "## What was measured", provenance_table(rows).markdown()]) + "\n"


def write_report(inputs: Sequence[Path], output: Path) -> tuple[Path, Path]:
    """Writes ``output`` (HTML) and the Markdown beside it. Raises KvfmtError if there are no rows."""
    for path in inputs:
        if not path.is_file():
            raise KvfmtError(f"no results at {path}", "Measure first, e.g. kvfmt bench quality.")
    rows = latest(r for path in inputs for r in Results(path))
    if not rows:
        raise KvfmtError("no rows in " + ", ".join(p.name for p in inputs), "Measure first, e.g. kvfmt bench quality.")
    found = sections(rows)
    text = output.with_suffix(".md")
    for path, content in ((output, html(rows, found)), (text, markdown(rows, found))):
        write_whole(path, content)
    return output, text
