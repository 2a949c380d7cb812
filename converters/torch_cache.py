"""A PackedCache of kvfmt.torch to a packed cache file and back, byte for byte. Needs the extra "torch"."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, Optional

import numpy as np
import torch

from converters.packed_cache import Layer, read_cache, write_cache
from kvfmt.errors import KvfmtError
from kvfmt.profile import Profile
from kvfmt.torch import PackedCache, PackedSide


def save(cache: PackedCache, path: Path, name: str = "") -> None:
    """Writes what the cache holds. Raises KvfmtError if it is empty, and as ``write_cache``."""
    layers: list[Optional[Layer]] = []
    for layer in cache.layers:
        filled = layer.k is not None and layer.k.packed is not None and layer.k.length
        layers.append(Layer(layer.k.store, layer.v.store, tuple(layer.k.rows.shape[:3])) if filled else None)

    def rows() -> Iterator[np.ndarray]:
        for layer, there in zip(cache.layers, layers):
            if there is not None:
                for side in layer.sides:
                    yield side.rows.numpy()

    write_cache(path, layers, rows(), cache.profile, name)


def load(path: Path, config: Any, profile: Profile | None = None) -> PackedCache:
    """The cache in a file, to go on with a model of this configuration. Raises KvfmtError if it is not of such a model."""
    file = read_cache(path, profile)
    text = config.get_text_config(decoder=True)
    if len(file.layers) != text.num_hidden_layers:
        raise KvfmtError(f"{Path(path).name} is of {len(file.layers)} layers, the model has {text.num_hidden_layers}", "It is of another model.")
    heads, size = text.num_key_value_heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # A layer that takes its keys and values from an earlier one has none of its own.
    owners = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    missing = [i for i, found in enumerate(file.layers[:owners]) if found is None]
    if missing:
        raise KvfmtError(f"{Path(path).name} has nothing of layer {missing[0]}", "A model can only go on with a cache of all its layers.")
    shapes = {(found.shape[0], found.shape[2]) for found in file.layers if found is not None}
    if len(shapes) > 1:
        said = " and ".join(f"{batch} x {tokens}" for batch, tokens in sorted(shapes))
        raise KvfmtError(f"{Path(path).name} has layers of {said} sequences and tokens", "A model can only go on with a cache of the same tokens in all layers.")
    cache = PackedCache(config, "f16", interleaved=file.interleaved)
    cache.profile = file.profile
    for i, (layer, found) in enumerate(zip(cache.layers, file.layers)):
        if found is None:
            continue
        if (found.shape[1], found.k.size) != (heads, size):
            raise KvfmtError(
                f"{Path(path).name}: layer {i} has {found.shape[1]} heads of {found.k.size}, the model {heads} of {size}", "It is of another model."
            )
        layer.k, layer.v = PackedSide(found.k), PackedSide(found.v)
        for side, which in zip(layer.sides, ("k", "v")):
            side.packed = torch.from_numpy(np.array(file.rows(i, which)))
            side.length = found.shape[2]
        layer.is_initialized = True
    return cache
