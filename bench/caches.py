"""Caches to compare, as one writes them on the command line: "kvq3/kvq2:2"."""

from __future__ import annotations

from dataclasses import dataclass

from kvfmt import registry
from kvfmt.errors import KvfmtError
from kvfmt.policy import parse_kv


@dataclass(frozen=True)
class Cache:
    """Types of K and V, and how many layers at each end stay f16."""

    kv: str
    protect: int = 0

    @classmethod
    def parse(cls, text: str) -> Cache:
        """"q8_0", "kvq3/kvq2", "kvq3/kvq2:2". Raises UnknownName for a type, KvfmtError for a protection that does not exist."""
        kv, colon, protect = text.partition(":")
        parse_kv(kv)
        if colon and not protect.isdecimal():
            raise KvfmtError(f"'{protect}' in cache '{text}' is no number of layers", "Write e.g. kvq3/kvq2:2, or leave out the colon.")
        return cls(kv, int(protect or 0))

    @property
    def title(self) -> str:
        return self.kv + (f", protect {self.protect}" if self.protect else "")

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the K and the V type."""
        k, v = parse_kv(self.kv)
        return k.name, v.name

    def arguments(self) -> list[str]:
        """For the programs of llama.cpp."""
        k, v = self.sides
        return ["-ctk", k, "-ctv", v, "-fa", "on", "--kv-protect", str(self.protect)]


F16 = Cache("f16")
#: The pair that the project recommends, alone and with protected ends.
RECOMMENDED = (Cache("kvq3/kvq2"), Cache("kvq3/kvq2", 2))


def default_caches() -> tuple[Cache, ...]:
    """f16, upstream's usual types, every format of ours that needs no profile for both sides, and the recommended pair."""
    ours = tuple(Cache(fmt.spec.name) for fmt in registry.plain_formats())
    return (F16, Cache("q8_0"), Cache("q4_0"), *ours, *RECOMMENDED)


def parse_caches(text: str | None, default: tuple[Cache, ...]) -> tuple[Cache, ...]:
    """A list separated by spaces or commas, each cache once; ``default`` for None. Raises as ``Cache.parse``, and for an empty list."""
    if text is None:
        return default
    found = tuple(dict.fromkeys(Cache.parse(part) for part in text.replace(",", " ").split()))
    if not found:
        raise KvfmtError("no cache to measure", "Name some, e.g. --caches 'q8_0 kvq3/kvq2:2'.")
    return found
