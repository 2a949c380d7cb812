"""How close a quantized cache stays to the f16 cache: ``python -m bench.fidelity``.

Runs llama-perplexity --kl-divergence of the patched build for a list of K/V types on each model,
and writes one JSON file, from which ``--report`` makes the README's table and plot.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Optional

import typer

from bench.caches import F16, Cache, parse_caches
from kvfmt import perplexity, registry
from kvfmt.build.console import console, progress
from kvfmt.build.corpus import corpus
from kvfmt.build.files import write_whole
from kvfmt.build.models import chosen_models, fetch_model, load_models
from kvfmt.build.paths import ROOT, build_dir
from kvfmt.build.pins import get_pin
from kvfmt.errors import KvfmtError

RESULTS = ROOT / "bench" / "results" / "fidelity.json"


DEFAULT_CACHES = (
    Cache("f16"),
    Cache("q8_0"),
    Cache("q4_0"),
    Cache("kvq4"),
    Cache("kvnf4"),
    Cache("kvq3/kvq2"),
    Cache("kve8_3/kve8_2"),
    Cache("kvq3/kvq2", 2),
    Cache("kve8_3/kve8_2", 2),
    Cache("f16/kvq2"),
    Cache("f16/kve8_2"),
)


def text_of(file: Optional[Path]) -> tuple[str, str]:
    """Name and content of the text to score on: a user's file, or the documentation corpus."""
    if file is None:
        return "llama.cpp documentation", corpus("docs")
    if not file.is_file():
        raise KvfmtError(f"no text at {file}", "Give a text file, or none for the documentation corpus.")
    return file.name, file.read_text("utf-8", "replace")


def measure(model: str, caches: tuple[Cache, ...], text: str, n_ctx: int, chunks: int, threads: int) -> list[dict]:
    """One record a cache. The first run writes the f16 logits that the others are compared with."""
    program = build_dir(get_pin().name) / "cmake-cpu" / "bin" / "llama-perplexity"
    if not program.exists():
        raise KvfmtError("llama-perplexity is not built", "Run: kvfmt build")
    path = fetch_model(model)
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        source, base = Path(scratch, "text"), Path(scratch, "f16.kld")
        source.write_text(text, "utf-8")
        common = ["-m", str(path), "-f", str(source), "-c", str(n_ctx), "-b", str(n_ctx), "-t", str(threads)]
        common += ["--chunks", str(chunks), "--kl-divergence-base", str(base)]
        with progress(f"{model}: f16 logits", chunks) as update:
            perplexity.run(program, [*common, *F16.arguments()], lambda n: update(n, chunks))
        for cache in caches:
            with progress(f"{model}: {cache.title}", chunks) as update:
                arguments = [*common, "--kl-divergence", *cache.arguments()]
                found = perplexity.run(program, arguments, lambda n: update(n, chunks), compared=True)
            kld = found.statistics["kld"]
            console.print(f"{model:8} {cache.title:24} {found.bits_per_value:6.3f} bits  KLD {kld[0]:.5f} ± {kld[1]:.5f}")
            records.append({"model": model, "chunks": chunks, "cache": {"kv": cache.kv, "protect": cache.protect}, "title": cache.title, **asdict(found)})
    if records and records[0]["title"] == "f16" and records[0]["statistics"]["kld"][0] > 1e-4:
        raise KvfmtError(
            f"the f16 cache differs from itself by KLD {records[0]['statistics']['kld'][0]}", "The harness is wrong."
        )
    return records


def provenance(text_name: str, text: str, n_ctx: int) -> dict:
    """What was measured, so that it can be measured again."""
    pin = get_pin()
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "pin": pin.name,
        "commit": head.stdout.strip(),
        "formats": {fmt.spec.name: fmt.spec.hash for fmt in registry.all_formats()},
        "models": {name: model.sha256 for name, model in load_models().items()},
        "text": text_name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "n_ctx": n_ctx,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _figure(found: list[float], digits: int) -> str:
    """A value with its standard error. f16 against itself may come out as -0, and with no error at all."""
    value, error = found
    text = f"{value:.{digits}f}"
    text = text.removeprefix("-") if float(text) == 0 else text
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


def markdown(results: dict) -> str:
    """The README's table."""
    lines = [
        "| model | cache (K/V) | bits/value, allocated | maps, MiB | mean KLD | 99.9 % KLD | same top token | PPL ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results["records"]:
        s = r["statistics"]
        lines.append(
            f"| {r['model']} | {r['title']} | {r['bits_without_maps']:.2f} | {r['maps'] / 2**20:.2f} "
            f"| {_figure(s['kld'], 4)} | {s['kld_999'][0]:.3f} | {_figure(s['same_top'], 1)} % | {_figure(s['ppl_ratio'], 4)} |"
        )
    return "\n".join(lines)


def _kind(record: dict) -> str:
    if "@" in record["title"]:
        return "kvfmt, with a profile"
    return "kvfmt" if any(part in registry.names() for part in record["cache"]["kv"].split("/")) else "llama.cpp's own types"


def plot(results: dict, target: Path) -> None:
    """Mean KLD against allocated bits per value, a panel a model."""
    import matplotlib.pyplot as plt

    from bench import plots

    looks = {"kvfmt, with a profile": (plots.FAMILIES["calibrated"], "o"), "kvfmt": (plots.OURS, "o"), "llama.cpp's own types": (plots.STOCK, "s")}
    panels: dict[str, list[dict]] = {}
    for r in results["records"]:
        if r["title"] != "f16":
            panels.setdefault(r["model"], []).append(r)
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.4), sharey=True, squeeze=False, layout="constrained")
    for axis, (model, records) in zip(axes[0], panels.items()):
        for kind, (colour, marker) in looks.items():
            shown = [(r["bits_without_maps"], *r["statistics"]["kld"]) for r in records if _kind(r) == kind]
            if shown:
                bits, kld, error = zip(*shown)
                axis.errorbar(bits, kld, yerr=error, fmt=marker, color=colour, capsize=2, markersize=6, label=kind)
        axis.set_yscale("log")
        axis.set_xlim(2, 9.8)
        axis.set_xlabel("allocated bits per value")
        axis.set_title(model)
        axis.grid(True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("mean KLD against the f16 cache (nats)\nlower is better")
    axes[0][-1].legend(fontsize=8, loc="upper right")
    # Once all panels are drawn, which share an axis. The colour says that a cache has a profile.
    for axis, records in zip(axes[0], panels.values()):
        plots.spread_labels(axis, [(r["bits_without_maps"], r["statistics"]["kld"][0], r["title"].split("@")[0]) for r in records])
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main(
    models: str = typer.Option("smollm2", help="names separated by commas, or 'all'"),
    chunks: int = typer.Option(8, min=1, help="chunks of n-ctx tokens; the second half of each is scored"),
    n_ctx: int = typer.Option(1024, min=128),
    threads: int = typer.Option(os.cpu_count() or 1),
    text: Optional[Path] = typer.Option(None, help="a text file; default: llama.cpp's documentation"),
    caches: Optional[str] = typer.Option(None, help="e.g. 'q8_0 kvq3/kvq2:2 kvt3/kve8_2@{model}.gguf'; ':N' protects N layers at each end, '@' names a profile"),
    output: Path = typer.Option(RESULTS, help="JSON; records of other models in it are kept"),
    report: bool = typer.Option(False, help="measure nothing: print the table and write the plot from the JSON"),
) -> None:
    """Fidelity of KV cache types on real models."""
    try:
        if not report:
            name, content = text_of(text)
            results = {**provenance(name, content, n_ctx), "records": []}
            names = chosen_models(models)
            if output.exists():
                before = json.loads(output.read_text())
                same = all(before.get(k) == results[k] for k in ("text_sha256", "n_ctx", "formats", "pin"))
                results["records"] = [r for r in before["records"] if same and r["model"] not in names]
            for model in names:
                chosen = parse_caches(caches and caches.replace("{model}", model), DEFAULT_CACHES)
                results["records"] += measure(model, chosen, content, n_ctx, chunks, threads)
                # After each model: what is measured is not lost if a later one is interrupted.
                write_whole(output, json.dumps(results, indent=1) + "\n")
        results = json.loads(output.read_text())
        plot(results, output.with_suffix(".png"))
        print(markdown(results))
    except KvfmtError as error:
        console.print(f"[bold red]error:[/bold red] {error}")
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
