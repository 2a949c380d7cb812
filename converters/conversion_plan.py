"""What a converted state will look like, byte for byte, before anything is written; all that can be refused is refused here.

The result is what a context of the asked types, protection and profile would have saved: the same types by layer, rotation,
maps, and description.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from converters.domain import PLAIN, Domain, Mapped, Rotated, Unknown
from converters.kv_description import DIGITS, Description, describe, parse
from converters.model_layers import Layer, Model
from converters.state_bytes import StateError
from converters.state_layout import MAGIC, CacheLayout, SideLayout, StateLayout, StreamLayout
from kvfmt import registry
from kvfmt.policy import CacheType, cache_type, layer_types, layout_fault
from kvfmt.profile import Profile
from kvfmt.side_maps import SideMaps
from kvfmt.transform import rotation_size


@dataclass(frozen=True)
class Request:
    """What a context would be asked for. ``protect`` None: as many layers as llama.cpp protects by itself.

    ``flash``: whether the target has flash attention, None: as the source. ``profile`` maps the target, ``source_profile`` the source.
    """

    k: CacheType
    v: CacheType
    protect: int | None = None
    flash: bool | None = None
    profile: Profile | None = None
    source_profile: Profile | None = None
    model: Model | None = None


@dataclass(frozen=True)
class SideJob:
    """One side of one layer of one stream: where it is, where it goes, and in which domains."""

    source: SideLayout
    target: SideLayout
    before: Domain
    after: Domain

    @property
    def same(self) -> bool:
        """Whether the bytes stay as they are."""
        return (self.source.type, self.source.transposed, self.before) == (self.target.type, self.target.transposed, self.after)


@dataclass(frozen=True)
class Plan:
    """``copies``: (from, to, bytes) that stay as they are. ``literals``: (to, bytes). ``jobs``: the cache itself."""

    target: StateLayout
    copies: tuple[tuple[int, int, int], ...]
    literals: tuple[tuple[int, bytes], ...]
    jobs: tuple[SideJob, ...]


class _Target:
    """The target as it grows."""

    def __init__(self, start: int) -> None:
        self.at = start
        self.copies: list[tuple[int, int, int]] = [(0, 0, start)]
        self.literals: list[tuple[int, bytes]] = []
        self.jobs: list[SideJob] = []

    def put(self, code: str, *values: int) -> None:
        self.literal(struct.pack("<" + code, *values))

    def literal(self, data: bytes) -> None:
        self.literals.append((self.at, data))
        self.at += len(data)

    def copy(self, begin: int, end: int) -> None:
        self.copies.append((begin, self.at, end - begin))
        self.at += end - begin

    def side(self, source: SideLayout, kind: CacheType, transposed: bool, before: Domain, after: Domain) -> SideLayout:
        if transposed:
            self.put("iII", kind.type_id, kind.size, source.values)
        else:
            self.put("iQ", kind.type_id, kind.row_bytes(source.values))
        target = SideLayout(kind, source.values, source.cells, self.at, transposed)
        self.jobs.append(SideJob(source, target, before, after))
        self.at += target.nbytes
        return target


@dataclass(frozen=True)
class _CacheFacts:
    """What is known of one cache before its target is chosen. ``numbers`` are its layers' in the model."""

    layout: CacheLayout
    description: Description | None
    numbers: tuple[int, ...]
    layers: list[Layer] | None
    types: tuple[tuple[CacheType, CacheType], ...]
    values: tuple[tuple[int, int], ...]


def plan_conversion(layout: StateLayout, request: Request) -> Plan:
    """Raises KvfmtError for whatever llama.cpp would refuse, for what does not belong together, and where the model is needed and missing."""
    _check_belongings(layout, request)
    facts = _facts(layout, request.model)
    orders = _orders(facts, request)
    n_owners = len(request.model.layers) if request.model else sum(len(f.types) for f in facts)
    chosen = _chosen_types(request.profile, facts, orders)
    by_order = layer_types(n_owners, request.k, request.v, request.protect, chosen, request.profile is not None)
    types = [[by_order[i] for i in order] for order in orders]
    flash = _flash(layout, request.flash, [v for pairs in types for _, v in pairs])
    target = _Target(layout.caches_at)
    caches = tuple(_cache(target, cache, pairs, request, flash) for cache, pairs in zip(facts, types))
    planned = replace(layout, size=target.at, caches=caches)
    return Plan(planned, tuple(target.copies), tuple(target.literals), tuple(target.jobs))


def _check_belongings(layout: StateLayout, request: Request) -> None:
    said = layout.architecture
    named = {"the model": request.model and request.model.architecture, "the profile": request.profile and request.profile.architecture,
             "the source's profile": request.source_profile and request.source_profile.architecture}
    for what, found in named.items():
        if said and found and said != found:
            raise StateError(f"the state is of architecture {said}, {what} of {found}", "Give those that the state was made with.")
    if request.profile and request.model and request.profile.architecture != request.model.architecture:
        raise StateError(f"the profile is of architecture {request.profile.architecture}, the model of {request.model.architecture}", "Give those that belong together.")


def _facts(layout: StateLayout, model: Model | None) -> list[_CacheFacts]:
    if not layout.sides:
        raise StateError("the state holds no tokens", "Evaluate a prompt before saving.")
    descriptions = [None if cache.description is None else parse(cache.description) for cache in layout.caches]
    # A cache whose streams are all empty says nothing of its layers; a sliding window may be empty where the whole is not.
    if any(not cache.filled for cache in layout.caches):
        raise StateError("one of the two caches holds no cells", "Such states are not converted: evaluate more than nothing in both.")
    streams = [cache.filled[0] for cache in layout.caches]
    if any(not stream.v for stream in streams):
        raise StateError("the cache has no V: attention takes it out of K (latent attention)", "Such caches are not converted.")
    layers = model.caches([len(stream.k) for stream in streams]) if model else [None] * len(streams)
    found = []
    for cache, description, stream, owned in zip(layout.caches, descriptions, streams, layers):
        types = tuple((k.type, v.type) for k, v in zip(stream.k, stream.v))
        values = tuple((k.values, v.values) for k, v in zip(stream.k, stream.v))
        if description:
            description.check_types(types)
        if owned:
            for layer, pair in zip(owned, values):
                if pair != (layer.heads * layer.head_k, layer.heads * layer.head_v):
                    raise StateError(
                        f"layer {layer.number} stores {pair[0]} and {pair[1]} values a token, {model.name} has {layer.heads} KV heads of {layer.head_k} and {layer.head_v}",
                        "The state was saved with another model.",
                    )
            numbers = tuple(layer.number for layer in owned)
            runs = description.runs if description else ()
            if runs and (runs[0].first, runs[-1].last) != (numbers[0], numbers[-1]):
                raise StateError(
                    f"the state describes layers {runs[0].first} to {runs[-1].last}, {model.name} has {numbers[0]} to {numbers[-1]} there", "The state was saved with another model."
                )
        else:
            numbers = description.numbers(len(types)) if description else tuple(range(len(types)))
            if numbers is None and len(streams) == 1:
                raise StateError("the model has layers without a cache between the others, and the state does not say which", "Give the model: --model model.gguf")
            # Of two caches without the model only what needs no numbers is converted.
            numbers = numbers or tuple(range(len(types)))
        found.append(_CacheFacts(cache, description, numbers, owned, types, values))
    return found


def _orders(facts: list[_CacheFacts], request: Request) -> list[list[int]]:
    """The place of each cache's layers among those that own KV."""
    if request.model:
        return [[request.model.order(layer) for layer in cache.layers] for cache in facts]
    if len(facts) == 1:
        return [list(range(len(facts[0].types)))]
    if request.profile or request.source_profile or request.protect or {request.k.name, request.v.name} & set(registry.names()):
        raise StateError("the state has two caches, and does not say which layer is in which", "Give the model: --model model.gguf")
    first = len(facts[0].types)
    return [list(range(first)), list(range(first, first + len(facts[1].types)))]


def _chosen_types(profile: Profile | None, facts: list[_CacheFacts], orders: list[list[int]]) -> list[tuple[CacheType, CacheType]] | None:
    if profile is None:
        return None
    for cache in facts:
        if cache.numbers[-1] >= profile.layers:
            raise StateError(f"the state has a layer {cache.numbers[-1]}, the profile is for {profile.layers} layers", "Give the profile of the state's model.")
    if profile.types_k is None:
        return None
    by_order = {order: number for cache, places in zip(facts, orders) for number, order in zip(cache.numbers, places)}
    pairs = []
    for order in sorted(by_order):
        names = profile.types_k[by_order[order]], profile.types_v[by_order[order]]
        if "" in names:
            raise StateError(f"layer {by_order[order]} owns KV in the state and not in the profile", "Give the profile of the state's model.")
        pairs.append(tuple(map(cache_type, names)))
    return pairs


def _flash(layout: StateLayout, asked: bool | None, v_types: Sequence[CacheType]) -> bool:
    quantized = next((kind for kind in v_types if kind.is_quantized), None)
    if quantized and asked is False:
        raise StateError(f"V of type {quantized.name} needs flash attention", "Leave --no-flash-attn away, or ask for V in f16.")
    transposed = any(stream.transposed for cache in layout.caches for stream in cache.filled)
    return asked if asked is not None else bool(quantized) or not transposed


def _cache(target: _Target, cache: _CacheFacts, types: list[tuple[CacheType, CacheType]], request: Request, flash: bool) -> CacheLayout:
    old, profile = _source_profile(cache, request), request.profile
    _check_profile(cache, types, profile)
    rotations = [_rotation(cache, side, types) for side in (0, 1)]
    maps = [_mapped(cache, cache.types, old), _mapped(cache, types, profile)]
    if cache.description:
        flags = cache.description.rotated_k, cache.description.rotated_v
        before_rotation = [_described(cache, side, rotations[side]) if flags[side] else PLAIN for side in (0, 1)]
    else:
        before_rotation = rotations
    before, after = (
        [tuple(_domain(kind, mapped, turn) for kind, mapped, turn in zip(pair, found, turns)) for pair, found in zip(kinds, maps[i])]
        for i, (kinds, turns) in enumerate(((cache.types, before_rotation), (types, rotations)))
    )
    description = _target_description(cache, types, maps[1], after, profile)
    if description is not None:
        text = description.encode()
        target.put("II", MAGIC, len(text))
        target.literal(text)
    target.put("I", len(cache.layout.streams))
    streams: list[StreamLayout | None] = []
    for stream in cache.layout.streams:
        if stream is None:
            target.put("I", 0)
            streams.append(None)
            continue
        target.put("I", stream.cells)
        cells_at = target.at
        target.copy(stream.cells_at, stream.cells_end)
        cells_end = target.at
        target.put("II", not flash, len(stream.k))
        k, v = (
            tuple(
                target.side(side, types[i][n], bool(n) and not flash, before[i][n], _reachable(cache, i, n, before[i][n], after[i][n]))
                for i, side in enumerate(sides)
            )
            for n, sides in enumerate((stream.k, stream.v))
        )
        streams.append(replace(stream, cells_at=cells_at, cells_end=cells_end, transposed=not flash, k=k, v=v))
    return CacheLayout(description, tuple(streams))


def _source_profile(cache: _CacheFacts, request: Request) -> Profile | None:
    """The profile that the source's layers are mapped by, found by its hash."""
    wanted = cache.description.profile if cache.description else ""
    if not wanted:
        return None
    for profile in (request.source_profile, request.profile):
        if profile is not None and profile.hash[:DIGITS] == wanted:
            if cache.numbers[-1] >= profile.layers:
                raise StateError(f"the state has a layer {cache.numbers[-1]}, its profile is for {profile.layers} layers", "The state is damaged.")
            return profile
    given = request.source_profile or request.profile
    raise StateError(
        f"the state was saved under the profile {wanted}" + (f", the one given is {given.hash[:DIGITS]}" if given else ""),
        "Give that profile: --source-profile PROFILE.gguf, or --profile if the new cache is to have it too.",
    )


def _check_profile(cache: _CacheFacts, types: list[tuple[CacheType, CacheType]], profile: Profile | None) -> None:
    """Raises StateError where llama.cpp would refuse a type under the profile, or without one."""
    for number, pair, heads, values in zip(cache.numbers, types, cache.layers or [None] * len(types), cache.values):
        for side, kind in enumerate(pair):
            layout = None if profile is None else (profile.layout_v if side else profile.layout_k)[number]
            if fault := layout_fault(kind, layout):
                raise StateError(f"layer {number}: {fault}", "Give a profile made for it: kvfmt calibrate --k " + kind.name)
            head = None if heads is None else (heads.head_v if side else heads.head_k)
            if (head or values[side]) % kind.block:
                raise StateError(
                    f"layer {number}: type {kind.name} with block {kind.block} does not divide " + (f"heads of {head}" if head else f"{values[side]} values"), "Choose another type."
                )


def _mapped(cache: _CacheFacts, types: Sequence[tuple[CacheType, CacheType]], profile: Profile | None) -> list[tuple[Mapped | None, Mapped | None]]:
    """What a profile does to each layer and side; None where it does nothing."""
    found = []
    for number, pair, values in zip(cache.numbers, types, cache.values):
        sides = []
        for side, kind in enumerate(pair):
            maps = SideMaps.of(profile.maps.get(number), not side) if profile else None
            if maps is None or not kind.is_quantized:
                sides.append(None)
                continue
            heads, size = maps.shape
            if heads * size != values[side]:
                raise StateError(f"layer {number} stores {values[side]} values a token, the profile has {heads} heads of {size}", "Give the profile of the state's model.")
            sides.append(Mapped((profile.hash, number, side), maps))
        found.append(tuple(sides))
    return found


def _rotation(cache: _CacheFacts, side: int, types: Sequence[tuple[CacheType, CacheType]]) -> Domain:
    """How llama.cpp rotates this side of the cache's quantized layers: all heads of one size that 64 divides."""
    values = [pair[side] for pair in cache.values]
    if cache.layers:
        heads = {layer.head_v if side else layer.head_k for layer in cache.layers}
        size = rotation_size(heads.pop(), not side) if len(heads) == 1 else 1
        return Rotated(size) if size > 1 else PLAIN
    if any(n % 64 for n in values):
        return PLAIN
    ours = registry.names()
    described = cache.description and (cache.description.rotated_v if side else cache.description.rotated_k)
    # Only heads that 64 divides have our types, or are rotated at all.
    rotates = bool(described) or any(pair[side].name in ours for pairs in (cache.types, types) for pair in pairs)
    if rotates:
        sizes = {rotation_size(head, not side) for n in values for head in range(64, n + 1, 64) if n % head == 0}
        if len(sizes) == 1:
            return Rotated(sizes.pop())
    return Unknown("V" if side else "K", rotates)


def _described(cache: _CacheFacts, side: int, rotation: Domain) -> Domain:
    """The rotation that the description says there is."""
    if rotation == PLAIN:
        raise StateError(
            f"the state says that its {'V' if side else 'K'} is rotated; with {'this model' if cache.layers else 'these rows'} it is not", "The state was saved with another model, or is damaged."
        )
    return rotation


def _domain(kind: CacheType, mapped: Mapped | None, rotation: Domain) -> Domain:
    if not kind.is_quantized:
        return PLAIN
    if mapped is None:
        return rotation
    return mapped if mapped.maps.mixes else replace(mapped, turned=rotation)


def _reachable(cache: _CacheFacts, layer: int, side: int, before: Domain, after: Domain) -> Domain:
    """``after``. Raises StateError if the way there depends on the size of the heads, which is not known."""
    if before != after and (isinstance(before.rotation, Unknown) or isinstance(after.rotation, Unknown)):
        raise StateError(
            f"layer {cache.numbers[layer]} stores {cache.values[layer][side]} values of {'V' if side else 'K'} a token; how llama.cpp rotates them depends on how large a head is",
            "Give the model: --model model.gguf",
        )
    return after


def _target_description(
    cache: _CacheFacts, types: list[tuple[CacheType, CacheType]], maps: list[tuple[Mapped | None, Mapped | None]], after: list[tuple[Domain, Domain]], profile: Profile | None
) -> str | None:
    rotated = []
    for side in (0, 1):
        domains = [pair[side].rotation for pair in after]
        rotated.append(any(isinstance(domain, Rotated) or isinstance(domain, Unknown) and domain.rotates for domain in domains))
    mapped = profile.hash if profile and any(m for pair in maps for m in pair) else ""
    layers = [(number, *pair) for number, pair in zip(cache.numbers, types)]
    text = describe(layers, *rotated, mapped)
    turned = (domain.rotation for pair in after for domain in pair)
    if text is not None and (unknown := next((d for d in turned if isinstance(d, Unknown) and not d.rotates), None)):
        raise StateError(f"whether {unknown.side} is rotated depends on how large a head is, and the state must say it", "Give the model: --model model.gguf")
    return text
