"""A packed cache as a GGUF file: keys and values of every layer in a cache type each, for others to read.

Tensors are blk.N.k and blk.N.v, in numpy's order [batch, heads, tokens, values of a head as stored]; a layer may be missing.
Metadata says the rest, lists with one entry for each layer:

    general.architecture      "kvfmt-cache"
    kvfmt.cache.version       1
    kvfmt.cache.layers        u32
    kvfmt.cache.formats       "name=spec hash" of every kvfmt type in it
    kvfmt.cache.types_k, _v   names of the types; "" where a layer is missing
    kvfmt.cache.head_k, _v    values of a head before padding, u32
    kvfmt.cache.domain_k, _v  what was done before storing: "plain", "hadamard N" (of runs of N values), "map" (of the profile: its
                              matrices, or its channels in order and mixed), or "scaled" (its mean and scale, of values its mean),
                              alone or before ", hadamard N"
    kvfmt.cache.interleaved   whether keys came in transformers' order and are stored in llama.cpp's
    kvfmt.cache.profile       the profile's hash, where a domain is "map" or "scaled"; the profile itself is attached as in a model
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Optional, Sequence

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from kvfmt import registry
from kvfmt.build.files import asked_file
from kvfmt.errors import KvfmtError
from kvfmt.gguf_read import ARRAY, STRING, U32, GgufFile, parse_gguf, read_gguf
from kvfmt.head_store import HeadStore
from kvfmt.policy import cache_type, known_types
from kvfmt.profile import ATTACHED, ATTACHED_BYTES, MAX_LAYERS, Profile, ProfileError, attached, formats_of
from kvfmt.side_maps import SideMaps

ARCHITECTURE = "kvfmt-cache"
VERSION = 1
BOOL = 7


class CacheFileError(KvfmtError):
    """A packed cache file that is damaged, or not of this build."""


@dataclass(frozen=True)
class Layer:
    """How a layer is stored, and ``shape``: (batch, heads, tokens) of its K and V."""

    k: HeadStore
    v: HeadStore
    shape: tuple[int, int, int]

    @property
    def sides(self) -> tuple[tuple[str, HeadStore], ...]:
        return ("k", self.k), ("v", self.v)


@contextmanager
def _writing(path: Path) -> Iterator[GGUFWriter]:
    with asked_file(Path(path), "the cache") as partial:
        writer = GGUFWriter(partial, ARCHITECTURE)
        try:
            yield writer
        finally:
            writer.close()


def write_cache(
    path: Path, layers: Sequence[Optional[Layer]], rows: Iterable[np.ndarray], profile: Profile | None = None, name: str = ""
) -> None:
    """Writes the file whole or not at all. ``rows``: K, then V of each layer that is there, uint8 [batch, heads, tokens, row bytes]; they
    are taken one by one, so that no more than one need be in memory.

    Raises KvfmtError if rows are missing, too many or of another shape, if a side that is under a profile has none, and if the folder cannot
    be written to.
    """
    if not 1 <= len(layers) <= MAX_LAYERS or not any(layers):
        raise KvfmtError(f"a cache of {len(layers)} layers, {sum(map(bool, layers))} of them there", f"1 to {MAX_LAYERS} are possible, and one must be there.")
    there = [(i, layer) for i, layer in enumerate(layers) if layer is not None]
    profiled = any(store.profiled for _, layer in there for _, store in layer.sides)
    if profiled and profile is None:
        raise KvfmtError("a mapped cache cannot be read without its profile", "Give the profile that it was written under.")
    with _writing(path) as writer:
        if name:
            writer.add_name(name)
        writer.add_uint32("kvfmt.cache.version", VERSION)
        writer.add_uint32("kvfmt.cache.layers", len(layers))
        named = formats_of([store.kind.name for _, layer in there for _, store in layer.sides])
        if named:
            writer.add_array("kvfmt.cache.formats", [f"{kind}={digest}" for kind, digest in sorted(named.items())])
        for side in ("k", "v"):
            stores = [getattr(layer, side) if layer else None for layer in layers]
            writer.add_array(f"kvfmt.cache.types_{side}", [s.kind.name if s else "" for s in stores])
            writer.add_array(f"kvfmt.cache.domain_{side}", [s.domain if s else "" for s in stores])
            # gguf-py takes a list of small numbers for i32; the type is said instead.
            writer.add_key_value(f"kvfmt.cache.head_{side}", [s.size if s else 0 for s in stores], GGUFValueType.ARRAY, GGUFValueType.UINT32)
        writer.add_bool("kvfmt.cache.interleaved", any(layer.k.interleave for _, layer in there))
        if profiled:
            writer.add_string("kvfmt.cache.profile", profile.hash)
            data = profile.without_statistics().content()
            writer.add_key_value(ATTACHED, np.frombuffer(data + bytes(-len(data) % 8), "<u8").tolist(), GGUFValueType.ARRAY, GGUFValueType.UINT64)
            writer.add_uint64(ATTACHED_BYTES, len(data))
        expected = []
        for i, layer in there:
            for side, store in layer.sides:
                shape = (*layer.shape, store.row_bytes)
                kind = GGMLQuantizationType(store.kind.type_id)
                # Rows of bytes for blocks, values for plain floats: what gguf-py's own shapes are.
                values = shape if store.kind.is_quantized else (*layer.shape, store.padded)
                writer.add_tensor_info(f"blk.{i}.{side}", values, np.dtype(np.uint8 if store.kind.is_quantized else np.float32), math.prod(shape), kind)
                expected.append((f"layer {i}, {side.upper()}", shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        found = iter(rows)
        for what, shape in expected:
            data = next(found, None)
            if data is None:
                raise KvfmtError(f"{what} has no rows", "Give K and V of each layer that is there.")
            if data.dtype != np.uint8 or data.shape != shape:
                raise KvfmtError(f"{what} has rows {data.dtype} {data.shape}, uint8 {shape} were announced", "All layers are of the batch and the tokens that were announced.")
            writer.write_tensor_data(np.ascontiguousarray(data))
        if next(found, None) is not None:
            raise KvfmtError("there are more rows than layers", "Give K and V of each layer that is there.")


@dataclass(frozen=True)
class PackedFile:
    """An open packed cache, checked. ``layers``: by number, None where one is missing."""

    name: str
    layers: tuple[Optional[Layer], ...]
    profile: Optional[Profile]
    interleaved: bool
    file: GgufFile

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(math.prod(layer.shape) * store.row_bytes for layer in self.layers if layer for _, store in layer.sides)

    @property
    def bits_per_value(self) -> float:
        """Of all blocks, padding counted."""
        return 8 * self.nbytes / sum(math.prod(layer.shape) * store.size for layer in self.layers if layer for _, store in layer.sides)

    def rows(self, layer: int, side: str) -> np.ndarray:
        """The bytes of one side ("k" or "v"), uint8 [batch, heads, tokens, row bytes], read-only and mapped, not copied."""
        store, shape = self._side(layer, side)
        tensor = self.file.tensors[f"blk.{layer}.{side}"]
        count = math.prod(shape) * store.row_bytes
        return np.frombuffer(tensor.data, np.uint8, count, tensor.offset).reshape(*shape, store.row_bytes)

    def decode(self, layer: int, side: str) -> np.ndarray:
        """Keys or values of one layer, float32 [batch, heads, tokens, head size]."""
        return self._side(layer, side)[0].decode(self.rows(layer, side))

    def _side(self, layer: int, side: str) -> tuple[HeadStore, tuple[int, int, int]]:
        found = self.layers[layer] if 0 <= layer < len(self.layers) else None
        if found is None or side not in ("k", "v"):
            raise CacheFileError(f"{self.file.name} has no {side!r} of layer {layer}", f"It has k and v of layers {[i for i, x in enumerate(self.layers) if x]}.")
        return getattr(found, side), found.shape


def read_cache(path: Path, profile: Profile | None = None) -> PackedFile:
    """Opens a packed cache and checks all but the blocks themselves, which any bytes are. ``profile``: used instead of the attached one.

    Raises KvfmtError that says what is wrong, for any file whatever.
    """
    file = read_gguf(Path(path))
    try:
        return _read(file, profile)
    except KvfmtError as error:
        raise CacheFileError(f"{file.name}: {error.message}", error.hint) from None


def _read(file: GgufFile, profile: Profile | None) -> PackedFile:
    if file.architecture != ARCHITECTURE:
        raise CacheFileError(f"it has architecture '{file.architecture}', not '{ARCHITECTURE}'", "It is not a packed cache. Make one: kvfmt pack")

    def get(key: str, kind: int | tuple[int, int]) -> object:
        full = f"kvfmt.cache.{key}"
        if file.types.get(full) != kind:
            raise CacheFileError(f"{full} has GGUF type {file.types.get(full)}, not {kind}", "It is damaged, or of another version.")
        return file.metadata[full]

    if (version := get("version", U32)) != VERSION:
        raise CacheFileError(f"it is of version {version}", f"This build reads version {VERSION}.")
    count = get("layers", U32)
    if not 1 <= count <= MAX_LAYERS:
        raise CacheFileError(f"it is of {count} layers", f"1 to {MAX_LAYERS} are possible: it is damaged.")
    interleaved = get("interleaved", BOOL)
    lists = {}
    for key, kind in (("types", STRING), ("domain", STRING), ("head", U32)):
        for side in ("k", "v"):
            found = get(f"{key}_{side}", (ARRAY, kind))
            if len(found) != count:
                raise CacheFileError(f"kvfmt.cache.{key}_{side} has {len(found)} entries for {count} layers", "It is damaged.")
            lists[key, side] = found
    formats = get("formats", (ARRAY, STRING)) if "kvfmt.cache.formats" in file.types else []
    digests = dict(entry.partition("=")[::2] for entry in formats)
    if any(map(_under_profile, (*lists["domain", "k"], *lists["domain", "v"]))):
        profile = _profile(file, get("profile", STRING), profile, count)
    layers: list[Optional[Layer]] = []
    for i in range(count):
        names = {side: f"blk.{i}.{side}" for side in ("k", "v")}
        if not any(lists["types", side][i] or names[side] in file.tensors for side in names):
            layers.append(None)
            continue
        stores, shapes = [], []
        for side, name in names.items():
            store = _store(i, side, lists, digests, profile, interleaved)
            if name not in file.tensors:
                raise CacheFileError(f"it has no tensor {name}", "A layer has both or neither: it is damaged.")
            tensor = file.tensors[name]
            shape = (1,) * (4 - len(tensor.shape)) + tensor.shape
            if tensor.type_id != store.kind.type_id or shape[-1] != store.padded:
                raise CacheFileError(f"tensor {name} is {tensor.type_name} {shape}, {store.kind.name} with rows of {store.padded} was said", "It is damaged.")
            if tensor.offset + math.prod(shape[:-1]) * store.row_bytes > len(tensor.data):
                raise CacheFileError(f"tensor {name} of {shape} values does not end within the file's {len(tensor.data)} bytes", "It was cut off, or is damaged.")
            store.check_heads(shape[1])
            stores.append(store)
            shapes.append(shape[:-1])
        if shapes[0] != shapes[1]:
            raise CacheFileError(f"layer {i} has keys of {shapes[0]} and values of {shapes[1]} (batch, heads, tokens)", "It is damaged.")
        layers.append(Layer(*stores, shapes[0]))
    name = file.metadata.get("general.name", "")
    return PackedFile(name if isinstance(name, str) else "", tuple(layers), profile, bool(interleaved), file)


def _profile(file: GgufFile, digest: str, given: Profile | None, layers: int) -> Profile:
    found = given
    if found is None:
        carried = attached(file)
        if carried is None:
            raise CacheFileError("it is mapped, and does not carry its profile", "Give the profile that it was written under.")
        try:
            found = Profile.of(parse_gguf("the attached profile", memoryview(carried)))
        except ProfileError as error:
            # Another profile would not read it.
            raise CacheFileError(error.message, "Read it with the build that wrote it.") from None
    if found.hash != digest:
        raise CacheFileError(f"it was written under profile {digest[:16]}, this is {found.hash[:16]}", "Give the profile that it was written under.")
    if found.layers != layers:
        raise CacheFileError(f"its profile is for {found.layers} layers, it has {layers}", "It is damaged.")
    return found


def _under_profile(domain: str) -> bool:
    return domain == "map" or domain.startswith("scaled")


def _store(layer: int, side: str, lists: dict, digests: dict, profile: Profile | None, interleaved: bool) -> HeadStore:
    name, domain, size = (lists[key, side][layer] for key in ("types", "domain", "head"))
    what = f"layer {layer}, {side.upper()}"
    if name not in known_types():
        raise CacheFileError(f"{what} is of type '{name[:80]}'", "Known: " + ", ".join(known_types()))
    own = {fmt.spec.name: fmt.spec.hash for fmt in registry.all_formats()}.get(name)
    if own is not None and digests.get(name) != own:
        raise CacheFileError(f"{what} was written with another definition of {name} ({digests.get(name, 'none')[:16]}), this build has {own[:16]}", "Read it with the build that wrote it.")
    if not 1 <= size <= 1 << 16:
        raise CacheFileError(f"{what} has heads of {size} values", "It is damaged.")
    keys = side == "k"
    maps = SideMaps.of(profile.maps.get(layer), keys) if _under_profile(domain) else None
    store = HeadStore(cache_type(name), int(size), keys, maps, bool(interleaved) and keys)
    if store.domain != domain:
        raise CacheFileError(f"{what} is said to be stored '{domain[:80]}', {name} with heads of {size} is stored '{store.domain}'", "It is damaged, or of another version.")
    return store
