"""Puts a KV profile into a model's own file, and takes it off again.

The profile lies in the model's metadata, so that any llama.cpp loads the model as before, tools that rewrite metadata keep it,
and the patched one finds it with ``--kv-profile auto``. Nothing else changes; taken off, the file is the original one again,
byte for byte. A policy is a profile without maps: it only says which types each layer's cache has.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Callable, Optional

from converters.gguf_copy import check_padding, copy_tensors, string_entry, u64_entry, words_entry, write_header
from converters.model_layers import owners_of
from converters.state_layout import OTHER_MEMORY
from kvfmt.build.fetch import SPARE_BYTES, require_space
from kvfmt.build.files import asked_file, check_place
from kvfmt.errors import KvfmtError
from kvfmt.gguf_read import GgufFile, read_gguf
from kvfmt.policy import layer_types, layout_fault, parse_kv
from kvfmt.profile import ATTACHED, ATTACHED_BYTES, Profile, attached, fingerprint_of, formats_of, head_shape, layers_of, read_model

#: The profile's hash, for people who look at the metadata.
ATTACHED_HASH = "kvfmt.attached.hash"
KEYS = (ATTACHED, ATTACHED_BYTES, ATTACHED_HASH)


def policy_of(model: Path) -> Profile:
    """A profile of this model that maps nothing and chooses nothing yet. Raises KvfmtError if the file is no model."""
    file = read_model(model)
    layers = layers_of(file)
    none = ("",) * layers
    return Profile(f"policy of {file.name}", file.architecture, layers, fingerprint_of(file), none, none, {})


def with_types(profile: Profile, model: Path, kv: str, protect: int | None = None) -> Profile:
    """The profile, choosing ``kv`` (such as "kvt3/kve8_2") for every layer that owns KV, except f16 for ``protect`` at each end.

    Raises UnknownName, and KvfmtError for a type that a layer's map or head size does not suit, and for a model that takes no profile.
    """
    file = read_model(model)
    if file.setting("attention.key_length_mla") or file.architecture in OTHER_MEMORY["caches for an indexer"]:
        raise KvfmtError(f"{file.name} takes no profile: its attention shares K and V, or is read by an indexer", "Name the types where it runs: -ctk, -ctv")
    k, v = parse_kv(kv)
    shapes = [head_shape(file, layer) for layer in range(profile.layers)]
    owners = [layer for layer, (heads, _, _) in enumerate(shapes[: owners_of(file)]) if heads != 0]
    types: tuple[list[str], list[str]] = ([""] * profile.layers, [""] * profile.layers)
    for layer, pair in zip(owners, layer_types(len(owners), k, v, protect, profile=bool(profile.maps))):
        for kind, layouts, size, chosen in zip(pair, (profile.layout_k, profile.layout_v), shapes[layer][1:], types):
            fault = layout_fault(kind, layouts[layer])
            if fault:
                raise KvfmtError(f"layer {layer}: {fault}", "Choose the type that the profile was made for, or calibrate for this one.")
            kind.row_bytes(size)  # raises for heads that are not whole blocks
            chosen[layer] = kind.name
    named = (*profile.layout_k, *profile.layout_v, *types[0], *types[1])
    return dataclasses.replace(profile, types_k=tuple(types[0]), types_v=tuple(types[1]), formats=formats_of(named))


def attach(
    model: Path, profile: Profile, target: Path, statistics: bool = False, replace: bool = False, update: Callable[[int, int], None] = lambda done, of: None
) -> None:
    """Writes a copy of ``model`` that carries the profile; ``target`` may be the model itself.

    ``statistics``: keep those that the maps were made from, which llama.cpp does not need. ``replace``: a profile that is there gives
    way. Raises KvfmtError if the profile is not for this model, if there is one, if the model is cut off or in parts, and if the copy cannot be written.
    """
    file = read_gguf(model)
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise KvfmtError(f"{file.name} is one of {parts} parts of a model", "Join them first: llama-gguf-split --merge")
    profile.check_model(model)
    if any(key in file.types for key in KEYS) and not replace:
        raise KvfmtError(f"{file.name} carries a profile already", "Say --replace, or take it off first: kvfmt profile detach")
    check_padding(file)
    file.check_tensors()
    if not statistics:
        profile = profile.without_statistics()
    data = profile.content()
    _copy(file, target, [words_entry(ATTACHED, data), u64_entry(ATTACHED_BYTES, len(data)), string_entry(ATTACHED_HASH, profile.hash)], update)


def detach(
    model: Path, target: Path, saved: Optional[Path] = None, update: Callable[[int, int], None] = lambda done, of: None
) -> None:
    """Writes a copy of ``model`` without its profile, the original file byte for byte; ``target`` may be the model itself.

    ``saved``: the profile is written there. Raises KvfmtError if the model carries none, ``saved`` is one of the two models, or a
    file cannot be written.
    """
    model, target = Path(model), Path(target)
    file = read_gguf(model)
    if not any(key in file.types for key in KEYS):
        raise KvfmtError(f"{file.name} carries no profile", "There is nothing to take off.")
    check_padding(file)
    if saved is not None:
        carried = attached(file)
        if carried is None:
            raise KvfmtError(f"{file.name} carries only the traces of a profile", "Take it off without saving it.")
        saved = Path(saved)
        if saved.resolve() in (model.resolve(), target.resolve()):
            raise KvfmtError(f"{saved} was to be the profile and a model", "Name another file for the profile.")
        check_place(target, "the model")
        with asked_file(saved, "the profile") as partial:
            partial.write_bytes(carried)
    _copy(file, target, [], update)


def _copy(file: GgufFile, target: Path, added: list[bytes], update: Callable[[int, int], None]) -> None:
    target = Path(target)
    check_place(target, "the model")
    require_space(target.parent, len(file.data) + sum(map(len, added)) + SPARE_BYTES, "The model")
    with asked_file(target, "the model") as partial, open(partial, "wb") as out:
        write_header(file, out, added, KEYS)
        copy_tensors(file, out, update)
