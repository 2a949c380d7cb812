"""Which layer gets which cache type, and what a cache costs to the byte.

Mirrors what the patched llama.cpp does (``src/llama-kv-policy.cpp``); a test compares the two.
"""

from __future__ import annotations

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
    return STOCK + tuple(fmt.spec.name for fmt in registry.all_formats())


def cache_type(name: str) -> CacheType:
    """The type called ``name``. Raises UnknownName."""
    if name in STOCK:
        member = GGMLQuantizationType[name.upper()]
        block, size = GGML_QUANT_SIZES[member]
        return CacheType(name, int(member), block, size)
    if name not in known_types():
        raise UnknownName(f"unknown cache type '{name}'", "Known: " + ", ".join(known_types()))
    spec = registry.get(name).spec
    return CacheType(name, spec.type_id, spec.block, spec.size)


def parse_kv(kv: str) -> tuple[CacheType, CacheType]:
    """"kvq3/kvq2" -> the types of K and V; one name serves both sides. Raises UnknownName."""
    k, slash, v = kv.partition("/")
    return cache_type(k), cache_type(v if slash else k)


def protected_layers(n_owners: int, protect: int) -> tuple[int, ...]:
    """Which of the layers that own KV, counted from 0, stay f16. Raises KvfmtError if ``protect`` is negative."""
    if protect < 0:
        raise KvfmtError(f"protect={protect} is negative", "Give the number of layers at each end, 0 for none.")
    return tuple(i for i in range(n_owners) if i < protect or i >= n_owners - protect)


@dataclass(frozen=True)
class CacheCost:
    """Allocated bytes of each side, and the values they hold."""

    k_bytes: int
    v_bytes: int
    k_values: int
    v_values: int

    @property
    def total(self) -> int:
        return self.k_bytes + self.v_bytes

    @property
    def bits_per_value(self) -> float:
        return 8 * self.total / (self.k_values + self.v_values)


def cache_cost(cells: int, k_row: int, v_row: int, n_owners: int, k: CacheType, v: CacheType, protect: int) -> CacheCost:
    """Bytes of a cache of ``cells`` tokens: rows of ``k_row`` and ``v_row`` values in ``n_owners`` layers."""
    kept = len(protected_layers(n_owners, protect))
    f16 = cache_type("f16")

    def side(chosen: CacheType, row: int) -> int:
        n_kept = kept if chosen.is_quantized else 0
        return cells * (n_kept * f16.row_bytes(row) + (n_owners - n_kept) * chosen.row_bytes(row))

    values = cells * n_owners
    return CacheCost(side(k, k_row), side(v, v_row), values * k_row, values * v_row)
