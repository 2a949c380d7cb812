"""Where keys are quantized: W_k's output, the key before RoPE, and what is stored are three objects.

Without a key norm (Llama, Qwen2) the key before RoPE is W_k's output, bias included; with one (Gemma-3) the norm
sits between: an error before it is rescaled with the key, and a common factor vanishes. Values are left in f16.
"""

from __future__ import annotations

from functools import cache
from typing import Callable

import numpy as np

from bench.lab import contexts as ctxs
from bench.lab.cache import Geometry, Stored
from bench.lab.codecs import Codec, Exact, PerChannel, Rotated, Sorted, Stock
from bench.lab.contexts import Context, Setting
from bench.lab.experiment import Announce, build_contexts, origin
from bench.lab.methods import Method
from bench.lab.probe import to_f16
from bench.lab.score import Scores
from bench.lab.session import Session
from bench.records import Outcome, Results, Row
from kvfmt.subjects import ModelFile, Text

WK, NORMED, STORED = "W_k's output", "before RoPE", "as stored"
LOCUS = Setting("locus", 64, 448, scored=128, count=2)


def locus_codecs() -> tuple[Codec, ...]:
    """f16 shows what the way there and back costs by itself."""
    return (Exact(), Stock("q4_0"), Rotated(Stock("q4_0"), "k"), Sorted(8), PerChannel())


def loci(geometry: Geometry) -> tuple[str, ...]:
    """The different objects of a model: two without a key norm, three with one."""
    has_norm = any(norm is not None for norm in geometry.key_norms)
    return (WK, NORMED, STORED) if has_norm else (WK, STORED)


def at_locus(context: Context, codec: Codec, locus: str) -> Stored:
    """The cache whose keys were quantized at that place, and then normed and rotated as the model does."""
    keys = context.keys

    def change(layer: int, side: str, x: np.ndarray):
        if side != "k":
            return None
        if locus == STORED:
            return x if isinstance(codec, Exact) else to_f16(codec.apply(x.astype(np.float32)))
        positions = context.stored.positions(layer)
        projected = keys.projected[layer][positions]
        if locus == WK:
            normed = keys.normed(layer, codec.apply(projected))
        else:
            normed = codec.apply(keys.normed(layer, projected))
        return to_f16(keys.rotated(layer, normed, positions))

    return context.stored.changed(change)


def measure_loci(
    session: Session,
    geometry: Geometry,
    model: ModelFile,
    text: Text,
    results: Results,
    update: Callable[[int, int], None],
    announce: Announce = lambda row: None,
    setting: Setting = LOCUS,
) -> list[Row]:
    """A row for each codec at each place."""
    source = origin(model, text, setting.stored)
    built = cache(lambda: build_contexts(session, geometry, text, setting, lambda n: None))
    rows, wanted = [], [(codec, locus) for codec in locus_codecs() for locus in loci(geometry)]
    for codec, locus in wanted:
        setup = {**setting.as_setup(), "what": "locus", "locus": locus, "key_norm": len(loci(geometry)) == 3}
        method = f"{codec.name}, {locus}"

        def measure() -> Outcome:
            scores = [ctxs.score(session, context, at_locus(context, codec, locus)) for context in built()]
            bits = Method(method, "", codec, Exact()).bits(built()[0].layout, *geometry.sizes)
            return bits, Scores.joined(scores).metrics(), {}

        rows.append(results.once("lab", method, codec.name, "f16", source, setup, measure, announce))
        update(len(rows), len(wanted))
    return rows
