"""Keys and values from elsewhere into a packed cache file, and back: npz and safetensors dumps, transformers' caches.

A dump has two arrays for each layer, whose names hold the layer's number and the word k, key or keys, and v, value or values:
"layers.3.k", "past_key_values.3.value", "v_3". Shapes are [batch, heads, tokens, head size], or without the batch. Layers are
read, packed and written one by one.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import numpy as np
from numpy.lib import format as npy

from converters.packed_cache import Layer, PackedFile, write_cache
from converters.safetensors_file import read_safetensors, write_safetensors
from kvfmt.build.files import asked_file
from kvfmt.errors import KvfmtError
from kvfmt.head_store import layer_stores
from kvfmt.profile import MAX_LAYERS, Profile

_WORDS = {"k": "k", "key": "k", "keys": "k", "v": "v", "value": "v", "values": "v"}
Update = Callable[[int, int], None]


class DumpError(KvfmtError):
    """A dump that cannot be read, or whose arrays are not keys and values."""


@dataclass(frozen=True)
class Dump:
    """Keys and values before packing: ``shapes`` by (layer, "k" or "v"), [batch, heads, tokens, head size]; ``read`` gives floats."""

    name: str
    shapes: Mapping[tuple[int, str], tuple[int, int, int, int]]
    read: Callable[[int, str], np.ndarray]

    @property
    def layers(self) -> int:
        return max(layer for layer, _ in self.shapes) + 1


def role_of(name: str) -> tuple[int, str] | None:
    """(layer, "k" or "v") that the name of an array says; None if it says none, or more than one."""
    # "past_key_values" is what transformers calls the whole cache.
    parts = re.findall(r"\d+|[a-z]+", name.lower().replace("key_values", ""))
    numbers = [int(part) for part in parts if part.isdigit()]
    sides = {_WORDS[part] for part in parts if part in _WORDS}
    return (numbers[0], sides.pop()) if len(numbers) == 1 and len(sides) == 1 and numbers[0] < MAX_LAYERS else None


def dump_of(name: str, shapes: Mapping[str, Sequence[int]], read: Callable[[str], np.ndarray]) -> Dump:
    """Finds each layer's keys and values among named arrays. Raises DumpError that names the array which does not fit."""
    names: dict[tuple[int, str], str] = {}
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    for title, shape in shapes.items():
        role = role_of(title)
        if role is None:
            raise DumpError(f"{name}: array {title[:80]!r} is not the keys or the values of one layer", "Names hold one number and one of k, key, keys, v, value, values.")
        if role in names:
            raise DumpError(f"{name}: {names[role]!r} and {title[:80]!r} are both {role[1].upper()} of layer {role[0]}", "Leave one out.")
        if len(shape) not in (3, 4) or 0 in shape:
            raise DumpError(f"{name}: array {title[:80]!r} is {tuple(shape)}", "[batch, heads, tokens, head size] was expected, or without the batch.")
        names[role] = title
        found[role] = (1,) * (4 - len(shape)) + tuple(shape)
    if not found:
        raise DumpError(f"{name} has no arrays", "Keys and values of at least one layer were expected.")
    for layer, side in found:
        other = (layer, "v" if side == "k" else "k")
        if other not in found:
            raise DumpError(f"{name}: layer {layer} has only {side.upper()}", "Both keys and values were expected.")
        if found[layer, side][:3] != found[other][:3]:
            raise DumpError(f"{name}: keys and values of layer {layer} are {found[layer, 'k']} and {found[layer, 'v']}", "They must have the same batch, heads and tokens.")
    return Dump(name, found, lambda layer, side: read(names[layer, side]).reshape(found[layer, side]))


def open_dump(path: Path) -> Dump:
    """An npz or safetensors file. Raises KvfmtError that says what is wrong, for any file whatever."""
    path = Path(path)
    if path.suffix == ".safetensors":
        file = read_safetensors(path)
        return dump_of(path.name, file.shapes, file.read)
    if path.suffix == ".npz":
        return _open_npz(path)
    raise DumpError(f"{path.name} is neither .npz nor .safetensors", "Give a dump of one of these kinds.")


def _open_npz(path: Path) -> Dump:
    damaged = "It is damaged, or not an npz file of floats."
    if not path.is_file():
        raise DumpError(f"no file {path}", "Check the name.")
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # beside its own, zipfile raises what its decoders do: of versions, names, extra fields
        raise DumpError(f"{path.name} cannot be opened: {error}", damaged) from None
    shapes: dict[str, tuple[int, ...]] = {}
    for info in archive.infolist():
        title = info.filename.removesuffix(".npy")
        try:
            with archive.open(info) as stream:
                version = npy.read_magic(stream)
                # Only numbers: an array of objects would run what the file says.
                shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
                rest = info.file_size - stream.tell()
        except Exception as error:  # zlib, zipfile and numpy have many; a header is all that was read
            raise DumpError(f"{path.name}: array {title[:80]!r} cannot be read: {error}", damaged) from None
        count = 1
        for extent in shape:
            count *= extent
        if dtype.kind != "f" or count * dtype.itemsize != rest:
            raise DumpError(f"{path.name}: array {title[:80]!r} is {dtype} {shape} in {rest} bytes", damaged)
        shapes[title] = shape

    def read(title: str) -> np.ndarray:
        try:
            with archive.open(title + ".npy") as stream:
                return npy.read_array(stream, allow_pickle=False)
        except Exception as error:
            raise DumpError(f"{path.name}: array {title[:80]!r} cannot be read: {error}", damaged) from None

    return dump_of(path.name, shapes, read)


def dump_of_cache(cache: Any, name: str = "cache") -> Dump:
    """The keys and values of a transformers DynamicCache. Raises DumpError if it is another kind, or empty."""
    arrays: dict[str, Any] = {}
    for i, layer in enumerate(getattr(cache, "layers", ())):
        for side, tensor in (("k", getattr(layer, "keys", None)), ("v", getattr(layer, "values", None))):
            if tensor is not None and tensor.numel():
                arrays[f"{i}.{side}"] = tensor
    if not arrays:
        raise DumpError(f"{name} holds no keys and values: {type(cache).__name__}", "Give a DynamicCache that a model has filled.")
    return dump_of(name, {title: tuple(tensor.shape) for title, tensor in arrays.items()}, lambda title: arrays[title].detach().float().cpu().numpy())


def pack(
    dump: Dump, target: Path, kv: str | None, protect: int | None = None, profile: Profile | None = None, interleaved: bool = False,
    update: Update = lambda done, of: None,
) -> None:
    """Writes the dump as a packed cache. ``interleaved``: keys are in transformers' order of a model of the llama family.

    ``update(layers, of)`` is called on the way. Raises as ``layer_stores`` and ``write_cache``.
    """
    count = dump.layers
    sizes = [(dump.shapes[i, "k"][3], dump.shapes[i, "v"][3]) if (i, "k") in dump.shapes else None for i in range(count)]
    stores = layer_stores(sizes, kv, protect, profile, interleaved)
    layers: list[Optional[Layer]] = [pair and Layer(*pair, dump.shapes[i, "k"][:3]) for i, pair in enumerate(stores)]

    def rows() -> Iterator[np.ndarray]:
        for i, layer in enumerate(layers):
            for side, store in layer.sides if layer else ():
                yield store.encode(dump.read(i, side))
            update(i + 1, count)

    write_cache(target, layers, rows(), profile, dump.name)


def unpack(file: PackedFile, target: Path, update: Update = lambda done, of: None) -> None:
    """Writes a packed cache as float32 dump, npz or safetensors by its suffix: "layers.N.k" and "layers.N.v". Raises KvfmtError."""
    target = Path(target)
    there = [(i, side, (*layer.shape, store.size)) for i, layer in enumerate(file.layers) if layer for side, store in layer.sides]

    def values() -> Iterator[np.ndarray]:
        for done, (i, side, _) in enumerate(there):
            yield file.decode(i, side)
            update(done + 1, len(there))

    if target.suffix == ".safetensors":
        write_safetensors(target, {f"layers.{i}.{side}": shape for i, side, shape in there}, values())
    elif target.suffix == ".npz":
        with asked_file(target, "the dump") as partial, zipfile.ZipFile(partial, "w") as archive:
            for (i, side, _), array in zip(there, values()):
                with archive.open(f"layers.{i}.{side}.npy", "w", force_zip64=True) as stream:
                    npy.write_array(stream, array, allow_pickle=False)
    else:
        raise DumpError(f"{target.name} is neither .npz nor .safetensors", "Name a dump of one of these kinds.")
