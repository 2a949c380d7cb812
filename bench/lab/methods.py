"""The methods of the table: a codec for K, one for V, and which cells are kept in a better one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, Sequence, runtime_checkable

import numpy as np

from bench.lab import codecs as c
from bench.lab import policies as p
from bench.lab.cache import Stored
from bench.lab.check import Check
from bench.lab.codecs import Codec
from kvfmt import registry
from kvfmt.errors import UnknownName

#: How many layers the study called sensitive, and how many decoded tokens it kept beside the prompt.
SENSITIVE, DECODED = 3, 32
WINDOW = 64


@runtime_checkable
class PerLayer(Protocol):
    """A codec that is another in each layer."""

    def of_layer(self, layer: int) -> Codec: ...


@dataclass(frozen=True)
class Method:
    """``k`` and ``v`` for every cell but those in ``kept``, which get ``keeper``.

    ``family`` groups the table. ``note`` says what the row is there to show.
    """

    name: str
    family: str
    k: Codec
    v: Codec
    kept: p.Region = p.Nowhere()
    keeper: Codec = c.Exact()
    note: str = ""

    def apply(self, stored: Stored, layout: p.Layout) -> Stored:
        """The stored cache after this method. Raises LabError if a codec gives back something else than it got."""
        checks: dict[tuple[str, str], Check] = {}

        def change(layer: int, side: str, x: np.ndarray) -> np.ndarray:
            kept = self.kept.mask(layout, layer)
            out = x.copy()
            for cells, codec in ((~kept, self.k if side == "k" else self.v), (kept, self.keeper)):
                # f16 cells stay bit for bit what they were.
                if cells.any() and not isinstance(codec, c.Exact):
                    if isinstance(codec, PerLayer):
                        codec = codec.of_layer(layer)
                    values = x[cells].astype(np.float32)
                    back = codec.apply(values)
                    name, label = codec.name, side.upper()
                    check = checks.setdefault((name, side), Check(name, label, getattr(codec, "centroid", False)))
                    check.add(values, back)
                    out[cells] = np.clip(back, -c.F16_MAX, c.F16_MAX).astype(np.float16)
            return out

        changed = stored.changed(change)
        for check in checks.values():
            check.verdict()
        return changed

    def bits(self, layout: p.Layout, heads: int, k_dim: int, v_dim: int) -> float:
        """Bits per value, as allocated, over all layers and both sides of a cache of that layout."""
        bits = values = 0
        for layer in range(layout.layers):
            kept = int(self.kept.mask(layout, layer).sum())
            rest = len(layout.positions[layer]) - kept
            for codec, dim in ((self.k, k_dim), (self.v, v_dim)):
                for n, used in ((rest, codec), (kept, self.keeper)):
                    bits += used.allocated_bits(n, heads, dim) if n else 0
                    values += n * heads * dim
        return bits / values


def _both(name: str, family: str, codec: Codec, rotated: bool = False, **more) -> Method:
    k, v = (c.Rotated(codec, side) for side in "kv") if rotated else (codec, codec)
    return Method(name, family, k, v, **more)


def _pair(k: str, v: str) -> tuple[Codec, Codec]:
    return c.Rotated(c.Blocks(k), "k"), c.Rotated(c.Blocks(v), "v")


@lru_cache(maxsize=1)
def all_methods() -> tuple[Method, ...]:
    """Every method, in the table's order; names are unique."""
    nf4 = c.Blocks("kvnf4")
    int2 = (c.Sorted(8), c.Sorted(4))
    anchors, sensitive = p.Anchors(DECODED), p.Sensitive(SENSITIVE)
    recommended = _pair("kvq3", "kvq2")
    found = [
        Method("f16", "baseline", c.Exact(), c.Exact(), note="the untouched cache: KLD 0"),
        _both("noise floor", "baseline", c.LastBits(), note="the last bit of 1 value in 1000 flipped"),
        _both("int8", "baseline", c.Int(8), note="the honest baseline"),
        _both("q8_0, Hadamard", "stock", c.Stock("q8_0"), True),
        _both("q5_0, Hadamard", "stock", c.Stock("q5_0"), True),
        _both("q4_0, Hadamard", "stock", c.Stock("q4_0"), True),
        _both("q8_0", "stock", c.Stock("q8_0")),
        _both("q4_0", "stock", c.Stock("q4_0")),
    ]
    for fmt in registry.plain_formats():
        name = fmt.spec.name
        found += [
            _both(f"{name}, Hadamard", "kvfmt", c.Blocks(name), True),
            _both(f"{name}, no rotation" if name != "kvnf4" else "NF4/g64", "kvfmt" if name != "kvnf4" else "study", c.Blocks(name)),
        ]
    found += [
        Method("kvq3/kvq2", "kvfmt", *recommended),
        Method("kvq3/kvq2, ends 2 in f16", "kvfmt", *recommended, kept=p.Ends(2)),
        Method("kvq3/kvq2, first 4 tokens in f16", "kvfmt", *recommended, kept=p.FirstTokens(4)),
        Method("NF4/g64 + anchors f16", "study", nf4, nf4, kept=anchors, note="prompt and first 32 decoded tokens, all layers"),
        Method("NF4/g64 + anchors int8", "study", nf4, nf4, kept=anchors, keeper=c.Int(8)),
        Method("NF4/g64 + anchors f16, layer 0", "study", nf4, nf4, kept=anchors & p.Layers(frozenset({0}))),
        Method(f"NF4/g64 + window {WINDOW}", "study", nf4, nf4, kept=p.Recent(WINDOW), note="last 64 tokens in f16"),
        Method("NF4/g64 + ends 2 in f16", "study", nf4, nf4, kept=p.Ends(2)),
        _both("int4/g64 clipped", "study", c.Int(4, 64, clip=0.7), note="the scale cuts off what is beyond 0.7 of the largest"),
        _both("int4/g64", "study", c.Int(4, 64)),
        Method("int2 sorted", "study", *int2, note="8 groups for K, 4 for V, order per head"),
        Method("int2 sorted per vector", "study", c.Sorted(8, True), c.Sorted(4, True), note="the order is stored: nominal 2 bits"),
        Method("int2 sorted + anchors f16", "study", *int2, kept=anchors),
        Method("int2 sorted + anchors int8", "study", *int2, kept=anchors, keeper=c.Int(8)),
        Method("int2 sorted + anchors int4", "study", *int2, kept=anchors, keeper=c.Int(4, 64)),
        Method("int2 sorted + anchors f16, layer 0", "study", *int2, kept=anchors & p.Layers(frozenset({0}))),
        Method(
            "int2 sorted + anchors f16, sensitive layers", "study", *int2, kept=anchors & sensitive,
            note="every other layer is quantized: the retracted claim, measured rightly",
        ),
        Method(
            "int2 sorted on sensitive layers only", "study", *int2, kept=~sensitive | (anchors & sensitive),
            note="the retracted test: all other layers stay in f16",
        ),
        _both("ternary", "study", c.Ternary()),
        Method("ternary + anchors f16, sensitive layers", "study", c.Ternary(), c.Ternary(), kept=anchors & sensitive),
        Method(
            "ternary on sensitive layers only", "study", c.Ternary(), c.Ternary(), kept=~sensitive | (anchors & sensitive),
            note="the retracted test: all other layers stay in f16",
        ),
        _both("sign", "study", c.Sign()),
        _both("Fourier 4+4", "study", c.Fourier(4, 4), note="magnitude and phase bits"),
        _both("Fourier 3+3", "study", c.Fourier(3, 3)),
        _both("Fourier 2+2", "study", c.Fourier(2, 2)),
        Method("KIVI-like 2-bit", "KIVI", c.PerChannel(), c.PerToken()),
        Method("KIVI-like 2-bit + window 128", "KIVI", c.PerChannel(), c.PerToken(), kept=p.Recent(128)),
    ]
    names = [m.name for m in found]
    if len(set(names)) != len(names):
        raise ValueError(f"a method's name occurs twice: {sorted(n for n in names if names.count(n) > 1)}")
    return tuple(found)


def find_methods(text: str | None, more: Sequence[Method] = ()) -> tuple[Method, ...]:
    """Methods whose names are in a list separated by ";" (names have commas), of the table's and ``more``; all for None. Raises UnknownName."""
    every = (*all_methods(), *more)
    if text is None:
        return every
    known = {m.name: m for m in every}
    wanted = [name.strip() for name in text.split(";") if name.strip()]
    for name in wanted:
        if name not in known:
            raise UnknownName(f"no method '{name}' in the lab", "Known: " + "; ".join(known))
    if not wanted:
        raise UnknownName("no method to measure", "Known: " + "; ".join(known))
    return tuple(known[name] for name in wanted)


#: Context lengths at which the table shows how bits grow, in tokens.
GROWTH = (128, 512, 2048, 8192, 32768)
#: The two kinds of context: nearly all prompt, or a prompt of this many tokens.
SHORT_PROMPT = 64


def growth(method: Method, layout: p.Layout, window: tuple, heads: int, k_dim: int, v_dim: int) -> dict[str, list[float]]:
    """Bits per value at each of GROWTH: with a short prompt, and where all but the last 64 tokens are the prompt."""
    return {
        "short prompt": [method.bits(layout.at(n, SHORT_PROMPT, window), heads, k_dim, v_dim) for n in GROWTH],
        "long prompt": [method.bits(layout.at(n, n - SHORT_PROMPT, window), heads, k_dim, v_dim) for n in GROWTH],
    }
