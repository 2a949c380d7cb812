"""``kvfmt bench lab``, ``probe``, ``report`` and ``all``, added to the commands of bench.cli."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Optional

import typer

from kvfmt.cli import plain_errors

TEXT = typer.Option("docs", help="'docs', 'cpp' or a text file")


def register(app: typer.Typer, model_option, output_option, threads_option, output_file: Callable[[Optional[Path], str], Path]) -> None:
    """Adds the commands; the options are those that the other measurements have."""

    @app.command()
    @plain_errors
    def lab(
        model: str = model_option,
        text: str = TEXT,
        methods: Optional[str] = typer.Option(None, help="names separated by ';'; default: all"),
        profile: Optional[Path] = typer.Option(None, help="what `kvfmt calibrate` wrote: adds rows with calibrated keys"),
        output: Optional[Path] = output_option,
        threads: Optional[int] = threads_option,
    ) -> None:
        """Other methods, simulated: stored keys and values through codecs in Python; and where keys are quantized."""
        from bench import report as pages
        from bench.lab.commands import run_lab
        from kvfmt.build.console import console

        target = output_file(output, model)
        rows = run_lab(model, text, target, methods, threads=threads, profile=profile)
        console.print(pages.lab_table([r for r in rows if r.setup["what"] == "method"]).markdown(), soft_wrap=True)
        console.print(f"rows: {target}", soft_wrap=True)

    @app.command()
    @plain_errors
    def probe(
        model: str = model_option, text: str = TEXT, output: Optional[Path] = output_option, threads: Optional[int] = threads_option,
    ) -> None:
        """How much each layer's K and V matter, and which old tokens do."""
        from bench.lab.commands import run_probe
        from bench.lab.probe import ranking
        from kvfmt.build.console import console

        target = output_file(output, model)
        rows = [r for r in run_probe(model, text, target, threads) if r.setup["what"] == "layer" and r.method.startswith("int2")]
        console.print("most sensitive layers: " + " ".join(map(str, ranking(rows)[:8])))
        console.print(f"rows: {target}; the plot: kvfmt bench report", soft_wrap=True)

    @app.command()
    @plain_errors
    def report(
        inputs: Optional[list[Path]] = typer.Argument(None, help="files of rows; default: all in bench/results"),
        output: Optional[Path] = typer.Option(None, help="the HTML page; a Markdown file is put beside it; default: build/report.html"),
    ) -> None:
        """One HTML page and one Markdown file from the rows."""
        from bench.report import write_report
        from kvfmt.build.console import console
        from kvfmt.build.paths import ROOT

        files = inputs or sorted((ROOT / "bench" / "results").glob("*.jsonl"))
        for path in write_report(files, output or ROOT / "build" / "report.html"):
            console.print(f"wrote {path}", soft_wrap=True)

    @app.command("all")
    @plain_errors
    def everything(
        models: str = typer.Option("smollm2", help="names separated by commas, or 'all'"),
        folder: Optional[Path] = typer.Option(None, help="for rows, one file a model, and the report; default: bench/results"),
        threads: Optional[int] = threads_option,
    ) -> None:
        """Every measurement, of a size that takes about half an hour for SmolLM2 on two cores; then the report."""
        from bench import cli
        from bench.caches import default_caches, shortlist
        from bench.profiles import calibrated_caches
        from kvfmt.build.models import chosen_models
        from kvfmt.build.paths import ROOT
        from kvfmt.subjects import find_model

        folder = folder or ROOT / "bench" / "results"
        outputs = []
        for name in chosen_models(models):
            target = folder / output_file(None, name).name
            calibrated = calibrated_caches(find_model(name), ROOT / "build" / "profiles", threads)
            every, chosen = ((*caches, *calibrated) for caches in (default_caches(), shortlist()))
            same = {"model": name, "output": target, "threads": threads, "gpu_layers": 0}
            cli.quality(text=["docs"], caches=every, n_ctx=[1024], chunks=4, score_from=None, **same)
            cli.generate(sets="short,hard", caches=chosen, prompts=4, seed=1, **same)
            cli.retrieval(length=[1024], caches=chosen, documents=2, keys=5, seed=1, **same)
            cli.speed(depth=[0, 1024], caches=chosen, rounds=4, decode=16, prefill=128, seed=1, **same)
            probe(name, "docs", target, threads)
            lab(name, "docs", None, calibrated[0].profile, target, threads)
            outputs.append(target)
        report(outputs, folder / "report.html")
