"""``kvfmt bench``: the measurements. Mounted by kvfmt.cli, which imports this module only when it is asked for.

Each command's work is in a module of its own, imported when the command runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, Optional

import typer

from bench.lab.cli import register
from kvfmt.build.paths import ROOT
from kvfmt.cli import plain_errors

if TYPE_CHECKING:
    from bench.caches import Cache
    from bench.engine import Engine
    from bench.records import Results
    from kvfmt.subjects import ModelFile

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def measurements() -> None:
    """Measure KV cache types against the f16 cache."""


MODEL = typer.Option("smollm2", help="a name of `kvfmt models list`, or a GGUF file")
CACHES = typer.Option(None, help="e.g. 'q8_0 kvq3/kvq2:2'; ':N' protects N layers at each end; default: all formats and the usual types")
OUTPUT = typer.Option(None, help="JSON lines; rows in it are not measured again; default: bench/results/<model>.jsonl")
THREADS = typer.Option(None, min=1, help="default: all cores")
GPU_LAYERS = typer.Option(0, min=0, help="layers to compute on the GPU, if the build has one")
SEED = typer.Option(1, help="of the prompts")


@dataclass(frozen=True)
class Run:
    """What every measurement has: the caches, the model's file and the loaded model, the rows' file."""

    caches: tuple[Cache, ...]
    subject: ModelFile
    engine: Engine
    results: Results


@contextmanager
def run(model: str, caches: Optional[str] | tuple[Cache, ...], output: Optional[Path], threads: Optional[int], gpu_layers: int) -> Iterator[Run]:
    """Finds the model, loads it, and says in the end where the rows are. What is wrong with the request is said first."""
    from bench import caches as kinds
    from bench.engine import Engine
    from bench.records import Results
    from kvfmt.subjects import find_model
    from kvfmt.build.console import console

    chosen = kinds.parse_caches(caches, kinds.default_caches())
    subject = find_model(model)
    results = Results(output_file(output, model))
    with Engine(subject.path, threads, gpu_layers) as engine:
        yield Run(chosen, subject, engine, results)
    console.print(f"rows: {results.path}", soft_wrap=True)


def output_file(output: Optional[Path], model: str) -> Path:
    """Where rows go unless the user says otherwise: one file a model, rows of all kinds."""
    return output or ROOT / "bench" / "results" / f"{Path(model).stem}.jsonl"


@app.command()
@plain_errors
def quality(
    model: str = MODEL,
    caches: Optional[str] = CACHES,
    text: list[str] = typer.Option(["docs"], help="'docs', 'cpp' or a text file; may be given several times"),
    n_ctx: list[int] = typer.Option([1024], min=32, help="tokens of a chunk; may be given several times"),
    chunks: int = typer.Option(8, min=1),
    score_from: Optional[int] = typer.Option(None, min=0, help="first position that is scored in a chunk; default: half of it"),
    output: Optional[Path] = OUTPUT,
    threads: Optional[int] = THREADS,
    gpu_layers: int = GPU_LAYERS,
) -> None:
    """KLD, perplexity and most likely tokens on text, against the f16 cache."""
    from bench import quality as work, tables
    from kvfmt.subjects import find_text
    from kvfmt.build.console import progress

    texts = [find_text(name) for name in text]
    plans = [work.make_plan(n, chunks, score_from) for n in n_ctx]
    rows = []
    with run(model, caches, output, threads, gpu_layers) as r:
        # What cannot work is said before hours of work.
        for plan in plans:
            r.engine.check_ctx(plan.n_ctx)
            for piece in texts:
                work.chunks_of(r.engine, piece, plan)
        for piece in texts:
            for plan in plans:
                title = f"{r.subject.name} on {piece.name}, {plan.chunks} x {plan.n_ctx} tokens"
                with progress(title, plan.chunks * plan.n_ctx * len(r.caches)) as update:
                    rows += work.measure(r.engine, r.subject, piece, r.caches, plan, r.results, update, tables.announce)
        tables.show(tables.table(rows, tables.quality(rows)))


@app.command()
@plain_errors
def generate(
    model: str = MODEL,
    caches: Optional[str] = CACHES,
    sets: str = typer.Option("short,hard,long", help="sets of prompts, separated by commas"),
    prompts: int = typer.Option(8, min=2, help="of each set"),
    seed: int = SEED,
    output: Optional[Path] = OUTPUT,
    threads: Optional[int] = THREADS,
    gpu_layers: int = GPU_LAYERS,
) -> None:
    """Greedy text: how long it stays the f16 cache's, and whether it falls into loops."""
    from bench import generate as work, prompts as known, tables
    from kvfmt.build.console import progress

    wanted = [part.strip() for part in sets.split(",") if part.strip()]
    for name in wanted:
        known.prompts(name, 1, seed)
    rows = []
    with run(model, caches, output, threads, gpu_layers) as r:
        for name in wanted:
            with progress(f"{r.subject.name}, {prompts} {name} prompts", prompts * (len(r.caches) + 1)) as update:
                rows += work.measure(r.engine, r.subject, r.caches, name, prompts, seed, r.results, update, tables.announce)
        tables.show(tables.table(rows, tables.generate(rows)))


@app.command()
@plain_errors
def retrieval(
    model: str = MODEL,
    caches: Optional[str] = CACHES,
    length: list[int] = typer.Option([1024, 4096], min=128, help="tokens of a document, e.g. 1024 to 16384; may be given several times"),
    documents: int = typer.Option(4, min=1, help="of each length"),
    keys: int = typer.Option(5, min=1, help="values hidden in a document, at even depths"),
    seed: int = SEED,
    output: Optional[Path] = OUTPUT,
    threads: Optional[int] = THREADS,
    gpu_layers: int = GPU_LAYERS,
) -> None:
    """Values hidden in a long text: are they found again, and how sure is the model of them?"""
    from bench import retrieval as work, tables
    from kvfmt.build.console import progress

    rows = []
    with run(model, caches, output, threads, gpu_layers) as r:
        for n in length:
            r.engine.check_ctx(n)
        for n in sorted(set(length)):
            with progress(f"{r.subject.name}, {documents} documents of {n} tokens", documents * (len(r.caches) + 1)) as update:
                rows += work.measure(r.engine, r.subject, r.caches, n, documents, keys, seed, r.results, update, tables.announce)
        tables.show(tables.table(rows, tables.retrieval(rows)))


@app.command()
@plain_errors
def speed(
    model: str = MODEL,
    caches: Optional[str] = CACHES,
    depth: list[int] = typer.Option([0, 1024, 4096], min=0, help="tokens in the cache; may be given several times"),
    rounds: int = typer.Option(6, min=2, help="turns of each cache"),
    decode: int = typer.Option(16, min=1, help="tokens decoded in a turn"),
    prefill: int = typer.Option(128, min=1, help="tokens prefilled in a turn"),
    seed: int = SEED,
    output: Optional[Path] = OUTPUT,
    threads: Optional[int] = THREADS,
    gpu_layers: int = GPU_LAYERS,
) -> None:
    """Decode and prefill beside the f16 cache, by turns; size of the cache; what memory bandwidth allows."""
    from bench import speed as work, tables
    from kvfmt.build.console import progress

    with run(model, caches, output, threads, gpu_layers) as r:
        with progress(f"{r.subject.name}: speed of {len(r.caches)} caches", 1) as update:
            rows = work.measure(
                r.engine, r.subject, r.caches, tuple(depth), rounds, decode, prefill, seed, r.results, update, tables.announce
            )
        tables.show(tables.table(rows, tables.speed(rows)))
        tables.show(tables.table(rows, tables.roofline(rows), tables.bandwidth(rows)))


register(app, MODEL, OUTPUT, THREADS, output_file)

if __name__ == "__main__":
    app()
