"""What `kvfmt profile show` prints: where a profile comes from, and what it does in each layer."""

from __future__ import annotations

import numpy as np
from rich import box
from rich.table import Table

from kvfmt.geometry import logit_error
from kvfmt.policy import FLAT_LAYOUT, SCALED_LAYOUT
from kvfmt.profile import Profile
from kvfmt.side_maps import SideMaps


def gains(profile: Profile, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
    """dB by which a profile lowers a logit's squared error against a plain Hadamard, for noise that is the same in every slot:
    float64 [KV heads], of all keys and of the first token's. None for other layouts or without statistics."""
    maps, found = profile.maps.get(layer), profile.statistics.get(layer)
    if found is None or maps is None or profile.layout_k[layer] not in (FLAT_LAYOUT, SCALED_LAYOUT):
        return None
    unit = np.eye(found.k_size)
    keys, first = [], []
    for head in range(found.heads):
        if maps.k_map is not None:
            a, inverse = maps.k_map[head].astype(np.float64), maps.q_map[head].astype(np.float64)
        else:
            scale = np.ones(found.k_size) if maps.k_scale is None else maps.k_scale[head].astype(np.float64)
            a, inverse = np.diag(scale), np.diag(1 / scale)
        asked, moment, start = (x[head].astype(np.float64) for x in (found.q_moment, found.k_moment(), found.k_first))
        mean = np.zeros(found.k_size) if maps.k_mean is None else maps.k_mean[head].astype(np.float64)
        shifted = moment if maps.k_mean is None else found.k_cov[head].astype(np.float64)
        keys.append(_decibel(logit_error(unit, unit, moment, asked), logit_error(a, inverse, shifted, asked)))
        first.append(_decibel(
            logit_error(unit, unit, np.outer(start, start), asked), logit_error(a, inverse, np.outer(start - mean, start - mean), asked)
        ))
    return np.array(keys), np.array(first)


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
    for title in ("layer", "heads", "K", "V", "types", "mean", "maps", "gain dB", "least", "first"):
        table.add_column(title, justify="left" if title in ("K", "V", "types", "mean", "maps") else "right", no_wrap=True)
    for layer in range(profile.layers):
        maps = profile.maps.get(layer)
        types = f"{profile.types_k[layer]}/{profile.types_v[layer]}" if profile.types_k and profile.types_k[layer] else "-"
        if maps is None and types == "-":
            continue
        keys = SideMaps.of(maps, True)
        found = gains(profile, layer)
        numbers = ("-",) * 3 if found is None else (f"{found[0].mean():.1f}", f"{found[0].min():.1f}", f"{found[1].min():.1f}")
        table.add_row(
            str(layer), "x".join(map(str, keys.shape)) if keys else "-", profile.layout_k[layer] or "-", profile.layout_v[layer] or "-", types,
            "yes" if maps and maps.k_mean is not None else "no", keys.forward.dtype.name if keys and keys.mixes else "-", *numbers,
        )
    table.caption = (
        "gain: how far the maps lower the expected squared error of a logit below a plain Hadamard's, mean and least of the\n"
        "layer's heads, for noise that is the same in every slot; 6 dB is one bit. first: least gain for the first token's key."
    )
    table.caption_justify = "left"
    return table


def summary(profile: Profile) -> str:
    """One line on the gains."""
    found = [g for g in (gains(profile, layer) for layer in range(profile.layers)) if g is not None]
    if not found:
        return "no statistics, or layouts whose noise is not the same in every slot: no gain to predict"
    keys, first = (np.concatenate([g[i] for g in found]) for i in (0, 1))
    return (
        f"expected gain over a plain Hadamard: {keys.mean():.1f} dB (heads from {keys.min():.1f} to {keys.max():.1f}); "
        f"first token's key: {first.mean():.1f} dB (from {first.min():.1f})"
    )
