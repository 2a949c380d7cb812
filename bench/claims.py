"""What others claimed about small KV caches, held against the rows: each verdict is computed, none is written down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional, Sequence

from bench.records import Row

HOLDS, FAILS = "holds", "does not hold"


@dataclass(frozen=True)
class Verdict:
    """``measured`` says in figures what ``verdict`` rests on."""

    claim: str
    model: str
    measured: str
    verdict: str


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Every claim that the rows can decide, for each model; a claim whose rows are missing is left out."""
    found = []
    for model in dict.fromkeys(r.provenance.model for r in rows):
        own = [r for r in rows if r.provenance.model == model]
        for claim, test in CLAIMS:
            result = test(own)
            if result is not None:
                measured, holds = result
                found.append(Verdict(claim, model, measured, HOLDS if holds else FAILS))
    return found


Answer = Optional[tuple[str, bool]]


def _method(rows: Sequence[Row], name: str, setting: str = "long prompt") -> Optional[Row]:
    return next((r for r in rows if r.kind == "lab" and r.method == name and r.setup.get("setting") == setting), None)


def _methods(rows: Sequence[Row], *names: str, setting: str = "long prompt") -> Optional[list[Row]]:
    found = [_method(rows, name, setting) for name in names]
    return None if None in found else found  # type: ignore[return-value]


def _figure(row: Row) -> str:
    return f"{row.method}: KLD {row.metrics['kld'].value:.3f} at {row.bits_per_value:.2f} bits"


def _anchors_on_few_layers(rows: Sequence[Row]) -> Answer:
    found = _methods(rows, "int2 sorted", "int2 sorted + anchors f16, sensitive layers", "int2 sorted on sensitive layers only", "int8")
    if found is None:
        return None
    bare, right, wrong, int8 = found
    # Harmless would be: no further from f16 than int8 is.
    return "; ".join(map(_figure, (bare, right, wrong))) + (
        f". The third left {_share(wrong, bare):.0%} of the rate difference to f16 unquantized: the retracted test"
    ), right.metrics["kld"].value <= int8.metrics["kld"].value


def _share(wrong: Row, bare: Row) -> float:
    return (wrong.bits_per_value - bare.bits_per_value) / (16 - bare.bits_per_value)


def _anchors_compress(rows: Sequence[Row]) -> Answer:
    row = _method(rows, "NF4/g64 + anchors f16")
    if row is None:
        return None
    at, bits = row.detail["growth_at"], row.detail["growth"]["long prompt"]
    text = ", ".join(f"{b:.1f} bits at {n} tokens" for n, b in zip(at, bits))
    return f"{row.method}, all but 64 tokens prompt: {text}", bits[-1] < 12


def _int8(rows: Sequence[Row]) -> Answer:
    found = _methods(rows, "int8", "NF4/g64", "int2 sorted", "ternary")
    if found is None:
        return None
    klds = [r.metrics["kld"].value for r in found]
    same = found[0].metrics["same_top"].value
    return "; ".join(map(_figure, found)) + f"; same top token with int8 {same:.1%}", klds[0] * 3 <= min(klds[1:])


def _lossless(rows: Sequence[Row]) -> Answer:
    row = _method(rows, "int8")
    if row is None:
        return None
    agreed = row.metrics["agreement"].value
    return f"int8 agrees on {agreed:.1%} of 50 greedy tokens, KLD {row.metrics['kld'].value:.4f}", agreed == 1.0


def _sub2(rows: Sequence[Row]) -> Answer:
    found = _methods(rows, "ternary", "sign")
    if found is None:
        return None
    return "; ".join(_figure(r) + f", same top {r.metrics['same_top'].value:.0%}" for r in found), all(
        r.metrics["same_top"].value > 0.9 for r in found
    )


def _first_layer(rows: Sequence[Row]) -> Answer:
    drift: dict[int, float] = {}
    for r in rows:
        if r.kind == "probe" and r.setup.get("what") == "layer" and r.method.startswith("int2"):
            drift[r.setup["layer"]] = max(drift.get(r.setup["layer"], 0.0), r.metrics["drift"].value)
    if len(drift) < 2:
        return None
    ranked = sorted(drift, key=drift.get, reverse=True)
    return "largest logit drift: " + ", ".join(f"layer {i} ({drift[i]:.3f})" for i in ranked[:3]), ranked[0] == 0


def _layer0_enough(rows: Sequence[Row]) -> Answer:
    found = _methods(rows, "NF4/g64", "NF4/g64 + anchors f16, layer 0", "NF4/g64 + anchors f16")
    if found is None:
        return None
    bare, one, every = (r.metrics["kld"].value for r in found)
    return "; ".join(map(_figure, found)), one - every < 0.1 * (bare - every)


def _clipping(rows: Sequence[Row]) -> Answer:
    found = _methods(rows, "int4/g64", "int4/g64 clipped")
    if found is None:
        return None
    return "; ".join(map(_figure, found)), found[1].metrics["kld"].value > found[0].metrics["kld"].value


def _asymmetric(rows: Sequence[Row]) -> Answer:
    found = _methods(rows, "kvq3/kvq2", "kvq2, Hadamard")
    if found is None:
        return None
    a, b = (r.metrics["kld"].value for r in found)
    return "; ".join(map(_figure, found)) + f"; {b / a:.1f} times", b / a >= 5


def _ends(rows: Sequence[Row]) -> Answer:
    found = _methods(rows, "kvq3/kvq2", "kvq3/kvq2, ends 2 in f16")
    if found is None:
        return None
    a, b = (r.metrics["kld"].value for r in found)
    return "; ".join(map(_figure, found)), b < a / 2


CLAIMS: tuple[tuple[str, Callable[[Sequence[Row]], Answer]], ...] = (
    ("Anchors on a few sensitive layers make 2 bits harmless in all the others (retracted by its authors)", _anchors_on_few_layers),
    ("Sub-2-bit caches work: the same top token in over 90 % (retracted by its authors)", _sub2),
    ("Anchors on layer 0 alone do what anchors on every layer do (retracted by its authors)", _layer0_enough),
    ("Prompt and first decoded tokens in f16 still compress when the prompt is long", _anchors_compress),
    ("int8 is a strong baseline: a third of the KLD of the 4-bit and 2-bit methods, or less", _int8),
    ("int8 is lossless", _lossless),
    ("The first layer has the largest logit drift", _first_layer),
    ("Clipping outliers loses to keeping their range", _clipping),
    ("3-bit keys with 2-bit values are at least 5 times closer than 2 bits for both", _asymmetric),
    ("The first and last two layers in f16 at least halve the KLD of a 3/2-bit cache", _ends),
)
