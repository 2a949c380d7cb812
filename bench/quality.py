"""How close a quantized cache stays to the f16 cache on text: ``kvfmt bench quality``.

The f16 cache and the others take each chunk of the text together, a batch at a time, so that no more than a batch
of logits exists, however large the vocabulary, and nothing of them goes to the disk.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Callable, Optional

import numpy as np

from bench.caches import F16, Cache
from bench.divergence import Scores, by_position, compare, metrics
from bench.engine import UBATCH, Engine, Session
from bench.records import Metric, Provenance, Results, Row, row_key, spec_hashes
from kvfmt.build.files import write_whole
from kvfmt.errors import KvfmtError
from kvfmt.subjects import ModelFile, Text

#: Caches that are open at a time, beside f16's: what a pass costs in memory is bounded, and f16 runs once a pass.
TOGETHER = 6
BUCKETS = 8


@dataclass(frozen=True)
class Plan:
    """What is scored: ``chunks`` pieces of ``n_ctx`` tokens, in each the positions from ``first`` on.

    As llama-perplexity: each chunk begins with the model's first token if it wants one, and the token at position
    i+1 is scored with the logits at position i, for i from ``first`` to n_ctx - 2.
    """

    n_ctx: int
    chunks: int
    first: int

    @property
    def per_chunk(self) -> int:
        return self.n_ctx - 1 - self.first


def make_plan(n_ctx: int, chunks: int, first: Optional[int]) -> Plan:
    """``first`` None: half the context, as llama-perplexity. Raises KvfmtError if nothing would be scored."""
    first = n_ctx // 2 if first is None else first
    if not 0 <= first < n_ctx - 1:
        raise KvfmtError(f"scoring from position {first} leaves nothing of {n_ctx} tokens", "Score from an earlier position: --score-from.")
    return Plan(n_ctx, chunks, first)


def chunks_of(engine: Engine, text: Text, plan: Plan) -> np.ndarray:
    """The text in tokens, int32 [chunks, n_ctx]. Raises KvfmtError if it is too short."""
    tokens = engine.tokenize(text.content)
    if len(tokens) < plan.n_ctx * plan.chunks:
        raise KvfmtError(
            f"text '{text.name}' has {len(tokens)} tokens, {plan.chunks} chunks of {plan.n_ctx} need {plan.n_ctx * plan.chunks}",
            f"Give a longer text, or at most {len(tokens) // plan.n_ctx} chunks."
            if len(tokens) >= plan.n_ctx
            else f"The text is shorter than one chunk: give a longer one, or a context of at most {len(tokens)} tokens.",
        )
    pieces = tokens[: plan.n_ctx * plan.chunks].reshape(plan.chunks, plan.n_ctx).copy()
    if engine.add_bos:
        pieces[:, 0] = engine.bos
    return pieces


def score_chunk(
    base: Session, others: list[Session], tokens: np.ndarray, first: int, on_tokens: Callable[[int], None] = lambda n: None
) -> list[Scores]:
    """Takes one chunk, int32 [n], through all caches; scores of each of ``others`` from position ``first`` on.

    ``on_tokens(n)`` is called when all caches have taken n more tokens.
    """
    n = len(tokens)
    sessions = [base, *others]
    results = [Scores.empty(n - 1 - first) for _ in others]
    for session in sessions:
        session.clear()
    threads = base.engine.threads
    start = 0
    with ThreadPoolExecutor(threads) as pool:
        # The last token predicts nothing that could be scored, but is read all the same, as upstream does.
        while start < n:
            stop = min(start + UBATCH, n, max(first, start + base.rows))
            wanted_from = max(first - start, 0)
            if stop - start - wanted_from > 0:
                stop = min(stop, start + wanted_from + base.rows)
            piece = tokens[start:stop]
            scored = wanted_from if stop > first else None
            targets = tokens[start + wanted_from + 1 : stop + 1]
            logits = base.decode(piece, scored)
            for session, result in zip(others, results):
                changed = session.decode(piece, scored)
                if len(targets):
                    at = start + wanted_from - first
                    out = result.part(slice(at, at + len(targets)))
                    compare(logits[: len(targets)], changed[: len(targets)], targets, out, pool, threads)
            on_tokens(stop - start)
            start = stop
    return results


class Progress:
    """Scores of finished chunks on disk, until the rows are written: [caches, chunks, positions]."""

    def __init__(self, path: Path, n_caches: int, plan: Plan) -> None:
        self.path = path
        self.done: list[list[Scores]] = []
        if path.exists():
            try:
                with np.load(path) as saved:
                    arrays = [saved[f.name] for f in fields(Scores)]
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                arrays = []  # damaged: measured again
            if arrays and arrays[0].shape[1:] == (n_caches, plan.per_chunk):
                self.done = [[Scores(*(a[c, i] for a in arrays)) for i in range(n_caches)] for c in range(len(arrays[0]))]

    def add(self, scores: list[Scores]) -> None:
        self.done.append(scores)
        buffer = io.BytesIO()
        np.savez(buffer, **{f.name: np.array([[getattr(s, f.name) for s in chunk] for chunk in self.done]) for f in fields(Scores)})
        write_whole(self.path, buffer.getvalue())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def provenance(model: ModelFile, text: Text, n_ctx: int, kv: str, seed: int = 0) -> Provenance:
    """For any row that is measured in-process."""
    return Provenance.here(spec_hashes(kv), model, text, n_ctx, seed)


def row_of(cache: Cache, bits: float, scores: list[Scores], plan: Plan, origin: Provenance) -> Row:
    """The row of a cache from its scores, one a chunk."""
    every = Scores.concatenate(scores)
    # Position = tokens in the cache when the next one is predicted.
    positions = np.tile(np.arange(plan.first, plan.n_ctx - 1) + 1, len(scores))
    edges = np.linspace(plan.first, plan.n_ctx, BUCKETS + 1).astype(int)
    detail = {
        "by_position": by_position(every, positions, edges),
        "kld_by_chunk": [float(s.kld.mean()) for s in scores],
    }
    found = metrics(every)
    found["positions"] = Metric(float(len(every.kld)))
    return Row("quality", cache.title, *cache.sides, cache.protect, bits, origin, settings(plan), found, detail)


def settings(plan: Plan) -> dict:
    return {"chunks": plan.chunks, "score_from": plan.first}


def key_of(cache: Cache, plan: Plan, origin: Provenance) -> str:
    return row_key("quality", cache.title, *cache.sides, cache.protect, origin, settings(plan))


def measure(
    engine: Engine,
    model: ModelFile,
    text: Text,
    caches: tuple[Cache, ...],
    plan: Plan,
    results: Results,
    update: Callable[[int, int], None] = lambda done, total: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Rows of the caches in order; those already in ``results`` are not measured again, the others are added to it.

    ``update(done, total)`` counts tokens over all caches. Raises KvfmtError for a text that is too short, a context
    longer than the model's, a cache that the library refuses, and an f16 cache that differs from itself.
    """
    engine.check_ctx(plan.n_ctx)
    origins = {cache: provenance(model, text, plan.n_ctx, cache.kv) for cache in caches}
    missing = [c for c in caches if results.find(key_of(c, plan, origins[c])) is None]
    pieces = chunks_of(engine, text, plan) if missing else np.empty((0, plan.n_ctx), np.int32)
    groups = [missing[i : i + TOGETHER] for i in range(0, len(missing), TOGETHER)]
    total, done = len(missing) * plan.chunks * plan.n_ctx, 0
    for group in groups:
        identity = "\n".join(key_of(c, plan, origins[c]) for c in group)
        name = f".{results.path.name}.{hashlib.sha256(identity.encode()).hexdigest()[:12]}.npz"
        progress = Progress(results.path.with_name(name), len(group), plan)
        done += len(progress.done) * plan.n_ctx * len(group)
        update(done, total)
        rows = engine.logit_rows()
        with ExitStack() as stack:
            # The candidates first: one that is refused is refused before anything is computed.
            others = [stack.enter_context(engine.open(cache, plan.n_ctx, rows)) for cache in group]
            base = stack.enter_context(engine.open(F16, plan.n_ctx, rows))

            def on_tokens(n: int) -> None:
                nonlocal done
                done += n * len(group)
                update(done, total)

            for piece in pieces[len(progress.done) :]:
                progress.add(score_chunk(base, others, piece, plan.first, on_tokens))
            for i, (cache, session) in enumerate(zip(group, others)):
                row = row_of(cache, session.allocated.bits_per_value, [c[i] for c in progress.done], plan, origins[cache])
                check_identity(row)
                results.append(row)
                on_row(row)
        progress.remove()
    return [row for c in caches if (row := results.find(key_of(c, plan, origins[c])))]


def check_identity(row: Row) -> None:
    """An f16 cache is at a distance of exactly 0 from itself. Raises KvfmtError: nothing measured with it would be true."""
    if row.k == row.v == "f16" and row.metrics["kld_max"].value != 0:
        raise KvfmtError(
            f"the f16 cache differs from itself by a KLD of up to {row.metrics['kld_max'].value:.2e}",
            "The harness or this build is wrong: nothing was recorded.",
        )
