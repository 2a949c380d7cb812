"""What a layer's K or V costs at each type, from the distance that each type alone has on a text.

The distance of one layer at a fine type drowns in noise: a model that rounds its activations to 8 bits moves by as much at the
smallest change, the more the earlier it comes. So the floor is a line over the layers, drawn through distances at f32, which
changes nothing but the last bits. Above it a distance is proportional to the power of the noise that a type adds, as long as it is
small; the factor of a place is fitted to its types together, and the coarse ones, which stand out of the noise, decide it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Mapping, Sequence

import numpy as np

from bench.lab.codecs import Blocks, Codec, Stock
from kvfmt import registry
from kvfmt.policy import cache_type

#: Said after a key type, in place of its maps, which cost more than they bring where a cache is short or heads are large: only a mean
#: and a scale for each channel, and their order where the type wants one, or nothing. PLAIN values are not centred.
SCALED, PLAIN = ":scaled", ":plain"

#: Layer, side, candidate.
Place = tuple[int, str, str]


def type_of(kind: str) -> str:
    """The cache type of a candidate, whatever is done to its keys."""
    return kind[: len(kind) - len(treatment(kind))]


def treatment(kind: str) -> str:
    """SCALED, PLAIN, or "" for maps."""
    return next((how for how in (SCALED, PLAIN) if kind.endswith(how)), "")


@lru_cache(maxsize=None)
def noise(name: str) -> float:
    """Mean squared error of a quantized type on a unit Gaussian, heads of 256. Raises UnknownName."""
    codec: Codec = Blocks(name) if name in registry.names() else Stock(name)
    x = np.random.default_rng(1).standard_normal((128, 1, 256), np.float32)
    return float(np.mean((codec.apply(x) - x) ** 2))


def floor_of(points: Sequence[tuple[int, float]]) -> np.poly1d:
    """The noise floor by layer, a line through (layer, distance at f32); a constant if only one layer was looked at."""
    layers, found = np.array(points, np.float64).T
    return np.poly1d(np.polyfit(layers, found, 1 if len(set(layers)) > 1 else 0))


def costs(measured: Mapping[Place, float], floor: np.poly1d) -> dict[Place, float]:
    """Cost of every candidate in nats, at least 0, from its distance alone."""
    families: dict[tuple, list[Place]] = {}
    found = {}
    for place in measured:
        layer, side, kind = place
        chosen = cache_type(type_of(kind))
        if chosen.is_quantized:
            # Noise compares types only where the same is done to the values before: maps, vectors, and channels by importance.
            families.setdefault((layer, side, treatment(kind), chosen.needs_profile), []).append(place)
        else:
            found[place] = max(0.0, measured[place] - max(0.0, floor(layer)))
    for (layer, *_), places in families.items():
        power = np.array([noise(type_of(kind)) for _, _, kind in places])
        above = np.maximum([measured[place] - max(0.0, floor(layer)) for place in places], 0)
        factor = power @ above / (power @ power)
        found.update({place: float(factor * p) for place, p in zip(places, power)})
    return found
