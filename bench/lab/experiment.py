"""The methods' table: every method on the same stored contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Callable, Iterable, Optional, Sequence

import numpy as np

from bench.divergence import mean
from bench.lab import contexts as ctxs
from bench.lab import recall as recalls
from bench.lab.cache import Geometry, Stored
from bench.lab.codecs import Blocks, Codec
from bench.lab.contexts import HORIZON, Context, Setting
from bench.lab.keys import evaluate, watch_qk
from bench.lab.methods import GROWTH, Method, growth
from bench.lab.policies import Layout
from bench.lab.score import Scores
from bench.lab.session import LabError, Session
from bench.prompts import Hidden, document
from bench.records import Metric, Outcome, Provenance, Results, Row
from kvfmt import registry
from kvfmt.subjects import ModelFile, Text

#: Of the documents that hide values: their sentences, and how many values are hidden in each.
DOCUMENTS, ASKED = (16, 24, 32, 40), 6
#: Tokens that a sentence takes, at most.
SENTENCE = 22
SEED = 20240817
#: Position buckets of the scored tokens, for curves.
BUCKET = 16

Announce = Callable[[Row], None]


def origin(model: ModelFile, text: Text, n_ctx: int, *codecs: Codec) -> Provenance:
    """Where a row of the lab comes from, with the spec hashes of those codecs that are formats of ours, and of their maps."""
    inner = [getattr(c, "inner", c) for c in codecs]
    hashes = {c.name: registry.get(c.name).spec.hash for c in inner if isinstance(c, Blocks)}
    for codec in codecs:
        hashes.update(getattr(codec, "identity", {}))
    return Provenance.here(hashes, model, text, n_ctx, SEED)


def open_session(model: ModelFile, settings: Sequence[Setting], threads: Optional[int] = None) -> tuple[Session, Geometry]:
    """A session with room for the longest of the settings, whose queries and keys can be watched."""
    geometry = Geometry.of(model.path)
    longest = max((s.stored + max(s.scored, HORIZON) + 1 for s in settings), default=0)
    # The last sentence's worth is for a question.
    n_ctx = max(longest, SENTENCE * (max(DOCUMENTS) + ASKED + 2))
    return Session(model.path, -(-n_ctx // 256) * 256, threads or 0, watch=watch_qk()), geometry


def build_contexts(session: Session, geometry: Geometry, text: Text, setting: Setting, update: Callable[[int], None]) -> list[Context]:
    """The contexts of one setting, each checked to be at KLD 0 from itself."""
    found = []
    for old, follow in ctxs.pieces(session.tokenize(text.content), setting):
        found.append(ctxs.make(session, geometry, old, follow, setting.prompt))
        update(len(found))
    return found


@dataclass(frozen=True)
class RecallContext:
    """A stored document and the values that it hides."""

    stored: Stored
    layout: Layout
    asked: list[Hidden]


def build_recall(session: Session, geometry: Geometry) -> list[RecallContext]:
    """One stored document for each of DOCUMENTS; it is the prompt, nothing was decoded."""
    found = []
    for sentences in DOCUMENTS:
        made = document(sentences, ASKED, f"lab {SEED}")
        tokens = session.tokenize(made.text)
        data, keys, _ = evaluate(session, tokens, geometry)
        stored = Stored.read(data, geometry, keys.order)
        layout = Layout(tuple(stored.positions(i) for i in range(geometry.layers)), len(tokens), len(tokens))
        found.append(RecallContext(stored, layout, made.hidden))
    return found


class Recall:
    """Retrieval from the stored documents. They are the same for every setting: each method is asked once."""

    def __init__(self, session: Session, geometry: Geometry, sensitive: tuple[int, ...]) -> None:
        self._session, self._sensitive = session, sensitive
        self._documents = cache(lambda: build_recall(session, geometry))
        self._found: dict[str, dict[str, Metric]] = {}

    def __call__(self, method: Method) -> dict[str, Metric]:
        """``recall`` is the share of values given, ``answer_nll`` in nats a value."""
        if method.name not in self._found:
            right, nll = [], []
            for context in self._documents():
                changed = method.apply(context.stored, replace(context.layout, sensitive=self._sensitive))
                found = recalls.recall(self._session, changed, context.asked)
                right.append(found[0])
                nll.append(found[1])
            self._found[method.name] = {"recall": mean(np.concatenate(right)), "answer_nll": mean(np.concatenate(nll))}
        return self._found[method.name]


def windows(geometry: Geometry, stored: Stored) -> tuple[Optional[int], ...]:
    """How many tokens each layer holds at most, None for all of them."""
    return tuple(geometry.window if stored.order[i].cache == 1 else None for i in range(geometry.layers))


def by_position(scores: Sequence[Scores]) -> list[dict]:
    """Mean KLD per bucket of scored positions, over contexts: the distance from the stored part in tokens."""
    kld = np.array([s.kld for s in scores])
    return [
        {"from": start, "to": min(start + BUCKET, kld.shape[1]), "kld": float(kld[:, start : start + BUCKET].mean())}
        for start in range(0, kld.shape[1], BUCKET)
    ]


def setup_of(setting: Setting, method: Method, sensitive: tuple[int, ...]) -> dict:
    """What else a row's key holds: the regions' names, and the layers that the probe called sensitive."""
    uses = "sensitive" in method.kept.name
    return {
        **setting.as_setup(), "what": "method", "family": method.family, "kept": method.kept.name, "keeper": method.keeper.name,
        "horizon": HORIZON, "hidden_in": " ".join(map(str, DOCUMENTS)), "asked": ASKED, "sensitive": " ".join(map(str, sensitive)) if uses else None,
    }


def measure_methods(
    session: Session,
    geometry: Geometry,
    model: ModelFile,
    text: Text,
    setting: Setting,
    methods: Iterable[Method],
    sensitive: tuple[int, ...],
    results: Results,
    update: Callable[[int], None],
    announce: Announce = lambda row: None,
    recalled: Optional[Recall] = None,
) -> list[Row]:
    """One row a method; those that ``results`` has are not measured again. Rows are appended as they come.

    The contexts are made on the first method that needs them. ``recalled`` serves several settings.
    """
    recalled = recalled or Recall(session, geometry, sensitive)
    built = cache(lambda: build_contexts(session, geometry, text, setting, lambda n: None))
    rows = []
    for number, method in enumerate(methods, 1):
        setup = setup_of(setting, method, sensitive)
        source = origin(model, text, setting.stored, method.k, method.v, method.keeper)

        def measure() -> Outcome:
            return _measure(session, geometry, method, built(), recalled(method), sensitive)

        rows.append(results.once("lab", method.name, method.k.name, method.v.name, source, setup, measure, announce))
        update(number)
    return rows


def _measure(session, geometry, method, contexts, recalled, sensitive) -> Outcome:
    scores, agreed, bits = [], [], []
    sizes = geometry.sizes
    for context in contexts:
        layout = replace(context.layout, sensitive=sensitive)
        changed = method.apply(context.stored, layout)
        scores.append(ctxs.score(session, context, changed))
        agreed.append(ctxs.agreement(session, context, changed))
        bits.append(method.bits(layout, *sizes))
    if method.name == "f16" and max(s.kld.max() for s in scores) != 0.0:
        raise LabError("the f16 method is not at KLD 0", "The harness is wrong: report it.")
    layout = replace(contexts[0].layout, sensitive=sensitive)
    metrics = {
        **Scores.joined(scores).metrics(),
        "agreement": mean(np.array(agreed)),
        **recalled,
    }
    detail = {
        "growth_at": list(GROWTH),
        "growth": growth(method, layout, windows(geometry, contexts[0].stored), *sizes),
        "by_position": by_position(scores),
        "note": method.note,
    }
    return float(np.mean(bits)), metrics, detail
