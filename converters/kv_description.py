"""What the patched llama.cpp writes before a cache that upstream could not have made: types, rotation, profile.

Mirrors ``llama_kv_policy_state_desc`` of src/llama-kv-policy.cpp; a test compares the two::

    rotated: K V; profile 0123456789abcdef; layers 0-1: f16/f16; layers 2-27: kvq3#<16 hex digits>/kvq2#<...>

Layers are numbered as in the model; a run of them may step over layers of another cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from converters.state_bytes import StateError
from kvfmt import registry
from kvfmt.policy import CacheType

#: Digits of a hash that are written.
DIGITS = 16
_ROTATED = re.compile(r"rotated:( K)?( V)?( none)?")
_PROFILE = re.compile(r"profile ([0-9a-f]{16})")
_LAYERS = re.compile(r"layers (\d{1,5})-(\d{1,5}): ([^/; ]{1,64})/([^/; ]{1,64})")


@dataclass(frozen=True)
class Run:
    """Layers ``first`` to ``last`` of one pair of types, each a name, with "#" and a spec hash for ours; V is "-" without one."""

    first: int
    last: int
    k: str
    v: str


@dataclass(frozen=True)
class Description:
    """A description taken apart. ``profile`` is the beginning of its hash, "" if no layer is mapped."""

    rotated_k: bool
    rotated_v: bool
    profile: str
    runs: tuple[Run, ...]

    def numbers(self, n_layers: int) -> tuple[int, ...] | None:
        """The layers' numbers; None if the runs step over layers of another cache."""
        found = tuple(i for run in self.runs for i in range(run.first, run.last + 1))
        return found if len(found) == n_layers else None

    def check_types(self, types: Sequence[tuple[CacheType, CacheType | None]]) -> None:
        """Raises StateError unless the layers of the state have these types, as this build defines them."""
        runs = list(self.runs)
        for pair in types:
            named = tuple("-" if kind is None else type_label(kind) for kind in pair)
            if runs and (runs[0].k, runs[0].v) != named and len(runs) > 1 and (runs[1].k, runs[1].v) == named:
                runs.pop(0)
            if not runs or (runs[0].k, runs[0].v) != named:
                said = f"{runs[0].k}/{runs[0].v}" if runs else "nothing"
                raise StateError(
                    f"the cache has a layer of {'/'.join(named)} where its description says {said}",
                    "It was saved by a build with another version of the format, or is damaged.",
                )
        if len(runs) > 1:
            raise StateError(f"the description has more layers than the cache: {runs[1]}", "The state is damaged.")


def type_label(kind: CacheType) -> str:
    """"f16", "kvq3#<the first digits of its spec hash>"."""
    for fmt in registry.all_formats():
        if fmt.spec.type_id == kind.type_id:
            return f"{kind.name}#{fmt.spec.hash[:DIGITS]}"
    return kind.name


def parse(text: str) -> Description:
    """Raises StateError for a description that this version does not write."""
    first, *parts = text.split("; ")
    rotated = _ROTATED.fullmatch(first)
    profile = _PROFILE.fullmatch(parts[0]) if parts else None
    runs = [_LAYERS.fullmatch(part) for part in parts[1 if profile else 0 :]]
    if not rotated or not runs or None in runs or bool(rotated[3]) == bool(rotated[1] or rotated[2]):
        raise StateError(f"the description {text[:200]!r} is not one that this version knows", "It was saved by a newer build, or is damaged.")
    found = tuple(Run(int(run[1]), int(run[2]), run[3], run[4]) for run in runs)
    if any(run.first > run.last for run in found) or any(a.last >= b.first for a, b in zip(found, found[1:])):
        raise StateError(f"the description {text[:200]!r} has layers out of order", "The state is damaged.")
    return Description(bool(rotated[1]), bool(rotated[2]), profile[1] if profile else "", found)


def describe(
    layers: Sequence[tuple[int, CacheType, CacheType]], rotated_k: bool, rotated_v: bool, profile: str
) -> str | None:
    """The description of a cache whose layers, by number, have these types of K and V; None if upstream has such caches.

    ``profile`` is the hash of the profile that maps layers in it, or "". The rotation is the usual one: what
    LLAMA_ATTN_ROT_DISABLE makes is not written here.
    """
    labels = [(number, type_label(k), type_label(v)) for number, k, v in layers]
    if not profile and all(pair == labels[0][1:] and "#" not in "".join(pair) for _, *rest in labels if (pair := tuple(rest))):
        return None
    rotated = (" K" if rotated_k else "") + (" V" if rotated_v else "") or " none"
    parts = [f"rotated:{rotated}"] + ([f"profile {profile[:DIGITS]}"] if profile else [])
    runs: list[list] = []
    for number, k, v in labels:
        if runs and runs[-1][2:] == [k, v]:
            runs[-1][1] = number
        else:
            runs.append([number, number, k, v])
    return "; ".join(parts + [f"layers {a}-{b}: {k}/{v}" for a, b, k, v in runs])
