"""Calibration profiles with random maps for random models, written with gguf-py alone: what the file format says, and no more."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Sequence

import gguf
import numpy as np
from kvfmt import registry
from kvfmt.profile import VERSION

SPECS = {fmt.spec.name: fmt.spec for fmt in registry.all_formats()}


def fnv1a(parts: Sequence[bytes]) -> str:
    value = 0xCBF29CE484222325
    for part in parts:
        for byte in part:
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


@dataclass
class Facts:
    """What a profile has to know of a model."""

    arch: str
    n_layer: int
    heads_kv: list[int]
    head_k: list[int]
    head_v: list[int]
    owners: list[int]
    fingerprint: str


def facts_of(model: Path) -> Facts:
    reader = gguf.GGUFReader(model)

    def get(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    arch = get("general.architecture")
    n_layer = get(f"{arch}.block_count")
    heads = get(f"{arch}.attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * n_layer
    shared = get(f"{arch}.attention.shared_kv_layers", 0)
    window = get(f"{arch}.attention.sliding_window_pattern")

    def heads_of(key: str) -> list[int]:
        size = get(f"{arch}.attention.{key}")
        if size is None:
            size = get(f"{arch}.embedding_length") // get(f"{arch}.attention.head_count")
        small = get(f"{arch}.attention.{key}_swa", size)
        return [small if isinstance(window, list) and window[il] else size for il in range(n_layer)]

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = [f"blk.{il}.attn_norm.weight" for il in range(n_layer)] + ["output_norm.weight"]
    norms = [tensors[name].data for name in names if name in tensors]
    parts = [np.asarray(data, "<f4").tobytes() for data in norms]
    return Facts(
        arch,
        n_layer,
        heads,
        heads_of("key_length"),
        heads_of("value_length"),
        [il for il in range(n_layer) if heads[il] and il < n_layer - shared],
        fnv1a([*parts, get("kvfmt.fold.hash", "").encode()]),
    )


def invertible(rng: np.random.Generator, d: int, spread: float) -> np.ndarray:
    """A random matrix whose singular values lie between exp(-spread) and exp(spread)."""
    left, right = (np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(2))
    return left @ np.diag(np.exp(rng.uniform(-spread, spread, d))) @ right


@dataclass
class Profile:
    """Metadata and tensors to change at will before ``write``. Tensors are in numpy's order: [heads, d, d]."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "kvfmt-profile")
        for key, value in self.metadata.items():
            if key == "general.architecture":
                writer.kv_data[0][key].value = value
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_uint32(key, value)
        for name, data in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def random_profile(
    model: Path,
    *,
    k: bool = True,
    v: bool = True,
    mean: bool = True,
    scale: bool = False,
    ordered: bool = False,
    layers: Sequence[int] | None = None,
    layout: str = "flat",
    types: tuple[Sequence[str], Sequence[str]] | None = None,
    spread: float = 0.5,
    dtype: type = np.float16,
    seed: int = 5,
    change: Callable[[Profile], None] | None = None,
) -> Profile:
    """Random maps of the layers (default: all that own KV). Keys and values lie far from zero relative to what the maps see.

    ``layout`` "scaled": both sides have vectors in place of matrices; keys a mean, a scale or both, values a mean. ``ordered``: keys have
    an order, a scale and a matrix for every 16 slots in place of those for whole heads. ``mean`` is for both sides.
    """
    facts = facts_of(model)
    rng = np.random.default_rng(seed)
    mapped = facts.owners if layers is None else layers
    scaled = layout == "scaled"
    profile = Profile()
    names = {name for side in (types or ()) for name in side} | {layout}
    profile.metadata = {
        "general.name": "random",
        "kvfmt.profile.version": VERSION,
        "kvfmt.profile.hash": hashlib.sha256(f"{seed} {k} {v} {mean} {mapped} {scaled and scale} {ordered}".encode()).hexdigest(),
        "kvfmt.profile.model.architecture": facts.arch,
        "kvfmt.profile.model.layers": facts.n_layer,
        "kvfmt.profile.model.fingerprint": facts.fingerprint,
        "kvfmt.profile.layout_k": [layout if k and il in mapped else "" for il in range(facts.n_layer)],
        "kvfmt.profile.layout_v": [layout if v and (mean or not scaled) and il in mapped else "" for il in range(facts.n_layer)],
        "kvfmt.profile.formats": [f"{name}={SPECS[name].hash}" for name in sorted(names) if name in SPECS],
    }
    if types:
        profile.metadata["kvfmt.profile.types_k"] = list(types[0])
        profile.metadata["kvfmt.profile.types_v"] = list(types[1])
    for il in mapped:
        n_head = facts.heads_kv[il]
        if k:
            shape = (n_head, facts.head_k[il])
            matrices = not scaled and not ordered
            if matrices:
                a = np.stack([invertible(rng, facts.head_k[il], spread) for _ in range(n_head)])
            if mean:
                profile.tensors[f"blk.{il}.kv_k_mean"] = rng.standard_normal(shape).astype(np.float32)
            if ordered:
                profile.tensors[f"blk.{il}.kv_k_order"] = np.stack([rng.permutation(shape[1]) for _ in range(n_head)]).astype(np.int32)
                profile.tensors[f"blk.{il}.kv_k_mix"] = np.linalg.qr(rng.standard_normal((16, 16)))[0].astype(np.float32)
            if matrices:
                profile.tensors[f"blk.{il}.kv_k_map"] = a.astype(dtype)
                profile.tensors[f"blk.{il}.kv_q_map"] = np.linalg.inv(a).transpose(0, 2, 1).astype(dtype)
            elif scale or ordered:
                profile.tensors[f"blk.{il}.kv_k_scale"] = np.exp(rng.uniform(-spread, spread, shape)).astype(np.float32)
        if v:
            if mean:
                profile.tensors[f"blk.{il}.kv_v_mean"] = rng.standard_normal((n_head, facts.head_v[il])).astype(np.float32)
            if scaled:
                continue
            b = np.stack([invertible(rng, facts.head_v[il], spread) for _ in range(n_head)])
            profile.tensors[f"blk.{il}.kv_v_map"] = b.astype(dtype)
            profile.tensors[f"blk.{il}.kv_o_map"] = np.linalg.inv(b).astype(dtype)
    if change:
        change(profile)
    return profile


def centre_values(profile: Profile) -> None:
    """A ``change``: values of each layer with an order of channels get a mean. Made for profiles without maps of values, in models whose
    values' heads are as large as the keys'."""
    rng = np.random.default_rng(12)
    layouts = profile.metadata["kvfmt.profile.layout_v"]
    for name, order in list(profile.tensors.items()):
        if name.endswith("kv_k_order"):
            il = name.split(".")[1]
            profile.tensors[f"blk.{il}.kv_v_mean"] = rng.standard_normal(order.shape).astype(np.float32)
            layouts[int(il)] = "scaled"


def as_kvfmt(profile: Profile):
    """The same profile as kvfmt's own class has it, with its true hash; general.name and the maps are taken over."""
    from kvfmt import profile as own

    def of(key: str, default: Any = None) -> Any:
        return profile.metadata.get(f"kvfmt.profile.{key}", default)

    maps: dict[int, dict[str, np.ndarray]] = {}
    for name, data in profile.tensors.items():
        block, _, what = name.removeprefix("blk.").partition(".kv_")
        maps.setdefault(int(block), {})[what] = data
    types = [None if of(key) is None else tuple(of(key)) for key in ("types_k", "types_v")]
    return own.Profile(
        "random", of("model.architecture"), of("model.layers"), of("model.fingerprint"), tuple(of("layout_k")), tuple(of("layout_v")),
        {layer: own.LayerMaps(**arrays) for layer, arrays in maps.items()}, *types, dict(entry.split("=") for entry in of("formats")),
    )
