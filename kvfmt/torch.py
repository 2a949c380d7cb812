"""A KV cache for transformers that holds packed bytes: ``model.generate(..., past_key_values=PackedCache(model.config, "kvq3/kvq2"))``.

Needs the extra "torch". What is stored are the blocks that llama.cpp stores, in torch.uint8 tensors; at each step of the model
one layer at a time is decoded for its attention, and the decoded keys and values are dropped with it. They are always the
decoded ones, also of the tokens just written, as in llama.cpp. Encoding and decoding run on the CPU; a model elsewhere gets
copies. transformers' attention takes keys, not queries, from the cache: so mapped keys come back under the inverse of the map
instead of being asked with turned queries, which is the same scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import numba
import numpy as np

from kvfmt.bindings import DEFAULT_KV
from kvfmt.errors import KvfmtError, MissingTool
from kvfmt.head_store import HeadStore, layer_stores
from kvfmt.profile import Profile

try:
    import torch
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise MissingTool(f"{error.name or 'transformers'} is not installed", "Install the extra: pip install 'kvfmt[torch]'") from None

# Numba would share torch's OpenMP threads. When they take turns each waits for the other, busily, and a step of the model took up
# to a hundred times as long. Numba's own threads sleep. A choice that was made before, by the user, stands.
if numba.config.THREADING_LAYER == "default":
    numba.config.THREADING_LAYER = "workqueue"

#: Tokens by which the room for packed bytes grows at least, and the part of its length by which it grows beyond that.
ROOM, PART = 64, 8
#: Families whose keys the converter to GGUF interleaves.
INTERLEAVED = ("llama", "mistral", "mixtral")
#: Layer types of transformers' configurations that a layer here serves.
SERVED = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Memory:
    """What a cache takes: ``allocated`` bytes of its tensors, ``used`` of them by tokens, ``maps`` of a profile beside them; ``values``
    of K and V that it holds."""

    allocated: int
    used: int
    maps: int
    values: int

    @property
    def bits_per_value(self) -> float:
        """Of the bytes used, padding and protected layers counted, maps not."""
        return 8 * self.used / self.values if self.values else 0.0


class PackedSide:
    """Keys or values of one layer: ``packed`` uint8 [batch, heads, room, row bytes], the first ``length`` tokens of it in use."""

    def __init__(self, store: HeadStore) -> None:
        self.store = store
        self.packed: Optional[torch.Tensor] = None
        self.length = 0
        self._back: Optional[tuple[torch.Tensor, ...]] = None

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """States [batch, heads, tokens, size] as bytes. Raises KvfmtError for another shape than before."""
        x = states.detach().to("cpu", torch.float32).numpy()
        made = torch.from_numpy(self.store.encode(x))
        batch, heads = made.shape[:2]
        if self.packed is not None and self.packed.shape[:2] != (batch, heads):
            raise KvfmtError(
                f"{batch} sequences of {heads} heads were to be appended to {self.packed.shape[0]} of {self.packed.shape[1]}",
                "Reset the cache, or use one for each batch.",
            )
        return made

    def append(self, made: torch.Tensor) -> None:
        """Stores what ``encode`` made."""
        batch, heads, tokens, row = made.shape
        end = self.length + tokens
        if self.packed is None or end > self.packed.shape[2]:
            # A tensor that is made in inference mode could only be written to there.
            with torch.inference_mode(False):
                grown = torch.zeros((batch, heads, end + max(ROOM, end // PART), row), dtype=torch.uint8)
            if self.packed is not None:
                grown[:, :, : self.length] = self.packed[:, :, : self.length]
            self.packed = grown
        self.packed[:, :, self.length : end] = made
        self.length = end

    @property
    def rows(self) -> torch.Tensor:
        """The bytes in use, uint8 [batch, heads, length, row bytes], a view. The side must hold something."""
        return self.packed[:, :, : self.length]

    def read(self, like: torch.Tensor) -> torch.Tensor:
        """All tokens, decoded, [batch, heads, length, size], in the type and on the device of ``like``."""
        x = torch.from_numpy(self.store.unpack(self.rows.numpy()))
        if self._back is None:
            self._back = tuple(None if m is None else torch.from_numpy(m) for m in (self.store.back, self.store.divisor, self.store.offset))
        back, divisor, offset = self._back
        if back is not None:
            x = x @ back
        if divisor is not None:
            x /= divisor
        if offset is not None:
            x += offset
        return x.to(like.device, like.dtype)

    def keep(self, chosen: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the bytes by what ``chosen`` makes of them, along the batch."""
        if self.packed is not None:
            with torch.inference_mode(False):
                self.packed = chosen(self.packed)

    def crop(self, length: int) -> None:
        self.length = length

    def clear(self) -> None:
        self.packed, self.length = None, 0


class PackedLayer(CacheLayerMixin):
    """A layer of the cache; its methods are those that transformers calls. ``make`` gives the stores for head sizes (K, V)."""

    is_croppable = True
    is_sliding = False

    def __init__(self, make: Callable[[int, int], tuple[HeadStore, HeadStore]]) -> None:
        super().__init__()
        self._make = make
        self.k: Optional[PackedSide] = None
        self.v: Optional[PackedSide] = None

    @property
    def sides(self) -> tuple[PackedSide, ...]:
        """K and V, none before the first token."""
        return () if self.k is None else (self.k, self.v)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        k, v = self._make(key_states.shape[-1], value_states.shape[-1])
        self.k, self.v = PackedSide(k), PackedSide(v)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values, [batch, heads, tokens, size] each; all there are, decoded. Raises KvfmtError for what does not fit."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[:3] != value_states.shape[:3]:
            raise KvfmtError(f"keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} are not of the same tokens", "Give [batch, heads, tokens, size].")
        # Both or none: a layer whose keys and values are of different tokens would be read as garbage.
        made = self.k.encode(key_states), self.v.encode(value_states)
        for side, rows in zip(self.sides, made):
            side.append(rows)
        return self.k.read(key_states), self.v.read(value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.k.length if self.k is not None else 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        if self.k is None or self.k.packed is None:
            raise AttributeError("batch_size: nothing is stored yet")
        return self.k.packed.shape[0]

    def offload(self) -> None:
        """The bytes are in the main memory already."""

    prefetch = offload

    def reset(self) -> None:
        for side in self.sides:
            side.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens. Raises ValueError for a positive number, as transformers' caches do."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        for side in self.sides:
            side.crop(max(side.length + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for side in self.sides:
            side.keep(lambda packed: packed.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for side in self.sides:
            side.keep(lambda packed: packed.index_select(0, torch.as_tensor(indices, device="cpu")))


class PackedCache(Cache):
    """``config``: the model's. ``kv``: types of K and V, such as "kvq3/kvq2" (the default); ``protect``: layers at each end that
    stay f16 (None: as llama.cpp chooses); ``profile``: a calibration profile of this model, or its file. A profile that chooses the
    types wants no ``kv``. ``interleaved``: whether the family's keys are interleaved in its GGUF (None: known from the config); it
    decides whether the bytes, and a profile, are llama.cpp's.

    Layers with a sliding window keep all their tokens. Raises UnknownName, and KvfmtError for a profile or a kind of model
    that does not fit.
    """

    def __init__(
        self,
        config: Any,
        kv: str | None = None,
        protect: int | None = None,
        profile: Profile | str | Path | None = None,
        interleaved: bool | None = None,
    ) -> None:
        config = config.get_text_config(decoder=True)
        other = sorted(set(getattr(config, "layer_types", None) or SERVED) - set(SERVED))
        if other:
            raise KvfmtError(f"a {config.model_type} model has layers of the kind {', '.join(other)}", "Only layers with attention over keys and values can be packed.")
        if profile is not None and not isinstance(profile, Profile):
            profile = Profile.read(Path(profile))
        if kv is None and (profile is None or profile.types_k is None):
            kv = DEFAULT_KV
        self.interleaved = config.model_type in INTERLEAVED if interleaved is None else interleaved
        count = config.num_hidden_layers

        def stores(layer: int | None, sizes: tuple[int, int] | None) -> Any:
            return layer_stores([sizes if i == layer else None for i in range(count)], kv, protect, profile, self.interleaved)

        def make(layer: int) -> Callable[[int, int], tuple[HeadStore, HeadStore]]:
            # Layers may have heads of different sizes, and the first keys and values say which.
            return lambda k_size, v_size: stores(layer, (k_size, v_size))[layer]

        stores(None, None)  # types and a profile that cannot be are refused now, not at the first token
        self.profile = profile
        super().__init__(layers=[PackedLayer(make(layer)) for layer in range(count)])

    def memory(self) -> Memory:
        """What the cache takes now, from its tensors' own sizes."""
        allocated = used = maps = values = 0
        for layer in self.layers:
            for side in layer.sides:
                if side.packed is None:
                    continue
                batch, heads, _, row = side.packed.shape
                allocated += side.packed.untyped_storage().nbytes()
                used += batch * heads * side.length * row
                values += batch * heads * side.length * side.store.size
                if side.store.profiled:
                    maps += sum(m.nbytes for m in (side.store.back, side.store.divisor, side.store.offset) if m is not None)
        return Memory(allocated, used, maps, values)


def open_gguf(path: str | Path) -> tuple[Any, Any]:
    """The model (float32) and the tokenizer of a GGUF file, through transformers and without a network.

    Raises KvfmtError with transformers' words if it does not know the architecture or the quantization.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(path)
    if not path.is_file():
        raise KvfmtError(f"no file {path}", "Check the name.")
    try:
        arguments = {"gguf_file": path.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **arguments)
        return model.eval(), AutoTokenizer.from_pretrained(path.parent, **arguments)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise KvfmtError(f"transformers cannot open {path.name}: {error}", "llama.cpp may know it: kvfmt bench quality") from None


def logits(model: Any, tokens: np.ndarray, cache: Cache, step: int = 64) -> Iterator[torch.Tensor]:
    """Runs tokens, int [n], through the model, ``step`` at a time on one cache; yields their logits, float32 [tokens, vocabulary]."""
    if step < 1:
        raise KvfmtError(f"step={step}: so many tokens cannot be run at a time", "Give at least 1.")
    ids = torch.as_tensor(np.asarray(tokens, np.int64), device=model.device)[None]
    with torch.inference_mode():
        for start in range(0, ids.shape[1], step):
            yield model(input_ids=ids[:, start : start + step], past_key_values=cache, use_cache=True).logits[0].float().cpu()


def perplexity(model: Any, tokens: np.ndarray, cache: Cache, step: int = 64, first: int = 0) -> float:
    """Perplexity of tokens[first + 1:], each predicted from all before it in the cache. Raises KvfmtError if there are none."""
    targets = torch.as_tensor(np.asarray(tokens, np.int64))
    if not 0 <= first < len(targets) - 1:
        raise KvfmtError(f"{len(targets)} tokens, none of them to predict after token {first}", "Give a longer text.")
    total, at = 0.0, 0
    for rows in logits(model, tokens, cache, step):
        low, high = max(first - at, 0), min(len(rows), len(targets) - 1 - at)
        if low < high:
            total += torch.nn.functional.cross_entropy(rows[low:high].double(), targets[at + low + 1 : at + high + 1], reduction="sum").item()
        at += len(rows)
    return float(np.exp(total / (len(targets) - 1 - first)))
