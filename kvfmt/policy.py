"""Which layer gets which cache type, and what a cache costs to the byte.

Mirrors what the patched llama.cpp does (``src/llama-kv-policy.cpp``); a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from . import registry
from .errors import KvfmtError, UnknownName

#: Upstream's cache types, as `--cache-type-k` lists them.
STOCK = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@dataclass(frozen=True)
class CacheType:
    """A type that a KV cache may have: block in values, size in bytes of a block."""

    name: str
    type_id: int
    block: int
    size: int
    needs_profile: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.block > 1

    def row_bytes(self, n_values: int) -> int:
        """Raises KvfmtError if the block does not divide the row."""
        if n_values % self.block:
            raise KvfmtError(
                f"cache type {self.name} with block {self.block} does not divide {n_values} values",
                "Choose a type whose block divides the head size: " + ", ".join(known_types()),
            )
        return n_values // self.block * self.size


def known_types() -> tuple[str, ...]:
    """Names of every cache type, upstream's first."""
    return STOCK + registry.names()


def cache_type(name: str) -> CacheType:
    """The type called ``name``. Raises UnknownName."""
    if name in STOCK:
        member = GGMLQuantizationType[name.upper()]
        block, size = GGML_QUANT_SIZES[member]
        return CacheType(name, int(member), block, size)
    if name not in known_types():
        raise UnknownName(f"unknown cache type '{name}'", "Known: " + ", ".join(known_types()))
    spec = registry.get(name).spec
    return CacheType(name, spec.type_id, spec.block, spec.size, spec.needs_profile)


def parse_kv(kv: str) -> tuple[CacheType, CacheType]:
    """"kvq3/kvq2" -> the types of K and V; one name serves both sides. Raises UnknownName."""
    k, slash, v = kv.partition("/")
    return cache_type(k), cache_type(v if slash else k)


def protected_layers(n_owners: int, protect: int) -> tuple[int, ...]:
    """Which of the layers that own KV, counted from 0, stay f16. Raises KvfmtError if ``protect`` is negative."""
    if protect < 0:
        raise KvfmtError(f"protect={protect} is negative", "Give the number of layers at each end, 0 for none.")
    return tuple(i for i in range(n_owners) if i < protect or i >= n_owners - protect)


#: What "auto" protects at each end, see LLAMA_KV_PROTECT_DEFAULT.
DEFAULT_PROTECT = 2


def auto_protect(n_owners: int, k: CacheType, v: CacheType, profile: bool = False) -> int:
    """How many layers at each end stay f16 if nobody says: some under our types, none under a calibration profile."""
    ours = set(registry.names())
    if profile or not {k.name, v.name} & ours:
        return 0
    return min(DEFAULT_PROTECT, n_owners // 8)


#: A profile's layouts that suit any type whose noise is the same in every channel: a matrix that ends in a rotation, and vectors
#: before llama.cpp's own.
FLAT_LAYOUT, SCALED_LAYOUT = "flat", "scaled"


def layout_fault(chosen: CacheType, layout: str | None) -> str | None:
    """Why a layer whose profile has this layout cannot store the type; None if it can.

    ``layout`` is "" for a layer without a map, "flat" or "scaled" for what any type can use, else the only type that its order
    of channels suits; None without a profile.
    """
    if not chosen.is_quantized:
        return None
    if layout is None:
        return f"cache type {chosen.name} needs a calibration profile" if chosen.needs_profile else None
    if layout != chosen.name and (chosen.needs_profile or layout not in ("", FLAT_LAYOUT, SCALED_LAYOUT)):
        return f"cache type {chosen.name} does not suit the profile's layout '{layout}'"
    return None


def layer_types(
    n_owners: int,
    k: CacheType,
    v: CacheType,
    protect: int | None = None,
    chosen: Sequence[tuple[CacheType, CacheType]] | None = None,
    profile: bool = False,
) -> list[tuple[CacheType, CacheType]]:
    """The types of K and V in each layer that owns KV.

    ``protect`` None means auto. ``chosen`` are the types of a profile that says so, one pair a layer: then ``k`` and ``v``
    must be f16 and nothing else protected. Raises KvfmtError where llama.cpp refuses.
    """
    if chosen is not None:
        if (k.name, v.name) != ("f16", "f16") or (protect or 0) > 0:
            raise KvfmtError(
                f"the profile chooses the cache types, {k.name}/{v.name} and protect={protect} were asked for as well",
                "Leave the types at f16 and protect at 0.",
            )
        if len(chosen) != n_owners:
            raise KvfmtError(f"types for {len(chosen)} layers, the model has {n_owners} that own KV", "Give one pair a layer.")
        return list(chosen)
    n_kept = auto_protect(n_owners, k, v, profile) if protect is None else protect
    kept = protected_layers(n_owners, n_kept)
    f16 = cache_type("f16")

    def side(asked: CacheType, i: int) -> CacheType:
        return f16 if asked.is_quantized and i in kept else asked

    return [(side(k, i), side(v, i)) for i in range(n_owners)]


@dataclass(frozen=True)
class CacheCost:
    """Allocated bytes of each side, the values they hold, and the bytes of the profile's maps in use."""

    k_bytes: int
    v_bytes: int
    k_values: int
    v_values: int
    sidecar: int = 0

    @property
    def total(self) -> int:
        return self.k_bytes + self.v_bytes + self.sidecar

    @property
    def bits_per_value(self) -> float:
        return 8 * self.total / (self.k_values + self.v_values)


def layers_cost(
    cells: int, rows: Sequence[tuple[int, int]], types: Sequence[tuple[CacheType, CacheType]], sidecar: int = 0
) -> CacheCost:
    """Bytes of a cache of ``cells`` tokens, of rows of K and V values and their types, one pair a layer.

    Raises KvfmtError if a block does not divide a row.
    """
    pairs = list(zip(rows, types, strict=True))
    return CacheCost(
        cells * sum(k.row_bytes(row) for (row, _), (k, _) in pairs),
        cells * sum(v.row_bytes(row) for (_, row), (_, v) in pairs),
        cells * sum(row for row, _ in rows),
        cells * sum(row for _, row in rows),
        sidecar,
    )


def cache_cost(cells: int, k_row: int, v_row: int, n_owners: int, k: CacheType, v: CacheType, protect: int) -> CacheCost:
    """Bytes of a cache of ``cells`` tokens: rows of ``k_row`` and ``v_row`` values in ``n_owners`` layers."""
    return layers_cost(cells, [(k_row, v_row)] * n_owners, layer_types(n_owners, k, v, protect))
