"""Which layers of a model own KV, in which of its caches, with what heads: from the GGUF's metadata, without loading it.

Mirrors llama_hparams (has_kv, set_swa_pattern) and the models' own settings in src/models of the pinned llama.cpp; tests
compare both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from converters.state_bytes import StateError
from converters.state_layout import refuse_architecture
from kvfmt.gguf_read import GgufFile
from kvfmt.profile import head_shape, layers_of

#: Every how many layers one sees everything where the file does not say, and whether it is the first of them: load_swa_pattern.
WINDOWS = {
    "afmoe": (4, False), "cohere2": (4, False), "cohere2moe": (4, True), "exaone-moe": (4, False), "exaone4": (4, False), "gemma2": (2, False),
    "gemma3": (6, False), "gemma3n": (5, False), "gpt-oss": (2, False), "laguna": (4, True), "llama4": (4, False), "mellum": (4, False),
    "muse-glimmer": (4, False), "olmo2": (4, False), "plamo3": (8, False), "smallthinker": (4, True),
}
#: Layers that own KV where later ones ask theirs and the file does not say: n_layer_kv_from_start.
OWNERS = {"gemma3n": 20}


@dataclass(frozen=True)
class Layer:
    """One layer that owns KV: its number in the model, KV heads, and the sizes of a head of K and of V."""

    number: int
    heads: int
    head_k: int
    head_v: int


@dataclass(frozen=True)
class Model:
    """``name`` and ``architecture`` of a model, and its layers that own KV; ``windowed`` says which are in the second of two caches."""

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    windowed: tuple[bool, ...]

    def caches(self, sizes: Sequence[int]) -> list[list[Layer]]:
        """The layers of each cache of a state whose caches have so many. Raises StateError if they are not this model's."""
        found = [list(self.layers)] if len(sizes) == 1 else [[layer for layer, w in zip(self.layers, self.windowed) if w == swa] for swa in (False, True)]
        if [len(layers) for layers in found] != list(sizes):
            raise StateError(
                f"the state has caches of {' and '.join(map(str, sizes))} layers, {self.name} of {' and '.join(str(len(x)) for x in found)}",
                "It was saved with another model, or holds only a part of the caches.",
            )
        return found

    def order(self, layer: Layer) -> int:
        """The layer's place among those that own KV."""
        return self.layers.index(layer)


def owners_of(file: GgufFile) -> int:
    """How many of the model's layers, from the first on, can own KV; later ones take theirs from them, or only predict ahead."""
    ahead = file.setting("nextn_predict_layers", 0)
    n_layer = (layers_of(file) or 0) - (ahead if type(ahead) is int else 0)
    shared = file.setting("attention.shared_kv_layers", 0)
    return min(OWNERS.get(file.architecture, n_layer), n_layer - (shared if type(shared) is int else 0))


def read_model_layers(file: GgufFile) -> Model:
    """Raises StateError for a model whose states are not converted, KvfmtError if the metadata does not say enough."""
    refuse_architecture(file.architecture)
    if file.setting("attention.kv_lora_rank"):
        raise StateError(f"{file.name} has latent attention: V is a view of K", "Such caches are not converted.")
    n_owners, layers = owners_of(file), []
    for number in range(n_owners):
        heads, head_k, head_v = head_shape(file, number)
        if not heads:
            raise StateError(f"layer {number} of {file.name} has no KV heads", "Caches of such models are not converted.")
        layers.append(Layer(number, heads, head_k, head_v))
    return Model(file.name, file.architecture, tuple(layers), tuple(_windowed(file, number) for number in range(n_owners)))


def _windowed(file: GgufFile, layer: int) -> bool:
    said = file.setting("attention.sliding_window_pattern")
    if isinstance(said, (np.ndarray, list)):
        return layer < len(said) and bool(said[layer])
    usual = WINDOWS.get(file.architecture)
    if usual is None:
        return False
    period, full_first = usual
    if type(said) is int and said >= 0:
        period = said
    if period == 0:
        return True
    return layer % period != 0 if full_first else layer % period < period - 1
