"""Can the model still find what it read? Values hidden at several depths, asked for one by one, beside the f16 cache:
``kvfmt bench retrieval``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

from bench import prompts
from bench.caches import F16, Cache
from bench.divergence import mean, share_of_few
from bench.engine import Engine, Session
from bench.quality import provenance
from bench.records import Metric, Results, Row, Setting, row_key
from kvfmt.errors import KvfmtError
from kvfmt.subjects import ModelFile


@dataclass(frozen=True)
class Answer:
    """One question: was the value written, and how unlikely was it, in nats a token."""

    depth: float
    right: bool
    nll: float


def question_of(engine: Engine, hidden: prompts.Hidden) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the question and of the value, int32 each."""
    question = engine.tokenize(hidden.question, special=False)
    # Tokenized together, because a word's token carries the space in front of it.
    return question, engine.tokenize(f"{hidden.question} {hidden.value}", special=False)[len(question) :]


def fit(engine: Engine, length: int, keys: int, seed: str) -> tuple[prompts.Document, np.ndarray]:
    """The longest document whose tokens fit ``length`` together with any of its questions and values, and its tokens.

    Raises KvfmtError if none does.
    """
    low, high = 1, max(2, length)
    best = None
    while low <= high:
        middle = (low + high) // 2
        made = prompts.document(middle, keys, seed)
        tokens = engine.tokenize(made.text)
        asked = max(sum(map(len, question_of(engine, hidden))) for hidden in made.hidden)
        if len(tokens) + asked <= length:
            best, low = (made, tokens), middle + 1
        else:
            high = middle - 1
    if best is None:
        raise KvfmtError(f"{keys} values do not fit {length} tokens", "Ask for fewer, or give more tokens.")
    return best


def ask(session: Session, question: np.ndarray, value: np.ndarray) -> tuple[bool, float]:
    """Whether greedy text begins with the value, and the value's mean negative log likelihood, teacher-forced.

    The cache is left with the question and the value in it.
    """
    logits = session.prefill(question, last=True).astype(np.float64)
    nll, right = 0.0, True
    for i, token in enumerate(value):
        nll += float(np.logaddexp.reduce(logits) - logits[token])
        # Greedy text equals the value as long as each of its tokens is the most likely one.
        right = right and int(np.argmax(logits)) == int(token)
        if i + 1 < len(value):
            logits = session.decode(np.array([token], np.int32), 0)[0].astype(np.float64)
    return right, nll / len(value)


def answers(engine: Engine, session: Session, made: prompts.Document, tokens: np.ndarray) -> list[Answer]:
    """Asks for each hidden value, from the same state of the cache."""
    session.clear()
    session.prefill(tokens)
    state = session.snapshot()
    out = []
    for i, hidden in enumerate(made.hidden):
        if i:
            session.restore(state)
        right, nll = ask(session, *question_of(engine, hidden))
        out.append(Answer(hidden.depth, right, nll))
    return out


def summary(ours: list[Answer], f16: list[Answer]) -> dict[str, Metric]:
    """``recall`` is the share of values written; ``lost`` the share that f16 writes and this cache does not, of all;
    ``recall_drop`` the paired difference. ``nll`` and ``nll_rise`` (paired) in nats a token."""
    a, b = (np.array([float(x.right) for x in answers]) for answers in (ours, f16))
    na, nb = (np.array([x.nll for x in answers]) for answers in (ours, f16))
    return {
        "recall": share_of_few(a > 0), "recall_f16": share_of_few(b > 0), "recall_drop": mean(b - a), "lost": share_of_few((b > 0) & (a == 0)),
        "nll": mean(na), "nll_f16": mean(nb), "nll_rise": mean(na - nb),
    }


def measure(
    engine: Engine,
    model: ModelFile,
    caches: tuple[Cache, ...],
    length: int,
    documents: int,
    keys: int,
    seed: int,
    results: Results,
    update: Callable[[int, int], None] = lambda done, total: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Rows at one length, in the order of ``caches``; f16 is measured too, as the other half of each pair.

    ``update(done, total)`` counts documents. Raises KvfmtError if the length is more than the model's context.
    """
    engine.check_ctx(length)
    made = [fit(engine, length, keys, f"{seed} {length} {i}") for i in range(documents)]
    subject = prompts.as_text(f"hidden values, {length} tokens", [d.text for d, _ in made])
    setup: dict[str, Setting] = {"length": length, "documents": documents, "keys": keys}
    origins = {cache: provenance(model, subject, length, cache.kv, seed) for cache in (F16, *caches)}
    names = {c: row_key("retrieval", c.title, *c.sides, c.protect, o, setup) for c, o in origins.items()}
    missing = [c for c in names if results.find(names[c]) is None]
    done, total = 0, len(missing) * documents
    for cache in missing:
        found: list[Answer] = []
        with engine.open(cache, length) as session:
            for text, tokens in made:
                found += answers(engine, session, text, tokens)
                done += 1
                update(done, total)
            bits = session.allocated.bits_per_value
        f16 = results.find(names[F16])
        reference = [Answer(**a) for a in f16.detail["answers"]] if f16 else found
        detail = {"answers": [vars(a) for a in found], "by_depth": by_depth(found, reference)}
        row = Row("retrieval", cache.title, *cache.sides, cache.protect, bits, origins[cache], setup, summary(found, reference), detail)
        results.append(row)
        on_row(row)
    return [row for c in caches if (row := results.find(names[c]))]


def by_depth(ours: list[Answer], f16: list[Answer]) -> list[dict]:
    """Recall and likelihood at each depth, from the front."""
    out = []
    for depth in sorted({a.depth for a in ours}):
        pairs = [(a, b) for a, b in zip(ours, f16) if a.depth == depth]
        out.append({
            "depth": depth, "n": len(pairs), "recall": float(np.mean([a.right for a, _ in pairs])),
            "recall_f16": float(np.mean([b.right for _, b in pairs])), "nll_rise": float(np.mean([a.nll - b.nll for a, b in pairs])),
        })
    return out
