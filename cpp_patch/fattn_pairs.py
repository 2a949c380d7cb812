"""The K/V pairs for which CUDA's vector flash-attention kernel is compiled: the one table.

Template instances, dispatch, the answers of supports_op, the list that a build reports and the tests all come from
``pairs()``. Every pair costs a file of ``len(HEADS)`` heads, each in four variants, so a pair is here because somebody should
use it; any other pair of supported types converts K and V to f16 at each call, which llama.cpp names in a warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfmt import registry

#: Head sizes of the upstream kernel.
HEADS = (64, 128, 256)

#: Pairs of our types: what the README recommends, and the symmetric ones that people ask for.
OURS = (
    ("kvq3", "kvq2"),
    ("kvq3", "kve8_2"),
    ("kvq4", "kvq4"),
    ("kvnf4", "kvnf4"),
    ("kve8_3", "kve8_2"),
    ("kvt3", "kvq2"),
    ("kvt3", "kve8_2"),
    ("kvt4", "kvq4"),
)

#: Stock key types that go with every value type of ours.
STOCK_KEYS = ("f16", "q8_0")


@dataclass(frozen=True)
class Pair:
    """One instance file: names of the K and the V type."""

    k: str
    v: str

    @property
    def name(self) -> str:
        return f"{self.k}-{self.v}"

    @property
    def k_enum(self) -> str:
        return f"GGML_TYPE_{self.k.upper()}"

    @property
    def v_enum(self) -> str:
        return f"GGML_TYPE_{self.v.upper()}"


def pairs() -> tuple[Pair, ...]:
    """All pairs, ours first. Raises KeyError if ``OURS`` names a format that does not exist."""
    mine = tuple(Pair(registry.get(k).spec.name, registry.get(v).spec.name) for k, v in OURS)
    values = [fmt.spec.name for fmt in registry.all_formats() if "V" in fmt.spec.roles]
    return mine + tuple(Pair(k, v) for k in STOCK_KEYS for v in values)
