"""How much each layer's K and V matter: only that one is quantized, all else stays f16."""

from __future__ import annotations

from functools import cache
from typing import Callable

from bench.lab import contexts as ctxs
from bench.lab.cache import Geometry
from bench.lab.codecs import F16_MAX, Codec, Exact, Rotated, Sorted, Stock
from bench.lab.contexts import Setting
from bench.lab.experiment import Announce, build_contexts, origin
from bench.lab.methods import Method
from bench.lab.policies import Layers
from bench.lab.score import Scores
from bench.lab.session import Session
from bench.records import Outcome, Results, Row
from kvfmt.subjects import ModelFile, Text

import numpy as np

#: Two contexts of the short kind, 64 tokens scored: seconds on a small model, and the ranking is stable.
PROBE = Setting("probe", 64, 192, scored=64, count=2)


def probe_codecs() -> dict[str, tuple[Codec, Codec]]:
    """What a layer is quantized with: stock q4_0 as it is served, and the study's 2 bits, which hurt visibly."""
    return {
        "q4_0": (Rotated(Stock("q4_0"), "k"), Rotated(Stock("q4_0"), "v")),
        "int2 sorted": (Sorted(8), Sorted(4)),
    }


def measure_layers(
    session: Session,
    geometry: Geometry,
    model: ModelFile,
    text: Text,
    codec: str,
    results: Results,
    update: Callable[[int, int], None],
    announce: Announce = lambda row: None,
    setting: Setting = PROBE,
) -> list[Row]:
    """Two rows a layer, K and V apart: KLD and logit drift when nothing else is quantized."""
    source = origin(model, text, setting.stored)
    codecs = dict(zip("kv", probe_codecs()[codec]))
    built = cache(lambda: build_contexts(session, geometry, text, setting, lambda n: None))
    rows, total = [], 2 * geometry.layers
    for layer in range(geometry.layers):
        for side in "kv":
            k, v = (codecs[s].name if s == side else "f16" for s in "kv")
            setup = {**setting.as_setup(), "what": "layer", "layer": layer, "layers": geometry.layers, "side": side}
            method = f"{codec}, {side.upper()} of layer {layer} alone"

            def measure() -> Outcome:
                scores = []
                for context in built():
                    changed = context.stored.changed(
                        lambda at, s, x: to_f16(codecs[side].apply(x.astype(np.float32))) if (at, s) == (layer, side) else None
                    )
                    scores.append(ctxs.score(session, context, changed))
                used = [codecs[s] if s == side else Exact() for s in "kv"]
                bits = Method(method, "", *used, kept=~Layers(frozenset({layer}))).bits(built()[0].layout, *geometry.sizes)
                return bits, Scores.joined(scores).metrics(), {}

            rows.append(results.once("probe", method, k, v, source, setup, measure, announce))
            update(len(rows), total)
    return rows


def to_f16(x: np.ndarray) -> np.ndarray:
    """What a cache holds after a codec: f16, saturating."""
    return np.clip(x, -F16_MAX, F16_MAX).astype(np.float16)


def ranking(rows: list[Row]) -> tuple[int, ...]:
    """Layers by the KLD of their K and V together, the most sensitive first."""
    total: dict[int, float] = {}
    for row in rows:
        total[row.setup["layer"]] = total.get(row.setup["layer"], 0.0) + row.metrics["kld"].value
    return tuple(sorted(total, key=lambda layer: (-total[layer], layer)))
