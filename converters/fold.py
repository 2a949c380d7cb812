"""Folds the pair scales of kvfmt.pair_scaling into a GGUF model: the same model, whose keys are easier to store.

Rows of W_k (and its bias) are multiplied by s and rows of W_q by 1/s; with a norm on keys and queries, its weights instead.
Everything else in the file keeps its bytes and its place; metadata gains three entries:

    kvfmt.fold.version  "1"
    kvfmt.fold.hash     sha256 over the scales: a profile made for the unfolded model does not fit by mistake
    kvfmt.fold.scales   "powers of two" or "best"

Values are left alone. A map of a value head folds into W_v and W_o, but W_o takes it on its columns, which a quantized tensor
cannot do without being quantized again. (Channel scales would win 0.3 to 0.6 dB on the models of models.toml.)

A LoRA adapter of the unfolded model does not fit: its share of W_k and W_q is not scaled.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, Mapping, Optional

import numpy as np

from converters.gguf_copy import CHUNK, string_entry, write_header
from converters.row_scale import CannotScale, Rounding, can_scale, scale_rows
from converters.same_model import Difference, difference
from kvfmt.build.files import asked_file, check_place
from kvfmt.build.fetch import SPARE_BYTES, require_space
from kvfmt.errors import KvfmtError
from kvfmt.geometry import pair_of
from kvfmt.gguf_read import GgufFile
from kvfmt.moments import LayerStatistics
from kvfmt.pair_scaling import Scales, best_scales
from kvfmt.profile import layers_of

VERSION = "1"
HASH = "kvfmt.fold.hash"
#: Tokens that the folded model must predict as the unfolded one does. It may be this far from it on average, in nats, and this
#: many times as far as the unfolded one is from itself: what a wrong pair of channels does is far more.
CHECKED, NEAR, TIMES = 128, 1e-3, 4
#: Architectures whose graph does something to keys or queries that pair scales do not pass through.
REFUSED = {
    "llama4": "normalizes keys after RoPE",
    "gemma3n": "lets late layers ask the keys of earlier ones",
    "gemma4": "lets late layers ask the keys of earlier ones",
    "gemma4-assistant": "asks the keys of another model",
}


class CannotFold(KvfmtError):
    """A model that pair scales cannot be folded into, or not with these statistics."""


@dataclass(frozen=True)
class Part:
    """Where a factor goes: ``size`` rows of a tensor from ``first`` on, or single numbers of a vector or norm weight."""

    name: str
    first: int
    size: int
    by_row: bool


@dataclass(frozen=True)
class Layer:
    """An attention layer with keys of its own. ``shared``: one norm weight serves all heads."""

    index: int
    head: int
    n_head: int
    n_head_kv: int
    keys: tuple[Part, ...]
    queries: tuple[Part, ...]
    shared: bool


@dataclass(frozen=True)
class Plan:
    """What is folded: ``scales`` by layer, and ``factors`` by tensor, float64 [rows] or [numbers], with whether by row."""

    scales: Mapping[int, Scales]
    factors: Mapping[str, tuple[np.ndarray, bool]]
    powers_of_two: bool

    @property
    def hash(self) -> str:
        """sha256 hex over the scales of all layers."""
        digest = hashlib.sha256(b"kvfmt fold " + VERSION.encode())
        for index in sorted(self.scales):
            key = np.ascontiguousarray(self.scales[index].key, "<f8")
            digest.update(struct.pack("<III", index, *key.shape) + key.tobytes())
        return digest.hexdigest()


def check_model(file: GgufFile) -> None:
    """Raises CannotFold for a file that no scales can be folded into."""
    name, arch = file.name, file.architecture
    if HASH in file.metadata:
        raise CannotFold(f"{name} is folded already ({HASH} {str(file.metadata[HASH])[:16]})", "Fold the model that it was made from.")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CannotFold(f"{name} is one of {file.metadata['split.count']} files", "Join them first: llama-gguf-split --merge.")
    if arch in REFUSED:
        raise CannotFold(f"architecture {arch} {REFUSED[arch]}", "Use a profile without folding: kvfmt calibrate.")
    latent = next((t for t in file.tensors if ".attn_kv_a_mqa." in t or ".attn_k_b." in t), None)
    if latent:
        raise CannotFold(f"{name} has latent attention ({latent}): its keys have no rows of their own", "Such models cannot be folded.")
    for key, what in (
        ("attention.clamp_kqv", "clamps keys and queries"),
        ("attention.shared_kv_layers", "has layers that ask the keys of others"),
        ("rope.dimension_count_swa", "rotates another part of the head in its sliding-window layers"),
        ("attention.key_length_swa", "has heads of another size in its sliding-window layers"),
    ):
        if file.setting(key):
            raise CannotFold(f"{name} {what} ({arch}.{key} = {file.setting(key)})", "Such models cannot be folded.")


def attention_layers(file: GgufFile) -> list[Layer]:
    """The layers that scales can be folded into. Raises CannotFold if a layer is of a kind that is not known."""
    check_model(file)
    layers = [found for index in range(layers_of(file) or 0) if (found := _layer(file, index)) is not None]
    if not layers:
        raise CannotFold(f"{file.name} has no layer with queries and keys", "Give a language model with attention.")
    return layers


def _number(file: GgufFile, name: str, layer: int, default: int = 0) -> int:
    """A setting that is one number, or one for each layer. Raises CannotFold if it is something else."""
    value = file.setting(name, default)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and layer < len(value):
        value = int(value[layer])
    if type(value) is not int or value < 0:
        raise CannotFold(f"{file.architecture}.{name} is {value!r}", "A number, or one for each layer, was expected: the file is damaged.")
    return value


def _layer(file: GgufFile, index: int) -> Optional[Layer]:
    tensors, block = file.tensors, f"blk.{index}"
    n_head = _number(file, "attention.head_count", index)
    n_head_kv = _number(file, "attention.head_count_kv", index, n_head)
    separate, fused = f"{block}.attn_k.weight" in tensors, f"{block}.attn_qkv.weight" in tensors
    if not separate and not fused:
        if f"{block}.attn_q.weight" in tensors:
            raise CannotFold(f"layer {index} has queries and no keys of its own", "It asks the keys of another layer: such models cannot be folded.")
        return None
    # Linear attention calls its input attn_qkv, too; such a layer has no keys to store.
    if n_head_kv == 0 or (not separate and any(t.startswith(f"{block}.ssm_") for t in tensors)):
        return None
    head = _number(file, "attention.key_length", index) or _number(file, "embedding_length", index) // max(n_head, 1)
    if not n_head or not head or n_head % n_head_kv:
        raise CannotFold(f"layer {index} has {n_head} heads, {n_head_kv} KV heads of {head}", "The model's metadata is not understood.")
    norms = [f"{block}.attn_{side}_norm.weight" in tensors for side in "qk"]
    if norms[0] != norms[1]:
        raise CannotFold(f"layer {index} has a norm weight on {'queries' if norms[0] else 'keys'} alone", "A scale cannot be folded on both sides.")
    if all(norms):
        return _with_norms(file, index, head, n_head, n_head_kv)
    n_q, n_k = n_head * head, n_head_kv * head
    if separate:
        keys = [Part(f"{block}.attn_k.weight", 0, n_k, True), Part(f"{block}.attn_k.bias", 0, n_k, False)]
        queries = [Part(f"{block}.attn_q.weight", 0, n_q, True), Part(f"{block}.attn_q.bias", 0, n_q, False)]
        rows = {f"{block}.attn_k.weight": n_k, f"{block}.attn_q.weight": n_q}
    else:
        whole = f"{block}.attn_qkv"
        keys = [Part(f"{whole}.weight", n_q, n_k, True), Part(f"{whole}.bias", n_q, n_k, False)]
        queries = [Part(f"{whole}.weight", 0, n_q, True), Part(f"{whole}.bias", 0, n_q, False)]
        if f"{whole}.bias" not in tensors:
            # Fused weights may come with biases that are not.
            keys.append(Part(f"{block}.attn_k.bias", 0, n_k, False))
            queries.append(Part(f"{block}.attn_q.bias", 0, n_q, False))
        value = _number(file, "attention.value_length", index) or head
        rows = {f"{whole}.weight": n_q + n_k + n_head_kv * value}
    for name, expected in rows.items():
        if name not in tensors or tensors[name].shape[0] != expected:
            found = f"{tensors[name].shape[0]} rows" if name in tensors else "no rows"
            raise CannotFold(f"{name} has {found}, not the {expected} of {n_head} and {n_head_kv} heads of {head}", "This kind of attention is not known here.")
    return Layer(index, head, n_head, n_head_kv, _there(file, keys), _there(file, queries), False)


def _with_norms(file: GgufFile, index: int, head: int, n_head: int, n_head_kv: int) -> Layer:
    """A layer whose keys and queries are normalized: the weights of the norms take the scales, and lose nothing by it."""
    sides, shared = [], False
    for side, heads in (("k", n_head_kv), ("q", n_head)):
        name = f"blk.{index}.attn_{side}_norm"
        size = math.prod(file.tensors[f"{name}.weight"].shape)
        if size not in (head, heads * head):
            raise CannotFold(f"{name}.weight has {size} values for {heads} heads of {head}", "This kind of norm is not known here.")
        shared = shared or size == head
        sides.append([Part(f"{name}.{kind}", 0, size, False) for kind in ("weight", "bias")])
    return Layer(index, head, n_head, n_head_kv, _there(file, sides[0]), _there(file, sides[1]), shared)


def _there(file: GgufFile, parts: list[Part]) -> tuple[Part, ...]:
    found = tuple(p for p in parts if p.name in file.tensors)
    for part in found:
        tensor = file.tensors[part.name]
        if not can_scale(tensor.type_id):
            raise CannotScale(
                f"{part.name} is stored as {tensor.type_name}, whose blocks have no f16 scale to multiply",
                "Fold the model before it is quantized to that type, or quantize its attention to another.",
            )
    return found


def make_plan(file: GgufFile, statistics: Mapping[int, LayerStatistics], powers_of_two: bool) -> Plan:
    """Scales for every layer with statistics.

    A layer without (one that was never run, such as a predictor of further tokens) stays as it is. Raises CannotFold for
    statistics of another shape, or none at all, and what ``attention_layers`` raises.
    """
    scales: dict[int, Scales] = {}
    factors: dict[str, tuple[np.ndarray, bool]] = {}
    for layer in attention_layers(file):
        if layer.index not in statistics:
            continue
        seen = statistics[layer.index]
        if (seen.heads, seen.k_size) != (layer.n_head_kv, layer.head):
            raise CannotFold(
                f"layer {layer.index} has {layer.n_head_kv} KV heads of {layer.head}, the statistics {seen.heads} of {seen.k_size}",
                "They were made with another model.",
            )
        # A cache that does not centre spends its levels on the mean key, too: it counts.
        keys, queries = (np.maximum(np.einsum("hii->hi", moment), 0) for moment in (seen.k_moment(), seen.q_moment))
        found = best_scales(keys, queries, pair_of(layer.head, seen.rotated, seen.adjacent), layer.shared, powers_of_two)
        scales[layer.index] = found
        per_query = np.repeat(1 / found.key, layer.n_head // layer.n_head_kv, axis=0)
        for parts, factor in ((layer.keys, found.key), (layer.queries, per_query)):
            for part in parts:
                tensor = file.tensors[part.name]
                size = tensor.shape[0] if part.by_row else math.prod(tensor.shape)
                whole, _ = factors.setdefault(part.name, (np.ones(size), part.by_row))
                # A norm weight that all heads share takes the one head's factors.
                whole[part.first : part.first + part.size] *= factor.reshape(-1)[: part.size]
    if not scales:
        raise CannotFold("the statistics have none of the model's layers", "They were made with another model.")
    return Plan(scales, factors, powers_of_two)


@contextmanager
def written(
    file: GgufFile, plan: Plan, source: Path, target: Path, update: Callable[[int, int], None] = lambda done, of: None
) -> Iterator[tuple[Path, Rounding]]:
    """Writes ``file``, which was read from ``source``, with the plan folded in, to a hidden file beside ``target``.

    Gives the hidden file's path, to be looked at. It becomes ``target`` when the block ends well, and is taken away otherwise.
    ``update(bytes, of)`` is called on the way. Raises CannotFold if target is the model itself, CannotScale, GgufError, and
    KvfmtError if it cannot be written.
    """
    if target.exists() and os.path.samefile(target, source):
        raise CannotFold(f"{target} is the model itself", "Write to another file: the unfolded model may be wanted again.")
    check_place(target, "the folded model")
    require_space(target.parent, len(file.data) + SPARE_BYTES, "The folded model")
    with asked_file(target, "the folded model") as partial:
        with open(partial, "wb") as out:
            rounding = _write(file, plan, out, update)
        yield partial, rounding


def _write(file: GgufFile, plan: Plan, out: BinaryIO, update: Callable[[int, int], None]) -> Rounding:
    entries = [
        ("kvfmt.fold.version", VERSION),
        (HASH, plan.hash),
        ("kvfmt.fold.scales", "powers of two" if plan.powers_of_two else "best"),
    ]

    def copy(start: int, stop: int) -> None:
        for at in range(start, stop, CHUNK):
            end = min(at + CHUNK, stop)
            out.write(file.data[at:end])
            update(end, len(file.data))

    write_header(file, out, [string_entry(*entry) for entry in entries])
    rounding, at = Rounding(), file.data_start
    for name in sorted(plan.factors, key=lambda name: file.tensors[name].offset):
        tensor, (factor, by_row) = file.tensors[name], plan.factors[name]
        copy(at, tensor.offset)
        raw = tensor.rows() if by_row else tensor.rows().reshape(len(factor), -1)
        made, one = scale_rows(raw, tensor.type_id, factor, name)
        rounding.add(one)
        out.write(made.data)
        at = tensor.offset + made.size
    copy(at, len(file.data))
    return rounding


@dataclass(frozen=True)
class Folded:
    """What was written: the plan, what was rounded, and how far the model's predictions are from the unfolded one's."""

    plan: Plan
    rounding: Rounding
    difference: Difference


def fold_model(
    source: Path,
    file: GgufFile,
    statistics: Mapping[int, LayerStatistics],
    target: Path,
    powers_of_two: bool,
    text: str,
    threads: int,
    update: Callable[[int, int], None] = lambda done, of: None,
) -> Folded:
    """Folds scales for these statistics into a model, ``file`` read from ``source``, and writes it if it is still the same model.

    Both files predict the first tokens of ``text``. Raises CannotFold if they differ, and as ``make_plan`` and ``written``.
    """
    plan = make_plan(file, statistics, powers_of_two)
    with written(file, plan, source, target, update) as (partial, rounding):
        found = difference(source, partial, text, CHECKED, threads)
        if not found.kld <= NEAR + TIMES * found.own:
            raise CannotFold(
                f"the folded {file.name} is not the same model: its predictions are {found.kld:.3g} nats away on average,"
                f" the unfolded one's {found.own:.3g} from each other",
                f"Architecture {file.architecture} does something to keys or queries that is not known here. Nothing was written.",
            )
    return Folded(plan, rounding, found)


def summary(found: Folded) -> list[str]:
    """What a reader wants to know of it, a line each."""
    gains = [scales.gain for scales in found.plan.scales.values()]
    spread = np.log2(np.concatenate([scales.key.reshape(-1) for scales in found.plan.scales.values()]))
    rounding, away = found.rounding, found.difference
    return [
        f"{len(gains)} layers, scales of 2^{spread.min():.1f} to 2^{spread.max():.1f}; expected key noise {np.mean(gains):.1f} dB lower"
        f" on average, {np.min(gains):.1f} to {np.max(gains):.1f} by layer",
        f"{rounding.touched} numbers scaled, {rounding.rounded} rounded" + (f", by {rounding.worst:.1e} at most" if rounding.rounded else ""),
        f"with an f16 cache, over {away.tokens} tokens: "
        + ("every logit the same to the bit" if away.none else f"KLD {away.kld:.1e} from the unfolded model")
        + f"; it is {away.own:.1e} from itself with batches of another size",
        f"hash {found.plan.hash}",
    ]
