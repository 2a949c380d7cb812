"""The packed cache in transformers: real packed bytes, as llama.cpp has them, under everything that generate() does to a cache."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if sys.version_info < (3, 11):
    pytest.skip("transformers itself needs Python 3.11", allow_module_level=True)

import torch
from converters.cache_import import dump_of, dump_of_cache, pack
from converters.packed_cache import read_cache
from converters.state import read as read_state
from converters.torch_cache import load, save
from kvfmt import registry
from kvfmt.errors import KvfmtError
from kvfmt.head_store import layer_stores
from kvfmt.policy import cache_type
from kvfmt.profile import LayerMaps, Profile, formats_of
from kvfmt.subjects import find_model, find_text
from kvfmt.torch import PackedCache, PackedLayer, logits, open_gguf, perplexity
from llama_lib import Context, kld
from random_profile import as_kvfmt, centre_values, random_profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config
from transformers.cache_utils import DynamicLayer

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_values_every_time():
    """A bound that one draw in many exceeds, as that on heads of their own size did, must not fail by chance."""
    torch.manual_seed(1)


@pytest.fixture(scope="module")
def path():
    return find_model("smollm2").path


@pytest.fixture(scope="module")
def opened(path):
    return open_gguf(path)


@pytest.fixture(scope="module")
def tokens(opened):
    return np.array(opened[1](find_text("docs").content[:4000]).input_ids[:160])


def tiny(**more) -> LlamaForCausalLM:
    torch.manual_seed(3)
    fields = dict(
        vocab_size=211, hidden_size=128, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=512, pad_token_id=0, eos_token_id=1,
    )
    return LlamaForCausalLM(LlamaConfig(**{**fields, **more})).eval()


# what a cache is asked to do, against one that holds decoded values in float32


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 70)),
        st.tuples(st.just("crop"), st.integers(0, 80)),
        st.tuples(st.just("reorder"), st.integers(0, 2**31)),
        st.tuples(st.just("repeat"), st.integers(1, 3)),
        st.tuples(st.just("select"), st.integers(0, 2**31)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=1,
    max_size=8,
)


@given(OPERATIONS, st.sampled_from(["kvq3/kvq2", "kvq4/f16", "q8_0/kve8_2"]), st.sampled_from([(64, 64), (80, 96)]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_operations(operations, kv, sizes, interleave):
    ((k, v),) = layer_stores([sizes], kv, 0, None, interleave)
    packed, plain = PackedLayer(lambda *_: (k, v)), DynamicLayer()
    batch, seed = 2, 0

    def same() -> None:
        assert packed.get_seq_length() == plain.get_seq_length()
        assert packed.get_mask_sizes(3) == plain.get_mask_sizes(3)

    for what, number in operations:
        if what == "append":
            draw = np.random.default_rng(seed := seed + 1)
            x, y = (draw.standard_normal((batch, 2, number, size)).astype(np.float32) for size in sizes)
            decoded = [torch.from_numpy(s.decode(s.encode(z))) for s, z in ((k, x), (v, y))]
            found, expected = packed.update(torch.from_numpy(x), torch.from_numpy(y)), plain.update(*decoded)
            for a, b in zip(found, expected):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        elif what == "crop":
            packed.crop(-number)
            plain.crop(-number)
        elif what == "reset":
            packed.reset()
            plain.reset()
        elif what == "repeat" and plain.get_seq_length() and batch * number <= 6:
            packed.batch_repeat_interleave(number)
            plain.batch_repeat_interleave(number)
            batch *= number
        elif plain.get_seq_length():
            count = batch if what == "reorder" else 1 + number % batch
            index = torch.from_numpy(np.random.default_rng(number).integers(0, batch, count))
            for layer in (packed, plain):
                layer.reorder_cache(index) if what == "reorder" else layer.batch_select_indices(index)
            batch = count
        if not plain.get_seq_length():
            packed.reset()
            plain.reset()
        same()


def ordered_profile(layers: int = 3, heads: int = 2, size: int = 64, value: float = 0.5) -> Profile:
    """Keys in order and centred values, in every layer."""
    rng = np.random.default_rng(8)
    maps = {
        layer: LayerMaps(
            rng.standard_normal((heads, size)).astype(np.float32), k_scale=np.exp2(rng.standard_normal((heads, size))).astype(np.float32),
            k_order=np.stack([rng.permutation(size) for _ in range(heads)]).astype(np.int32),
            k_mix=np.linalg.qr(rng.standard_normal((16, 16)))[0].astype(np.float32), v_mean=np.full((heads, size), value, np.float32),
        )
        for layer in range(layers)
    }
    return Profile("p", "llama", layers, "0" * 16, ("kvt4",) * layers, ("scaled",) * layers, maps, formats=formats_of(["kvt4"]))


@pytest.mark.parametrize("interleave", [True, False])
def test_a_profile_without_matrices_is_undone(interleave):
    """What the layer gives attention is what the store decodes, in the order that the heads came in; the mean of values is in it."""
    (k, v), *_ = layer_stores([(64, 64)] * 3, "kvt4/kve8_2", None, ordered_profile(), interleave)
    layer = PackedLayer(lambda *_: (k, v))
    x, y = (np.random.default_rng(i).standard_normal((2, 2, 70, 64)).astype(np.float32) for i in range(2))
    for start, end in ((0, 64), (64, 69), (69, 70)):
        found = layer.update(*(torch.from_numpy(part[:, :, start:end]) for part in (x, y)))
    for got, store, original in zip(found, (k, v), (x, y)):
        np.testing.assert_allclose(got.numpy(), store.decode(store.encode(original)), atol=1e-5)
    # The channels are in a random order here, not by importance: some have 3 bits and are large.
    assert np.corrcoef(found[0].numpy().ravel(), x.ravel())[0, 1] > 0.8 and np.mean((found[1].numpy() - y) ** 2) < 0.15
    assert abs(found[1].numpy().mean() - y.mean()) < 0.1
    # Of half types too.
    again = layer.k.read(torch.empty(0, dtype=torch.bfloat16))
    assert again.dtype == torch.bfloat16
    torch.testing.assert_close(again.float(), found[0], rtol=1e-2, atol=1e-2)


def test_a_cache_with_a_profile_without_matrices_counts_it():
    model, made = tiny(), ordered_profile()
    cache = PackedCache(model.config, "kvt4/kve8_2", 0, made)
    ids = torch.randint(2, 200, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model(ids, past_key_values=cache).logits
        parts = PackedCache(model.config, "kvt4/kve8_2", 0, made)
        torch.testing.assert_close(torch.cat([model(ids[:, at : at + 7], past_key_values=parts).logits for at in range(0, 90, 7)], dim=1), whole, rtol=1e-3, atol=1e-3)
    held = cache.memory()
    # What turns keys back is a matrix here, as large as one of a map; values have no more than their mean beside the rotation.
    assert held.maps == 3 * (2 * 64 * 64 * 4 + 2 * 2 * 64 * 4 + 64 * 64 * 4 + 2 * 64 * 4)
    assert held.used == 3 * 2 * 2 * 90 * (34 + 18)


@pytest.mark.parametrize("head", [64, 80, 96])
def test_a_model_sees_the_decoded_values_whatever_the_batches(head):
    model = tiny(head_dim=head)
    ids = torch.randint(2, 200, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        caches = [PackedCache(model.config, "kvq4/kvq3", 0) for _ in range(3)]
        whole = model(ids, past_key_values=caches[0]).logits
        parts = torch.cat([model(ids[:, at : at + 7], past_key_values=caches[1]).logits for at in range(0, 90, 7)], dim=1)
        torch.testing.assert_close(whole, parts, rtol=1e-3, atol=1e-3)
        # one sequence alone
        torch.testing.assert_close(model(ids[:1], past_key_values=caches[2]).logits, whole[:1], rtol=1e-3, atol=1e-3)
        exact = model(ids, past_key_values=DynamicCache()).logits
    assert 1e-4 < (whole - exact).abs().mean() < 0.5 * exact.abs().mean()
    # layers after the first see what rounding made of the attention before them: only nearly the same bytes
    assert torch.equal(caches[0].layers[0].k.rows, caches[1].layers[0].k.rows)
    assert np.mean(caches[0].layers[2].k.rows.numpy() != caches[1].layers[2].k.rows.numpy()) < 0.02


def test_only_bytes_are_held():
    model = tiny()
    cache = PackedCache(model.config, "kvq3/kvq2", 1)
    with torch.inference_mode():
        model(torch.randint(2, 200, (3, 100)), past_key_values=cache)
    rows = [(layer.k.rows, layer.v.rows) for layer in cache.layers]
    assert all(t.dtype == torch.uint8 for pair in rows for t in pair)
    shape = (3, 2, 100)
    assert [tuple(tuple(t.shape) for t in pair) for pair in rows] == [
        ((*shape, 128), (*shape, 128)), ((*shape, 26), (*shape, 18)), ((*shape, 128), (*shape, 128))
    ]
    held = cache.memory()
    assert held.used == sum(t.numel() for pair in rows for t in pair)
    assert held.values == 2 * 3 * 3 * 2 * 100 * 64
    # nothing but the packed tensors, and room that is bounded
    tensors = [value for layer in cache.layers for side in layer.sides for value in vars(side).values() if isinstance(value, torch.Tensor)]
    assert held.allocated == sum(t.untyped_storage().nbytes() for t in tensors) <= held.used * 1.7
    assert not any(isinstance(value, torch.Tensor) for layer in cache.layers for value in vars(layer).values())


def test_inside_and_outside_of_inference_mode():
    model = tiny()
    ids, beams = torch.randint(2, 200, (2, 150)), torch.tensor([1, 0])
    caches = [PackedCache(model.config, "kvq3/kvq2", 0) for _ in range(2)]
    for cache, modes in zip(caches, ([torch.inference_mode, torch.no_grad] * 2, [torch.no_grad] * 4)):
        for part, mode in enumerate(modes):
            with mode():
                found = model(ids[:, 10 * part : 10 * part + 10], past_key_values=cache).logits
                cache.reorder_cache(beams)
    assert all(torch.equal(a.rows, b.rows) for x, y in zip(*(c.layers for c in caches)) for a, b in zip(x.sides, y.sides))
    # with gradients on, keys and values are constants
    assert model(ids[:, 40:50], past_key_values=caches[0]).logits.requires_grad and not found.requires_grad


@pytest.mark.parametrize("how", [dict(do_sample=False), dict(do_sample=True, top_k=20), dict(num_beams=3, do_sample=False), dict(num_return_sequences=2, do_sample=True)], ids=str)
def test_generate_equals_a_cache_of_the_decoded_values(how):
    """transformers' own cache, given what ours decodes to, makes the same text."""

    class Decoded(DynamicCache):
        def __init__(self, config):
            super().__init__()
            self.stores = PackedCache(config, "kvq4/kvq3", 0)

        def update(self, k, v, layer, *args, **kwargs):
            if not self.stores.layers[layer].is_initialized:
                self.stores.layers[layer].lazy_initialization(k, v)
            sides = self.stores.layers[layer].sides
            k, v = (torch.from_numpy(side.store.decode(side.store.encode(x.numpy()))) for side, x in zip(sides, (k, v)))
            return super().update(k, v, layer, *args, **kwargs)

    model = tiny()
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
    made = []
    for cache in (PackedCache(model.config, "kvq4/kvq3", 0), Decoded(model.config)):
        torch.manual_seed(0)
        made.append(model.generate(ids, attention_mask=(ids > 0).long(), past_key_values=cache, max_new_tokens=24, min_new_tokens=24, **how))
    assert made[0].shape == made[1].shape and torch.equal(*made)


# the real model, beside llama.cpp


@pytest.fixture(scope="module")
def native(path, tokens):
    """Logits of llama.cpp, and its state in the cache, by types and profile."""

    def run(kv: str, profile=None) -> tuple[np.ndarray, bytes]:
        with Context(path, kv if "/" in kv else f"{kv}/{kv}", protect=0, profile=profile, threads=2) as context:
            return context.decode(tokens.tolist()), context.save()

    return run


def ours(opened, tokens, kv, profile=None, step=160) -> tuple[np.ndarray, PackedCache]:
    cache = PackedCache(opened[0].config, kv, 0, profile)
    return torch.cat(list(logits(opened[0], tokens, cache, step))).numpy(), cache


@pytest.fixture(scope="module")
def base(opened, tokens, native):
    """f16 caches: our logits, llama.cpp's, and the distance of the two forward passes."""
    (mine, _), (theirs, _) = ours(opened, tokens, "f16"), native("f16")
    return mine, theirs, kld(theirs, mine)


def test_the_two_forward_passes(base):
    assert 1e-5 < base[2] < 0.02


@pytest.mark.parametrize("kv", ["kvq4", "kvq3/kvq2"])
def test_a_cache_costs_what_it_costs_in_llama_cpp(opened, tokens, native, base, kv):
    mine, theirs, between = base
    here, there = kld(mine, ours(opened, tokens, kv)[0]), kld(theirs, native(kv)[0])
    # 160 tokens: the two passes are as far from each other as this allows them to differ
    assert abs(np.sqrt(here) - np.sqrt(there)) < 2 * np.sqrt(between), (here, there, between)
    assert 0.6 < here / there < 1.6


def test_the_bytes_are_llama_cpps(path, opened, tokens, native):
    """The first layer's keys come from the same embeddings; only the rounding of one product lies between the two."""
    cache = ours(opened, tokens, "kvq4")[1]
    side = cache.layers[0].k
    ours_bytes = side.rows[0].numpy()
    theirs = read_state(native("kvq4")[1]).caches[0].only.k[0]
    theirs_bytes = np.asarray(theirs.data).reshape(len(tokens), 3, side.store.row_bytes).transpose(1, 0, 2)
    a, b = (registry.get("kvq4").decode(np.ascontiguousarray(x)) for x in (ours_bytes, theirs_bytes))
    assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.99
    # in transformers' order they would be other values
    straight = PackedCache(opened[0].config, "kvq4", 0, interleaved=False)
    list(logits(opened[0], tokens, straight, 160))
    c = registry.get("kvq4").decode(straight.layers[0].k.rows[0].numpy())
    assert np.corrcoef(c.ravel(), b.ravel())[0, 1] < 0.5


@pytest.mark.parametrize(
    "kv, options",
    [
        ("kvq4", {}), ("kvq4", {"mean": False}), ("kvq4", {"layout": "scaled", "scale": True}),
        ("kvt4/kvq4", {"layout": "kvt4", "ordered": True, "v": False, "change": centre_values, "layers": None}),
    ],
    ids=["mapped", "mapped, not centred", "scaled", "in order"],
)
def test_a_profile_acts_as_in_llama_cpp(path, opened, tokens, native, base, tmp_path, kv, options):
    made = as_kvfmt(random_profile(path, spread=0.3, **{"layers": range(0, 30, 3), **options}))
    made.write(tmp_path / "profile.gguf")
    mine, theirs, between = base
    here = kld(mine, ours(opened, tokens, kv, tmp_path / "profile.gguf")[0])
    there = kld(theirs, native(kv, tmp_path / "profile.gguf")[0])
    assert abs(np.sqrt(here) - np.sqrt(there)) < 2 * np.sqrt(between), (here, there, between)


def test_generate_speaks(opened):
    model, tokenizer = opened
    ids = tokenizer("The capital of France is", return_tensors="pt")
    cache = PackedCache(model.config, "kvq4")
    made = model.generate(**ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0])
    assert cache.get_seq_length() == made.shape[1] - 1
    # the same cache goes on with a longer prompt
    more = model.generate(made, attention_mask=torch.ones_like(made), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert more.shape[1] == made.shape[1] + 2


def test_perplexity(opened, tokens):
    model = opened[0]
    with torch.inference_mode():
        rows = model(torch.from_numpy(tokens)[None]).logits[0]
        expected = torch.nn.functional.cross_entropy(rows[20:-1].double(), torch.from_numpy(tokens)[21:]).exp().item()
    assert perplexity(model, tokens, DynamicCache(), 48, 20) == pytest.approx(expected, rel=1e-4)
    assert perplexity(model, tokens, PackedCache(model.config, "f16"), 48, 20) == pytest.approx(expected, rel=0.01)
    for wrong in (dict(first=len(tokens)), dict(first=-1), dict(step=0)):
        with pytest.raises(KvfmtError):
            perplexity(model, tokens, DynamicCache(), **wrong)


# files


def test_saved_and_loaded_it_goes_on_as_before(tmp_path):
    model, path = tiny(), tmp_path / "cache.gguf"
    ids = torch.randint(2, 200, (2, 40))
    cache = PackedCache(model.config, "kvq3/kvq2", 1)
    with torch.inference_mode():
        model(ids[:, :30], past_key_values=cache)
        save(cache, path)
        again = load(path, model.config)
        assert all(torch.equal(a.rows, b.rows) for x, y in zip(cache.layers, again.layers) for a, b in zip(x.sides, y.sides))
        assert torch.equal(model(ids[:, 30:], past_key_values=cache).logits, model(ids[:, 30:], past_key_values=again).logits)
    for other, what in ((tiny(num_hidden_layers=2), "3 layers, the model has 2"), (tiny(num_key_value_heads=4), "2 heads of 64, the model 4")):
        with pytest.raises(KvfmtError, match=what):
            load(path, other.config)
    with pytest.raises(KvfmtError):
        save(PackedCache(model.config, "kvq3"), tmp_path / "empty.gguf")


def test_a_file_without_every_layer_of_the_same_tokens_is_refused(tmp_path):
    """A model would go on from it without a word, and with garbage."""
    model, path = tiny(), tmp_path / "cache.gguf"

    def cache(tokens: dict[int, int], batch: int = 1):
        arrays = {f"{i}.{side}": np.ones((batch if i else 1, 2, n, 64), np.float32) for i, n in tokens.items() for side in "kv"}
        pack(dump_of("made", {name: array.shape for name, array in arrays.items()}, arrays.__getitem__), path, "kvq4")
        return load(path, model.config)

    assert cache({0: 9, 1: 9, 2: 9}).get_seq_length() == 9
    for tokens, batch, what in (({1: 9, 2: 9}, 1, "nothing of layer 0"), ({0: 9, 2: 9}, 1, "nothing of layer 1"), ({0: 9, 1: 7, 2: 9}, 1, "1 x 7 and 1 x 9"), ({0: 9, 1: 9, 2: 9}, 2, "1 x 9 and 2 x 9")):
        with pytest.raises(KvfmtError, match=what):
            cache(tokens, batch)
    # A later layer may take its own from an earlier one, if the model says so.
    partly = PackedCache(model.config, "kvq4")
    for i in range(2):
        partly.update(torch.ones(1, 2, 9, 64), torch.ones(1, 2, 9, 64), i)
    save(partly, path)
    with pytest.raises(KvfmtError, match="nothing of layer 2"):
        load(path, model.config)
    model.config.num_kv_shared_layers = 1
    assert load(path, model.config).get_seq_length() == 9


def test_a_dynamic_cache_is_imported(tmp_path):
    model, path = tiny(), tmp_path / "cache.gguf"
    cache = DynamicCache()
    packed = PackedCache(model.config, "kvq4", 0)
    with torch.inference_mode():
        model(torch.arange(2, 52)[None], past_key_values=cache)
        for i, layer in enumerate(cache.layers):
            packed.update(layer.keys, layer.values, i)
    pack(dump_of_cache(cache), path, "kvq4", 0, interleaved=True)
    found = read_cache(path)
    for i, layer in enumerate(packed.layers):
        for side, name in zip(layer.sides, "kv"):
            assert np.array_equal(found.rows(i, name), side.rows.numpy())
    with pytest.raises(KvfmtError, match="holds no keys and values"):
        dump_of_cache(DynamicCache())


# what cannot be


def config(**more) -> Qwen2Config:
    return Qwen2Config(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, **more)


@pytest.mark.parametrize(
    "arguments, what",
    [
        (dict(kv="kvq9"), "unknown cache type"), (dict(kv="kvt3/kvq2"), "needs a calibration profile"), (dict(kv="kvq3", protect=-2), "negative"),
        (dict(kv="kvq3", profile=Profile("p", "qwen2", 3, "0" * 16, ("",) * 3, ("",) * 3, {})), "3 layers, the model has 2"),
        (dict(profile=Profile("p", "qwen2", 2, "0" * 16, ("",) * 2, ("",) * 2, {}, ("f16",) * 2, ("f16",) * 2), kv="kvq3"), "chooses the cache types"),
        (dict(profile="nowhere.gguf"), "no file"),
    ],
)
def test_caches_that_cannot_be(arguments, what):
    with pytest.raises(KvfmtError, match=what):
        PackedCache(config(), **arguments)


def test_layers_with_heads_of_their_own_size():
    """The second layer's heads are larger, and so are its maps."""
    ids = {name: registry.get(name).spec.hash for name in ("kvq4",)}
    unit = {64: np.eye(64, dtype=np.float32)[None].repeat(2, 0), 128: np.eye(128, dtype=np.float32)[None].repeat(2, 0)}
    maps = {layer: LayerMaps(None, unit[size], unit[size]) for layer, size in enumerate((64, 128))}
    made = Profile("p", "qwen2", 2, "0" * 16, ("flat",) * 2, ("",) * 2, maps, ("kvq4",) * 2, ("kvq4",) * 2, ids)
    cache = PackedCache(config(), profile=made)
    for layer, size in enumerate((64, 128)):
        x = torch.randn(1, 2, 3, size)
        torch.testing.assert_close(cache.update(x, x, layer)[0], x, atol=0.5, rtol=0)
    assert [layer.k.store.domain for layer in cache.layers] == ["map", "map"]


def test_models_that_cannot_be():
    odd = config()
    odd.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(KvfmtError, match="linear_attention"):
        PackedCache(odd, "kvq3")
    with pytest.raises(KvfmtError, match="no file"):
        open_gguf("nowhere.gguf")


def test_states_that_do_not_fit():
    cache = PackedCache(config(), "kvq3", 0)
    x = torch.zeros(1, 2, 3, 64)
    cache.update(x, x, 0)
    for k, v, what in ((x.repeat(2, 1, 1, 1), x.repeat(2, 1, 1, 1), "2 sequences"), (x, x[:, :, :1], "same tokens"), (x, x[..., :32], "64] was expected"), (x[..., :32], x[..., :32], "64] was expected")):
        with pytest.raises(KvfmtError, match=what):
            cache.update(k, v, 0)
    assert cache.get_seq_length() == 3
    with pytest.raises(ValueError, match="negative"):
        cache.crop(2)


def test_a_types_only_profile_and_the_default():
    types = ("kvq4", "f16"), ("kvq2", "f16")
    made = Profile("p", "qwen2", 2, "0" * 16, ("",) * 2, ("",) * 2, {}, *types, {name: registry.get(name).spec.hash for name in ("kvq4", "kvq2")})
    cache = PackedCache(config(), profile=made)
    x = torch.zeros(1, 2, 3, 64)
    for layer in range(2):
        cache.update(x, x, layer)
    assert [tuple(side.store.kind.name for side in layer.sides) for layer in cache.layers] == [("kvq4", "kvq2"), ("f16", "f16")]
    assert not cache.interleaved and cache.layers[0].k.store.kind == cache_type("kvq4")
