"""Does the cache change what the model writes? Greedy text against the f16 cache's: ``kvfmt bench generate``."""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np

from bench import prompts
from bench.caches import F16, Cache
from bench.divergence import mean, share_of_few
from bench.engine import Engine
from bench.quality import provenance
from bench.records import Metric, Results, Row, Setting, row_key
from kvfmt.errors import KvfmtError
from kvfmt.subjects import ModelFile

HORIZONS = (50, 100, 200)
#: A loop: one cycle of at most so many tokens, repeated at least so often, at the end of the text.
LOOP_CYCLE, LOOP_REPEATS, LOOP_TOKENS = 32, 3, 24


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ends in a loop: a cycle of at most 32 tokens, three times or more, over 24 tokens or more."""
    n = len(tokens)
    for cycle in range(1, LOOP_CYCLE + 1):
        length = max(cycle * LOOP_REPEATS, LOOP_TOKENS)
        if length > n:
            break
        tail = tokens[n - length :]
        if all(tail[i] == tail[i + cycle] for i in range(length - cycle)):
            return True
    return False


def prefix(ours: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens until the two part."""
    same = [a == b for a, b in zip(ours, reference)]
    return same.index(False) if False in same else len(same)


def compare(ours: list[list[int]], reference: list[list[int]], horizons: Sequence[int] = HORIZONS) -> dict[str, Metric]:
    """Agreement of texts, one a prompt: ``match_<h>`` is the share whose first h tokens are the same; a text that
    ended agrees if the other ended at the same place. ``prefix`` in tokens."""
    found = {f"match_{h}": share_of_few(np.array([a[:h] == b[:h] for a, b in zip(ours, reference)])) for h in horizons}
    found["prefix"] = mean(np.array([float(prefix(a, b)) for a, b in zip(ours, reference)]))
    found["loops"] = share_of_few(np.array([loops(a) for a in ours]))
    found["loops_f16"] = share_of_few(np.array([loops(b) for b in reference]))
    return found


def write(engine: Engine, cache: Cache, tokens: list[np.ndarray], length: int, n_ctx: int, step: Callable[[], None]) -> tuple[list[list[int]], float]:
    """Greedy continuations of ``length`` tokens, one a prompt, and the cache's bits per value."""
    with engine.open(cache, n_ctx) as session:
        made = []
        for prompt in tokens:
            session.clear()
            made.append(session.greedy(session.prefill(prompt, last=True), length))
            step()
        return made, session.allocated.bits_per_value


def measure(
    engine: Engine,
    model: ModelFile,
    caches: tuple[Cache, ...],
    kind: str,
    count: int,
    seed: int,
    results: Results,
    update: Callable[[int, int], None] = lambda done, total: None,
    on_row: Callable[[Row], None] = lambda row: None,
    horizons: Sequence[int] = HORIZONS,
) -> list[Row]:
    """Rows of one set of prompts, in the order of ``caches``; f16 is measured too, as their reference.

    ``update(done, total)`` counts texts. Raises UnknownName for a set, KvfmtError if a prompt does not fit the model.
    """
    texts = prompts.prompts(kind, count, seed)
    tokens = [engine.tokenize(text) for text in texts]
    length, longest = max(horizons), max(len(t) for t in tokens)
    if longest + length > engine.n_ctx_train:
        raise KvfmtError(
            f"a prompt of set '{kind}' with {length} more tokens takes {longest + length}, the model's context has {engine.n_ctx_train}",
            "Choose other sets: " + ", ".join(s for s in prompts.SETS if s != kind),
        )
    n_ctx = min(-(-(longest + length) // 256) * 256, engine.n_ctx_train)
    subject = prompts.as_text(f"prompts: {kind}", texts)
    setup: dict[str, Setting] = {"set": kind, "prompts": count, "horizons": " ".join(map(str, horizons))}
    origins = {cache: provenance(model, subject, n_ctx, cache.kv, seed) for cache in (F16, *caches)}
    keys = {c: row_key("generate", c.title, *c.sides, c.protect, o, setup) for c, o in origins.items()}
    missing = [c for c in keys if results.find(keys[c]) is None]
    done, total = 0, len(missing) * count

    def step() -> None:
        nonlocal done
        done += 1
        update(done, total)

    for cache in missing:
        made, bits = write(engine, cache, tokens, length, n_ctx, step)
        f16 = results.find(keys[F16])
        reference = f16.detail["tokens"] if f16 else made
        detail = {"tokens": made, "prefix": [prefix(a, b) for a, b in zip(made, reference)], "texts": [engine.detokenize(m) for m in made]}
        row = Row("generate", cache.title, *cache.sides, cache.protect, bits, origins[cache], setup, compare(made, reference, horizons), detail)
        results.append(row)
        on_row(row)
    return [row for c in caches if (row := results.find(keys[c]))]
