"""Which old tokens matter: one group of them is quantized, all others stay f16.

Groups are quarters of the tokens, in each layer by itself: by age, by the attention that the scored tokens pay
(known only afterwards: an upper bound for what a policy could guess), by the quantizer's own error, and at random
for comparison. The first tokens, which most heads use as a sink, are a group of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Callable

import numpy as np

from bench.lab import contexts as ctxs
from bench.lab.cache import Geometry
from bench.lab.codecs import Codec, Sorted
from bench.lab.contexts import Context, Setting
from bench.lab.experiment import SEED, Announce, build_contexts, origin
from bench.lab.keys import attention_received
from bench.lab.probe import to_f16
from bench.lab.score import Scores
from bench.lab.session import Session
from bench.records import Metric, Outcome, Results, Row
from kvfmt.subjects import ModelFile, Text

SINK, GROUPS = 4, 4
POSITIONS = Setting("positions", 64, 448, scored=128, count=2)
CODECS: dict[str, Codec] = {"k": Sorted(8), "v": Sorted(4)}
RANKINGS = ("age", "attention", "error", "random")


def ranks(context: Context, attention: np.ndarray, by: str) -> list[np.ndarray]:
    """Group of each cell, int [cells] for each layer: 0 the sink, 1 to GROUPS from the least to the most.

    Age counts back from the end: group 1 holds the newest tokens.
    """
    rng = np.random.default_rng(SEED)
    found = []
    for layer in range(context.layout.layers):
        at = context.layout.positions[layer]
        if by == "age":
            value = -at.astype(float)
        elif by == "attention":
            value = attention[layer][at]
        elif by == "random":
            value = rng.random(len(at))
        else:
            value = relative_error(context, layer)
        group = np.zeros(len(at), int)
        rest = np.flatnonzero(at >= SINK)
        order = rest[np.argsort(value[rest], kind="stable")]
        for i, part in enumerate(np.array_split(order, GROUPS), 1):
            group[part] = i
        found.append(group)
    return found


def relative_error(context: Context, layer: int) -> np.ndarray:
    """Squared error of the codecs on each cell of a layer, over its squared norm, K and V added; float64 [cells]."""
    total = 0.0
    for side, codec in CODECS.items():
        x = context.stored.f16(layer, side).astype(np.float32)
        error = ((codec.apply(x) - x).astype(np.float64) ** 2).sum(axis=(1, 2))
        total = total + error / np.maximum((x.astype(np.float64) ** 2).sum(axis=(1, 2)), 1e-30)
    return total


def measure_positions(
    session: Session,
    geometry: Geometry,
    model: ModelFile,
    text: Text,
    results: Results,
    update: Callable[[int, int], None],
    announce: Announce = lambda row: None,
    setting: Setting = POSITIONS,
) -> list[Row]:
    """A row for the sink and for each group of each ranking."""
    source = origin(model, text, setting.stored)
    wanted = [("age", 0)] + [(by, group) for by in RANKINGS for group in range(1, GROUPS + 1)]
    built = cache(lambda: build_contexts(session, geometry, text, setting, lambda n: None))
    attention = cache(lambda: [attention_received(session, c.stored, c.follow[:-1]) for c in built()])
    rows = []
    for by, group in wanted:
        setup = {**setting.as_setup(), "what": "positions", "by": by if group else "sink", "group": group, "groups": GROUPS}
        method = f"int2 sorted on {'the first ' + str(SINK) + ' tokens' if group == 0 else f'quarter {group} by {by}'} alone"

        def measure() -> Outcome:
            return _measure(session, geometry, built(), attention(), by, group)

        rows.append(results.once("probe", method, CODECS["k"].name, CODECS["v"].name, source, setup, measure, announce))
        update(len(rows), len(wanted))
    return rows


def _measure(session, geometry, contexts, attention, by, group) -> Outcome:
    scores, share, error, bits = [], [], [], []
    for context, received in zip(contexts, attention):
        groups = ranks(context, received, by)

        def change(layer: int, side: str, x: np.ndarray):
            out, chosen = x.copy(), groups[layer] == group
            # The codec's order of channels is the whole cache's, in every group: only the cells differ.
            out[chosen] = to_f16(CODECS[side].apply(x.astype(np.float32)))[chosen]
            return out

        scores.append(ctxs.score(session, context, context.stored.changed(change)))
        layers = range(geometry.layers)
        at = context.layout.positions
        share.append(np.mean([received[i][at[i]][groups[i] == group].sum() for i in layers]))
        error.append(np.mean([relative_error(context, i)[groups[i] == group].mean() for i in layers]))
        dims = {"k": geometry.k_dim, "v": geometry.v_dim}
        n, cells = sum((g == group).sum() for g in groups), sum(len(g) for g in groups)
        coded = sum(CODECS[s].allocated_bits(int(n), 1, dims[s]) for s in "kv")
        bits.append((coded + 16 * (cells - n) * sum(dims.values())) / (cells * sum(dims.values())))
    metrics = {
        **Scores.joined(scores).metrics(),
        "attention_share": Metric(float(np.mean(share))),
        "relative_error": Metric(float(np.mean(error))),
    }
    return float(np.mean(bits)), metrics, {}
