"""What `kvfmt profile show` prints: where a profile comes from, and what it does in each layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from rich import box
from rich.table import Table

from kvfmt import registry
from kvfmt.distortion import equal_noise, slot_noise
from kvfmt.geometry import logit_error
from kvfmt.policy import FLAT_LAYOUT, SCALED_LAYOUT, cache_type
from kvfmt.profile import LayerMaps, Profile
from kvfmt.side_maps import SideMaps


def gains(profile: Profile, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
    """dB by which a profile lowers a logit's squared error against a plain Hadamard: float64 [KV heads], of all keys and of the first token's.

    For "flat" and "scaled" the type is the same on both sides, any whose noise is the same in every slot; a layout that orders channels
    is counted with its type's own noise, against the best type of that size that treats all values alike. None without
    statistics, and where keys are stored as they are.
    """
    maps, found = profile.maps.get(layer), profile.statistics.get(layer)
    if found is None or maps is None or not (noise := _noise(profile.layout_k[layer], found.k_size)):
        return None
    slots, plain = noise
    unit = np.eye(found.k_size)
    keys, first = [], []
    forward, backward = _matrices(maps, found.heads, found.k_size)
    for head in range(found.heads):
        a, inverse = forward[head], backward[head]
        asked, moment, start = (x[head].astype(np.float64) for x in (found.q_moment, found.k_moment(), found.k_first))
        mean = np.zeros(found.k_size) if maps.k_mean is None else maps.k_mean[head].astype(np.float64)
        shifted = moment if maps.k_mean is None else found.k_cov[head].astype(np.float64)
        keys.append(_decibel(logit_error(unit, unit, moment, asked, plain), logit_error(a, inverse, shifted, asked, slots)))
        first.append(_decibel(
            logit_error(unit, unit, np.outer(start, start), asked, plain), logit_error(a, inverse, np.outer(start - mean, start - mean), asked, slots)
        ))
    return np.array(keys), np.array(first)


def _noise(layout: str, size: int) -> tuple[np.ndarray | float, float] | None:
    """Relative squared error of each slot under a layout, and of each value without one."""
    if layout in (FLAT_LAYOUT, SCALED_LAYOUT):
        return 1.0, 1.0
    if not layout or not cache_type(layout).needs_profile or size % cache_type(layout).block:
        return None
    fmt = registry.get(layout)
    return slot_noise(fmt, size), equal_noise(fmt)


def _matrices(maps: LayerMaps, heads: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(A, A^-T) of the keys, float64 [H, d, d]: what becomes of each unit vector on the way to the store, and back."""
    units = np.broadcast_to(np.eye(size, dtype=np.float32), (heads, size, size))
    keys = replace(SideMaps.of(maps, True), mean=None)
    return keys.store(units).transpose(0, 2, 1).astype(np.float64), keys.restore(units).astype(np.float64)


def _decibel(before: float, after: float) -> float:
    return 10 * np.log10(before / after) if before > 0 and after > 0 else 0.0


def facts(profile: Profile) -> list[tuple[str, str]]:
    """What is known of the whole profile, as (what, value)."""
    known = profile.provenance

    def text(value: object) -> str:
        return ", ".join(str(x)[:16] for x in value) if isinstance(value, (list, tuple)) else str(value)

    rows = [
        ("profile", profile.name), ("hash", profile.hash[:16]),
        ("model", f"{known.get('model.file', '?')}, {profile.architecture}, {profile.layers} layers, fingerprint {profile.fingerprint}"),
        ("text", f"{text(known.get('text.name', '?'))}: {known.get('tokens', '?')} tokens in contexts of {text(known.get('context', '?'))}"),
        ("build", text(known.get("build", "?"))),
        ("sidecar", f"{profile.sidecar_bytes / 2**20:.2f} MiB in memory beside the cache"),
    ]
    rows += [("format", f"{name}, spec hash {digest[:8]}") for name, digest in sorted(profile.formats.items())]
    return rows


def layer_table(profile: Profile) -> Table:
    """A row for each layer that has something of its own."""
    table = Table(title="Layers", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
    for title in ("layer", "heads", "K", "V", "types", "mean", "by", "gain", "least", "first"):
        table.add_column(title, justify="left" if title in ("K", "V", "types", "mean", "by") else "right", no_wrap=True)
    for layer in range(profile.layers):
        maps = profile.maps.get(layer)
        types = f"{profile.types_k[layer]}/{profile.types_v[layer]}" if profile.types_k and profile.types_k[layer] else "-"
        if maps is None and types == "-":
            continue
        sides = [SideMaps.of(maps, keys) for keys in (True, False)]
        heads = next(("x".join(map(str, side.shape)) for side in sides if side), "-")
        centred = "+".join(name for name, side in zip("KV", sides) if side and side.mean is not None)
        found = gains(profile, layer)
        numbers = ("-",) * 3 if found is None else (f"{found[0].mean():.1f}", f"{found[0].min():.1f}", f"{found[1].min():.1f}")
        table.add_row(str(layer), heads, profile.layout_k[layer] or "-", profile.layout_v[layer] or "-", types, centred or "no", _means(sides[0]), *numbers)
    table.caption = (
        "mean: which of K and V are centred. by: what keys are mapped by, a matrix for each head (its type), a scale for each channel, "
        "or scales and an order of the channels. gain: by how many dB that lowers the expected squared error of a logit below a plain "
        "Hadamard's, mean and least of the layer's heads; 6 dB is one bit. Channels in order count with their type's noise, against the "
        "best type of that size that has none. first: least gain for the first token's key."
    )
    table.caption_justify = "left"
    return table


def _means(keys: SideMaps | None) -> str:
    """By what keys are mapped."""
    if keys is None:
        return "-"
    if keys.forward is not None:
        return keys.forward.dtype.name
    return "order" if keys.order is not None else "scale" if keys.scale is not None else "-"


def summary(profile: Profile) -> str:
    """A line on the gains of keys, and how many layers' values are centred."""
    found = [g for g in (gains(profile, layer) for layer in range(profile.layers)) if g is not None]
    centred = sum(maps.v_mean is not None for maps in profile.maps.values())
    values = f"; values are centred in {centred} layers" if centred else ""
    if not found:
        return f"no statistics, or keys as they are: no gain to predict{values}"
    keys, first = (np.concatenate([g[i] for g in found]) for i in (0, 1))
    return (
        f"expected gain over a plain Hadamard: {keys.mean():.1f} dB (heads from {keys.min():.1f} to {keys.max():.1f}); "
        f"first token's key: {first.mean():.1f} dB (from {first.min():.1f}){values}"
    )
