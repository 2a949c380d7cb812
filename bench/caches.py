"""Caches to compare, as one writes them on the command line: "kvq3/kvq2:2"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Optional

from kvfmt import registry
from kvfmt.errors import KvfmtError
from kvfmt.policy import parse_kv
from kvfmt.profile import Profile, formats_of

#: What stands for the type where a profile gives each layer its own.
BY_PROFILE = "profile"


@dataclass(frozen=True)
class Cache:
    """Types of K and V, how many layers at each end stay f16, and a calibration profile.

    ``kv`` is "" where the profile gives each layer its types.
    """

    kv: str
    protect: int = 0
    profile: Optional[Path] = None

    def __post_init__(self) -> None:
        if self.profile is None:
            return
        chooses = self.calibrated.types_k is not None
        if chooses and (self.kv or self.protect):
            raise KvfmtError(f"profile {self.profile.name} gives each layer its types, {self.kv}:{self.protect} was asked for as well", f"Write @{self.profile}")
        if not chooses and not self.kv:
            raise KvfmtError(f"profile {self.profile.name} does not say which types", f"Write e.g. kvt3/kve8_2@{self.profile}")

    @cached_property
    def calibrated(self) -> Profile:
        """What the profile's file holds, read once for this cache. Raises KvfmtError."""
        return Profile.read(self.profile)

    @classmethod
    def parse(cls, text: str) -> Cache:
        """"q8_0", "kvq3/kvq2", "kvq3/kvq2:2", "kvt3/kve8_2@FILE", "@FILE" for a profile that says the types.

        Raises UnknownName for a type, KvfmtError for a protection that does not exist and a profile that cannot be read.
        """
        types, at, file = text.partition("@")
        kv, colon, protect = types.partition(":")
        if kv or not at:
            parse_kv(kv)
        if colon and not protect.isdecimal():
            raise KvfmtError(f"'{protect}' in cache '{text}' is no number of layers", "Write e.g. kvq3/kvq2:2, or leave out the colon.")
        if at and not file:
            raise KvfmtError(f"cache '{text}' names no profile", "Write e.g. kvt3/kve8_2@model.kvprofile.gguf")
        return cls(kv, int(protect or 0), Path(file).expanduser() if at else None)

    @property
    def title(self) -> str:
        name = "" if self.profile is None else "@" + self.profile.name.removesuffix(".gguf").removesuffix(".kvprofile")
        return self.kv + name + (f", protect {self.protect}" if self.protect else "")

    @property
    def type_ids(self) -> tuple[int, int]:
        """What a context asks for: f16 where the profile decides."""
        k, v = parse_kv(self.kv or "f16")
        return k.type_id, v.type_id

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the K and the V type."""
        if not self.kv:
            return BY_PROFILE, BY_PROFILE
        k, v = parse_kv(self.kv)
        return k.name, v.name

    @property
    def identity(self) -> dict[str, str]:
        """What a row of it depends on beside the types' names: spec hashes of our formats, the profile's hash."""
        names = {kind.name for kind in parse_kv(self.kv)} if self.kv else set()
        if self.profile is None:
            return formats_of(tuple(names))
        chosen = {*(self.calibrated.types_k or ()), *(self.calibrated.types_v or ())}
        return {**formats_of((*names, *chosen)), "profile": self.calibrated.hash}

    def arguments(self) -> list[str]:
        """For the programs of llama.cpp."""
        types = [x for option, name in zip(("-ctk", "-ctv"), self.sides) for x in (option, name)] if self.kv else []
        profile = [] if self.profile is None else ["--kv-profile", str(self.profile)]
        return [*types, "-fa", "on", "--kv-protect", str(self.protect), *profile]


F16 = Cache("f16")
#: The pair that the project recommends, alone and with protected ends.
RECOMMENDED = (Cache("kvq3/kvq2"), Cache("kvq3/kvq2", 2))


def default_caches() -> tuple[Cache, ...]:
    """f16, upstream's usual types, every format of ours that needs no profile for both sides, and the recommended pair."""
    ours = tuple(Cache(fmt.spec.name) for fmt in registry.plain_formats())
    return (F16, Cache("q8_0"), Cache("q4_0"), *ours, *RECOMMENDED)


def shortlist() -> tuple[Cache, ...]:
    """What is measured where each cache takes long: f16, upstream's usual types, and the pairs that the project names."""
    return (F16, Cache("q8_0"), Cache("q4_0"), Cache("kvq4"), Cache("kve8_3/kve8_2"), *RECOMMENDED)


def parse_caches(text: str | tuple[Cache, ...] | None, default: tuple[Cache, ...]) -> tuple[Cache, ...]:
    """A list separated by spaces or commas, each cache once; ``default`` for None, caches as they are. Raises as ``Cache.parse``, and for an empty list."""
    if text is None:
        return default
    if isinstance(text, tuple):
        return text
    found = tuple(dict.fromkeys(Cache.parse(part) for part in text.replace(",", " ").split()))
    if not found:
        raise KvfmtError("no cache to measure", "Name some, e.g. --caches 'q8_0 kvq3/kvq2:2'.")
    return found
