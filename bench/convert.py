"""What `kvfmt convert` costs and keeps: ``python -m bench.convert --tokens 4000 --caches "kvq3/kvq2"``.

A session of a real model with an f16 cache is saved by llama.cpp and converted; then one context goes on from the converted
file, another from a cache that was quantized live, and both are held against the f16 cache over the next tokens of the text.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import typer
from rich import box
from rich.table import Table

from bench.caches import F16, Cache, parse_caches
from bench.divergence import Scores, compare, mean, share
from bench.engine import Engine, Session
from bench.records import Metric
from converters.conversion_plan import Request
from converters.convert_state import convert_state
from converters.model_layers import read_model_layers
from kvfmt.build.console import console, progress
from kvfmt.build.files import write_whole
from kvfmt.errors import KvfmtError
from kvfmt.policy import parse_kv
from kvfmt.profile import read_model
from kvfmt.subjects import find_model, find_text

#: Tokens after the session whose predictions are compared.
SCORED = 256


@dataclass(frozen=True)
class Row:
    """One conversion. Sizes in bytes, seconds of each turn, KLD in nats: of the live and of the converted cache from f16, and of the
    converted from the live one; how often each names f16's most likely token."""

    cache: str
    before: int
    after: int
    bits: float
    seconds: tuple[float, ...]
    kld_live: Metric
    kld_converted: Metric
    kld_between: Metric
    same_live: Metric
    same_converted: Metric

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """MB of input a second."""
        return self.before / 1e6 / self.median


def _save(session: Session, path: Path, tokens: np.ndarray) -> None:
    values = (ctypes.c_int32 * len(tokens))(*tokens.tolist())
    if not session.engine.lib.llama_state_save_file(session.context, str(path).encode(), values, len(tokens)):
        raise KvfmtError(f"llama.cpp did not save {path}", "Is there room?")


def _load(session: Session, path: Path, room: int) -> None:
    values, count = (ctypes.c_int32 * room)(), ctypes.c_size_t(0)
    if not session.engine.lib.llama_state_load_file(session.context, str(path).encode(), values, room, ctypes.byref(count)):
        raise KvfmtError(f"the cache {session.cache.title} does not take the converted session", "Report it with the command.")
    session.length = count.value


def _logits(session: Session, more: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocabulary] after each of them; they are forgotten again."""
    length = session.length
    found = session.decode(more, 0).copy()
    session.forget(length)
    return found


def measure(model: str, text: str, tokens: int, caches: tuple[Cache, ...], turns: int, threads: int) -> list[Row]:
    """One row a cache. Raises KvfmtError for a text that is too short, and whatever the engine and the converter raise."""
    subject = find_model(model)
    shape = read_model_layers(read_model(subject.path))
    rows = []
    with Engine(subject.path, threads) as engine, tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        source, target = Path(folder) / "f16.bin", Path(folder) / "converted.bin"
        # 16 characters a token are more than any text needs.
        ids = engine.tokenize(find_text(text).content[: 16 * (tokens + SCORED)])
        if len(ids) < tokens + SCORED:
            raise KvfmtError(f"the text has {len(ids)} tokens, {tokens + SCORED} are needed", "Ask for fewer tokens, or give a longer text.")
        prompt, more, targets = ids[:tokens], ids[tokens : tokens + SCORED - 1], ids[tokens + 1 : tokens + SCORED]
        n_ctx = -(-(tokens + SCORED) // 256) * 256

        def scores(base: np.ndarray, other: np.ndarray) -> Scores:
            found = Scores.empty(len(targets))
            compare(base, other, targets, found, pool, threads)
            return found

        with progress("f16 and each cache", 1 + len(caches)) as update:
            with engine.open(F16, n_ctx, SCORED) as session:
                session.prefill(prompt)
                _save(session, source, prompt)
                reference = _logits(session, more)
            update(1, 1 + len(caches))
            for done, cache in enumerate(caches):
                k, v = parse_kv(cache.kv or "f16")
                request = Request(k, v, cache.protect, profile=None if cache.profile is None else cache.calibrated, model=shape)
                # The first turn fills caches and loads libraries.
                made = [convert_state(source, target, request, threads) for _ in range(turns + 1)][1:]
                with engine.open(cache, n_ctx, SCORED) as session:
                    _load(session, target, tokens)
                    converted = _logits(session, more)
                    session.clear()
                    session.prefill(prompt)
                    live = _logits(session, more)
                from_f16, of_live, between = scores(reference, converted), scores(reference, live), scores(live, converted)
                after = made[0].after
                rows.append(Row(
                    cache.title, made[0].before.size, after.size, 8 * after.cache_bytes / after.values, tuple(one.seconds for one in made),
                    mean(of_live.kld), mean(from_f16.kld), mean(between.kld), share(of_live.same), share(from_f16.same),
                ))
                update(2 + done, 1 + len(caches))
    return rows


def report(rows: list[Row], title: str) -> Table:
    """One line a conversion."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("cache", "MB", "smaller", "bits/value", "s", "MB/s of f16", "KLD live", "KLD converted", "live to converted", "same top live", "converted"):
        table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
    for row in rows:
        klds = (f"{m.value:.4f} ± {m.error:.4f}" for m in (row.kld_live, row.kld_converted, row.kld_between))
        tops = (f"{100 * m.value:.1f} %" for m in (row.same_live, row.same_converted))
        table.add_row(row.cache, f"{row.after / 1e6:.1f}", f"{row.before / row.after:.2f}", f"{row.bits:.3f}", f"{row.median:.2f}", f"{row.rate:.0f}", *klds, *tops)
    return table


def main(
    model: str = typer.Option("smollm2", help="a name of `kvfmt models list`, or a GGUF file"),
    text: str = typer.Option("docs", help="'docs', 'cpp' or a text file"),
    tokens: int = typer.Option(4000, min=16, help="tokens of the session"),
    caches: str = typer.Option("kvq3/kvq2", help="separated by blanks, e.g. 'kvq3/kvq2:2 kvt3/kve8_2@FILE'"),
    turns: int = typer.Option(5, min=1, help="conversions that are timed"),
    threads: int = typer.Option(2, min=1),
    output: Optional[Path] = typer.Option(None, "--output", "-o", help="write the rows to this JSON file"),
) -> None:
    """Size, speed and predictions of a converted session."""
    try:
        rows = measure(model, text, tokens, parse_caches(caches, ()), turns, threads)
    except KvfmtError as error:
        console.print(f"[bold red]error:[/bold red] {error}")
        raise typer.Exit(1) from None
    console.print(report(rows, f"{model}, a session of {tokens} tokens in f16 ({rows[0].before / 1e6:.1f} MB), {threads} threads"))
    if output:
        write_whole(output, json.dumps({"model": model, "text": text, "tokens": tokens, "threads": threads, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
