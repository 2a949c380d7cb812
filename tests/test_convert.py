"""Converted states against what llama.cpp saves from a live cache of those types: bytes where rounding allows it, predictions elsewhere."""

from __future__ import annotations

import tracemalloc
from itertools import product

import numpy as np
import pytest
import random_gguf
from llama_lib import Context, kld
from random_profile import centre_values
from saved_states import TOKENS, layers, load_as, profile_of, save_as

from converters import convert_state as work
from converters import state as states
from converters.conversion_plan import Request
from converters.convert_state import convert_state
from converters.state_bytes import BytesSource, FileSource, StateError
from converters.state_layout import KINDS, read_layout
from kvfmt import registry
from kvfmt.errors import KvfmtError
from kvfmt.ggml_cpu import Encoders, installed_folder
from kvfmt.policy import cache_type, known_types
from kvfmt.transform import hadamard, rotation_size

QUANTIZED = [name for name in known_types() if cache_type(name).is_quantized and not cache_type(name).needs_profile]
PLAIN = [name for name in known_types() if not cache_type(name).is_quantized]


def request(kv: str, protect: int | None = 0, **more) -> Request:
    k, v = kv.split("/")
    return Request(cache_type(k), cache_type(v), protect, **more)


def saved(model, kv: str, n: int = 50, **more) -> bytes:
    with Context(model, kv, **more) as context:
        context.decode(TOKENS[:n])
        return context.save()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One layer: its keys and values do not depend on how the cache is stored. Two heads of 128."""
    return random_gguf.llama(tmp_path_factory.mktemp("one") / "one.gguf", n_layer=1, head=128, n_head=2, n_head_kv=2)


@pytest.fixture(scope="module")
def exact(one, tmp_path_factory):
    """The values that every cache of it is made of: saved in f32."""
    path = tmp_path_factory.mktemp("exact") / "f32"
    path.write_bytes(saved(one, "f32/f32"))
    return path


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return random_gguf.llama(tmp_path_factory.mktemp("three") / "three.gguf", n_layer=3)


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Two caches, the layers of one between those of the other; the window is shorter than what is saved."""
    return random_gguf.iswa(tmp_path_factory.mktemp("windows") / "windows.gguf", window=64)


@pytest.mark.parametrize("name", QUANTIZED + PLAIN)
def test_each_type_has_the_bytes_of_a_live_cache(one, exact, tmp_path, name):
    for kv in (f"{name}/f16", f"f16/{name}"):
        convert_state(exact, tmp_path / "x", request(kv, model=layers(one)))
        assert (tmp_path / "x").read_bytes() == saved(one, kv, protect=0), kv


def test_from_f16_only_the_rounding_to_f16_is_between(one, tmp_path):
    (tmp_path / "f16").write_bytes(saved(one, "f16/f16"))
    for name in QUANTIZED:
        kv = f"{name}/{name}"
        convert_state(tmp_path / "f16", tmp_path / "x", request(kv, model=layers(one)))
        found, live = states.read((tmp_path / "x").read_bytes()), states.read(saved(one, kv, protect=0))
        assert found.caches[0].description == live.caches[0].description
        for a, b in zip((*found.caches[0].only.k, *found.caches[0].only.v), (*live.caches[0].only.k, *live.caches[0].only.v), strict=True):
            assert np.mean(a.data == b.data) > 0.97, name


def test_between_quantized_types_the_rotation_stays(one, exact, tmp_path):
    """Against the Python codecs: what one gives is what the other is given."""
    convert_state(exact, tmp_path / "a", request("kvq4/kve8_2", model=layers(one)))
    convert_state(tmp_path / "a", tmp_path / "b", request("kvq3/kvq4"))
    a, b = (states.read((tmp_path / name).read_bytes()).caches[0].only for name in "ab")
    np.testing.assert_array_equal(b.k[0].data, registry.get("kvq3").encode(registry.get("kvq4").decode(a.k[0].data)))
    np.testing.assert_array_equal(b.v[0].data, registry.get("kvq4").encode(registry.get("kve8_2").decode(a.v[0].data)))
    # Back in f16 they lose the rotation, keys over the whole head and values over 64.
    convert_state(tmp_path / "b", tmp_path / "c", request("f32/f32", model=layers(one)))
    c = states.read((tmp_path / "c").read_bytes()).caches[0].only
    for side, fmt, size in ((0, "kvq3", rotation_size(128, True)), (1, "kvq4", 64)):
        stored = registry.get(fmt).decode((b.k, b.v)[side][0].data)
        np.testing.assert_array_equal((c.k, c.v)[side][0].data.view("<f4"), hadamard(stored, size))


@pytest.mark.parametrize(
    "layout, kv, how",
    [
        ("flat", "kvq3/kvq2", {"v": False}), ("flat", "kvq4/q8_0", {}), ("flat", "kvq4/q8_0", {"mean": False}),
        *(
            (f.spec.name, f"{f.spec.name}/kve8_2", {"v": False, **more})
            for f in registry.all_formats() if f.spec.needs_profile for more in ({}, {"ordered": True, "change": centre_values}, {"ordered": True, "mean": False})
        ),
    ],
)
def test_under_a_profile(one, exact, tmp_path, layout, kv, how):
    real = profile_of(one, layout=layout, **how)
    real.write(tmp_path / "p.gguf")
    convert_state(exact, tmp_path / "x", request(kv, model=layers(one), profile=real))
    found, live = states.read((tmp_path / "x").read_bytes()), states.read(saved(one, kv, profile=tmp_path / "p.gguf"))
    assert found.caches[0].description == live.caches[0].description and real.hash[:16] in found.caches[0].description
    # Sums of another order may fall to the other side of a code now and then.
    for a, b in ((found.caches[0].only.k[0], live.caches[0].only.k[0]), (found.caches[0].only.v[0], live.caches[0].only.v[0])):
        assert np.mean(a.data == b.data) > 0.99
    # Undone, and without the profile refused by name.
    with pytest.raises(StateError, match=real.hash[:16]):
        convert_state(tmp_path / "x", tmp_path / "y", request("f32/f32", model=layers(one)))
    convert_state(tmp_path / "x", tmp_path / "y", request("f32/f32", model=layers(one), source_profile=real))
    before, after = (states.read(path.read_bytes()).caches[0].only for path in (exact, tmp_path / "y"))
    for a, b, worst in ((before.k[0], after.k[0], 0.25), (before.v[0], after.v[0], 0.5)):
        a, b = a.data.view("<f4").astype(float), b.data.view("<f4").astype(float)
        assert np.sum((a - b) ** 2) < worst * np.sum((a - a.mean(0)) ** 2)


@pytest.mark.parametrize("name", QUANTIZED)
def test_centred_values_have_the_bytes_of_a_live_cache(one, exact, tmp_path, name):
    real = profile_of(one, k=False, layout="scaled")
    real.write(tmp_path / "p.gguf")
    assert set(real.layout_v) == {"scaled"} and set(real.layout_k) == {""}
    convert_state(exact, tmp_path / "x", request(f"f16/{name}", model=layers(one), profile=real))
    live = saved(one, f"f16/{name}", profile=tmp_path / "p.gguf")
    assert (tmp_path / "x").read_bytes() == live
    assert real.hash[:16] in states.read(live).caches[0].description and "rotated: V" in states.read(live).caches[0].description
    # Back, the mean is in them again; without the profile they are refused.
    with pytest.raises(StateError, match=real.hash[:16]):
        convert_state(tmp_path / "x", tmp_path / "z", request("f32/f32", model=layers(one)))
    convert_state(tmp_path / "x", tmp_path / "z", request("f32/f32", model=layers(one), source_profile=real))
    before, after = (states.read(path.read_bytes()).caches[0].only.v[0].data.view("<f4").astype(float) for path in (exact, tmp_path / "z"))
    mean = real.maps[0].v_mean.astype(float).ravel()
    assert 0 < np.mean((before - after) ** 2) < 0.3 * np.mean((before - mean) ** 2)
    # To another type under the same profile nothing is turned back.
    convert_state(tmp_path / "x", tmp_path / "y", request("f16/q8_0", model=layers(one), profile=real))
    x, y = (states.read((tmp_path / n).read_bytes()).caches[0].only.v[0].data for n in "xy")
    encoders = Encoders(installed_folder())
    np.testing.assert_array_equal(y, encoders.encode(cache_type("q8_0"), encoders.decode(cache_type(name), x).reshape(len(x), -1)))


@pytest.mark.parametrize("name", QUANTIZED)
def test_scaled_keys_have_the_bytes_of_a_live_cache(one, exact, tmp_path, name):
    """Nothing is summed: what a profile without matrices does is llama.cpp's to the bit."""
    real = profile_of(one, v=False, layout="scaled", scale=True)
    real.write(tmp_path / "p.gguf")
    convert_state(exact, tmp_path / "x", request(f"{name}/f16", model=layers(one), profile=real))
    live = saved(one, f"{name}/f16", profile=tmp_path / "p.gguf")
    assert (tmp_path / "x").read_bytes() == live
    assert real.hash[:16] in states.read(live).caches[0].description and "rotated: K" in states.read(live).caches[0].description
    # To another type under the same profile nothing is turned back; without the model the size of a head is not known.
    convert_state(tmp_path / "x", tmp_path / "y", request("q8_0/f16", model=layers(one), profile=real))
    x, y = (states.read((tmp_path / n).read_bytes()).caches[0].only.k[0].data for n in "xy")
    encoders = Encoders(installed_folder())
    np.testing.assert_array_equal(y, encoders.encode(cache_type("q8_0"), encoders.decode(cache_type(name), x).reshape(len(x), -1)))
    with pytest.raises(StateError, match=real.hash[:16]):
        convert_state(tmp_path / "x", tmp_path / "z", request("f32/f32", model=layers(one)))
    with pytest.raises(StateError, match="--model"):
        convert_state(tmp_path / "x", tmp_path / "z", request("f32/f32", source_profile=real))
    convert_state(tmp_path / "x", tmp_path / "z", request("f32/f32", model=layers(one), source_profile=real))
    before, after = (states.read(path.read_bytes()).caches[0].only.k[0].data.view("<f4").astype(float) for path in (exact, tmp_path / "z"))
    assert 0 < np.mean((before - after) ** 2) < 0.25 * np.mean((before - before.mean(0)) ** 2)


CACHES = {
    # What is saved, the target, and whether the target has flash attention.
    "protected": ("three", "kvq3/kvq2", {"protect": 1}, {}),
    "protected by itself": ("windows", "kvq3/kvq2", {"protect": None}, {}),
    "two caches": ("windows", "kvq4/kve8_2", {"protect": 2}, {}),
    "two caches under a profile": ("windows", "kvq4/q8_0", {"profile": True}, {}),
    "two caches, scaled keys and centred values": ("windows", "kvq4/q8_0", {"profile": "scaled"}, {}),
    "two caches, keys in order": ("windows", "kvt4/q8_0", {"profile": "in order"}, {}),
    "types of a profile": ("windows", "f16/f16", {"profile": "types"}, {}),
    "stock, protected": ("three", "q8_0/q4_0", {"protect": 1}, {}),
    "transposed, only K": ("three", "kvq4/f16", {}, {"flash": "off"}),
    "transposed, V too": ("three", "kvq4/kvq4", {"protect": 1}, {"flash": "off"}),
    "streams": ("three", "kvq4/kvq4", {}, {"n_seq": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CACHES)
def test_every_kind_of_state_goes_on_as_a_live_cache(case, kind, request, tmp_path):
    name, kv, asked, source = CACHES[case]
    model = request.getfixturevalue(name)
    asked = dict(asked)
    if asked.get("profile"):
        types = None
        if asked["profile"] == "types":
            types = ([("kvq4", "f16", "q8_0")[i % 3] for i in range(7)], [("f16", "kvq4")[i % 2] for i in range(7)])
        how = {
            "scaled": {"layout": "scaled", "scale": True}, "in order": {"layout": "kvt4", "ordered": True, "v": False, "change": centre_values},
        }.get(asked["profile"], {})
        asked["profile"] = profile_of(model, types=types, spread=0.1, **how)
        asked["profile"].write(tmp_path / "p.gguf")
    protect = asked.get("protect", 0)
    n, more = 100, TOKENS[200:216]
    with Context(model, "f16/f16", **source) as context:
        for seq in range(source.get("n_seq", 1)):
            context.decode(TOKENS[:n], seq, 0)
        save_as(context, kind, tmp_path / "before", TOKENS[:n])
        reference = context.decode(more, 0, n)
    k, v = kv.split("/")
    done = convert_state(tmp_path / "before", tmp_path / "after", Request(cache_type(k), cache_type(v), protect, profile=asked.get("profile"), model=layers(model)))
    assert done.after.size < done.before.size
    types = {"profile": tmp_path / "p.gguf"} if "profile" in asked else {}
    flash = "off" if source.get("flash") == "off" and v == "f16" else "on"
    target = {"protect": -1 if protect is None else protect, "n_seq": source.get("n_seq", 1), "flash": flash, **types}
    with Context(model, kv, **target) as context:
        assert load_as(context, kind, tmp_path / "after") == (TOKENS[:n] if kind in ("session", "sequence") else []), context.log
        converted = context.decode(more, 0, n)
        context.clear()
        for seq in range(target["n_seq"]):
            context.decode(TOKENS[:n], seq, 0)
        save_as(context, kind, tmp_path / "live", TOKENS[:n])
        live = context.decode(more, 0, n)
    # Of a live cache every layer but the first was computed from quantized ones: it is farther from f16, not nearer.
    assert kld(reference, converted) < 1.25 * kld(reference, live)
    with FileSource(tmp_path / "live") as opened:
        saved_live = read_layout(opened)
    assert done.after == saved_live
    # And back to f16, as it lay there.
    back = Request(cache_type("f16"), cache_type("f16"), 0, source.get("flash") != "off", source_profile=asked.get("profile"), model=layers(model))
    convert_state(tmp_path / "after", tmp_path / "again", back)
    with Context(model, "f16/f16", **source) as context:
        assert load_as(context, kind, tmp_path / "again") is not None
        assert kld(converted, context.decode(more, 0, n)) < 0.25 * kld(reference, converted)


@pytest.mark.parametrize("n_kv, heads", product((1, 2), (64, 96, 128, 192)))
def test_rotation_by_head_size(n_kv, heads, tmp_path):
    model = random_gguf.llama(tmp_path / "m.gguf", n_layer=1, head=heads, n_head=2, n_head_kv=n_kv)
    (tmp_path / "f32").write_bytes(saved(model, "f32/f32", 10))
    convert_state(tmp_path / "f32", tmp_path / "x", request("q8_0/q4_0", model=layers(model)))
    live = saved(model, "q8_0/q4_0", 10)
    assert (tmp_path / "x").read_bytes() == live
    # Without the model, stock types are not turned: the state does not say what a head is.
    if heads * n_kv % 64 == 0:
        with pytest.raises(StateError, match="--model") as error:
            convert_state(tmp_path / "f32", tmp_path / "y", request("q8_0/q4_0"))
        assert "depends on how large a head is" in str(error.value)
    convert_state(tmp_path / "x", tmp_path / "y", request("q4_0/q8_0"))
    assert not list(tmp_path.glob(".*"))


def test_our_types_need_no_model_where_every_head_size_gives_one_rotation(tmp_path):
    model = random_gguf.llama(tmp_path / "m.gguf", n_layer=2, n_head=3, n_head_kv=3, n_embd=96)
    (tmp_path / "f16").write_bytes(saved(model, "f16/f16"))
    for kv in ("kvq3/kvq2", "kvq4/f16", "f16/kve8_2"):
        convert_state(tmp_path / "f16", tmp_path / "x", request(kv))
        convert_state(tmp_path / "f16", tmp_path / "y", request(kv, model=layers(model)))
        assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_plain_types_there_and_back_are_exact(one, tmp_path):
    (tmp_path / "f16").write_bytes(saved(one, "f16/f16"))
    convert_state(tmp_path / "f16", tmp_path / "f32", request("f32/f32"))
    convert_state(tmp_path / "f32", tmp_path / "again", request("f16/f16"))
    assert (tmp_path / "again").read_bytes() == (tmp_path / "f16").read_bytes()
    convert_state(tmp_path / "f16", tmp_path / "f16", request("bf16/f16"))  # in place
    with FileSource(tmp_path / "f16") as opened:
        assert {side.type.name for side in read_layout(opened).sides} == {"bf16", "f16"}


def test_windows_join_as_if_there_were_none(three, tmp_path, monkeypatch):
    for flash in ("on", "off"):
        (tmp_path / "f16").write_bytes(saved(three, "f16/f16", flash=flash))
        for kv, onto in (("kvq3/f16", None), ("kvq3/q8_0", None), ("bf16/bf16", False), ("bf16/bf16", True)):
            asked = request(kv, model=layers(three), flash=onto)
            convert_state(tmp_path / "f16", tmp_path / "whole", asked)
            with monkeypatch.context() as patch:
                patch.setattr(work, "WINDOW", 900)
                patch.setattr(work, "COPY", 1000)
                convert_state(tmp_path / "f16", tmp_path / "parts", asked, threads=3)
            assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_memory_does_not_grow_with_the_file(tmp_path):
    cells, width, n_layer = 20_000, 192, 4
    rng = np.random.default_rng(2)
    side = states.Side(1, rng.standard_normal((cells, width)).astype(np.float16).view(np.uint8))
    stream = states.Stream(np.arange(cells, dtype=np.int32), np.zeros(cells, np.int32), (side,) * n_layer, (side,) * n_layer, False)
    (tmp_path / "large").write_bytes(states.write(states.State(0, (states.Cache((stream,)),))))
    convert_state(tmp_path / "large", tmp_path / "small", request("kvq3/kvq2"), 1)
    tracemalloc.start()
    try:
        convert_state(tmp_path / "large", tmp_path / "small", request("kvq3/kvq2"), 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "large").stat().st_size > 60_000_000 > 6 * peak


def test_decoders_are_those_of_the_formats():
    encoders = Encoders(installed_folder())
    x = np.random.default_rng(4).standard_normal((8, 256)).astype(np.float32)
    for name in known_types():
        kind = cache_type(name)
        packed = encoders.encode(kind, x)
        if kind.type_id in {fmt.spec.type_id for fmt in registry.all_formats()}:
            np.testing.assert_array_equal(encoders.decode(kind, packed), registry.get(name).decode(packed))
        else:
            assert np.abs(encoders.decode(kind, packed) - x).max() < (0.5 if kind.is_quantized else 0.02)


def test_refusals(three, one, windows, tmp_path):
    (tmp_path / "s").write_bytes(saved(three, "f16/f16"))
    (tmp_path / "w").write_bytes(saved(windows, "f16/f16"))
    (tmp_path / "q").write_bytes(saved(three, "kvq3/kvq2", protect=0))
    (tmp_path / "t").write_bytes(saved(three, "f16/f16", flash="off"))
    needs = next(f.spec.name for f in registry.all_formats() if f.spec.needs_profile)
    other = profile_of(windows)
    cases = [
        ("s", request("kvq3/kvq2", model=layers(one)), "caches of 3 layers, one.gguf of 1"),
        ("s", request("kvq3/kvq2", model=layers(windows)), "caches of 3 layers, windows.gguf of 7"),
        ("s", request(f"{needs}/kvq2", model=layers(three)), f"cache type {needs} needs a calibration profile"),
        ("s", request("kvq3/kvq2", flash=False, model=layers(three)), "V of type kvq2 needs flash attention"),
        ("s", request("kvq3/kvq2", -1, model=layers(three)), "protect=-1 is negative"),
        ("s", request("kvq3/kvq2"), "--model"),
        ("s", request("kvq3/kvq2", model=layers(three), profile=other), "the profile is of architecture gemma3, the model of llama"),
        ("w", request("kvq3/kvq2"), "which layer is in which"),
        ("q", request("f16/f16", source_profile=other), "--model"),
    ]
    for name, asked, words in cases:
        with pytest.raises(KvfmtError, match=words):
            convert_state(tmp_path / name, tmp_path / "no", asked)
    for edit, words in (
        (lambda d: d.replace(registry.get("kvq3").spec.hash[:16].encode(), b"0" * 16), "another version of the format"),
        (lambda d: d.replace(b"rotated: K V", b"rotated: K X"), "not one that this version knows"),
        (lambda d: d[:-1], "within the values of V of layer 2"),
        (lambda d: d + b"x", "within the number of streams"),
    ):
        (tmp_path / "edited").write_bytes(edit((tmp_path / "q").read_bytes()))
        with pytest.raises(StateError, match=words):
            convert_state(tmp_path / "edited", tmp_path / "no", request("f16/f16", model=layers(three)))
    (tmp_path / "edited").write_bytes((tmp_path / "q").read_bytes().replace(b"layers 0-2", b"layers 0-3"))
    with pytest.raises(StateError, match="the state does not say which"):
        convert_state(tmp_path / "edited", tmp_path / "no", request("f16/f16"))
    with pytest.raises(KvfmtError, match="no folder"):
        convert_state(tmp_path / "s", tmp_path / "nowhere" / "x", request("bf16/bf16"))
    with pytest.raises(StateError, match="no file"):
        convert_state(tmp_path / "none", tmp_path / "x", request("bf16/bf16"))
    assert not (tmp_path / "no").exists() and not list(tmp_path.glob(".*"))
    assert read_layout(BytesSource((tmp_path / "t").read_bytes())).caches[0].filled[0].transposed
