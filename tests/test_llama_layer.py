"""What the patched llama.cpp does with KV cache types that differ between layers, on models small enough for a CPU.

Needs the patched wheel; the tests of the programs need them built as well (``kvfmt build``).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
from pathlib import Path

import llama_lib as lib
import numpy as np
import pytest
import random_gguf
from kvfmt import registry
from kvfmt.build.models import fetch_model

SPECS = {fmt.spec.name: fmt.spec for fmt in registry.all_formats()}
STOCK = ["q8_0", "q4_0"]
PAIRS = [f"{name}/{name}" for name in [*STOCK, *(f.spec.name for f in registry.plain_formats())]] + ["kvq3/kvq2", "kvq3/f16", "f16/kvq2", "kvq4/q8_0"]

RNG = np.random.default_rng(7)
TOKENS = RNG.integers(3, random_gguf.N_VOCAB, 4096).tolist()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """name -> path of a random model, written when first asked for."""
    folder = tmp_path_factory.mktemp("models")
    make = {
        "plain": lambda path: random_gguf.llama(path),
        "gqa": lambda path: random_gguf.llama(path, n_head=4, n_head_kv=1),
        "varying": lambda path: random_gguf.llama(path, n_head_kv=[1, 2, 4, 2]),
        "partial": lambda path: random_gguf.llama(path, n_rot=16),
        "mla": lambda path: random_gguf.mla(path),
        "hybrid": lambda path: random_gguf.hybrid(path),
        "iswa": lambda path: random_gguf.iswa(path),
    }

    def get(name: str):
        path = folder / f"{name}.gguf"
        if not path.exists():
            if name.startswith("head"):
                random_gguf.llama(path, head=int(name.removeprefix("head")), n_head=2, n_head_kv=1, n_layer=3)
            elif name.startswith("deep"):
                random_gguf.llama(path, n_layer=int(name.removeprefix("deep")))
            else:
                make[name](path)
        return path

    return get


def first_logits(model, kv, tokens=TOKENS[:96], **options):
    with lib.Context(model, kv, **options) as context:
        return context.decode(tokens)


def policy_line(log: str) -> str:
    lines = [line for line in log.splitlines() if "kv policy: K " in line]
    assert len(lines) == 1, log
    return lines[0]


# types


@pytest.mark.parametrize("kv", PAIRS)
def test_every_pair_runs_and_stays_near_f16(models, kv):
    model = models("plain")
    divergence = lib.kld(first_logits(model, "f16/f16"), first_logits(model, kv, protect=0))
    bits = {"f16": 16, "q8_0": 8.5, "q4_0": 4.5} | {name: spec.bits_per_value for name, spec in SPECS.items()}
    fewest = min(bits[side] for side in kv.split("/"))
    assert 0 < divergence < (0.002 if fewest > 8 else 0.1 if fewest > 4 else 1.0)


def test_more_bits_mean_less_divergence(models):
    reference = first_logits(models("plain"), "f16/f16")
    by_bits = [lib.kld(reference, first_logits(models("plain"), f"{t}/{t}", protect=0)) for t in ("kvq2", "kvq3", "kvq4", "q8_0")]
    assert by_bits == sorted(by_bits, reverse=True)


@pytest.mark.parametrize("name", ["gqa", "varying", "partial", "hybrid", "mla", "iswa"])
def test_layouts_of_other_models(models, name):
    kv = "kvq4/kvq4"
    divergence = lib.kld(first_logits(models(name), "f16/f16"), first_logits(models(name), kv, protect=0))
    assert 0 < divergence < 0.1


@pytest.mark.parametrize("head", [64, 128, 192, 256, 576])
def test_heads_that_a_block_divides(models, head):
    model = models(f"head{head}")
    assert lib.kld(first_logits(model, "f16/f16"), first_logits(model, "kvq4/kvq4", protect=0)) < 0.1


@pytest.mark.parametrize("flash", ["on", "off", "auto"])
@pytest.mark.parametrize("head", [80, 96, 112])
def test_heads_that_no_block_divides_are_refused_by_name(models, head, flash):
    with pytest.raises(lib.Refused, match=rf"K cache type kvq3 with block size 64 .* n_embd_head_k={head} \(layer 0\)"):
        lib.Context(models(f"head{head}"), "kvq3/f16", protect=0, flash=flash)
    if flash != "off":
        with pytest.raises(lib.Refused, match=rf"V cache type kvq2 with block size 64 .* n_embd_head_v={head} \(layer 0\)"):
            lib.Context(models(f"head{head}"), "f16/kvq2", protect=0, flash=flash)
    # what is protected needs no block
    assert np.isfinite(first_logits(models(f"head{head}"), "kvq3/f16", protect=2, flash=flash)).all()


@pytest.mark.parametrize("kv", ["f16/q4_0", "f16/kvq2", "kvq3/kvq2"])
def test_quantized_v_needs_flash_attention(models, kv):
    with pytest.raises(lib.Refused, match="quantized V cache requires flash_attn"):
        lib.Context(models("plain"), kv, flash="off")
    with lib.Context(models("plain"), kv, flash="auto") as context:
        assert np.isfinite(context.decode(TOKENS[:8])).all()


def test_unknown_type_ids_are_refused(models):
    for bad in (9999, -1, 500, lib.llama_cpp.GGML_TYPE_IQ2_XXS, lib.llama_cpp.GGML_TYPE_I32):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(lib.kv_types.KV_CACHE_TYPES, "bad", bad)
            patch.setitem(lib.kv_types._NAMES, bad, "bad")
            with pytest.raises(lib.Refused, match="K cache type"):
                lib.Context(models("plain"), "bad/f16")


# protection


@pytest.mark.parametrize("name", ["plain", "gqa", "varying", "partial", "hybrid", "head80", "iswa"])
@pytest.mark.parametrize("kv", ["q4_0/q4_0", "kvq3/kvq2"])
def test_a_wholly_protected_cache_is_the_f16_cache(models, name, kv):
    expected = first_logits(models(name), "f16/f16")
    assert np.array_equal(first_logits(models(name), kv, protect=4), expected)
    assert np.array_equal(first_logits(models(name), kv, protect=1000), expected)


def test_protection_counts_the_layers_that_own_kv(models):
    for name, protect, layers in (("plain", 1, "0 3"), ("hybrid", 1, "2 10"), ("hybrid", 2, "2 5 8 10"), ("plain", 0, "none")):
        with lib.Context(models(name), "kvq3/kvq2", protect=protect) as context:
            assert f"protected layers: {layers}, total" in policy_line(context.log)


def test_protection_counts_over_both_caches_of_a_sliding_window_model(models):
    with lib.Context(models("iswa"), "kvq3/kvq2", protect=1) as context:
        lines = [line for line in context.log.splitlines() if "kv policy: K " in line]
    assert len(lines) == 2
    assert "protected layers: none" in lines[0]  # layer 5
    assert "protected layers: 0 6," in lines[1]


def test_protection_chosen_by_type(models):
    with lib.Context(models("plain"), "q4_0/q4_0") as context:
        assert "protected layers: none" in policy_line(context.log)
    for n_layer, layers in ((4, "none"), (8, "0 7"), (17, "0 1 15 16")):
        with lib.Context(models(f"deep{n_layer}"), "kvq3/f16") as context:
            assert f"protected layers: {layers}, total" in policy_line(context.log)


def test_negative_protection_is_refused(models):
    with pytest.raises(lib.Refused, match="kv_protect = -2"):
        lib.Context(models("plain"), "kvq3/f16", protect=-2)


def test_f16_layers_do_not_change_with_protection(models):
    expected = first_logits(models("plain"), "f16/f16")
    assert np.array_equal(first_logits(models("plain"), "f16/f16", protect=3), expected)


@pytest.mark.parametrize("protect", [0, 1])
def test_log_line_is_what_was_allocated(models, protect):
    with lib.Context(models("plain"), "kvq3/kvq2", protect=protect) as context:
        line = policy_line(context.log)
    n_quantized, n_f16, values = 4 - 2 * protect, 2 * protect, 128 * 256
    total = 0
    for side, name in (("K", "kvq3"), ("V", "kvq2")):
        per_layer = values // SPECS[name].block * SPECS[name].size
        allocated = n_quantized * per_layer + n_f16 * values * 2
        total += allocated
        label = f"{name} x {n_quantized}" + (f" + f16 x {n_f16}" if n_f16 else "")
        assert f"{side} {label} layers = {allocated / 2**20:.2f} MiB ({8 * allocated / (4 * values):.3f} bits/value)" in line
    f16 = 2 * 4 * values * 2
    assert f"total {total / 2**20:.2f} MiB" in line
    assert f"f16 would be {f16 / 2**20:.2f} MiB ({f16 / total:.2f}x smaller)" in line


# context shift


def shifted(model, kv, *, shifts=20, keep=4, discard=32, tokens=TOKENS, **options):
    """Logits of a run that forgets its past ``shifts`` times."""
    logits = []
    with lib.Context(model, kv, n_ctx=256, **options) as context:
        at = 224
        context.decode(tokens[:at])
        for _ in range(shifts):
            context.shift(keep, discard)
            logits.append(context.decode(tokens[at : at + discard]))
            at += discard
    return logits


@pytest.mark.parametrize("name", ["plain", "varying", "partial", "hybrid", "mla", "iswa"])
@pytest.mark.parametrize("kv", ["q8_0/q8_0", "q4_0/q4_0", "kvq4/kvq4"])
def test_context_shift_equals_the_f16_cache_shifted_the_same_way(models, name, kv):
    model = models(name)
    unshifted = lib.kld(first_logits(model, "f16/f16", TOKENS[:224]), first_logits(model, kv, TOKENS[:224], protect=0))
    reference, other = shifted(model, "f16/f16"), shifted(model, kv, protect=0)
    divergences = [lib.kld(a, b) for a, b in zip(reference, other)]
    # requantizing adds the format's error once more at each shift of a key, and no more than that
    assert np.mean(divergences) < 4 * unshifted + 1e-4
    assert np.mean(divergences[-5:]) < 2 * np.mean(divergences[:5]) + 1e-4


@pytest.mark.parametrize("kv", ["q4_0/q4_0", "kvq3/kvq2"])
def test_context_shift_with_protected_layers(models, kv):
    reference = shifted(models("plain"), "f16/f16")
    for a, b in zip(reference, shifted(models("plain"), kv, protect=2)):
        assert np.array_equal(a, b)
    some = np.mean([lib.kld(a, b) for a, b in zip(reference, shifted(models("plain"), kv, protect=1))])
    none = np.mean([lib.kld(a, b) for a, b in zip(reference, shifted(models("plain"), kv, protect=0))])
    assert some < none


def test_context_shift_of_a_real_model():
    model = os.environ.get("KVFMT_MODEL") or fetch_model()
    with lib.Context(model) as context:
        text = Path(lib.llama_cpp.__file__).with_name("llama.py").read_text()[3000:12000]
        tokens = context.tokenize(text)
    reference = shifted(model, "f16/f16", tokens=tokens, threads=2)
    means = {}
    for kv, protect in (("q4_0/q4_0", 0), ("kvq4/kvq4", 0), ("kvq3/kvq2", 0), ("kvq3/kvq2", 2)):
        divergences = [lib.kld(a, b) for a, b in zip(reference, shifted(model, kv, protect=protect, tokens=tokens, threads=2))]
        means[kv, protect] = np.mean(divergences)
    assert means["kvq4/kvq4", 0] < 1.5 * means["q4_0/q4_0", 0] < 0.2
    assert means["kvq3/kvq2", 2] < means["kvq3/kvq2", 0] < 1.0


# saved state


@pytest.mark.parametrize("seq", [0, None], ids=["sequence", "whole"])
@pytest.mark.parametrize("kv, protect", [("kvq3/kvq2", 0), ("kvq3/kvq2", 1), ("kvnf4/kvq4", -1), ("q4_0/q4_0", 0)])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(models, kv, protect, seq):
    with lib.Context(models("plain"), kv, protect=protect) as context:
        context.decode(TOKENS[:64])
        state = context.save(seq)
        expected = context.decode(TOKENS[64:80])
    with lib.Context(models("plain"), kv, protect=protect) as context:
        assert context.load(state, seq)
        context.n_past = 64
        assert np.array_equal(context.decode(TOKENS[64:80]), expected)


VARIANTS = [
    ("f16/f16", 0, {}),
    ("q4_0/q4_0", 0, {}),
    ("q4_0/q4_0", 1, {}),
    ("q4_0/q4_0", 0, {"LLAMA_ATTN_ROT_DISABLE": "1"}),
    ("kvq4/kvq4", 0, {}),
    ("kvq4/kvq4", 1, {}),
    ("kvq4/kvq4", 0, {"LLAMA_ATTN_ROT_DISABLE": "1"}),
    ("kvnf4/kvnf4", 0, {}),  # the same size as kvq4
    ("kvq3/kvq2", 0, {}),
]


@pytest.mark.parametrize("seq", [0, None], ids=["sequence", "whole"])
def test_a_state_of_another_kind_is_refused_and_the_context_stays_usable(models, seq, monkeypatch):
    contexts = []
    for kv, protect, environment in VARIANTS:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            contexts.append(lib.Context(models("plain"), kv, protect=protect))
    lib.assert_states_refuse_each_other(contexts, seq, TOKENS, "saved from another kind of KV cache|mismatched (key|value)")


@pytest.mark.parametrize("kv", ["f16/f16", "q4_0/q4_0", "q8_0/f16"])
def test_states_of_stock_caches_are_in_upstreams_format(models, kv):
    with lib.Context(models("plain"), kv) as context:
        context.decode(TOKENS[:32])
        assert context.save(0).find(b"rotated:") == -1
    with lib.Context(models("plain"), "kvq3/kvq2", protect=1) as context:
        context.decode(TOKENS[:32])
        state = context.save(0)
    described = re.search(rb"rotated: K V; layers 0-0: f16/f16; layers 1-2: kvq3#(\w{16})/kvq2#(\w{16}); layers 3-3: f16/f16", state)
    assert described, state[:200]
    assert described[1].decode() == SPECS["kvq3"].hash[:16]
    assert described[2].decode() == SPECS["kvq2"].hash[:16]


def test_damaged_states_are_refused_or_harmless(models):
    rng = np.random.default_rng(3)
    with lib.Context(models("plain"), "kvq3/kvq2", protect=1) as context:
        expected = context.decode(TOKENS[:48])
        state = context.save(0)
        header = state.find(b"rotated:")
        for trial in range(50):
            damaged = bytearray(state)
            if trial % 2:
                damaged = damaged[: int(rng.integers(0, len(state)))]
            else:
                place = int(rng.integers(0, header + 120)) if trial % 4 else int(rng.integers(0, len(state)))
                damaged[place] ^= 1 << int(rng.integers(0, 8))
            context.load(bytes(damaged), 0)
            context.clear()
            assert np.array_equal(context.decode(TOKENS[:48]), expected), trial


@pytest.mark.parametrize("seq", [0, None], ids=["sequence", "whole"])
def test_a_restore_that_fails_in_one_of_two_caches_leaves_both_empty(models, seq):
    with lib.Context(models("iswa"), "kvq3/kvq2", protect=1) as context:
        expected = context.decode(TOKENS[:48])
        state = context.save(seq)
        second = state.rfind(b"rotated:")
        assert second > state.find(b"rotated:")
        damaged = state[:second] + b"R" + state[second + 1 :]
        assert not context.load(damaged, seq)
        for cut in (second + 200, len(state) - 1):
            assert not context.load(state[:cut], seq)
            # nothing is left of the sequence, so it starts again without a clear()
            assert lib.llama_cpp.llama_memory_seq_pos_max(context.memory, 0) == -1
            np.testing.assert_array_equal(context.decode(TOKENS[:48], pos=0), expected)


def test_truncated_files_are_refused(models, tmp_path):
    rng = np.random.default_rng(5)
    saved, cut = str(tmp_path / "saved").encode(), tmp_path / "cut"
    space, count = (lib.llama_cpp.llama_token * 64)(), ctypes.c_size_t()
    with lib.Context(models("plain"), "kvq3/kvq2", protect=1) as context:
        expected = context.decode(TOKENS[:48])
        lib.llama_cpp.llama_state_seq_save_file(context.ctx, saved, 0, (lib.llama_cpp.llama_token * 48)(*TOKENS[:48]), 48)
        whole = (tmp_path / "saved").read_bytes()
        for size in [0, 8, len(whole) - 1, *rng.integers(9, len(whole) - 1, 25)]:
            cut.write_bytes(whole[:size])
            n = lib.llama_cpp.llama_state_seq_load_file(
                context.ctx, str(cut).encode(), 0, space, len(space), ctypes.byref(count)
            )
            assert n == 0, size
            context.clear()
            assert np.array_equal(context.decode(TOKENS[:48]), expected), size


def test_empty_states(models):
    with lib.Context(models("plain"), "kvq3/kvq2") as context:
        state = context.save(0)
        assert context.load(state, 0)
        assert not context.load(b"", 0)
        assert np.isfinite(context.decode(TOKENS[:8])).all()


# sequences


def test_parallel_sequences_do_not_touch_each_other(models):
    for kv in ("kvq3/kvq2", "kvq4/f16"):
        alone = [first_logits(models("plain"), kv, TOKENS[i * 40 : i * 40 + 40]) for i in range(3)]
        with lib.Context(models("plain"), kv, n_ctx=3 * 256, n_seq=3) as context:
            for i, expected in enumerate(alone):
                got = context.decode(TOKENS[i * 40 : i * 40 + 40], seq=i, pos=0)
                np.testing.assert_allclose(got, expected, atol=1e-3)


# the high-level bindings


def llama(model, **options):
    return lib.llama_cpp.Llama(str(model), n_ctx=256, n_threads=1, n_threads_batch=1, **{"verbose": False} | options)


def test_llama_takes_names_and_ids(models):
    by_name = llama(models("plain"), type_k="kvq3", type_v="kvq2", kv_protect=1, flash_attn=True)
    by_id = llama(models("plain"), type_k=SPECS["kvq3"].type_id, type_v=SPECS["kvq2"].type_id, kv_protect=1, flash_attn=True)
    for one in (by_name, by_id):
        assert (one.context_params.type_k, one.context_params.type_v) == (SPECS["kvq3"].type_id, SPECS["kvq2"].type_id)
        assert one.context_params.kv_protect == 1
    outputs = [one.create_completion([5, 6, 7], max_tokens=8, temperature=0.0)["choices"][0]["text"] for one in (by_name, by_id)]
    assert outputs[0] == outputs[1]
    again = pickle.loads(pickle.dumps(by_name))
    assert (again.context_params.type_k, again.context_params.kv_protect) == (SPECS["kvq3"].type_id, 1)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"type_k": "kvq5"}, "type_k='kvq5'.*kvq3"),
        ({"type_k": 10}, "type_k=10.*q8_0"),
        ({"type_v": 3.5}, "type_v=3.5"),
        ({"type_k": True}, "type_k=True"),
        ({"type_v": "kvq2"}, "kvq2.*flash_attn=True"),
        ({"type_k": "kvq3", "kv_protect": -2}, "kv_protect=-2"),
    ],
)
def test_llama_refuses_by_name(models, options, words):
    with pytest.raises(ValueError, match=words):
        llama(models("plain"), **options)


def test_constants_match_the_registry():
    for name, spec in SPECS.items():
        assert getattr(lib.llama_cpp, f"GGML_TYPE_{name.upper()}") == spec.type_id
        assert lib.kv_types.kv_cache_type(name) == spec.type_id
