"""The calibration profile: a GGUF sidecar with the maps that llama.cpp applies to keys, queries and values.

llama.cpp computes no geometry: it applies the matrices that it finds here. On a layer and side with a map::

    k' = A (k - mean)    stored key       blk.{il}.kv_k_map, kv_k_mean (no mean: no centring)
    q' = A^-T q          query            blk.{il}.kv_q_map, by the query's KV head
    v' = B v             stored value     blk.{il}.kv_v_map
    o  = B^-1 o'         attention output blk.{il}.kv_o_map

A layer whose layout of K is "scaled" has vectors and no matrices; R is llama.cpp's own rotation, which it leaves out under a map::

    k' = R ((k - mean) * scale)           blk.{il}.kv_k_mean, kv_k_scale, or one of them
    q' = R (q / scale)

One whose layout of K is a type that orders channels may have, in place of matrices, the channel of each slot; M mixes every g slots::

    k' = M P ((k - mean) * scale)         blk.{il}.kv_k_order, kv_k_mix, kv_k_scale; kv_k_mean
    q' = M P (q / scale)

Values may be centred, since what attention does with them sums to one: with a map, or under R, where the layout of V is "scaled"::

    v' = R (v - mean)                     blk.{il}.kv_v_mean
    o  = R^T o' + mean

In ggml's order maps are [d, d, KV heads], means, scales and orders [d, KV heads], M [g, g]; here they are numpy's [H, d, d], row j of A
at [h, j], and [H, d]. Maps contain whatever Hadamard they want. ``blk.{il}.kv_stat.*`` are the statistics that they were made from; llama.cpp
ignores them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import numpy as np
from gguf import GGUFWriter

from kvfmt import registry
from kvfmt.build.files import asked_file
from kvfmt.errors import KvfmtError
from kvfmt.gguf_read import ARRAY, STRING, U32, U64, GgufFile, parse_gguf, read_gguf
from kvfmt.moments import LayerStatistics
from kvfmt.policy import FLAT_LAYOUT, SCALED_LAYOUT, cache_type, known_types

ARCHITECTURE = "kvfmt-profile"
VERSION = 2
#: More layers than any model has: a damaged count must not be believed.
MAX_LAYERS = 4096
#: What llama.cpp and the bindings take in place of a file's name: the profile that the model's own file carries.
AUTO = "auto"
#: Where a model's metadata has a whole profile, a GGUF file, as 64-bit little-endian words, and how many bytes of them it is. Words,
#: because what prints or parses metadata does so element by element.
ATTACHED, ATTACHED_BYTES = "kvfmt.attached.profile", "kvfmt.attached.profile_bytes"
#: How far the product of a map and its inverse may be from the unit matrix, relative to the sizes of the terms that are summed:
#: two roundings to f16 leave up to 2^-10.
INVERSE = 0.005
#: The same of the matrix that mixes groups of channels, which is orthogonal and not rounded to f16.
MIXING = 1e-5
#: The least and the largest scale of a channel, and the largest size of a mean, which is of what an f16 cache holds: far beyond what
#: calibration makes, far within what queries and keys bear in f32. llama.cpp holds a file to the same (llama-kv-profile.cpp).
LEAST_SCALE, LARGEST_SCALE, LARGEST_MEAN = 2.0**-24, 2.0**24, 65504.0

_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,3})\.kv_(k_mean|k_scale|k_order|k_mix|k_map|q_map|v_mean|v_map|o_map|stat\.[a-z_]+)")
_HEX16, _HEX64 = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{64}")
#: Where the statistics' numbers lie beside their arrays: lists with one entry a layer.
_COUNTS = {"tokens": int, "queries": int, "shift_free": bool, "rotated": int, "adjacent": bool}


class ProfileError(KvfmtError):
    """A profile that is damaged, or does not belong to the model or to this build."""


@dataclass(frozen=True)
class LayerMaps:
    """What is applied in one layer; None where nothing is. Maps float16 or float32 [KV heads, d, d], means and scale float32, order int32
    [KV heads, d], mix float32 [g, g], orthogonal."""

    k_mean: Optional[np.ndarray] = None
    k_map: Optional[np.ndarray] = None
    q_map: Optional[np.ndarray] = None
    v_map: Optional[np.ndarray] = None
    o_map: Optional[np.ndarray] = None
    k_scale: Optional[np.ndarray] = None
    k_order: Optional[np.ndarray] = None
    k_mix: Optional[np.ndarray] = None
    v_mean: Optional[np.ndarray] = None

    NAMES = ("k_mean", "k_scale", "k_order", "k_mix", "k_map", "q_map", "v_mean", "v_map", "o_map")
    #: What they are, beside the maps.
    VECTORS, ORDER, MIX = ("k_mean", "k_scale", "v_mean"), "k_order", "k_mix"

    def arrays(self) -> dict[str, np.ndarray]:
        """Those that are there, by name."""
        return {name: getattr(self, name) for name in self.NAMES if getattr(self, name) is not None}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    def layout_k(self, mapped: str) -> str:
        """What a profile calls the keys of this layer, whose matrix, if it has one, is of the layout ``mapped``."""
        if self.k_map is not None or self.k_order is not None:
            return mapped
        return SCALED_LAYOUT if self.k_mean is not None or self.k_scale is not None else ""

    def layout_v(self, mapped: str) -> str:
        """The same of its values."""
        return mapped if self.v_map is not None else "" if self.v_mean is None else SCALED_LAYOUT


@dataclass(frozen=True)
class Profile:
    """A whole profile, checked. Sequences have one entry for each of the model's layers.

    ``layout_k``, ``layout_v``: "" (nothing applied), "flat", "scaled", or the quantized type that the channels were ordered for. ``types_k``, ``types_v``: cache
    types, "" where a layer owns no KV; None: not decided here. ``maps``, ``statistics``: by layer. ``formats``: spec hash of every
    kvfmt format that a layout or type names. ``provenance``: what else is known of its making, by key after "kvfmt.profile.".
    """

    name: str
    architecture: str
    layers: int
    fingerprint: str
    layout_k: tuple[str, ...]
    layout_v: tuple[str, ...]
    maps: Mapping[int, LayerMaps]
    types_k: Optional[tuple[str, ...]] = None
    types_v: Optional[tuple[str, ...]] = None
    formats: Mapping[str, str] = field(default_factory=dict)
    statistics: Mapping[int, LayerStatistics] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def hash(self) -> str:
        """sha256 (hex) over all that llama.cpp reads: the model that it is for, layouts, types, formats, and every map's name,
        type, shape and little-endian bytes. Name, statistics and provenance are left out."""
        record = {
            "version": VERSION, "architecture": self.architecture, "layers": self.layers, "fingerprint": self.fingerprint,
            "layout_k": self.layout_k, "layout_v": self.layout_v, "types_k": self.types_k, "types_v": self.types_v,
            "formats": dict(self.formats),
        }
        digest = hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
        for layer in sorted(self.maps):
            for name, array in self.maps[layer].arrays().items():
                digest.update(f"\n{_name(layer, name)} {array.dtype.name} {array.shape}\n".encode())
                digest.update(_little(array).tobytes())
        return digest.hexdigest()

    @property
    def sidecar_bytes(self) -> int:
        """What llama.cpp holds in memory beside the cache: means, scales and maps."""
        return sum(maps.nbytes for maps in self.maps.values())

    def without_statistics(self) -> Profile:
        """What llama.cpp reads of it; the hash is the same."""
        return dataclasses.replace(self, statistics={})

    def content(self) -> bytes:
        """The file as bytes, as ``write`` writes it."""
        with tempfile.TemporaryDirectory(prefix="kvfmt-") as scratch:
            path = Path(scratch) / "profile.gguf"
            self._write(path)
            return path.read_bytes()

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all. Raises KvfmtError if the folder cannot be written to."""
        with asked_file(Path(path), "the profile") as partial:
            self._write(partial)

    def _write(self, path: Path) -> None:
        writer = GGUFWriter(path, ARCHITECTURE)
        try:
            writer.add_name(self.name)
            writer.add_uint32("kvfmt.profile.version", VERSION)
            writer.add_string("kvfmt.profile.hash", self.hash)
            writer.add_string("kvfmt.profile.model.architecture", self.architecture)
            writer.add_uint32("kvfmt.profile.model.layers", self.layers)
            writer.add_string("kvfmt.profile.model.fingerprint", self.fingerprint)
            # An empty list has no type in a GGUF: no format is no key.
            for key, texts in {
                "layout_k": self.layout_k, "layout_v": self.layout_v, "types_k": self.types_k, "types_v": self.types_v,
                "formats": [f"{name}={digest}" for name, digest in sorted(self.formats.items())],
            }.items():
                if texts:
                    writer.add_array(f"kvfmt.profile.{key}", list(texts))
            if self.statistics:
                for key, kind in _COUNTS.items():
                    found = [kind(getattr(self.statistics[i], key)) if i in self.statistics else kind(0) for i in range(self.layers)]
                    writer.add_array(f"kvfmt.profile.stat.{key}", found)
            for key, value in self.provenance.items():
                _add(writer, f"kvfmt.profile.{key}", value)
            for layer in range(self.layers):
                for name, array in self.maps[layer].arrays().items() if layer in self.maps else ():
                    writer.add_tensor(_name(layer, name), _little(array))
                for name in LayerStatistics.ARRAYS if layer in self.statistics else ():
                    array = getattr(self.statistics[layer], name)
                    writer.add_tensor(_name(layer, f"stat.{name}"), np.ascontiguousarray(array, "<f4"))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()

    @classmethod
    def read(cls, path: Path) -> Profile:
        """The profile in a file, or the one that a model's file carries. Raises KvfmtError that says what is wrong, for any file whatever."""
        file = read_gguf(Path(path))
        try:
            if file.architecture != ARCHITECTURE and (carried := attached(file)) is not None:
                return cls.of(parse_gguf("the attached profile", memoryview(carried)))
            return cls.of(file)
        except ProfileError as error:
            raise ProfileError(f"{file.name}: {error.message}", error.hint) from None

    @classmethod
    def of(cls, file: GgufFile) -> Profile:
        """The profile that an open file is. Raises ProfileError that says what is wrong."""
        return _read(file)

    def check_model(self, model: Path) -> None:
        """Raises ProfileError, which names what differs, if the profile is not for this model (a GGUF) or not for this build."""
        file = read_model(model)
        again = f"Make one for this model: kvfmt calibrate {file.name} ..."

        def refuse(what: str, hint: str = again) -> None:
            raise ProfileError(f"the profile is not for {file.name}: {what}", hint)

        if file.architecture != self.architecture:
            refuse(f"it was made for architecture '{self.architecture}', this is '{file.architecture}'")
        if layers_of(file) != self.layers:
            refuse(f"it was made for {self.layers} layers, this model has {layers_of(file)}")
        for layer, maps in sorted(self.maps.items()):
            heads, size_k, size_v = head_shape(file, layer)
            for name, array in maps.arrays().items():
                if name == LayerMaps.MIX:
                    continue  # held against the order's size
                size = size_v if name.startswith(("v_", "o_")) else size_k
                if array.shape[-1] != size:
                    refuse(f"layer {layer} has heads of {array.shape[-1]} in it, {size} in this model ({name})")
                if heads is not None and len(array) != heads:
                    refuse(f"layer {layer} has {len(array)} KV heads in it, {heads} in this model")
        found = fingerprint_of(file)
        if found != self.fingerprint:
            refuse(f"its norm weights have fingerprint {found}, those of the model that it was made for {self.fingerprint}")
        for name, digest in self.formats.items():
            if registry.get(name).spec.hash != digest:
                refuse(f"it was made for {name} with spec hash {digest[:8]}, this build's has {registry.get(name).spec.hash[:8]}", "Make it again with this build: kvfmt calibrate ...")


def attached(file: GgufFile) -> bytes | None:
    """The bytes of the profile that a model carries; None without one. Raises ProfileError if what is there is damaged."""
    if ATTACHED not in file.types and ATTACHED_BYTES not in file.types:
        return None
    words, size = file.metadata.get(ATTACHED), file.metadata.get(ATTACHED_BYTES)
    if file.types.get(ATTACHED) != (ARRAY, U64) or file.types.get(ATTACHED_BYTES) != U64 or not 8 * (len(words) - 1) < size <= 8 * len(words):
        raise ProfileError(f"{file.name} carries a damaged profile ({ATTACHED})", "Take it off: kvfmt profile detach")
    return words.astype("<u8").tobytes()[:size]


def formats_of(names: Sequence[str]) -> dict[str, str]:
    """Spec hash of every kvfmt format among names of layouts and types."""
    return {fmt.spec.name: fmt.spec.hash for fmt in registry.all_formats() if fmt.spec.name in names}


def read_model(model: Path) -> GgufFile:
    """A model's GGUF without its vocabulary. Raises KvfmtError if it is none."""
    file = read_gguf(Path(model), lambda key: not key.startswith("tokenizer."))
    if not file.architecture or layers_of(file) is None:
        raise ProfileError(f"{file.name} is not a model: it has no architecture or no block_count", "Give a model in llama.cpp's format.")
    return file


def layers_of(file: GgufFile) -> int | None:
    """The model's block_count; None if it has none that makes sense."""
    found = file.setting("block_count")
    return found if type(found) is int and 1 <= found <= MAX_LAYERS else None


def head_shape(file: GgufFile, layer: int) -> tuple[int | None, int, int]:
    """(KV heads or None, head size of K, of V) of a layer by the model's metadata, zeros for a layer that is said to have no KV heads.

    Raises ProfileError if it does not say how large they are.
    """

    def at(name: str) -> int | None:
        value = file.setting(name)
        if isinstance(value, np.ndarray):
            value = int(value[layer]) if layer < len(value) else None
        return value if type(value) is int else None

    heads, kv_heads = at("attention.head_count"), at("attention.head_count_kv")
    if kv_heads == 0:
        return 0, 0, 0
    embedding = at("embedding_length")
    usual = embedding // heads if embedding and heads else None
    windowed = file.setting("attention.sliding_window_pattern")
    # Some models have heads of another size in their sliding-window layers.
    swa = isinstance(windowed, np.ndarray) and layer < len(windowed) and bool(windowed[layer])
    sizes = []
    for side in ("key", "value"):
        size = (at(f"attention.{side}_length_swa") if swa else None) or at(f"attention.{side}_length") or usual
        if not size:
            raise ProfileError(f"{file.name} does not say how large its heads are", "It needs attention.key_length.")
        sizes.append(size)
    return heads if kv_heads is None else kv_heads, sizes[0], sizes[1]


def fingerprint_of(model: Path | GgufFile) -> str:
    """What a model is recognized by, 16 hex digits: it is the same for every quantization of it.

    FNV-1a (64 bits) over the little-endian f32 bytes of blk.N.attn_norm.weight in the order of layers, then of
    output_norm.weight (those that are there, as f32), then the UTF-8 bytes of "kvfmt.fold.hash" if the metadata has it.
    Layers at the end that only predict further tokens are left out: llama.cpp does not always load them.
    Raises KvfmtError if the file is no model.
    """
    file = model if isinstance(model, GgufFile) else read_model(model)
    ahead = file.setting("nextn_predict_layers", 0)
    layers = (layers_of(file) or 0) - (ahead if type(ahead) is int else 0)
    parts = []
    for name in [f"blk.{layer}.attn_norm.weight" for layer in range(layers)] + ["output_norm.weight"]:
        tensor = file.tensors.get(name)
        if tensor is not None and tensor.dtype == np.float32:
            parts.append(tensor.floats().tobytes())
    folded = file.metadata.get("kvfmt.fold.hash")
    if isinstance(folded, str):
        parts.append(folded.encode())
    value = 0xCBF29CE484222325
    for byte in b"".join(parts):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def _little(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _name(layer: int, name: str) -> str:
    return f"blk.{layer}.kv_{name}"


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint64(key, value)
    elif isinstance(value, float):
        writer.add_float64(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, list(value))


def _check(profile: Profile) -> None:
    """Raises ProfileError unless everything fits together."""
    n = profile.layers
    if not 1 <= n <= MAX_LAYERS:
        raise ProfileError(f"the profile is for {n} layers", f"1 to {MAX_LAYERS} are possible.")
    if not _HEX16.fullmatch(profile.fingerprint):
        raise ProfileError(f"the fingerprint {profile.fingerprint!r} is not 16 hex digits", "It is damaged, or of another version.")
    for key in ("layout_k", "layout_v", "types_k", "types_v"):
        found = getattr(profile, key)
        if found is None and key.startswith("types"):
            continue
        if len(found) != n:
            raise ProfileError(f"{key} has {len(found)} entries for {n} layers", "It has one for each layer.")
        quantized = [name for name in known_types() if cache_type(name).is_quantized]
        layouts = ("", FLAT_LAYOUT, SCALED_LAYOUT, *quantized)
        known = ("", *known_types()) if key.startswith("types") else layouts
        for layer, name in enumerate(found):
            if name not in known:
                raise ProfileError(f"{key} of layer {layer} is '{name}', which this build does not know", "Known: " + ", ".join(known[1:]))
    if (profile.types_k is None) != (profile.types_v is None):
        raise ProfileError("the profile has types for one of K and V", "It has both or neither.")
    named = {*profile.layout_k, *profile.layout_v, *(profile.types_k or ()), *(profile.types_v or ())}
    expected = set(formats_of(tuple(named)))
    if set(profile.formats) != expected:
        raise ProfileError(f"the profile has spec hashes of {sorted(profile.formats)}, and names the formats {sorted(expected)}", "It has one for each.")
    for name, digest in profile.formats.items():
        if not _HEX64.fullmatch(digest):
            raise ProfileError(f"the spec hash of {name} is {digest[:80]!r}, not 64 hex digits", "It is damaged.")
    for what, layers in (("maps", profile.maps), ("statistics", profile.statistics)):
        for layer in layers:
            if not 0 <= layer < n:
                raise ProfileError(f"{what} for layer {layer} of {n}", "It is damaged.")
    for layer in range(n):
        _check_maps(layer, profile.maps.get(layer, LayerMaps()), profile.layout_k[layer], profile.layout_v[layer])
    for layer, statistics in profile.statistics.items():
        try:
            statistics.check(f"layer {layer}")
        except KvfmtError as error:
            raise ProfileError(error.message, error.hint) from None


def _check_maps(layer: int, maps: LayerMaps, layout_k: str, layout_v: str) -> None:
    there = maps.arrays()
    for what, layout, vectors, maps_of, orders in (
        ("K", layout_k, {"k_mean", "k_scale"}, {"k_map", "q_map"}, {"k_order", "k_mix", "k_scale"}),
        ("V", layout_v, {"v_mean"}, {"v_map", "o_map"}, set()),
    ):
        found = set(there) & (vectors | maps_of | orders)
        optional = {name for name in vectors if name.endswith("mean")}
        if not layout:
            fits = not found
        elif layout == SCALED_LAYOUT:
            fits = bool(found) and found <= vectors
        else:
            fits = found - optional in (maps_of, orders or maps_of)
        if not fits:
            raise ProfileError(
                f"layer {layer} has layout '{layout}' for {what}, and the tensors {sorted(found)}",
                f"With 'scaled' it has some of {sorted(vectors)}, with another layout {sorted(maps_of)}"
                f"{f' or, where it orders channels, {sorted(orders)}' if orders else ''}, without one none.",
            )
    mix = there.pop(LayerMaps.MIX, None)
    heads = {len(array) for array in there.values()}
    for name, array in there.items():
        is_vector = name in LayerMaps.VECTORS
        types = ("float32",) if is_vector else ("int32",) if name == LayerMaps.ORDER else ("float32", "float16")
        dims = 2 if is_vector or name == LayerMaps.ORDER else 3
        if array.dtype.name not in types or array.ndim != dims or array.shape[-1] != array.shape[1] or len(heads) != 1 or array.size == 0:
            raise ProfileError(
                f"layer {layer}: {name} is {array.dtype.name} {array.shape}",
                f"{' or '.join(types)} with {dims} dimensions, the same number of heads as the others and square maps were expected.",
            )
        if not np.isfinite(array).all():
            raise ProfileError(f"layer {layer}: {name} has values that are not finite", "It is damaged.")
    for names in (("k_mean", "k_scale", "k_order", "k_map"), ("v_mean", "v_map")):
        of_side = [(name, there[name]) for name in names if name in there]
        for (one, a), (other, b) in zip(of_side, of_side[1:]):
            if a.shape != b.shape[:2]:
                raise ProfileError(f"layer {layer}: {one} is {a.shape}, {other} {b.shape}", "Both are of the same heads.")
    if mix is not None:
        _check_order(layer, there[LayerMaps.ORDER], mix)
    for name, least, largest in (("k_scale", LEAST_SCALE, LARGEST_SCALE), *((name, -LARGEST_MEAN, LARGEST_MEAN) for name in ("k_mean", "v_mean"))):
        if name in there and (out := there[name][(there[name] < least) | (there[name] > largest)]).size:
            raise ProfileError(f"layer {layer}: {name} has a value of {out[0]:.3g}", f"From {least:.3g} to {largest:.3g} is possible: it is damaged.")
    for forward, backward, transposed in (("k_map", "q_map", True), ("v_map", "o_map", False)):
        if forward not in there:
            continue
        a, b = (there[name].astype(np.float64) for name in (forward, backward))
        if a.shape != b.shape:
            raise ProfileError(f"layer {layer}: {forward} is {a.shape}, {backward} {b.shape}", "One undoes the other.")
        other = b.transpose(0, 2, 1) if transposed else b
        with np.errstate(all="ignore"):
            # Against what its terms could cancel to: scales of channels may span many powers of ten.
            off = (np.abs(a @ other - np.eye(a.shape[1])) / np.maximum(np.abs(a) @ np.abs(other), 1)).max()
        if not off <= INVERSE:
            raise ProfileError(f"layer {layer}: {backward} does not undo {forward}: their product is {off:.3g} off", f"At most {INVERSE}: it is damaged.")


def _check_order(layer: int, order: np.ndarray, mix: np.ndarray) -> None:
    size = order.shape[1]
    for head, channels in enumerate(order):
        if not np.array_equal(np.sort(channels), np.arange(size)):
            raise ProfileError(f"layer {layer}: k_order of head {head} does not name each of {size} channels once", "It is damaged.")
    if mix.dtype != np.float32 or mix.ndim != 2 or mix.shape[0] != mix.shape[1] or not mix.size or size % len(mix):
        raise ProfileError(f"layer {layer}: k_mix is {mix.dtype.name} {mix.shape}", f"float32, square, and a whole part of {size} channels was expected.")
    with np.errstate(all="ignore"):
        off = np.abs(mix.astype(np.float64) @ mix.T - np.eye(len(mix))).max()
    if not off <= MIXING:
        raise ProfileError(f"layer {layer}: k_mix is not orthogonal: its square is {off:.3g} off", f"At most {MIXING}: it is damaged.")


def _read(file: GgufFile) -> Profile:
    if file.architecture != ARCHITECTURE:
        raise ProfileError(f"it has architecture '{file.architecture}', not '{ARCHITECTURE}'", "It is not a profile. Make one: kvfmt calibrate")

    def get(key: str, kind: int | tuple[int, int], need: bool = True) -> Any:
        full = f"kvfmt.profile.{key}" if key != "general.name" else key
        if full not in file.metadata:
            if need:
                raise ProfileError(f"it has no {full}", "It is not a whole profile. Make it again: kvfmt calibrate")
            return None
        if file.types[full] != kind:
            raise ProfileError(f"{full} has GGUF type {file.types[full]}, not {kind}", "It is damaged, or of another version.")
        return file.metadata[full]

    version = get("version", U32)
    if version != VERSION:
        older = version < VERSION
        raise ProfileError(
            f"the profile is of version {version}, which {'an older' if older else 'a newer'} kvfmt wrote",
            f"This build reads version {VERSION}. " + ("Make it again: kvfmt calibrate" if older else "Update kvfmt."),
        )
    texts = (ARRAY, STRING)
    layers = get("model.layers", U32)
    if not 1 <= layers <= MAX_LAYERS:
        raise ProfileError(f"it is for {layers} layers", f"1 to {MAX_LAYERS} are possible: it is damaged.")
    formats = {}
    for entry in get("formats", texts, need=False) or ():
        name, _, digest = entry.partition("=")
        if name in formats:
            raise ProfileError(f"it has two spec hashes of {name[:80]!r}", "It is damaged.")
        formats[name] = digest
    maps: dict[int, dict[str, np.ndarray]] = {}
    measured: dict[int, dict[str, np.ndarray]] = {}
    for name, tensor in file.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ProfileError(f"it has a tensor {name[:80]!r}", "No profile of this version has it.")
        what = match[2]
        target, what = (measured, what[5:]) if what.startswith("stat.") else (maps, what)
        values = tensor.integers() if what == LayerMaps.ORDER else tensor.floats()
        target.setdefault(int(match[1]), {})[what] = values.astype(values.dtype.newbyteorder("="))
    counts = {}
    if measured:
        for key, kind in _COUNTS.items():
            found = file.metadata.get(f"kvfmt.profile.stat.{key}")
            if not isinstance(found, np.ndarray) or len(found) != layers or found.dtype.kind not in ("b" if kind is bool else "iu"):
                raise ProfileError(f"kvfmt.profile.stat.{key} is not one number for each layer", "It is damaged.")
            counts[key] = [kind(x) for x in found]
    types = [get(key, texts, need=False) for key in ("types_k", "types_v")]
    known = {
        "version", "hash", "model.architecture", "model.layers", "model.fingerprint", "layout_k", "layout_v", "types_k", "types_v", "formats",
        *(f"stat.{key}" for key in _COUNTS),
    }
    prefix = "kvfmt.profile."
    provenance = {
        key[len(prefix) :]: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items() if key.startswith(prefix) and key[len(prefix) :] not in known
    }
    profile = Profile(
        name=get("general.name", STRING, need=False) or "",
        architecture=get("model.architecture", STRING), layers=layers, fingerprint=get("model.fingerprint", STRING),
        layout_k=tuple(get("layout_k", texts)), layout_v=tuple(get("layout_v", texts)),
        types_k=None if types[0] is None else tuple(types[0]), types_v=None if types[1] is None else tuple(types[1]),
        formats=formats, provenance=provenance,
        maps={layer: LayerMaps(**arrays) for layer, arrays in maps.items()},
        statistics={layer: _statistics(layer, layers, arrays, counts) for layer, arrays in measured.items()},
    )
    stated = get("hash", STRING)
    if stated != profile.hash:
        raise ProfileError(f"its content has hash {profile.hash[:16]}, it says {stated[:16]}", "It is damaged. Make it again: kvfmt calibrate")
    return profile


def _statistics(layer: int, layers: int, arrays: dict[str, np.ndarray], counts: dict[str, list]) -> LayerStatistics:
    if layer >= layers:
        raise ProfileError(f"statistics for layer {layer} of {layers}", "It is damaged.")
    if set(arrays) != set(LayerStatistics.ARRAYS):
        raise ProfileError(f"layer {layer} has the statistics {sorted(arrays)}", f"It has all of {sorted(LayerStatistics.ARRAYS)} or none.")
    return LayerStatistics(**arrays, **{key: found[layer] for key, found in counts.items()})
