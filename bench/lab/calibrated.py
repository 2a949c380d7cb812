"""Calibrated caches in the lab: centring, pair scaling, the full map and unequal bits, each on its own and together, and centred values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Mapping

import numpy as np

from bench.lab import codecs as c
from bench.lab.methods import Method
from bench.lab.session import LabError
from kvfmt import registry
from kvfmt.calibrate import stored_maps
from kvfmt.errors import KvfmtError
from kvfmt.geometry import key_maps, layout_for, value_mean
from kvfmt.moments import LayerStatistics
from kvfmt.profile import LayerMaps, Profile
from kvfmt.side_maps import SideMaps

#: Types that the table's calibrated rows are made of: keys with the same noise everywhere, values.
FLAT_KEYS, E8_KEYS, VALUES = "kvq3", "kve8_3", "kve8_2"
#: What the rows are called whose channels are in order, in groups that are mixed alike, and not mixed by a matrix of the whole head.
ORDERED = "ordered channels, centred, unequal bits"


@dataclass(frozen=True)
class Mapped:
    """Keys or values that pass through a layer's maps into a format, as llama.cpp stores them, and come back through their inverse.

    ``maps`` has what each layer stores beside its cells for this side, and counts in the rate. A mean is added again: of keys it
    changes no attention, since softmax does not see it; of values attention's weights sum to one, so its output has it once.
    """

    inner: c.Codec
    kind: str
    centre: bool
    maps: Mapping[int, LayerMaps] = field(compare=False, repr=False)
    side: str = "k"

    @property
    def name(self) -> str:
        return f"{self.inner.name}, map {self.kind}{', centred' if self.centre else ''}"

    @property
    def identity(self) -> dict[str, str]:
        """What a row depends on beside the format: a hash of the side's maps."""
        digest = hashlib.sha256()
        for layer, maps in sorted(self.maps.items()):
            for name, array in maps.arrays().items():
                digest.update(f"{layer} {name} {array.dtype.name} {array.shape}".encode() + array.tobytes())
        return {"maps" if self.side == "k" else "maps of values": digest.hexdigest()}

    def of_layer(self, layer: int) -> "InLayer":
        """The codec of one layer. Raises LabError if the profile has no statistics of it."""
        if layer not in self.maps:
            raise LabError(f"{self.name}: the profile has nothing of layer {layer}", "It was made for another model.")
        return InLayer(self.name, self.inner, self.maps[layer], self.side)

    def allocated_bits(self, tokens: int, heads: int, dim: int) -> int:
        """With the maps of a layer, which are stored once for any number of tokens."""
        found = next(iter(self.maps.values()))
        return self.inner.allocated_bits(tokens, heads, dim) + 8 * found.nbytes


@dataclass(frozen=True)
class InLayer:
    """One layer of ``Mapped``, which counts the bits."""

    name: str
    inner: c.Codec
    maps: LayerMaps
    side: str

    def apply(self, x: np.ndarray) -> np.ndarray:
        """float32 [tokens, heads, dim]. Raises LabError for other heads than the profile's."""
        maps = SideMaps.of(self.maps, self.side == "k")
        if maps is None:
            return c.Rotated(self.inner, self.side).apply(x)
        if x.shape[1:] != maps.shape:
            raise LabError(f"{self.name}: {self.side.upper()} has heads and values {x.shape[1:]}, the profile {maps.shape}", "It was made for another model.")
        inner = self.inner if maps.mixes else c.Rotated(self.inner, self.side)
        stored = maps.store(x.transpose(1, 0, 2)).transpose(1, 0, 2)
        return maps.restore(inner.apply(stored).transpose(1, 0, 2)).transpose(1, 0, 2)


def _statistics(profile: Profile) -> Mapping[int, LayerStatistics]:
    if not profile.statistics:
        raise KvfmtError(f"profile '{profile.name}' has no statistics", "The lab makes maps from them: kvfmt calibrate makes a profile that has.")
    return profile.statistics


def keys_of(profile: Profile, name: str, kind: str, centre: bool) -> Mapped:
    """Keys of the format ``name`` through maps made from the profile's statistics. Raises KvfmtError if it has none."""
    layout = layout_for(name)
    # A layer whose softmax is not shift-invariant is not centred, whatever is asked for.
    maps = {layer: stored_maps(key_maps(found, layout, kind, centre), found) for layer, found in _statistics(profile).items()}
    return Mapped(c.Blocks(name), kind, centre, maps)


def values_of(profile: Profile, name: str) -> Mapped:
    """Values of the format ``name``, centred by the profile's statistics. Raises KvfmtError if it has none."""
    maps = {layer: LayerMaps(v_mean=value_mean(found)) for layer, found in _statistics(profile).items()}
    return Mapped(c.Blocks(name), "none", True, maps, "v")


def methods(profile: Profile) -> tuple[Method, ...]:
    """What a profile adds to the table: each part of the geometry alone, then all, with the same values throughout; then values centred."""
    values = c.Rotated(c.Blocks(VALUES), "v")
    plain = Method(f"{FLAT_KEYS}/{VALUES}, Hadamard only", "calibrated", c.Rotated(c.Blocks(FLAT_KEYS), "k"), values)
    unequal = [fmt.spec.name for fmt in registry.all_formats() if fmt.spec.needs_profile]
    steps = [
        (FLAT_KEYS, "none", True, "centred"),
        (FLAT_KEYS, "pairs", False, "pair scaling"),
        (FLAT_KEYS, "pairs", True, "pair scaling, centred"),
        (FLAT_KEYS, "channels", True, "channel scaling, centred"),
        (E8_KEYS, "channels", True, "channel scaling, centred"),
        (FLAT_KEYS, "full", False, "full map"),
        (FLAT_KEYS, "full", True, "full map, centred"),
        *((name, "full", True, "full map, centred, unequal bits") for name in unequal),
        *((name, "channels", True, ORDERED) for name in unequal),
    ]
    rows = [Method(f"{name}/{VALUES}, {title}", "calibrated", keys_of(profile, name, kind, centre), values) for name, kind, centre, title in steps]
    centred = values_of(profile, VALUES)
    again = [f"{FLAT_KEYS}/{VALUES}, channel scaling, centred", *(f"{name}/{VALUES}, {ORDERED}" for name in unequal)]
    return (plain, *rows, *(replace(row, name=f"{row.name}, values centred", v=centred) for row in rows if row.name in again))
