"""Folds the pair scales of kvfmt.pair_scaling into a GGUF model: the same model, whose keys are easier to store.

Rows of W_k (and its bias) are multiplied by s and rows of W_q by 1/s; with a norm on keys and queries, its weights instead.
Everything else in the file keeps its bytes and its place; metadata gains three entries:

    kvfmt.fold.version  "1"
    kvfmt.fold.hash     sha256 over the scales: a profile made for the unfolded model does not fit by mistake
    kvfmt.fold.scales   "powers of two" or "best"

Values are left alone. A map of a value head folds into W_v and W_o, but W_o takes it on its columns, which a quantized tensor
cannot do without being quantized again.
"""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, Mapping, Optional

import numpy as np

from converters.gguf_header import GgufError, Header, string_field
from converters.row_scale import CannotScale, Rounding, can_scale, scale_rows
from kvfmt.errors import KvfmtError
from kvfmt.pair_scaling import Moments, Scales, best_scales, pairs

VERSION = "1"
HASH = "kvfmt.fold.hash"
CHUNK = 16 << 20
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


def check_model(header: Header) -> None:
    """Raises CannotFold for a file that no scales can be folded into."""
    name, arch = header.path.name, header.architecture
    if HASH in header.metadata:
        raise CannotFold(f"{name} is folded already ({HASH} {header.metadata[HASH][:16]})", "Fold the model that it was made from.")
    if header.metadata.get("split.count", 0) > 1:
        raise CannotFold(f"{name} is one of {header.metadata['split.count']} files", "Join them first: llama-gguf-split --merge.")
    if arch in REFUSED:
        raise CannotFold(f"architecture {arch} {REFUSED[arch]}", "Use a profile without folding: kvfmt calibrate.")
    latent = next((t for t in header.tensors if ".attn_kv_a_mqa." in t or ".attn_k_b." in t), None)
    if latent:
        raise CannotFold(f"{name} has latent attention ({latent}): its keys have no rows of their own", "Such models cannot be folded.")
    for key, what in (
        ("attention.clamp_kqv", "clamps keys and queries"),
        ("attention.shared_kv_layers", "has layers that ask the keys of others"),
        ("rope.dimension_count_swa", "rotates another part of the head in its sliding-window layers"),
        ("attention.key_length_swa", "has heads of another size in its sliding-window layers"),
    ):
        if header.setting(key):
            raise CannotFold(f"{name} {what} ({arch}.{key} = {header.setting(key)})", "Such models cannot be folded.")


def attention_layers(header: Header) -> list[Layer]:
    """The layers that scales can be folded into. Raises CannotFold if a layer is of a kind that is not known."""
    check_model(header)
    n_layer = header.setting("block_count")
    if not n_layer:
        raise CannotFold(f"{header.path.name} does not say how many layers it has", "Give a language model.")
    layers = [found for index in range(int(n_layer)) if (found := _layer(header, index)) is not None]
    if not layers:
        raise CannotFold(f"{header.path.name} has no layer with queries and keys", "Give a language model with attention.")
    return layers


def _of_layer(value, index: int) -> int:
    """A setting that is one number, or one a layer."""
    return int(value[index] if isinstance(value, np.ndarray) else value or 0)


def _layer(header: Header, index: int) -> Optional[Layer]:
    tensors, block = header.tensors, f"blk.{index}"
    n_head = _of_layer(header.setting("attention.head_count"), index)
    n_head_kv = _of_layer(header.setting("attention.head_count_kv", n_head), index)
    separate, fused = f"{block}.attn_k.weight" in tensors, f"{block}.attn_qkv.weight" in tensors
    if not separate and not fused:
        if f"{block}.attn_q.weight" in tensors:
            raise CannotFold(f"layer {index} has queries and no keys of its own", "It asks the keys of another layer: such models cannot be folded.")
        return None
    # Linear attention calls its input attn_qkv, too; such a layer has no keys to store.
    if n_head_kv == 0 or (not separate and any(t.startswith(f"{block}.ssm_") for t in tensors)):
        return None
    head = int(header.setting("attention.key_length") or int(header.setting("embedding_length", 0)) // max(n_head, 1))
    if not n_head or not head or n_head % n_head_kv:
        raise CannotFold(f"layer {index} has {n_head} heads, {n_head_kv} KV heads of {head}", "The model's metadata is not understood.")
    norms = [f"{block}.attn_{side}_norm.weight" in tensors for side in "qk"]
    if norms[0] != norms[1]:
        raise CannotFold(f"layer {index} has a norm weight on {'queries' if norms[0] else 'keys'} alone", "A scale cannot be folded on both sides.")
    if all(norms):
        return _with_norms(header, index, head, n_head, n_head_kv)
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
        value = int(header.setting("attention.value_length") or head)
        rows = {f"{whole}.weight": n_q + n_k + n_head_kv * value}
    for name, expected in rows.items():
        if name not in tensors or tensors[name].rows != expected:
            found = f"{tensors[name].rows} rows" if name in tensors else "no rows"
            raise CannotFold(f"{name} has {found}, not the {expected} of {n_head} and {n_head_kv} heads of {head}", "This kind of attention is not known here.")
    return Layer(index, head, n_head, n_head_kv, _there(header, keys), _there(header, queries), False)


def _with_norms(header: Header, index: int, head: int, n_head: int, n_head_kv: int) -> Layer:
    """A layer whose keys and queries are normalized: the weights of the norms take the scales, and lose nothing by it."""
    sides, shared = [], False
    for side, heads in (("k", n_head_kv), ("q", n_head)):
        name = f"blk.{index}.attn_{side}_norm"
        size = int(np.prod(header.tensors[f"{name}.weight"].shape))
        if size not in (head, heads * head):
            raise CannotFold(f"{name}.weight has {size} values for {heads} heads of {head}", "This kind of norm is not known here.")
        shared = shared or size == head
        sides.append([Part(f"{name}.{kind}", 0, size, False) for kind in ("weight", "bias")])
    return Layer(index, head, n_head, n_head_kv, _there(header, sides[0]), _there(header, sides[1]), shared)


def _there(header: Header, parts: list[Part]) -> tuple[Part, ...]:
    found = tuple(p for p in parts if p.name in header.tensors)
    for part in found:
        tensor = header.tensors[part.name]
        if not can_scale(tensor.type_id):
            raise CannotScale(
                f"{part.name} is stored as {tensor.type_name}, whose blocks have no f16 scale to multiply",
                "Fold the model before it is quantized to that type, or quantize its attention to another.",
            )
    return found


def make_plan(header: Header, moments: Mapping[int, Moments], powers_of_two: bool) -> Plan:
    """Scales for every layer with moments.

    A layer without moments (one that was never run, such as a predictor of further tokens) stays as it is. Raises
    CannotFold for moments of another shape, or none at all, and what ``attention_layers`` raises.
    """
    scales: dict[int, Scales] = {}
    factors: dict[str, tuple[np.ndarray, bool]] = {}
    for layer in attention_layers(header):
        if layer.index not in moments:
            continue
        keys, queries, rotated, adjacent = moments[layer.index]
        if keys.shape != (layer.n_head_kv, layer.head) or queries.shape != keys.shape:
            raise CannotFold(
                f"layer {layer.index} has {layer.n_head_kv} KV heads of {layer.head}, the statistics are {keys.shape}",
                "They were made with another model.",
            )
        found = best_scales(keys, queries, pairs(layer.head, rotated, adjacent), layer.shared, powers_of_two)
        scales[layer.index] = found
        per_query = np.repeat(1 / found.key, layer.n_head // layer.n_head_kv, axis=0)
        for parts, factor in ((layer.keys, found.key), (layer.queries, per_query)):
            for part in parts:
                tensor = header.tensors[part.name]
                size = tensor.rows if part.by_row else int(np.prod(tensor.shape))
                whole, _ = factors.setdefault(part.name, (np.ones(size), part.by_row))
                # A norm weight that all heads share takes the one head's factors.
                whole[part.first : part.first + part.size] *= factor.reshape(-1)[: part.size]
    if not scales:
        raise CannotFold("the statistics have none of the model's layers", "They were made with another model.")
    return Plan(scales, factors, powers_of_two)


@contextmanager
def written(header: Header, plan: Plan, target: Path, update: Callable[[int, int], None] = lambda done, of: None) -> Iterator[tuple[Path, Rounding]]:
    """Writes the folded model to a hidden file beside ``target`` and gives its path, to be looked at.

    It becomes ``target`` when the block ends well, and is taken away otherwise. ``update(bytes, of)`` is called on the way.
    Raises CannotFold if target is the model itself, CannotScale, GgufError.
    """
    if target.exists() and os.path.samefile(target, header.path):
        raise CannotFold(f"{target} is the model itself", "Write to another file: the unfolded model may be wanted again.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with open(header.path, "rb") as source, open(partial, "wb") as out:
            rounding = _write(header, plan, source, out, update)
        yield partial, rounding
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _write(header: Header, plan: Plan, source: BinaryIO, out: BinaryIO, update: Callable[[int, int], None]) -> Rounding:
    entries = [
        string_field("kvfmt.fold.version", VERSION),
        string_field(HASH, plan.hash),
        string_field("kvfmt.fold.scales", "powers of two" if plan.powers_of_two else "best"),
    ]
    out.write(source.read(16) + struct.pack("<Q", header.n_kv + len(entries)))
    _copy(source, out, 24, header.kv_end)
    out.write(b"".join(entries))
    _copy(source, out, header.kv_end, header.infos_end)
    out.write(bytes(-out.tell() % header.alignment))
    rounding, at = Rounding(), header.data_start
    for name in sorted(plan.factors, key=lambda name: header.tensors[name].start):
        tensor, (factor, by_row) = header.tensors[name], plan.factors[name]
        _copy(source, out, at, tensor.start, lambda n: update(n, header.file_bytes))
        raw = header.read(tensor, source)
        if not by_row:
            raw = raw.reshape(len(factor), -1)
        made, one = scale_rows(raw, tensor.type_id, factor, name)
        rounding.add(one)
        out.write(made.tobytes())
        at = tensor.start + made.size
        update(at, header.file_bytes)
    _copy(source, out, at, header.file_bytes, lambda n: update(n, header.file_bytes))
    return rounding


def _copy(source: BinaryIO, out: BinaryIO, start: int, stop: int, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    source.seek(start)
    while start < stop:
        data = source.read(min(CHUNK, stop - start))
        if not data:
            raise GgufError(f"the model ends at byte {start}, {stop} were expected", "The file is cut off.")
        out.write(data)
        start += len(data)
        on_bytes(start)
