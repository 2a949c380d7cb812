"""The profile file: what is written is read, what is damaged or another model's is refused by name."""

from __future__ import annotations

import dataclasses
import io
import struct

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import random_gguf
from random_profile import as_kvfmt, random_profile
from kvfmt import registry
from kvfmt.errors import KvfmtError
from kvfmt.calibrate import stored_maps
from kvfmt.cli import app
from kvfmt.distortion import slot_noise
from kvfmt.geometry import key_maps, layout_for, mixing, value_mean
from kvfmt.gguf_read import read_gguf
from kvfmt.moments import LayerStatistics
from kvfmt.profile import VERSION, LayerMaps, Profile, ProfileError, fingerprint_of, formats_of
from kvfmt.profile_view import facts, gains, layer_table, summary
from kvfmt.side_maps import SideMaps
from kvfmt.transform import hadamard

HEAD, HEADS, LAYERS = 64, 2, 4


def statistics(rng: np.random.Generator, heads: int = HEADS, size: int = HEAD) -> LayerStatistics:
    def moment() -> np.ndarray:
        x = rng.standard_normal((heads, size, 2 * size)).astype(np.float32)
        return x @ x.transpose(0, 2, 1) / (2 * size)

    def vector() -> np.ndarray:
        return rng.standard_normal((heads, size)).astype(np.float32)

    return LayerStatistics(1000, 2000, vector(), moment(), moment(), vector(), moment(), vector(), vector(), True, size, False)


def make(layers: int = LAYERS, head: int = HEAD, heads: int = HEADS, fingerprint: str = "0123456789abcdef", **more) -> Profile:
    """Layer 1 has nothing, layer 2 has no mean, and values are mapped in layer 3."""
    rng = np.random.default_rng(3)

    def pair(transposed: bool) -> tuple[np.ndarray, np.ndarray]:
        a = np.stack([np.linalg.qr(rng.standard_normal((head, head)))[0] for _ in range(heads)])
        a *= 1.5
        inverse = np.linalg.inv(a)
        return a.astype(np.float16), (inverse.transpose(0, 2, 1) if transposed else inverse).astype(np.float32 if transposed else np.float16)

    maps = {}
    for layer in (i for i in range(layers) if i != 1):
        k, q = pair(True)
        v, o = pair(False) if layer == 3 else (None, None)
        mean = None if layer == 2 else rng.standard_normal((heads, head)).astype(np.float32)
        maps[layer] = LayerMaps(mean, k, q, v, o)
    fields = dict(
        name="test", architecture="llama", layers=layers, fingerprint=fingerprint,
        layout_k=tuple("" if i == 1 else "flat" for i in range(layers)), layout_v=tuple("flat" if i == 3 else "" for i in range(layers)),
        maps=maps, statistics={0: statistics(rng, heads, head)}, provenance={"tokens": 1000, "text.name": ["docs"], "context": [128, 256], "centre": True},
    )
    return Profile(**{**fields, **more})


def assert_same(a: Profile, b: Profile) -> None:
    for f in dataclasses.fields(Profile):
        if f.name not in ("maps", "statistics"):
            assert getattr(a, f.name) == getattr(b, f.name), f.name
    for kind in ("maps", "statistics"):
        assert set(getattr(a, kind)) == set(getattr(b, kind))
        for layer, found in getattr(a, kind).items():
            for f in dataclasses.fields(found):
                x, y = getattr(found, f.name), getattr(getattr(b, kind)[layer], f.name)
                assert (x is None) == (y is None) and type(x) is type(y), f.name
                if isinstance(x, np.ndarray):
                    assert x.dtype == y.dtype
                    np.testing.assert_array_equal(x, y)
                else:
                    assert x == y


def test_what_is_written_is_read(tmp_path):
    types = ("f16", "kvq3", "q8_0", "")
    profile = make(types_k=types, types_v=types, formats=formats_of(types))
    assert profile.formats == {"kvq3": registry.get("kvq3").spec.hash}
    profile.write(tmp_path / "p.gguf")
    again = Profile.read(tmp_path / "p.gguf")
    assert_same(profile, again)
    assert again.hash == profile.hash
    assert again.sidecar_bytes == 3 * HEADS * HEAD * HEAD * (2 + 4) + 2 * HEADS * HEAD * 4 + HEADS * HEAD * HEAD * (2 + 2)
    assert [f.name for f in tmp_path.iterdir()] == ["p.gguf"]


def test_the_file_is_laid_out_as_llama_cpp_reads_it(tmp_path):
    profile = make()
    profile.write(tmp_path / "p.gguf")
    # gguf-py's reader is another implementation than the one that is tested.
    reader = GGUFReader(tmp_path / "p.gguf")
    assert reader.fields["general.architecture"].contents() == "kvfmt-profile"
    assert reader.fields["kvfmt.profile.layout_k"].contents() == ["flat", "", "flat", "flat"]
    assert reader.fields["kvfmt.profile.hash"].contents() == profile.hash
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["blk.0.kv_k_mean"].shape.tolist() == [HEAD, HEADS]
    key = tensors["blk.0.kv_k_map"]
    assert key.shape.tolist() == [HEAD, HEAD, HEADS] and key.tensor_type.name == "F16"
    # ggml_mul_mat(map, k): value j of the result is map[:, j] . k, and ne0 runs fastest.
    flat = np.asarray(key.data).reshape(-1)
    np.testing.assert_array_equal(flat[HEAD * HEAD + 5 * HEAD : HEAD * HEAD + 6 * HEAD], profile.maps[0].k_map[1, 5])
    assert "blk.1.kv_k_map" not in tensors and "blk.2.kv_k_mean" not in tensors and "kvfmt.profile.formats" not in reader.fields


def test_the_hash_is_over_what_llama_cpp_reads():
    profile = make()
    same = [make(name="other"), make(provenance={}), make(statistics={})]
    assert {p.hash for p in same} == {profile.hash}
    changed = dict(profile.maps)
    mean = profile.maps[0].k_mean.copy()
    mean[0, 0] = np.nextafter(mean[0, 0], np.float32(9))
    changed[0] = dataclasses.replace(profile.maps[0], k_mean=mean)
    types = ("f16",) * LAYERS
    others = [make(maps=changed), make(fingerprint="f" * 16), make(architecture="qwen2"), make(types_k=types, types_v=types)]
    assert len({p.hash for p in [profile, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"layers": 0}, "0 layers"),
        ({"fingerprint": "xyz"}, "fingerprint"),
        ({"layout_k": ("flat",)}, "layout_k has 1 entries for 4"),
        ({"layout_k": ("flat", "", "q9", "flat")}, "layer 2 is 'q9'"),
        ({"layout_k": ("", "", "flat", "flat")}, "layer 0 has layout ''"),
        ({"layout_k": ("flat",) * 4}, "layer 1 has layout 'flat'"),
        ({"layout_v": ("",) * 4}, "layer 3 has layout '' for V"),
        ({"types_k": ("f16",) * 4}, "types for one of K and V"),
        ({"types_k": ("q9",) * 4, "types_v": ("f16",) * 4}, "types_k of layer 0 is 'q9'"),
        ({"types_k": ("kvq3",) * 4, "types_v": ("f16",) * 4}, "spec hashes"),
        ({"types_k": ("kvq3",) * 4, "types_v": ("f16",) * 4, "formats": {"kvq3": "12"}}, "64 hex digits"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, said):
    with pytest.raises(ProfileError, match=said):
        make(**change)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("k_mean", np.zeros((HEADS, 32), np.float32), "k_mean is"),
        ("k_mean", np.zeros((HEADS, HEAD), np.float16), "k_mean is float16"),
        ("k_mean", np.full((HEADS, HEAD), np.nan, np.float32), "not finite"),
        ("k_map", np.zeros((HEADS, HEAD, 32), np.float32), "k_map is"),
        ("k_map", np.zeros((HEADS, HEAD, HEAD)), "float64"),
        ("k_map", np.zeros((HEADS, HEAD, HEAD), np.float32), "does not undo"),
        ("k_map", np.full((HEADS, HEAD, HEAD), np.inf, np.float16), "not finite"),
        ("q_map", None, "layout 'flat' for K"),
        ("q_map", np.zeros((1, HEAD, HEAD), np.float32), "q_map is|k_mean is"),
        ("o_map", np.zeros((HEADS, HEAD, HEAD), np.float32), "layer 0 has layout ''"),
    ],
)
def test_bad_maps_are_refused(name, value, said):
    profile = make()
    with pytest.raises(ProfileError, match=said):
        make(maps={**profile.maps, 0: dataclasses.replace(profile.maps[0], **{name: value})})


def scaled(**more) -> Profile:
    """Layer 0 has both vectors, 2 only a scale, 3 a mean, and values are mapped there as ``make`` maps them."""
    profile = make(**{key: value for key, value in more.items() if key not in ("maps", "layout_k")})
    width = np.exp2(np.random.default_rng(4).standard_normal((HEADS, HEAD))).astype(np.float32)
    maps = {
        0: LayerMaps(profile.maps[0].k_mean, k_scale=width), 2: LayerMaps(k_scale=1 / width),
        3: dataclasses.replace(profile.maps[3], k_map=None, q_map=None),
    }
    layouts = tuple("" if i == 1 else "scaled" for i in range(LAYERS))
    return make(**{"maps": maps, "layout_k": layouts, **more})


def test_vectors_alone(tmp_path):
    profile = scaled()
    profile.write(tmp_path / "p.gguf")
    again = Profile.read(tmp_path / "p.gguf")
    assert_same(profile, again)
    assert again.hash == profile.hash and again.sidecar_bytes == 4 * HEADS * HEAD * 4 + HEADS * HEAD * HEAD * (2 + 2)
    tensors = {t.name: t for t in GGUFReader(tmp_path / "p.gguf").tensors}
    width = tensors["blk.0.kv_k_scale"]
    assert width.shape.tolist() == [HEAD, HEADS] and width.tensor_type.name == "F32" and "blk.0.kv_k_map" not in tensors
    np.testing.assert_array_equal(width.data.reshape(HEADS, HEAD), profile.maps[0].k_scale)
    other = profile.maps[0].k_scale.copy()
    other[1, 3] = np.nextafter(other[1, 3], np.float32(9))
    changed = scaled(maps={**profile.maps, 0: dataclasses.replace(profile.maps[0], k_scale=other)})
    assert len({profile.hash, changed.hash, make().hash}) == 3
    text = io.StringIO()
    Console(width=100, file=text).print(layer_table(profile))
    rows = {line.split()[0]: line.split() for line in text.getvalue().splitlines() if line.strip()[:1].isdigit()}
    assert rows["0"][1:7] == ["2x64", "scaled", "-", "-", "K", "scale"] and rows["2"][5:7] == ["no", "scale"] and "dB" in summary(profile)
    assert rows["3"][1:7] == ["2x64", "scaled", "flat", "-", "K", "-"]


@pytest.mark.parametrize(
    "layer, change, said",
    [
        (0, {"k_scale": np.ones((HEADS, 32), np.float32)}, "k_mean is .2, 64., k_scale .2, 32."),
        (0, {"k_scale": np.ones((HEADS, HEAD), np.float16)}, "k_scale is float16"),
        (0, {"k_scale": np.ones((HEADS, HEAD, HEAD), np.float32)}, "k_scale is float32"),
        (0, {"k_scale": np.full((HEADS, HEAD), np.nan, np.float32)}, "k_scale has values that are not finite"),
        (0, {"k_scale": np.zeros((HEADS, HEAD), np.float32)}, "k_scale has a value of 0"),
        (2, {"k_scale": np.full((HEADS, HEAD), -1, np.float32)}, "k_scale has a value of -1"),
        (2, {"k_scale": np.full((HEADS, HEAD), 1e-8, np.float32)}, "k_scale has a value of 1e-08"),
        (2, {"k_scale": np.full((HEADS, HEAD), 3e38, np.float32)}, r"k_scale has a value of 3e\+38"),
        (0, {"k_mean": np.full((HEADS, HEAD), 3e38, np.float32)}, r"k_mean has a value of 3e\+38"),
        (2, {"k_scale": None}, r"layer 2 has layout 'scaled' for K, and the tensors \[\]"),
        (0, {"k_map": np.stack([np.eye(HEAD, dtype=np.float32)] * HEADS)}, r"layer 0 has layout 'scaled' for K, and the tensors \['k_map'"),
        (1, {"k_mean": np.ones((HEADS, HEAD), np.float32)}, r"layer 1 has layout '' for K, and the tensors \['k_mean'\]"),
        (3, {"k_scale": np.ones((1, HEAD), np.float32)}, "k_mean is"),
    ],
)
def test_bad_vectors_are_refused(layer, change, said):
    profile = scaled()
    with pytest.raises(ProfileError, match=said):
        scaled(maps={**profile.maps, layer: dataclasses.replace(profile.maps.get(layer, LayerMaps()), **change)})


def test_a_scale_is_not_beside_a_matrix_nor_for_values():
    profile = make()
    with pytest.raises(ProfileError, match=r"layer 0 has layout 'flat' for K, and the tensors \['k_map', 'k_mean', 'k_scale'"):
        make(maps={**profile.maps, 0: dataclasses.replace(profile.maps[0], k_scale=np.ones((HEADS, HEAD), np.float32))})
    with pytest.raises(ProfileError, match=r"layer 3 has layout 'scaled' for V, and the tensors \['o_map', 'v_map'\]"):
        make(layout_v=("", "", "", "scaled"))


#: Types that order channels: only their layouts have an order.
ORDERED = [fmt.spec.name for fmt in registry.all_formats() if fmt.spec.needs_profile]


def ordered(**more) -> Profile:
    """Layer 0 has all that an order may have and centred values, 1 centred values alone, 2 an order without a mean, 3 matrices on
    both sides beside centred values. V's heads are half as large as K's in all but layer 3."""
    profile = make(**{key: value for key, value in more.items() if key not in ("maps", "layout_k", "layout_v", "formats")})
    rng = np.random.default_rng(6)

    def order() -> dict:
        return {
            "k_order": np.stack([rng.permutation(HEAD) for _ in range(HEADS)]).astype(np.int32), "k_mix": mixing(16).astype(np.float32),
            "k_scale": np.exp2(rng.standard_normal((HEADS, HEAD))).astype(np.float32),
        }

    def centre(size: int) -> np.ndarray:
        return rng.standard_normal((HEADS, size)).astype(np.float32)

    maps = {
        0: LayerMaps(profile.maps[0].k_mean, **order(), v_mean=centre(HEAD // 2)), 1: LayerMaps(v_mean=centre(HEAD // 2)), 2: LayerMaps(**order()),
        3: dataclasses.replace(profile.maps[3], v_mean=centre(HEAD)),
    }
    layouts = (ORDERED[0], "", ORDERED[1], "flat")
    fields = {"maps": maps, "layout_k": layouts, "layout_v": ("scaled", "scaled", "", "flat"), "formats": formats_of(layouts)}
    return make(**{**fields, **more})


def test_an_order_and_centred_values(tmp_path):
    profile = ordered()
    profile.write(tmp_path / "p.gguf")
    again = Profile.read(tmp_path / "p.gguf")
    assert_same(profile, again)
    assert again.hash == profile.hash
    vectors = (3 + 2) * HEADS * HEAD * 4 + 2 * HEADS * HEAD // 2 * 4 + 2 * 16 * 16 * 4
    assert again.sidecar_bytes == vectors + HEADS * HEAD * HEAD * (2 + 4 + 2 + 2) + 2 * HEADS * HEAD * 4
    tensors = {t.name: t for t in GGUFReader(tmp_path / "p.gguf").tensors}
    order, mix, mean = (tensors[f"blk.0.kv_{name}"] for name in ("k_order", "k_mix", "v_mean"))
    assert order.shape.tolist() == [HEAD, HEADS] and order.tensor_type.name == "I32"
    assert mix.shape.tolist() == [16, 16] and mean.shape.tolist() == [HEAD // 2, HEADS] and mix.tensor_type.name == mean.tensor_type.name == "F32"
    np.testing.assert_array_equal(order.data.reshape(HEADS, HEAD), profile.maps[0].k_order)
    assert GGUFReader(tmp_path / "p.gguf").fields["kvfmt.profile.version"].contents() == VERSION == 2
    assert [(maps.layout_k("x"), maps.layout_v("y")) for maps in profile.maps.values()] == [("x", "scaled"), ("", "scaled"), ("x", ""), ("x", "y")]


@pytest.mark.parametrize("name", ["k_order", "k_mix", "k_scale", "v_mean", "k_mean"])
def test_each_tensor_counts_in_the_hash(name):
    profile = ordered()
    other = getattr(profile.maps[0], name).copy()
    if name == "k_order":
        other[0, [3, 5]] = other[0, [5, 3]]
    elif name == "k_mix":
        other[[3, 5]] = other[[5, 3]]
    else:
        other[0, 3] = np.nextafter(other[0, 3], np.float32(9))
    changed = ordered(maps={**profile.maps, 0: dataclasses.replace(profile.maps[0], **{name: other})})
    assert changed.hash != profile.hash
    assert ordered().hash == profile.hash


def repeated() -> np.ndarray:
    order = np.tile(np.arange(HEAD, dtype=np.int32), (HEADS, 1))
    order[1, 7] = 6
    return order


@pytest.mark.parametrize(
    "layer, change, said",
    [
        (0, {"k_order": repeated()}, "k_order of head 1 does not name each of 64 channels once"),
        (0, {"k_order": np.tile(np.arange(1, HEAD + 1, dtype=np.int32), (HEADS, 1))}, "k_order of head 0 does not name"),
        (0, {"k_order": np.tile(np.arange(-1, HEAD - 1, dtype=np.int32), (HEADS, 1))}, "k_order of head 0 does not name"),
        (0, {"k_order": np.tile(np.arange(HEAD), (HEADS, 1))}, "k_order is int64"),
        (0, {"k_order": np.tile(np.arange(HEAD, dtype=np.float32), (HEADS, 1))}, "k_order is float32"),
        (0, {"k_order": np.zeros(HEADS, np.int32)}, r"k_order is int32 \(2,\)"),
        (0, {"k_order": np.arange(HEAD, dtype=np.int32)[None]}, "k_mean is"),
        (0, {"k_order": np.tile(np.arange(32, dtype=np.int32), (HEADS, 1))}, r"k_scale is \(2, 64\), k_order \(2, 32\)"),
        (0, {"k_mix": mixing(16)}, "k_mix is float64"),
        (0, {"k_mix": mixing(24).astype(np.float32)}, r"k_mix is float32 \(24, 24\)"),
        (0, {"k_mix": mixing(128).astype(np.float32)}, r"k_mix is float32 \(128, 128\)"),
        (0, {"k_mix": np.ones((16, 8), np.float32)}, r"k_mix is float32 \(16, 8\)"),
        (0, {"k_mix": np.ones(16, np.float32)}, r"k_mix is float32 \(16,\)"),
        (0, {"k_mix": np.empty((0, 0), np.float32)}, r"k_mix is float32 \(0, 0\)"),
        (0, {"k_mix": 1.001 * mixing(16).astype(np.float32)}, "k_mix is not orthogonal: its square is 0.002 off"),
        (0, {"k_mix": np.full((16, 16), np.nan, np.float32)}, "k_mix is not orthogonal: its square is nan off"),
        (0, {"k_mix": np.full((16, 16), np.inf, np.float32)}, "k_mix is not orthogonal"),
        (0, {"k_mix": None}, rf"layer 0 has layout '{ORDERED[0]}' for K, and the tensors \['k_mean', 'k_order', 'k_scale'\]"),
        (0, {"k_scale": None}, rf"layer 0 has layout '{ORDERED[0]}' for K, and the tensors \['k_mean', 'k_mix', 'k_order'\]"),
        (2, {"k_order": None}, rf"layer 2 has layout '{ORDERED[1]}' for K, and the tensors \['k_mix', 'k_scale'\]"),
        (2, {"k_map": np.stack([np.eye(HEAD, dtype=np.float32)] * HEADS)}, rf"layer 2 has layout '{ORDERED[1]}' for K, and the tensors \['k_map'"),
        (3, {"k_order": np.tile(np.arange(HEAD, dtype=np.int32), (HEADS, 1))}, r"layer 3 has layout 'flat' for K, and the tensors \['k_map'"),
        (1, {"k_mix": mixing(16).astype(np.float32)}, r"layer 1 has layout '' for K, and the tensors \['k_mix'\]"),
        (2, {"v_mean": np.ones((HEADS, HEAD), np.float32)}, r"layer 2 has layout '' for V, and the tensors \['v_mean'\]"),
        (1, {"v_mean": None}, r"layer 1 has layout 'scaled' for V, and the tensors \[\]"),
        (1, {"v_mean": np.ones((HEADS, HEAD), np.float16)}, "v_mean is float16"),
        (1, {"v_mean": np.ones(HEAD, np.float32)}, r"v_mean is float32 \(64,\)"),
        (0, {"v_mean": np.ones((1, HEAD), np.float32)}, "k_mean is"),
        (1, {"v_mean": np.full((HEADS, HEAD), np.nan, np.float32)}, "v_mean has values that are not finite"),
        (1, {"v_mean": np.full((HEADS, HEAD), 65536, np.float32)}, r"v_mean has a value of 6.55e\+04"),
        (1, {"v_mean": np.full((HEADS, HEAD), -3e38, np.float32)}, r"v_mean has a value of -3e\+38"),
        (3, {"v_mean": np.ones((HEADS, HEAD // 2), np.float32)}, r"v_mean is \(2, 32\), v_map \(2, 64, 64\)"),
        (1, {"v_map": np.stack([np.eye(HEAD, dtype=np.float32)] * HEADS)}, r"layer 1 has layout 'scaled' for V, and the tensors \['v_map', 'v_mean'\]"),
    ],
)
def test_a_bad_order_or_centre_is_refused(layer, change, said):
    profile = ordered()
    with pytest.raises(ProfileError, match=said):
        ordered(maps={**profile.maps, layer: dataclasses.replace(profile.maps[layer], **change)})


def test_an_order_has_a_layout():
    profile = ordered()
    for layout in ("", "scaled"):
        layouts = (layout, *profile.layout_k[1:])
        with pytest.raises(ProfileError, match=f"layer 0 has layout '{layout}' for K, and the tensors"):
            ordered(layout_k=layouts, formats=formats_of(layouts))
    # A matrix may be laid out for such a type too, and values may be centred before one.
    layouts = (*profile.layout_k[:3], ORDERED[0])
    assert ordered(layout_k=layouts, formats=formats_of(layouts)).layout_v[3] == "flat"


def test_a_file_whose_order_is_no_order(tmp_path):
    """Written by another hand: the types of tensors, and what is beside them."""
    model = random_gguf.llama(tmp_path / "m.gguf", n_layer=2)

    made = random_profile(model, layout=ORDERED[0], ordered=True)
    made.metadata["kvfmt.profile.hash"] = as_kvfmt(made).hash
    good = Profile.read(made.write(tmp_path / "p.gguf"))
    good.check_model(model)
    assert good.layout_k == good.layout_v == (ORDERED[0],) * 2 and good.hash == as_kvfmt(made).hash
    tensors = dict(made.tensors)
    for name, dtype, said in (
        ("k_order", np.float32, "blk.1.kv_k_order has type f32, not i32"), ("k_order", np.int64, "blk.1.kv_k_order has type i64, not i32"),
        ("k_mix", np.int32, "blk.1.kv_k_mix has type i32, not f16, f32 or f64"), ("k_mix", np.float16, "k_mix is float16"), ("v_mean", np.float16, "v_mean is float16"),
    ):
        made.tensors = {**tensors, f"blk.1.kv_{name}": tensors[f"blk.1.kv_{name}"].astype(dtype)}
        with pytest.raises(KvfmtError, match=said):
            Profile.read(made.write(tmp_path / "p.gguf"))


def test_an_order_or_centre_of_another_model(tmp_path):
    model = random_gguf.llama(tmp_path / "m.gguf", head=HEAD, n_head_kv=HEADS)
    good = ordered(fingerprint=fingerprint_of(model))
    with pytest.raises(ProfileError, match=r"layer 0 has heads of 32 in it, 64 in this model \(v_mean\)"):
        good.check_model(model)
    maps = {**good.maps, **{layer: dataclasses.replace(good.maps[layer], v_mean=np.ones((HEADS, HEAD), np.float32)) for layer in (0, 1)}}
    ordered(fingerprint=fingerprint_of(model), maps=maps).check_model(model)


def small() -> Profile:
    """A layer with matrices, one with vectors, one with an order and one with a map of values beside their mean."""
    profile = make(layers=4, head=4, heads=1)
    mean, scale = np.ones((1, 4), np.float32), np.full((1, 4), 0.5, np.float32)
    order = LayerMaps(mean, k_scale=scale, k_order=np.array([[2, 0, 3, 1]], np.int32), k_mix=mixing(2).astype(np.float32), v_mean=mean)
    centred = dataclasses.replace(profile.maps[3], v_mean=-mean)
    layouts = ("flat", "scaled", ORDERED[0], "flat")
    return dataclasses.replace(
        profile, maps={0: profile.maps[0], 1: LayerMaps(mean, k_scale=scale), 2: order, 3: centred}, layout_k=layouts,
        layout_v=("", "", "scaled", "flat"), formats=formats_of(layouts),
    )


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "small.gguf"
    small().write(path)
    return path.read_bytes(), path.with_name("damaged.gguf")


def read_bytes(data: bytes, path) -> Profile:
    path.write_bytes(data)
    return Profile.read(path)


@pytest.mark.parametrize("extents", [(2**63 + 4, 0), (2**62, 0), (2**40, 2**40)])
def test_extents_that_no_file_holds_are_refused(small_file, extents):
    # With a 0 among them they promise no bytes, and numpy raised ValueError for the other.
    data, path = small_file
    at = data.index(b"blk.0.kv_stat.k_mean") + len(b"blk.0.kv_stat.k_mean") + 4
    with pytest.raises(KvfmtError, match="k_mean' has the shape"):
        read_bytes(data[:at] + struct.pack("<QQ", *extents) + data[at + 16 :], path)


def test_every_truncation_is_refused(small_file):
    data, path = small_file
    tensors = read_gguf(_written(path, data)).tensors.values()
    end = max(t.offset + (t.integers() if t.name.endswith("k_order") else t.floats()).nbytes for t in tensors)
    for size in [*range(0, end, 7), end - 1]:
        with pytest.raises(KvfmtError):
            read_bytes(data[:size], path)


def _written(path, data):
    path.write_bytes(data)
    return path


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_file_is_refused_or_means_the_same(small_file, data):
    good, path = small_file
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 8))
        size = data.draw(st.sampled_from([1, 4, 8]))
        raw[at : at + size] = data.draw(st.one_of(st.binary(min_size=size, max_size=size), st.sampled_from([b"\xff" * size, b"\0" * size, (2**31).to_bytes(8, "little")[:size]])))
    try:
        read = read_bytes(bytes(raw), path)
    except KvfmtError:
        return
    # Names, provenance and statistics are free; what llama.cpp applies is not.
    assert read.hash == small().hash


@given(data=st.binary(max_size=200))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(small_file, data):
    for head in (b"", b"GGUF\3\0\0\0"):
        with pytest.raises(KvfmtError):
            read_bytes(head + data, small_file[1])


def test_nothing_half_written(tmp_path, monkeypatch):
    with pytest.raises(KvfmtError, match="no folder"):
        small().write(tmp_path / "none" / "p.gguf")
    (tmp_path / "p.gguf").write_bytes(b"before")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(KvfmtError, match="No space"):
        small().write(tmp_path / "p.gguf")
    assert [f.name for f in tmp_path.iterdir()] == ["p.gguf"] and (tmp_path / "p.gguf").read_bytes() == b"before"


def test_the_fingerprint_is_fnv_of_the_norm_weights(tmp_path):
    model = random_gguf.llama(tmp_path / "m.gguf", n_layer=2, n_embd=128)
    tensors = {t.name: t for t in GGUFReader(model).tensors}
    value = 14695981039346656037
    for name in ("blk.0.attn_norm.weight", "blk.1.attn_norm.weight", "output_norm.weight"):
        for byte in np.asarray(tensors[name].data, "<f4").tobytes():
            value = ((value ^ byte) * 1099511628211) % 2**64
    assert fingerprint_of(model) == f"{value:016x}"
    assert fingerprint_of(random_gguf.llama(tmp_path / "n.gguf", n_layer=2, n_embd=128, seed=2)) != f"{value:016x}"


def test_another_model_is_refused_by_name(tmp_path):
    model = random_gguf.llama(tmp_path / "m.gguf", head=HEAD, n_head_kv=HEADS)
    print_ = fingerprint_of(model)
    good = make(fingerprint=print_)
    good.check_model(model)
    for profile, said in (
        (make(architecture="qwen2", fingerprint=print_), "architecture 'qwen2', this is 'llama'"),
        (make(layers=5, fingerprint=print_), "5 layers, this model has 4"),
        (make(head=32, fingerprint=print_), "heads of 32 in it, 64"),
        (make(heads=1, fingerprint=print_), "1 KV heads in it, 2"),
        (make(), "norm weights"),
    ):
        with pytest.raises(ProfileError, match=said):
            profile.check_model(model)
    types = ("kvq3",) * LAYERS
    with pytest.raises(ProfileError, match="kvq3 with spec hash 00000000"):
        make(fingerprint=print_, types_k=types, types_v=types, formats={"kvq3": "0" * 64}).check_model(model)
    with pytest.raises(ProfileError, match="not a model"):
        good.write(tmp_path / "p.gguf")
        good.check_model(tmp_path / "p.gguf")
    with pytest.raises(KvfmtError, match="no file"):
        good.check_model(tmp_path / "none.gguf")


def test_a_model_is_no_profile(tmp_path):
    with pytest.raises(ProfileError, match="m.gguf: it has architecture 'llama'"):
        Profile.read(random_gguf.llama(tmp_path / "m.gguf"))


def test_other_versions_are_refused(small_file):
    data, path = small_file
    key = b"kvfmt.profile.version"
    at = data.index(key) + len(key) + 4
    for version, wrote, hint in ((1, "an older", "Make it again: kvfmt calibrate"), (VERSION + 1, "a newer", "Update kvfmt.")):
        with pytest.raises(ProfileError, match=f"damaged.gguf: the profile is of version {version}, which {wrote} kvfmt wrote") as refused:
            read_bytes(data[:at] + bytes([version]) + data[at + 1 :], path)
        assert refused.value.hint == f"This build reads version {VERSION}. {hint}"


def test_commands_refuse_an_old_profile(small_file, tmp_path):
    data, path = small_file
    key = b"kvfmt.profile.version"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    model = random_gguf.llama(tmp_path / "m.gguf")
    for command in (["profile", "show", str(path)], ["calibrate", str(model), "--statistics", str(path), "-o", str(tmp_path / "p.gguf")]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1 and "the profile is of version 1, which an older kvfmt wrote" in " ".join(result.output.split())
    assert not (tmp_path / "p.gguf").exists()


def shown(profile: Profile, width: int = 80) -> dict[str, list[str]]:
    """The table's rows, split into words, by layer."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(layer_table(profile))
    text = console.export_text()
    assert "\u2026" not in text
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()[:1].isdigit()}


def test_show():
    profile = make()
    assert ("hash", profile.hash[:16]) in facts(profile)
    rows = shown(profile)
    assert list(rows) == ["0", "2", "3"] and rows["0"][2:7] == ["flat", "-", "-", "K", "float16"]
    assert "dB" in summary(profile) and "no statistics" in summary(make(statistics={})) and "values" not in summary(profile)


def test_an_order_and_centred_values_are_shown():
    types = ("kve8_2", "kve8_2", ORDERED[1], ORDERED[0]), ("kve8_2",) * LAYERS
    profile = dataclasses.replace(ordered(), types_k=types[0], types_v=types[1], formats=formats_of((*ORDERED, "kve8_2")), statistics={})
    rows = shown(profile)
    assert [row[1:7] for row in rows.values()] == [
        ["2x64", ORDERED[0], "scaled", "kve8_2/kve8_2", "K+V", "order"], ["2x32", "-", "scaled", "kve8_2/kve8_2", "V", "-"],
        ["2x64", ORDERED[1], "-", f"{ORDERED[1]}/kve8_2", "no", "order"], ["2x64", "flat", "flat", f"{ORDERED[0]}/kve8_2", "K+V", "float16"],
    ]
    assert "values are centred in 3 layers" in summary(profile)


@pytest.mark.parametrize("name", ORDERED)
def test_the_gain_of_channels_in_order_is_predicted(name):
    """Against a simulation: keys with the statistics, through the block and back, and what that does to logits."""
    rng = np.random.default_rng(2)
    size, count = HEAD, 4000
    channels, unit = rng.permutation(np.geomspace(1, 3e-3, size)) ** 0.5, np.exp(rng.standard_normal(size))
    near = np.linalg.qr(rng.standard_normal((size, size)))[0] * 0.1 + np.eye(size)
    keys = (rng.standard_normal((count, size)) @ near * channels * unit + rng.standard_normal(size)).astype(np.float32)
    queries = rng.standard_normal((count, size)) @ near.T * channels / unit
    mean, zero = keys.mean(axis=0), np.zeros((1, size))
    found = LayerStatistics(
        count, count, mean[None].astype(np.float64), np.cov(keys.T, ddof=0)[None], (queries.T @ queries / count)[None], zero, np.eye(size)[None], zero,
        keys[:1].astype(np.float64), True, size, False,
    )
    fmt = registry.get(name)
    rival = min((f for f in registry.plain_formats() if f.spec.bits_per_value == fmt.spec.bits_per_value), key=lambda f: slot_noise(f, size)[0])
    plain = hadamard(rival.decode(rival.encode(hadamard(keys, size))), size)
    before = np.mean((queries @ (plain - keys).T) ** 2)
    for kind in ("channels", "full"):
        maps = dataclasses.replace(stored_maps(key_maps(found, layout_for(name), kind), found), v_mean=value_mean(found))
        side = SideMaps.of(maps, True)
        back = side.restore(fmt.decode(fmt.encode(side.store(keys[None]))))[0]
        measured = 10 * np.log10(before / np.mean((queries @ (back - keys).T) ** 2))
        profile = make(layers=1, maps={0: maps}, layout_k=(name,), layout_v=("scaled",), formats=formats_of([name]), statistics={0: found})
        (gain,), (first,) = gains(profile, 0)
        assert gain == pytest.approx(measured, abs=1.0) and gain > 5 and np.isfinite(first)
        assert shown(profile)["0"][7] == f"{gain:.1f}" and f"{gain:.1f} dB" in summary(profile) and "centred in 1 layers" in summary(profile)
