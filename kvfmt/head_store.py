"""How heads of K or V are stored outside llama.cpp: type, padding, rotation or map; numpy in, packed bytes out, and back.

The bytes are those that llama.cpp stores for the same values: unmapped quantized sides are rotated as it rotates them, keys after
a profile's mean and scale, values after its mean; mapped ones hold what side_maps.py says. What differs is the reading: llama.cpp asks
with turned queries and adds the mean of values to the output of attention, here what is stored is turned back, mean and all, which gives
attention the same scores up to a constant that its softmax does not see, and lets any attention read them. A head that is not whole blocks is padded with zeros before the rotation, which llama.cpp refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Optional, Sequence

import numpy as np
from gguf import GGMLQuantizationType, quants

from kvfmt.errors import KvfmtError
from kvfmt.gguf_types import register
from kvfmt.policy import CacheType, cache_type, layer_types, layout_fault, parse_kv
from kvfmt.profile import Profile
from kvfmt.side_maps import SideMaps
from kvfmt.transform import hadamard, rotation_size

#: A model may give values that a type cannot hold, infinities and what is not a number too: no reason for numpy to warn at each step.
_QUIET = np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")


def interleaved_order(size: int) -> np.ndarray:
    """Which value of a head in transformers' order stands where in llama.cpp's, int [size].

    Where RoPE turns neighbours (the llama family), the converter to GGUF has interleaved the halves that transformers turns.
    """
    return np.arange(size).reshape(2, size // 2).T.ravel()


@dataclass(frozen=True)
class HeadStore:
    """One side of one layer. ``size``: values of a head; ``maps``: what a profile does to it; ``interleave``: keys come in transformers'
    order and are stored in llama.cpp's.

    Raises KvfmtError if the type cannot be written from Python, or a map would have to be padded.
    """

    kind: CacheType
    size: int
    keys: bool
    maps: Optional[SideMaps] = None
    interleave: bool = False

    def __post_init__(self) -> None:
        _check_written(self.kind)
        if self.maps is not None and self.maps.shape[1] != self.size:
            raise KvfmtError(
                f"the profile's maps are for heads of {self.maps.shape[1]} values, these have {self.size}",
                "Give the profile of this model.",
            )
        if self.mapped and self.padded != self.size:
            raise KvfmtError(f"heads of {self.size} are not whole blocks of {self.kind.name}, and a map cannot be padded", "Leave the profile out.")
        if self.interleave and self.size % 2:
            raise KvfmtError(f"keys of {self.size} values have no halves to interleave", "Say interleave=False.")

    @property
    def profiled(self) -> bool:
        """Whether a profile acts on what is stored."""
        return self.kind.is_quantized and self.maps is not None

    @property
    def mapped(self) -> bool:
        """Whether it does by a matrix, of a head or of groups of its channels, in place of the rotation."""
        return self.profiled and self.maps.mixes

    @property
    def padded(self) -> int:
        """Values that a head takes as stored."""
        return -(-self.size // self.kind.block) * self.kind.block

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token."""
        return self.kind.row_bytes(self.padded)

    @property
    def rotation(self) -> int:
        """Values that the Hadamard transform mixes before storing; 1 where nothing is rotated."""
        return rotation_size(self.padded, self.keys) if self.kind.is_quantized and not self.mapped else 1

    @property
    def domain(self) -> str:
        """"plain", "hadamard 64", "map", "scaled" or "scaled, hadamard 64": what is done to a head before it is stored."""
        if self.mapped:
            return "map"
        parts = ["scaled"] * self.profiled + [f"hadamard {self.rotation}"] * (self.rotation > 1)
        return ", ".join(parts) or "plain"

    def check_heads(self, heads: int) -> None:
        """Raises KvfmtError if the maps are for another number of heads."""
        if self.profiled and self.maps.shape[0] != heads:
            raise KvfmtError(f"the profile has maps of {self.maps.shape[0]} KV heads, these are {heads}", "Give the profile of this model.")

    @_QUIET
    def encode(self, x: np.ndarray) -> np.ndarray:
        """Heads, float [..., H, T, size] -> bytes, uint8 [..., H, T, row_bytes]. A token's bytes depend on it alone.

        Raises KvfmtError for another size or number of heads.
        """
        if x.ndim < 3 or x.shape[-1] != self.size:
            raise KvfmtError(f"heads of shape {x.shape} were to be stored, [..., heads, tokens, {self.size}] was expected", "They are of another model.")
        self.check_heads(x.shape[-3])
        x = np.ascontiguousarray(x, np.float32)
        if self.interleave:
            x = x[..., interleaved_order(self.size)]
        if self.profiled:
            # A matrix in float64, so that no rounding depends on how many tokens come at once.
            x = self.maps.store(x, np.float64)
        if self.padded != self.size:
            x = np.concatenate([x, np.zeros((*x.shape[:-1], self.padded - self.size), np.float32)], axis=-1)
        if self.rotation > 1:
            x = hadamard(x, self.rotation)
        if self.kind.name == "bf16" or self.kind.is_quantized:
            made = quants.quantize(np.ascontiguousarray(x), GGMLQuantizationType(self.kind.type_id))
            return made.view(np.uint8)
        return x.astype("<f4" if self.kind.name == "f32" else "<f2", order="C").view(np.uint8)

    @_QUIET
    def unpack(self, data: np.ndarray) -> np.ndarray:
        """Bytes, uint8 [..., row_bytes] -> what is stored, float32 [..., padded], still turned. Raises KvfmtError for other rows."""
        if data.dtype != np.uint8 or data.shape[-1] != self.row_bytes:
            raise KvfmtError(f"rows of {data.shape[-1]} bytes ({data.dtype}), {self.row_bytes} bytes were expected for {self.size} values in {self.kind.name}", "It is another type or head size.")
        data = np.ascontiguousarray(data)
        if self.kind.name in ("f32", "f16"):
            return data.view("<f4" if self.kind.name == "f32" else "<f2").astype(np.float32)
        return quants.dequantize(data, GGMLQuantizationType(self.kind.type_id))

    @cached_property
    def back(self) -> Optional[np.ndarray]:
        """What takes ``unpack``'s rows back to heads: float32 [padded, size] or, under a map, [H, size, size]; None: nothing to do."""
        if self.mapped:
            matrix = self.maps.undo.transpose(0, 2, 1)
        elif self.rotation > 1:
            matrix = hadamard(np.eye(self.padded), self.rotation)[:, : self.size]
        elif self.padded != self.size:
            matrix = np.eye(self.padded)[:, : self.size]
        elif not self.interleave:
            return None
        else:
            matrix = np.eye(self.size)
        if self.interleave:
            turned = np.empty_like(matrix)
            turned[..., interleaved_order(self.size)] = matrix
            matrix = turned
        return np.ascontiguousarray(matrix, np.float32)

    @cached_property
    def divisor(self) -> Optional[np.ndarray]:
        """What ``back``'s heads are divided by, float32 [H, 1, size]; None: by nothing."""
        return self._by_channel(self.maps.scale) if self.profiled else None

    @cached_property
    def offset(self) -> Optional[np.ndarray]:
        """The mean that is added then, float32 [H, 1, size]; None without one."""
        return self._by_channel(self.maps.mean) if self.profiled else None

    def _by_channel(self, vector: Optional[np.ndarray]) -> Optional[np.ndarray]:
        """[H, size] in llama.cpp's order -> float32 [H, 1, size] in the order that heads come in."""
        if vector is None:
            return None
        vector = vector.astype(np.float32)
        if self.interleave:
            turned = np.empty_like(vector)
            turned[:, interleaved_order(self.size)] = vector
            vector = turned
        return vector[:, None, :]

    @_QUIET
    def decode(self, data: np.ndarray) -> np.ndarray:
        """Bytes, uint8 [..., H, T, row_bytes] -> heads, float32 [..., H, T, size]. Raises KvfmtError for other rows or heads."""
        if self.profiled:
            self.check_heads(data.shape[-3])
        x = self.unpack(data)
        if self.back is not None:
            x = x @ self.back
        if self.divisor is not None:
            x = x / self.divisor
        return x if self.offset is None else x + self.offset


def _check_written(kind: CacheType) -> None:
    """Raises KvfmtError for a type that gguf-py reads and does not write."""
    register()
    traits = quants._type_traits.get(GGMLQuantizationType(kind.type_id))
    # The base class's method only raises.
    own = getattr(traits, "quantize_blocks", None)
    if kind.is_quantized and (traits is None or own is not None and own.__qualname__.split(".")[0] != traits.__name__):
        raise KvfmtError(f"cache type {kind.name} can be read here, not written", "Choose another quantized type: q8_0, q4_0, or a kvfmt one.")


def layer_stores(
    sizes: Sequence[Optional[tuple[int, int]]],
    kv: str | None,
    protect: int | None = None,
    profile: Profile | None = None,
    interleave: bool = False,
) -> list[Optional[tuple[HeadStore, HeadStore]]]:
    """The stores of K and V for each layer, whose heads have ``sizes`` (K, V) values, as llama.cpp would choose them; None for None.

    ``kv`` such as "kvq3/kvq2", None where the profile gives each layer its types; ``protect`` layers at each end stay f16 (None:
    as llama.cpp chooses). Raises UnknownName, and KvfmtError for what does not fit together.
    """
    if profile is not None and profile.layers != len(sizes):
        raise KvfmtError(f"the profile is for {profile.layers} layers, the model has {len(sizes)}", "Give the profile of this model.")
    chosen = None
    if profile is not None and profile.types_k is not None:
        chosen = [(cache_type(k or "f16"), cache_type(v or "f16")) for k, v in zip(profile.types_k, profile.types_v)]
    elif kv is None:
        raise KvfmtError("no cache types were named" + ("" if profile is None else ", and the profile does not choose them"), "Give kv, e.g. 'kvq3/kvq2'.")
    k, v = parse_kv("f16" if kv is None else kv)
    types = layer_types(len(sizes), k, v, protect, chosen, profile is not None)
    stores = []
    for layer, (size, (k_type, v_type)) in enumerate(zip(sizes, types)):
        maps = None if profile is None else profile.maps.get(layer)
        for kind, layouts in ((k_type, "layout_k"), (v_type, "layout_v")):
            _check_written(kind)
            fault = layout_fault(kind, None if profile is None else getattr(profile, layouts)[layer])
            if fault:
                raise KvfmtError(f"layer {layer}: {fault}", "Give a profile that was calibrated for it, or choose another type.")
        stores.append(size and (
            HeadStore(k_type, size[0], True, SideMaps.of(maps, True), interleave),
            HeadStore(v_type, size[1], False, SideMaps.of(maps, False)),
        ))
    return stores
