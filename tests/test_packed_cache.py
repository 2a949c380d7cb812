"""Packed caches as GGUF files: for gguf-py, for ggml's own reader, and from and to dumps. Damaged files are refused by name."""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace

import gguf
import numpy as np
import pytest
from converters.cache_import import dump_of, open_dump, pack, role_of, unpack
from converters.packed_cache import Layer, read_cache, write_cache
from converters.safetensors_file import read_safetensors
from gguf import GGMLQuantizationType, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvfmt import registry
from kvfmt.bindings import patched_bindings
from kvfmt.cli import app
from kvfmt.errors import KvfmtError
from kvfmt.gguf_types import register
from kvfmt.head_store import HeadStore, interleaved_order, layer_stores
from kvfmt.policy import cache_type, known_types
from kvfmt.profile import LayerMaps, Profile, formats_of
from kvfmt.transform import hadamard, rotation_size
from typer.testing import CliRunner

FORMATS = [fmt.spec.name for fmt in registry.all_formats()]
PLAIN = [fmt.spec.name for fmt in registry.plain_formats()]
SHAPE = (2, 3, 5)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def heads(size: int, seed: int = 0, shape=SHAPE) -> np.ndarray:
    return rng(seed).standard_normal((*shape, size)).astype(np.float32)


def profile(layers: int = 3, heads: int = 3, size: int = 64, layout: str = "flat", seed: int = 1, order: bool = False, centred: bool = False) -> Profile:
    """``order``: keys in order, without matrices. ``centred``: values have a mean and no maps."""

    def pair():
        a = np.stack([np.linalg.qr(rng(seed + h).standard_normal((size, size)))[0] * 1.5 for h in range(heads)])
        return a.astype(np.float32), np.linalg.inv(a)

    maps = {}
    for layer in range(layers):
        (a, inverse), (b, other) = pair(), pair()
        mean, width = (rng(seed + i).standard_normal((heads, size)).astype(np.float32) for i in (9, 10))
        values = {"v_map": b.astype(np.float16), "o_map": other.astype(np.float16)}
        if centred:
            values = {"v_mean": 3 * rng(seed + 11).standard_normal((heads, size)).astype(np.float32)}
        if order:
            channels = np.stack([rng(seed + h).permutation(size) for h in range(heads)]).astype(np.int32)
            mix = np.linalg.qr(rng(seed).standard_normal((16, 16)))[0].astype(np.float32)
            maps[layer] = LayerMaps(mean, k_scale=np.exp2(width), k_order=channels, k_mix=mix, **values)
        elif layout == "scaled":
            maps[layer] = LayerMaps(mean, k_scale=np.exp2(width), **values)
        else:
            maps[layer] = LayerMaps(mean, a, inverse.transpose(0, 2, 1).astype(np.float32), **values)
    layouts = (layout,) * layers
    return Profile("p", "llama", layers, "0" * 16, layouts, ("scaled" if centred else "flat",) * layers, maps, formats=formats_of([layout]))


def file_of(path, stores, seed: int = 0, **more) -> list[np.ndarray]:
    """Writes Gaussian keys and values under these stores; gives their rows of bytes."""
    layers = [pair and Layer(*pair, SHAPE) for pair in stores]
    rows = [s.encode(heads(s.size, seed + i)) for i, pair in enumerate(stores) if pair for s in pair]
    write_cache(path, layers, iter(rows), **more)
    return rows


# gguf-py


def test_gguf_py_knows_every_format():
    register()
    register()
    for fmt in registry.all_formats():
        spec = fmt.spec
        member = GGMLQuantizationType(spec.type_id)
        assert member.name == spec.name.upper() and member is GGMLQuantizationType[spec.name.upper()] and int(member) == spec.type_id
        assert gguf.GGML_QUANT_SIZES[member] == (spec.block, spec.size)
        x = heads(spec.block * 2)
        packed = quants.quantize(x, member)
        assert np.array_equal(packed, fmt.encode(x)) and np.array_equal(quants.dequantize(packed, member), fmt.decode(packed))


def test_another_meaning_of_an_id_is_refused(monkeypatch):
    spec = registry.all_formats()[0].spec
    register()
    monkeypatch.setitem(GGMLQuantizationType._value2member_map_, spec.type_id, GGMLQuantizationType.Q4_0)
    with pytest.raises(KvfmtError, match="Q4_0 where"):
        register()


# how heads are stored


def writable(name: str) -> bool:
    try:
        HeadStore(cache_type(name), 64, True)
    except KvfmtError as error:
        assert "can be read here, not written" in str(error)
        return False
    return True


def test_which_types_are_written():
    assert [name for name in known_types() if not writable(name)] == ["iq4_nl"]


@pytest.mark.parametrize("size", [64, 80, 96, 100, 128, 192])
@pytest.mark.parametrize("name", [name for name in known_types() if name != "iq4_nl" and name not in set(FORMATS) - set(PLAIN)])
def test_a_head_comes_back(name, size):
    for keys, interleave in ((True, True), (False, False)):
        store = HeadStore(cache_type(name), size, keys, interleave=interleave)
        x = heads(size)
        data = store.encode(x)
        assert data.shape == (*SHAPE, store.row_bytes) and data.dtype == np.uint8
        again = store.decode(data)
        assert again.shape == x.shape
        limit = {"f32": 1e-12, "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-3}.get(name, 0.2)
        assert np.mean((again - x) ** 2) < limit * np.mean(x**2)
        # a token's bytes depend on it alone
        assert all(np.array_equal(store.encode(x[:, :, i : i + 1])[:, :, 0], data[:, :, i]) for i in range(SHAPE[2]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [name for name in known_types() if name != "iq4_nl" and name not in set(FORMATS) - set(PLAIN)])
def test_values_that_a_type_cannot_hold_are_stored_without_a_word(name):
    store = HeadStore(cache_type(name), 64, True)
    usual = heads(64, shape=(1, 1, 3))
    for value in (np.nan, np.inf, -np.inf, 65504, 1e30, 3e38, 1e300, 1e-40, 0.0):
        x = np.concatenate([usual, np.full(usual.shape, value)], axis=1)
        # the other head's blocks are not touched by them
        np.testing.assert_allclose(store.decode(store.encode(x))[:, :1], store.decode(store.encode(usual)), atol=1e-5, err_msg=str(value))


@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_the_bytes_are_those_of_llama_cpps_rotation(size):
    for keys in (True, False):
        x = heads(size)
        rotated = hadamard(x, rotation_size(size, keys))
        assert np.array_equal(HeadStore(cache_type("kvq3"), size, keys).encode(x), registry.get("kvq3").encode(rotated))
    order = interleaved_order(size)
    x = heads(size)
    turned = np.stack([x[..., : size // 2], x[..., size // 2 :]], axis=-1).reshape(x.shape)
    assert np.array_equal(x[..., order], turned)


def test_under_a_profile():
    made = profile(layout="kvt3", size=128)
    for k, v in layer_stores([(128, 128)] * 3, "kvt3/kve8_2", None, made, interleave=True):
        assert (k.domain, v.domain) == ("map", "map")
        x = heads(128)
        turned = x[..., interleaved_order(128)]
        stored = np.einsum("hij,bhtj->bhti", k.maps.forward.astype(np.float64), turned.astype(np.float64) - k.maps.mean[:, None])
        packed = registry.get("kvt3").encode(stored.astype(np.float32))
        assert np.array_equal(k.encode(x), packed)
        # asked as llama.cpp asks: A^-T q on what is stored is q on what comes back, but for the mean
        q = rng(4).standard_normal((3, 128))
        asked = np.einsum("bhti,hij,hj->bht", registry.get("kvt3").decode(packed).astype(np.float64), made.maps[0].q_map.astype(np.float64), q)
        direct = np.einsum("bhti,hi->bht", k.decode(packed).astype(np.float64)[..., interleaved_order(128)] - k.maps.mean[:, None], q)
        np.testing.assert_allclose(asked, direct, atol=1e-4)
        assert np.mean((v.decode(v.encode(x)) - x) ** 2) < 0.25


@pytest.mark.parametrize("size", [64, 192, 80])
def test_scaled_keys_are_rotated_after(size):
    """By llama.cpp's formula, to the bit: R((k - mean) * scale), each step rounded to float32. Heads of 80 are padded."""
    made = profile(layout="scaled", size=size, heads=3)
    maps, name = made.maps[1], "kvq4"
    made = replace(made, maps={i: replace(m, v_map=None, o_map=None) for i, m in made.maps.items()}, layout_v=("",) * 3)
    k, v = layer_stores([(size, size)] * 3, name, None, made, interleave=True)[1]
    padded = -(-size // 64) * 64
    assert k.domain == f"scaled, hadamard {rotation_size(padded, True)}" and v.domain.startswith("hadamard") and not k.mapped and k.profiled
    x = heads(size)
    stored = np.zeros((*SHAPE, padded), np.float32)
    stored[..., :size] = (x[..., interleaved_order(size)] - maps.k_mean[:, None]) * maps.k_scale[:, None]
    data = k.encode(x)
    assert np.array_equal(data, registry.get(name).encode(hadamard(stored, rotation_size(padded, True))))
    again = k.decode(data)
    noise = (again - x)[..., interleaved_order(size)] * maps.k_scale[:, None]
    assert np.mean(noise**2) < 0.02 * np.mean(stored**2)
    assert all(np.array_equal(k.encode(x[:, :, i : i + 1])[:, :, 0], data[:, :, i]) for i in range(SHAPE[2]))
    with pytest.raises(KvfmtError, match="maps of 3 KV heads, these are 2"):
        k.encode(heads(size, shape=(1, 2, 5)))


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(PLAIN)))
@pytest.mark.parametrize("size", [64, 128, 192])
def test_channels_in_order_are_mixed_and_not_rotated(name, size):
    made = profile(layout=name, size=size, order=True, centred=True)
    maps = made.maps[1]
    k, v = layer_stores([(size, size)] * 3, f"{name}/kve8_2", None, made, interleave=True)[1]
    assert (k.domain, v.domain, k.rotation) == ("map", "scaled, hadamard 64", 1) and k.mapped and k.profiled
    x = heads(size)
    turned = (x[..., interleaved_order(size)] - maps.k_mean[:, None]) * maps.k_scale[:, None]
    stored = np.empty_like(turned)
    for h in range(3):
        slots = turned[:, h][..., maps.k_order[h]].astype(np.float64).reshape(2, 5, -1, 16)
        stored[:, h] = np.einsum("ij,btgj->btgi", maps.k_mix.astype(np.float64), slots).reshape(2, 5, size)
    data, direct = k.encode(x), registry.get(name).encode(stored)
    # A sum of 16 in float32 may fall to the other side of a code now and then.
    assert np.mean(data != direct) < 0.01
    # Asked as llama.cpp asks: M P (q / scale) on what is stored is q on what comes back, but for the mean.
    q = rng(4).standard_normal((3, size))
    asked = np.stack([(maps.k_mix.astype(np.float64) @ (q / maps.k_scale)[h][maps.k_order[h]].reshape(-1, 16).T).T.ravel() for h in range(3)])
    scores = np.einsum("bhti,hi->bht", registry.get(name).decode(data).astype(np.float64), asked)
    again = k.decode(data).astype(np.float64)[..., interleaved_order(size)]
    np.testing.assert_allclose(scores, np.einsum("bhti,hi->bht", again - maps.k_mean[:, None], q), atol=2e-3)
    np.testing.assert_allclose(again, k.maps.restore(registry.get(name).decode(data)), atol=1e-4)
    assert np.mean((again - maps.k_mean[:, None] - turned / maps.k_scale[:, None]) ** 2 * maps.k_scale[:, None] ** 2) < 0.3 * np.mean(turned**2)
    assert all(np.array_equal(k.encode(x[:, :, i : i + 1])[:, :, 0], data[:, :, i]) for i in range(SHAPE[2]))


@pytest.mark.parametrize("size", [64, 192, 80])
def test_centred_values_are_rotated_after(size):
    """To the bit as llama.cpp stores them; what attention makes of them has the mean in it once. Heads of 80 are padded."""
    made = profile(layout="scaled", size=size, centred=True)
    k, v = layer_stores([(size, size)] * 3, "f16/kvq4", None, made, interleave=True)[1]
    padded, mean = -(-size // 64) * 64, made.maps[1].v_mean[:, None]
    assert v.domain == "scaled, hadamard 64" and v.profiled and not v.mapped and v.divisor is None and not k.profiled
    x = heads(size) + mean
    stored = np.zeros((*SHAPE, padded), np.float32)
    stored[..., :size] = x - mean
    data = v.encode(x)
    assert np.array_equal(data, registry.get("kvq4").encode(hadamard(stored, 64)))
    again = v.decode(data)
    assert np.mean((again - x) ** 2) < 0.02
    weights = rng(3).dirichlet(np.ones(SHAPE[2]), (2, 3))
    without = hadamard(registry.get("kvq4").decode(data), 64)[..., :size]
    np.testing.assert_allclose(np.einsum("bht,bhti->bhi", weights, again), np.einsum("bht,bhti->bhi", weights, without) + mean[:, 0], atol=1e-5)
    with pytest.raises(KvfmtError, match="maps of 3 KV heads, these are 2"):
        v.encode(heads(size, shape=(1, 2, 5)))


def test_mapped_values_may_be_centred_too():
    plain = profile()
    made = replace(plain, maps={i: replace(m, v_mean=np.full((3, 64), 5, np.float32)) for i, m in plain.maps.items()})
    (_, v), (_, other) = (layer_stores([(64, 64)] * 3, "kvq4", None, p)[0] for p in (made, plain))
    assert v.domain == other.domain == "map"
    x = heads(64)
    assert np.array_equal(v.encode(x + 5), other.encode(x)) or np.mean(v.encode(x + 5) != other.encode(x)) < 0.01
    np.testing.assert_allclose(v.decode(other.encode(x)), other.decode(other.encode(x)) + 5, atol=1e-5)


@pytest.mark.parametrize(
    "arguments, what",
    [
        (dict(kv="kvt3/kvq2"), "kvt3 needs a calibration profile"),
        (dict(kv=None), "no cache types"),
        (dict(kv="kvq9"), "unknown cache type"),
        (dict(kv="iq4_nl"), "not written"),
        (dict(kv="iq4_nl", sizes=None), "not written"),  # before the first token
        (dict(kv=""), "unknown cache type ''"),
        (dict(kv="kvq3", protect=-1), "negative"),
        (dict(kv="kvq3", profile=profile(2)), "2 layers, the model has 3"),
        (dict(kv="kvq3", profile=profile(3, size=128)), "heads of 128 values, these have 64"),
        (dict(kv="kvq3", profile=profile(3, layout="kvt3")), "does not suit"),
        (dict(kv="kvt3/kvq2", profile=profile(3, layout="scaled")), "layer 0: cache type kvt3 does not suit the profile's layout 'scaled'"),
        (dict(kv="kvq3", profile=profile(3, size=80), sizes=(80, 80)), "cannot be padded"),
        (dict(kv="kvt4/kvq2", profile=profile(3, layout="kvt3", order=True)), "layer 0: cache type kvt4 does not suit the profile's layout 'kvt3'"),
        (dict(kv="f16/kvq2", profile=profile(3, size=128, centred=True), sizes=(128, 64)), "heads of 128 values, these have 64"),
        (dict(kv="kvq3", sizes=(65, 64), interleave=True), "no halves"),
    ],
)
def test_stores_that_cannot_be(arguments, what):
    sizes = arguments.pop("sizes", (64, 64))
    with pytest.raises(KvfmtError, match=what):
        layer_stores([sizes] * 3, **arguments)


def test_heads_that_do_not_fit():
    store = layer_stores([(64, 64)] * 3, "kvq3", 0, profile())[1][0]
    for x, what in ((heads(80), "64] was expected"), (heads(64, shape=(1, 2, 5)), "maps of 3 KV heads")):
        with pytest.raises(KvfmtError, match=what):
            store.encode(x)
    with pytest.raises(KvfmtError, match="26 bytes were expected"):
        store.unpack(np.zeros((1, 3, 5, 34), np.uint8))


# the file


@pytest.mark.parametrize("kv", [*PLAIN, "kvq3/kvq2", "f16/q8_0", "bf16/f32"])
@pytest.mark.parametrize("sizes", [(64, 64), (80, 96), (128, 64)])
def test_round_trip(tmp_path, kv, sizes):
    path = tmp_path / "cache.gguf"
    stores = layer_stores([sizes] * 4, kv, 1)
    stores[2] = None
    rows = file_of(path, stores, name="test")
    found = read_cache(path)
    assert found.name == "test" and [layer and layer.shape for layer in found.layers] == [SHAPE, SHAPE, None, SHAPE]
    places = [(i, side) for i in (0, 1, 3) for side in "kv"]
    for (i, side), data in zip(places, rows):
        assert np.array_equal(found.rows(i, side), data)
        store = stores[i]["kv".index(side)]
        assert np.array_equal(found.decode(i, side), store.decode(data))
    for wrong in ((2, "k"), (4, "k"), (-1, "k"), (0, "q")):
        with pytest.raises(KvfmtError, match="has no"):
            found.rows(*wrong)
    reader = gguf.GGUFReader(path)
    assert [t.name for t in reader.tensors] == [f"blk.{i}.{side}" for i, side in places]
    for (i, side), tensor, data in zip(places, reader.tensors, rows):
        store = stores[i]["kv".index(side)]
        assert tensor.tensor_type.name.lower() == store.kind.name
        assert tensor.shape.tolist() == [store.padded, *SHAPE[::-1]]
        assert tensor.data.tobytes() == data.tobytes()


@pytest.mark.parametrize(
    "layout, kv, how",
    [
        ("kvt3", "kvt3/kve8_2", {}), ("scaled", "kvq4/kve8_2", {}), ("scaled", "q8_0/f16", {}), ("kvt4", "kvt4/kve8_2", {"order": True, "centred": True}),
        ("flat", "f16/kve8_2", {"centred": True}),
    ],
)
def test_a_mapped_cache_carries_its_profile(tmp_path, layout, kv, how):
    path, made = tmp_path / "cache.gguf", profile(layout=layout, **how)
    stores = layer_stores([(64, 64)] * 3, kv, None, made, interleave=True)
    rows = file_of(path, stores, profile=made)
    found = read_cache(path)
    assert found.profile.hash == made.hash and found.interleaved
    for side, store, data in zip("kv", stores[1], rows[2:]):
        assert np.array_equal(found.decode(1, side), store.decode(data))
        assert np.array_equal(read_cache(path, made).decode(1, side), found.decode(1, side))
    with pytest.raises(KvfmtError, match="was written under profile"):
        read_cache(path, profile(layout=layout, seed=2, **how))
    with pytest.raises(KvfmtError, match="cannot be read without its profile"):
        file_of(path, stores)
    # Under a profile of an older kvfmt: its own version is another matter.
    data, key = bytearray(path.read_bytes()), b"kvfmt.profile.version"
    data[data.index(key) + len(key) + 4] = 1
    path.write_bytes(data)
    with pytest.raises(KvfmtError, match="cache.gguf: the profile is of version 1, which an older kvfmt wrote") as refused:
        read_cache(path)
    assert refused.value.hint == "Read it with the build that wrote it."


class _Gguf:
    """The reader of the ggml that the wheel carries, through ctypes."""

    class Params(ctypes.Structure):
        _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]

    def __init__(self) -> None:
        from pathlib import Path

        (library,) = Path(patched_bindings().__file__).parent.glob("lib/libggml-base.*")
        lib = self.lib = ctypes.CDLL(str(library))
        shapes = {
            "gguf_init_from_file": (ctypes.c_void_p, [ctypes.c_char_p, self.Params]),
            "gguf_free": (None, [ctypes.c_void_p]),
            "gguf_get_n_tensors": (ctypes.c_int64, [ctypes.c_void_p]),
            "gguf_get_data_offset": (ctypes.c_size_t, [ctypes.c_void_p]),
            "gguf_get_tensor_name": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
            "gguf_get_tensor_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
            "gguf_get_tensor_size": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
            "gguf_get_tensor_offset": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
            "gguf_get_tensor_ne": (ctypes.POINTER(ctypes.c_int64), [ctypes.c_void_p, ctypes.c_int64]),
            "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
        }
        for name, (result, arguments) in shapes.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments

    def tensors(self, path) -> list[tuple[str, str, list[int], bytes]] | None:
        """Name, type, ne and bytes of each; None if ggml does not read the file."""
        lib, raw = self.lib, path.read_bytes()
        context = lib.gguf_init_from_file(str(path).encode(), self.Params(True, None))
        if not context:
            return None
        start, found = lib.gguf_get_data_offset(context), []
        for i in range(lib.gguf_get_n_tensors(context)):
            at, size = start + lib.gguf_get_tensor_offset(context, i), lib.gguf_get_tensor_size(context, i)
            kind = lib.ggml_type_name(lib.gguf_get_tensor_type(context, i)).decode()
            found.append((lib.gguf_get_tensor_name(context, i).decode(), kind, lib.gguf_get_tensor_ne(context, i)[:4], raw[at : at + size]))
        lib.gguf_free(context)
        return found


@pytest.mark.parametrize("name", FORMATS)
def test_ggml_reads_it(tmp_path, name):
    path = tmp_path / "cache.gguf"
    made = profile(layout=name) if name not in PLAIN else None
    stores = layer_stores([(64, 64)] * 3, name + "/kvq2", None if made else 1, made)
    rows = file_of(path, stores, profile=made)
    found = _Gguf().tensors(path)
    places = list(itertools.product(range(3), "kv"))
    assert [entry[0] for entry in found] == [f"blk.{i}.{side}" for i, side in places]
    for (i, side), (_, kind, ne, data), row in zip(places, found, rows):
        store = stores[i]["kv".index(side)]
        assert kind == store.kind.name and ne == [store.padded, *SHAPE[::-1]] and data == row.tobytes()


@pytest.mark.parametrize("what", ["too few", "too many", "shape", "dtype", "no layers", "folder"])
def test_rows_that_do_not_fit(tmp_path, what):
    path = tmp_path / "cache.gguf"
    path.write_bytes(b"before")
    stores = layer_stores([(64, 64)], "kvq3", 0)
    layer = Layer(*stores[0], SHAPE)
    rows = [s.encode(heads(64)) for s in stores[0]]
    cases = {
        "too few": ([layer], rows[:1]), "too many": ([layer], rows * 2), "shape": ([layer], [rows[0][:, :, :-1], rows[1]]),
        "dtype": ([layer], [rows[0].view(np.int8), rows[1]]), "no layers": ([None], []), "folder": ([layer], rows),
    }
    with pytest.raises(KvfmtError):
        write_cache(tmp_path / "no" / "cache.gguf" if what == "folder" else path, *cases[what])
    assert path.read_bytes() == b"before" and [p.name for p in tmp_path.iterdir()] == ["cache.gguf"]


def test_layers_are_taken_one_by_one(tmp_path):
    """Rows are asked for only when those before are in the file."""
    stores = layer_stores([(64, 64)] * 3, "kvq3", 0)
    shape = (1, 4, 4096)
    sizes = []

    def rows():
        for pair in stores:
            for store in pair:
                (partial,) = tmp_path.glob(".*.partial")
                sizes.append(partial.stat().st_size)
                yield np.zeros((*shape, store.row_bytes), np.uint8)

    write_cache(tmp_path / "cache.gguf", [Layer(*pair, shape) for pair in stores], rows())
    steps = np.diff(sizes)
    assert len(sizes) == 6 and (np.abs(steps - 4 * 4096 * 26) < 1 << 16).all()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "cache.gguf"
    file_of(path, layer_stores([(64, 64)] * 2, "kvq3/kvq2", 0), name="small")
    return path


@given(st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_an_error_or_harmless(small, tmp_path, data):
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(raw), 1200) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    try:
        found = read_cache(path)
        for i, layer in enumerate(found.layers):
            for side, store in layer.sides if layer else ():
                # a damaged scale may be infinite, as it may in llama.cpp
                assert found.decode(i, side).shape == (*layer.shape, store.size)
    except KvfmtError:
        pass


def changed(small, tmp_path, key: str, value) -> str:
    """What ``read_cache`` says of the file with one metadata value replaced."""
    reader, path = gguf.GGUFReader(small), tmp_path / "changed.gguf"
    writer = gguf.GGUFWriter(path, "kvfmt-cache")
    for field in reader.fields.values():
        if field.name.startswith("kvfmt.") and (field.name != key or value is not None):
            kinds = field.types
            writer.add_key_value(field.name, value if field.name == key else field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(KvfmtError) as error:
        read_cache(path)
    return str(error.value)


@pytest.mark.parametrize(
    "key, value, what",
    [
        ("version", 2, "of version 2"), ("layers", 3, "2 entries for 3 layers"), ("layers", 0, "0 layers"), ("layers", None, "layers has GGUF type None"),
        ("types_k", ["kvq3", "kvq4"], "kvq4"), ("types_v", ["nonsense", "kvq2"], "nonsense"), ("types_v", ["", "kvq2"], "type ''"),
        ("formats", ["kvq3=" + "0" * 64, "kvq2=" + "0" * 64], "another definition of kvq3"), ("head_k", [64, 100], "with heads of 100 is stored"),
        ("head_k", [64, 0], "heads of 0"), ("domain_k", ["plain", "hadamard 64"], "said to be stored 'plain'"), ("domain_v", ["hadamard 64", "map"], "profile"),
        ("domain_k", ["scaled, hadamard 64", "hadamard 64"], "profile"),
    ],
)
def test_what_is_refused_is_named(small, tmp_path, key, value, what):
    assert what in changed(small, tmp_path, f"kvfmt.cache.{key}", value)


# dumps


def dumped(layers: int = 3, k: int = 80, v: int = 64, dtype=np.float32) -> dict[str, np.ndarray]:
    return {f"layers.{i}.{side}": heads(size, 7 * i + size).astype(dtype) for i in range(layers) for side, size in (("k", k), ("v", v))}


def as_npz(path, arrays, compress=False):
    (np.savez_compressed if compress else np.savez)(path, **arrays)
    return path


def as_safetensors(path, arrays, names={np.dtype("f4"): "F32", np.dtype("f2"): "F16", np.dtype("f8"): "F64", np.dtype("u2"): "BF16"}):
    header, at = {"__metadata__": {"a": "b"}}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays.values()))
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("kind", ["npz", "npz compressed", "safetensors"])
def test_a_dump_is_packed_and_unpacked(tmp_path, kind, dtype):
    arrays = dumped(dtype=dtype)
    path = tmp_path / f"dump.{kind.split()[0]}"
    as_safetensors(path, arrays) if kind == "safetensors" else as_npz(path, arrays, "compressed" in kind)
    target = tmp_path / "cache.gguf"
    pack(open_dump(path), target, "kvq3/kvq2", 1)
    found = read_cache(target)
    stores = layer_stores([(80, 64)] * 3, "kvq3/kvq2", 1)
    for i, pair in enumerate(stores):
        for side, store in zip("kv", pair):
            assert np.array_equal(found.rows(i, side), store.encode(arrays[f"layers.{i}.{side}"].astype(np.float32)))
    for back in (tmp_path / "back.npz", tmp_path / "back.safetensors"):
        unpack(found, back)
        again = open_dump(back)
        for i, side in itertools.product(range(3), "kv"):
            assert np.array_equal(again.read(i, side), found.decode(i, side))
    with np.load(tmp_path / "back.npz") as there:
        assert np.array_equal(there["layers.1.v"], found.decode(1, "v"))


def test_bf16_and_batchless_dumps(tmp_path):
    x = {name: array[0] for name, array in dumped().items()}
    upper = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in x.items()}
    found = open_dump(as_safetensors(tmp_path / "dump.safetensors", upper))
    assert found.shapes[1, "k"] == (1, 3, 5, 80)
    assert np.array_equal(found.read(1, "k")[0], (upper["layers.1.k"].astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize(
    "name, role",
    [
        ("layers.3.k", (3, "k")), ("past_key_values.12.value", (12, "v")), ("v_0", (0, "v")), ("KEYS-7", (7, "k")), ("blk.1.v", (1, "v")),
        ("layer1", None), ("k", None), ("layers.1.k.2", None), ("layers.1.k.v", None), ("weight.1", None), ("k.99999999", None),
    ],
)
def test_roles(name, role):
    assert role_of(name) == role


@pytest.mark.parametrize(
    "shapes, what",
    [
        ({}, "no arrays"), ({"a.k": (1, 2, 3, 4)}, "not the keys or the values"), ({"0.k": (1, 2, 3, 4)}, "layer 0 has only K"),
        ({"0.k": (1, 2, 3, 4), "0.key": (1, 2, 3, 4)}, "are both K"), ({"0.k": (2, 3), "0.v": (2, 3)}, "head size"),
        ({"0.k": (1, 2, 3, 4), "0.v": (1, 2, 4, 4)}, "same batch"), ({"0.k": (1, 2, 0, 4), "0.v": (1, 2, 0, 4)}, "head size"),
    ],
)
def test_arrays_that_are_no_dump(shapes, what):
    with pytest.raises(KvfmtError, match=what):
        dump_of("dump", shapes, lambda name: None)


def test_npz_that_are_no_dump(tmp_path):
    def refused(path) -> str:
        with pytest.raises(KvfmtError) as error:
            open_dump(path)
        return str(error.value)

    assert "no file" in refused(tmp_path / "nowhere.npz")
    assert "neither" in refused(tmp_path / "dump.txt")
    (tmp_path / "text.npz").write_text("text")
    assert "cannot be opened" in refused(tmp_path / "text.npz")
    assert "int64" in refused(as_npz(tmp_path / "int.npz", {"0.k": np.zeros((1, 1, 1, 64), np.int64)}))
    # an array of objects is code that would run
    np.savez(tmp_path / "object.npz", **{"0.k": np.array([{}], object)})
    assert "object" in refused(tmp_path / "object.npz")
    # a header that promises more than there is
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "large.npz", "w") as archive:
        archive.writestr("0.k.npy", stream.getvalue())
    assert "in 0 bytes" in refused(tmp_path / "large.npz")


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_damaged_dump_is_an_error_or_harmless(tmp_path, kind, data):
    arrays = dumped(1, 64, 64)
    path = tmp_path / f"dump.{kind}"
    if not path.exists():
        as_npz(path, arrays) if kind == "npz" else as_safetensors(path, arrays)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        edge = min(len(raw), 300)
        at = data.draw(st.one_of(st.integers(0, edge - 1), st.integers(len(raw) - edge, len(raw) - 1)))
        raw[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    damaged = tmp_path / f"damaged.{kind}"
    damaged.write_bytes(raw)
    try:
        found = open_dump(damaged)
        for layer, side in found.shapes:
            assert found.read(layer, side).dtype.kind == "f"
    except KvfmtError:
        pass


def test_every_byte_of_a_dumps_directory_may_be_wrong(tmp_path):
    # zipfile raises NotImplementedError for a version that it does not know, UnicodeDecodeError for a name.
    path = as_npz(tmp_path / "dump.npz", dumped(1, 64, 64))
    raw = path.read_bytes()
    start = raw.index(b"PK\x01\x02")
    said = set()
    for at in range(start, len(raw)):
        for value in (0, 64, 255):
            path.write_bytes(raw[:at] + bytes([value]) + raw[at + 1 :])
            try:
                found = open_dump(path)
                for layer, side in found.shapes:
                    found.read(layer, side)
            except KvfmtError as error:
                said.add(error.message)
    assert any("zip file version" in message for message in said) and len(said) > 5


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 1}', b'{"0.k": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}', b"\xff", b"[" * 100000])
def test_safetensors_headers_that_are_wrong(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(KvfmtError):
        read_safetensors(path)


def test_the_commands(tmp_path):
    def call(*arguments) -> str:
        done = CliRunner().invoke(app, [str(a) for a in arguments])
        return f"{done.exit_code} {' '.join(done.output.split())}"

    dump, cache, back = as_npz(tmp_path / "dump.npz", dumped()), tmp_path / "cache.gguf", tmp_path / "back.safetensors"
    said = call("pack", dump, "-o", cache, "--kv", "kvq4", "--protect", 0)
    assert f"kvfmt unpack {cache}" in call("inspect", cache)
    # 80 values are padded to 128: 68 bytes for 80 values of K, 34 for 64 of V
    assert said.startswith("0 ") and f"{8 * (68 + 34) / 144:.3f} bits/value" in said
    assert call("unpack", cache, "-o", back).startswith("0 ")
    assert open_dump(back).layers == 3
    assert "no file" in call("pack", tmp_path / "no.npz", "-o", cache, "--kv", "kvq4")
    for wrong in (["pack", dump, "-o", cache], ["pack", dump, "-o", cache, "--kv", ""], ["pack", tmp_path / "no.npz", "-o", cache, "--kv", "kvq4"], ["unpack", dump, "-o", back], ["unpack", cache, "-o", tmp_path / "x"]):
        said = call(*wrong)
        assert said.startswith("1 ") and "error:" in said and "what to do:" in said, wrong


def test_without_torch_the_cache_for_transformers_says_so():
    code = "import sys; sys.modules['torch'] = None\nfrom kvfmt.errors import MissingTool\ntry: import kvfmt.torch\nexcept MissingTool as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "torch is not installed" in done.stdout and "kvfmt[torch]" in done.stdout, done.stderr
