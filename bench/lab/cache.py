"""A saved state as arrays: keys and values of each layer, and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Optional

import numpy as np
from gguf import GGUFReader

from bench.lab.session import LabError
from converters import state as states


@dataclass(frozen=True)
class Geometry:
    """What the GGUF says of a model's attention. Sizes in values, ``window`` in tokens or None, ``norm`` for keys."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    n_rot: int
    rope_base: float
    norm_eps: float
    window: Optional[int]
    key_norms: tuple[Optional[np.ndarray], ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """KV heads, head size of K and of V."""
        return self.kv_heads, self.k_dim, self.v_dim

    @classmethod
    def of(cls, model: Path) -> "Geometry":
        """Reads the GGUF. Raises LabError for models whose layers differ in heads."""
        reader = GGUFReader(model)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        arch = fields["general.architecture"]

        def get(key: str, default=None):
            return fields.get(f"{arch}.{key}", default)

        heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv", get("attention.head_count"))
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise LabError(f"{model.name}: heads differ between layers", "The lab takes models whose layers are alike.")
        dim = get("attention.key_length", get("embedding_length") // heads)
        tensors = {t.name: t for t in reader.tensors}
        layers = get("block_count")
        norms = tuple(
            np.array(tensors[f"blk.{i}.attn_k_norm.weight"].data, np.float32) if f"blk.{i}.attn_k_norm.weight" in tensors else None
            for i in range(layers)
        )
        return cls(
            model.name, layers, heads, kv_heads, dim, get("attention.value_length", dim), get("rope.dimension_count", dim),
            get("rope.freq_base", 10000.0), get("attention.layer_norm_rms_epsilon", 1e-6), get("attention.sliding_window"), norms,
        )


@dataclass(frozen=True)
class Slot:
    """Where a layer lies in the state: which cache, and which of its layers."""

    cache: int
    index: int


@dataclass(frozen=True)
class Stored:
    """A state with its geometry. Layers come in the order in which the state has them; ``order`` maps to the model's.

    ``order[i]`` is the slot of layer i. Without sliding windows it is the state's own order.
    """

    state: states.State
    geometry: Geometry
    order: tuple[Slot, ...]

    @classmethod
    def read(cls, data: bytes, geometry: Geometry, order: Optional[tuple[Slot, ...]] = None) -> "Stored":
        """Raises StateError for damaged bytes, LabError for another model's state or an order that is not known."""
        state = states.read(data)
        slots = tuple(Slot(c, i) for c, cache in enumerate(state.caches) for i in range(len(cache.only.k)))
        if len(slots) != geometry.layers:
            raise LabError(
                f"the state has {len(slots)} layers, {geometry.name} has {geometry.layers}", "It was saved from another model."
            )
        for slot in slots:
            stream = state.caches[slot.cache].only
            for what, sides, dim in (("K", stream.k, geometry.k_dim), ("V", stream.v, geometry.v_dim)):
                if len(sides) != len(stream.k):
                    raise LabError("the state has no V", "Latent attention stores none: the lab does not take such models.")
                # f16, 2 bytes a value
                row, wanted = sides[slot.index].f16().shape[1], geometry.kv_heads * dim
                if row != wanted:
                    raise LabError(
                        f"{what} of layer {slot.index} has {row} values a token, {geometry.name} has {wanted}",
                        "It was saved from another model.",
                    )
        if order is None:
            if len(state.caches) > 1:
                raise LabError("the state has two caches, and no order of their layers was given", "Find it with bench.lab.keys.")
            order = slots
        if sorted(order, key=lambda s: (s.cache, s.index)) != list(slots):
            raise LabError("the order of the layers does not fit the state", "It belongs to another model.")
        return cls(state, geometry, order)

    def _stream(self, layer: int) -> states.Stream:
        return self.state.caches[self.order[layer].cache].only

    def positions(self, layer: int) -> np.ndarray:
        """int32 [cells]."""
        return self._stream(layer).positions

    def f16(self, layer: int, side: str) -> np.ndarray:
        """float16 [cells, heads, head size]; ``side`` is "k" or "v"."""
        dim = self.geometry.k_dim if side == "k" else self.geometry.v_dim
        values = getattr(self._stream(layer), side)[self.order[layer].index].f16()
        return values.reshape(len(values), self.geometry.kv_heads, dim)

    def changed(self, change: Callable[[int, str, np.ndarray], Optional[np.ndarray]]) -> "Stored":
        """A copy in which ``change(layer, side, float16 [cells, heads, dim])`` replaced what it did not return None for.

        Raises StateError if a replacement has another shape or dtype.
        """
        caches = [
            {"k": list(cache.only.k), "v": list(cache.only.v)} for cache in self.state.caches
        ]
        for layer, slot in enumerate(self.order):
            for side in ("k", "v"):
                after = change(layer, side, self.f16(layer, side))
                if after is not None:
                    sides = caches[slot.cache][side]
                    # Shapes of other ranks must not pass by flattening.
                    if after.shape != self.f16(layer, side).shape:
                        raise states.StateError(
                            f"{side.upper()} of layer {layer} became {after.shape}, was {self.f16(layer, side).shape}",
                            "A codec must not change the shape of what it stores.",
                        )
                    sides[slot.index] = sides[slot.index].with_f16(np.ascontiguousarray(after).reshape(len(after), -1))
        made = []
        for cache, sides in zip(self.state.caches, caches):
            stream = replace(cache.only, k=tuple(sides["k"]), v=tuple(sides["v"]))
            made.append(replace(cache, streams=tuple(stream if s is not None else None for s in cache.streams)))
        return replace(self, state=replace(self.state, caches=tuple(made)))

    def bytes(self) -> bytes:
        """What ``Session.load`` takes."""
        return states.write(self.state)
