"""What `kvfmt inspect` shows of a saved state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.table import Table

from converters.kv_description import parse
from converters.state_bytes import StateError
from converters.state_layout import KINDS, CacheLayout, SideLayout, StateLayout


@dataclass(frozen=True)
class Row:
    """Layers of one cache that are stored alike: first and last, counted within the cache from 0."""

    cache: int
    layers: tuple[int, int]
    k: SideLayout
    v: SideLayout | None
    nbytes: int
    bits: float


def facts(layout: StateLayout) -> Iterator[tuple[str, str]]:
    """(what, value) of the state as a whole."""
    yield "kind", KINDS[layout.kind] + (f", version {layout.version}" if layout.version is not None else "")
    if layout.architecture is not None:
        yield "model", f"architecture {layout.architecture}"
    if layout.sequence is not None:
        yield "sequence", f"{layout.sequence}"
    if layout.tokens is not None:
        yield "tokens", f"{layout.tokens:,}"
    for i, cache in enumerate(layout.caches):
        yield _name(layout, i), _cache(cache)
        yield "  stored", stored(cache)
    bits = f", {8 * layout.cache_bytes / layout.values:.3f} bits/value" if layout.values else ""
    yield "bytes", f"{layout.size:,}, of them K and V {layout.cache_bytes:,}{bits}"


def _name(layout: StateLayout, index: int) -> str:
    return "cache" if len(layout.caches) == 1 else ("full", "windowed")[index]


def _cache(cache: CacheLayout) -> str:
    streams = cache.filled
    if not streams:
        return f"no cells in {len(cache.streams)} stream{'s' * (len(cache.streams) > 1)}"
    cells = sum(stream.cells for stream in streams)
    first, last = min(s.first_position for s in streams), max(s.last_position for s in streams)
    several = f" in {len(streams)} of {len(cache.streams)} streams" if len(cache.streams) > 1 else ""
    flash = "transposed V (no flash attention)" if streams[0].transposed else "V by cell"
    return f"{cells:,} cells{several}, positions {first:,} to {last:,}, {len(streams[0].k)} layers, {flash if streams[0].v else 'no V'}"


def stored(cache: CacheLayout) -> str:
    """In which coordinates the cache's quantized layers are, as far as the state says."""
    quantized = [side for stream in cache.filled for side in stream.sides if side.type.is_quantized]
    if cache.description is None:
        return "rotated where 64 divides the heads (as llama.cpp does by itself)" if quantized else "K and V as they are"
    try:
        said = parse(cache.description)
    except StateError:
        return f"not known to this version: {cache.description[:500]!r}"
    rotated = " and ".join(name for name, flag in (("K", said.rotated_k), ("V", said.rotated_v)) if flag)
    if said.profile:
        return f"quantized layers under profile {said.profile}, rotated where it maps nothing: {rotated or 'none'}"
    return f"quantized layers: {rotated or 'nothing'} rotated"


def rows(layout: StateLayout) -> list[Row]:
    """Runs of layers with the same types and widths."""
    found = []
    for index, cache in enumerate(layout.caches):
        if not cache.filled:
            continue
        first = cache.filled[0]
        pairs = [(k, first.v[i] if first.v else None) for i, k in enumerate(first.k)]
        at = 0
        for _, group in groupby(pairs, lambda pair: tuple((side.type.name, side.values) if side else None for side in pair)):
            run = list(group)
            sides = [side for s in cache.filled for i in range(at, at + len(run)) for side in (s.k[i], *s.v[i : i + 1])]
            nbytes, values = sum(side.nbytes for side in sides), sum(side.values * side.cells for side in sides)
            found.append(Row(index, (at, at + len(run) - 1), *run[0], nbytes, 8 * nbytes / values))
            at += len(run)
    return found


def layer_table(layout: StateLayout) -> Table:
    """One line for each run of layers that are stored alike."""
    several = len(layout.caches) > 1
    table = Table(box=box.SIMPLE_HEAD)
    for name in (*(["cache"] if several else []), "layers", "K", "V", "values K/V a cell", "MiB", "bits/value"):
        table.add_column(name, justify="left" if name in ("cache", "K", "V") else "right")
    for row in rows(layout):
        first, last = row.layers
        v = row.v.type.name if row.v else "-"
        cells = [_name(layout, row.cache)] if several else []
        widths = f"{row.k.values}/{row.v.values if row.v else '-'}"
        table.add_row(*cells, f"{first}-{last}" if last > first else f"{first}", row.k.type.name, v, widths, f"{row.nbytes / 2**20:.2f}", f"{row.bits:.3f}")
    return table
