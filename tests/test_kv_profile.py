"""Calibration profiles in the patched llama.cpp: maps that cancel, per-layer types, and what is refused.

The maps are random and well-conditioned, so nothing but the cache's own quantization may differ.
"""

from __future__ import annotations

import os
import re

import gguf
import llama_lib as lib
import numpy as np
import pytest
import random_gguf
from converters.state import read as read_state
from kvfmt import registry
from kvfmt.bindings import cache_arguments, open_model
from kvfmt.errors import KvfmtError
from kvfmt.profile import LARGEST_MEAN, LARGEST_SCALE, LEAST_SCALE, VERSION
from kvfmt.transform import hadamard
from random_profile import SPECS, Profile, facts_of, random_profile

RNG = np.random.default_rng(11)
TOKENS = RNG.integers(3, random_gguf.N_VOCAB, 1024).tolist()

MODELS = {
    "plain": random_gguf.llama,
    "gqa": lambda path: random_gguf.llama(path, n_head=6, n_head_kv=2),
    "mqa": lambda path: random_gguf.llama(path, n_head=4, n_head_kv=1),
    "head128": lambda path: random_gguf.llama(path, head=128, n_head=2, n_head_kv=1, n_layer=2),
    "varying": lambda path: random_gguf.llama(path, n_head_kv=[1, 2, 4, 2]),
    "partial": lambda path: random_gguf.llama(path, n_rot=16),
    "fused": random_gguf.fused,
    "hybrid": random_gguf.hybrid,
    "iswa": random_gguf.iswa,
    "shared": random_gguf.shared_kv,
    "soft_cap": random_gguf.soft_cap,
    "sinks": random_gguf.sinks,
    "mla": random_gguf.mla,
    "other": lambda path: random_gguf.llama(path, seed=2),
    "deep": lambda path: random_gguf.llama(path, n_layer=17),
}
#: Where a mean does not cancel.
NO_MEAN = ("soft_cap", "sinks")
#: Vectors in place of matrices: keys with a mean and a scale, values with a mean; and keys whose channels are ordered.
SCALED = {"layout": "scaled", "scale": True}
ORDERED = {"ordered": True}
BOTH = pytest.mark.parametrize("options", [{}, SCALED, ORDERED], ids=["mapped", "scaled", "ordered"])


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def get(name: str):
        path = folder / f"{name}.gguf"
        return path if path.exists() else MODELS[name](path)

    return get


@pytest.fixture
def profile_of(models, tmp_path):
    """Writes a random profile of a random model; keywords as ``random_profile``."""

    def write(name: str, **options):
        path = tmp_path / f"profile{len(list(tmp_path.iterdir()))}.gguf"
        options = {"mean": name not in NO_MEAN} | options
        return random_profile(models(name), **options).write(path)

    return write


def logits_of(model, kv, tokens=TOKENS[:96], **options):
    with lib.Context(model, kv, **{"protect": 0} | options) as context:
        return context.decode(tokens)


def profile_line(log: str) -> str:
    lines = [line for line in log.splitlines() if "kv profile: " in line]
    assert len(lines) == 1, log
    return lines[0]


# the maps cancel


def far_from(reference, kv, model, **options) -> float:
    return lib.kld(reference, logits_of(model, kv, **options))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mla", "other", "deep")])
@BOTH
def test_only_the_caches_own_noise_remains(models, profile_of, name, options):
    model = models(name)
    reference = logits_of(model, "f16/f16")
    for kv, least in (("q8_0/q8_0", 1e-5), ("kvq4/kvq4", 1e-4)):
        plain = far_from(reference, kv, model)
        mapped = far_from(reference, kv, model, profile=profile_of(name, **options))
        # a random map and mean make the noise somewhat larger, at random
        assert 0 < mapped < 6 * plain + least, kv
        assert mapped != plain


@pytest.mark.parametrize("name", ["plain", "gqa", "mqa", "fused", "iswa", "shared", "hybrid"])
def test_scales_that_round_nothing_change_nothing(models, profile_of, name):
    """Powers of two, one for each KV head, and a mean of zero: every logit to the bit, rotation and all."""

    def even(profile: Profile) -> None:
        for key, data in profile.tensors.items():
            heads = np.arange(len(data), dtype=np.float32)[:, None]
            profile.tensors[key] = (0 * data if key.endswith("kv_k_mean") else 0 * data + 2 ** (1 - 2 * heads)).astype(np.float32)

    profile = profile_of(name, v=False, **SCALED, change=even)
    for kv in ("q8_0/f16", "q4_0/q8_0"):
        np.testing.assert_array_equal(logits_of(models(name), kv, profile=profile), logits_of(models(name), kv))


def test_a_scale_of_another_head_would_be_seen(models, profile_of):
    """The same measure tells heads, channels, and the queries' side apart: a channel that is scaled only where it is stored is far off."""
    model, profile = models("gqa"), profile_of("gqa", v=False, **SCALED)
    reference = logits_of(model, "f16/f16")
    with lib.Context(model, "q8_0/f16", protect=0, profile=profile) as context:
        context.decode(TOKENS[:64])
        state = context.save(0)
        own = context.decode(TOKENS[64:96])
    for change in (lambda scale: scale[::-1], lambda scale: np.roll(scale, 1, axis=1), lambda scale: 1 / scale):

        def other(found: Profile) -> None:
            for key, data in found.tensors.items():
                if key.endswith("kv_k_scale"):
                    found.tensors[key] = np.ascontiguousarray(change(data))

        # Random profiles are named by their seed: keys of the first are asked as the second asks.
        second = profile_of("gqa", v=False, **SCALED, change=other)
        with lib.Context(model, "q8_0/f16", protect=0, profile=second) as context:
            assert context.load(state, 0)
            context.n_past = 64
            off = lib.kld(reference[64:], context.decode(TOKENS[64:96]))
        assert off > 20 * lib.kld(reference[64:], own)


@pytest.mark.parametrize("name", ["gqa", "shared", "iswa"])
@pytest.mark.parametrize("what, options", [("kv_v_mean", SCALED), ("kv_v_mean", {}), ("kv_k_order", ORDERED)], ids=["values", "mapped values", "order"])
def test_a_mean_or_an_order_of_another_head_would_be_seen(models, profile_of, name, what, options):
    """What one profile stored is read under another, as the test before."""
    model = models(name)

    def change(found: Profile) -> None:
        for key, data in found.tensors.items():
            if key.endswith(what):
                found.tensors[key] = np.ascontiguousarray(data[::-1] if len(data) > 1 else np.roll(data, 1, axis=1))

    reference = logits_of(model, "f16/f16")
    with lib.Context(model, "q8_0/q8_0", protect=0, profile=profile_of(name, **options)) as context:
        context.decode(TOKENS[:64])
        state = context.save(0)
        own = context.decode(TOKENS[64:96])
    with lib.Context(model, "q8_0/q8_0", protect=0, profile=profile_of(name, **options, change=change)) as context:
        assert context.load(state, 0)
        context.n_past = 64
        assert lib.kld(reference[64:], context.decode(TOKENS[64:96])) > 20 * lib.kld(reference[64:], own)


@pytest.mark.parametrize("name", ["plain", "gqa", "shared", "iswa"])
@pytest.mark.parametrize("tensor", ["kv_q_map", "kv_o_map", "kv_k_map"])
def test_a_map_that_is_a_little_wrong_is_seen_by_the_same_measure(models, profile_of, name, tensor):
    def spoil(profile: Profile) -> None:
        for key in profile.tensors:
            if key.endswith(tensor):
                profile.tensors[key] = profile.tensors[key].copy()
                profile.tensors[key][:, :16] *= 1.3

    model = models(name)
    reference = logits_of(model, "f16/f16")
    plain = far_from(reference, "q8_0/q8_0", model)
    assert far_from(reference, "q8_0/q8_0", model, profile=profile_of(name, change=spoil)) > 6 * plain + 1e-5


@pytest.mark.parametrize("name", ["plain", "mqa", "gqa", "fused", "shared", "iswa", "hybrid"])
@BOTH
def test_one_token_at_a_time_equals_a_batch(models, profile_of, name, options):
    """Few tokens and many take different ways through the graph."""
    profile = profile_of(name, **options)
    with lib.Context(models(name), "q8_0/q8_0", profile=profile) as context:
        together = context.decode(TOKENS[:48])
    with lib.Context(models(name), "q8_0/q8_0", profile=profile) as context:
        steps = [1, 1, 2, 3, 4, 5, 16, 1, 15]
        starts = np.cumsum([0, *steps])
        apart = np.concatenate([context.decode(TOKENS[start : start + n]) for start, n in zip(starts, steps)])
    assert lib.kld(together, apart) < 1e-4


@BOTH
def test_a_deep_model_of_few_tensors_to_a_layer(tmp_path, options):
    """The graph's size is estimated from the number of tensors."""
    model = random_gguf.fused(tmp_path / "deep.gguf", n_layer=64, n_head=2, n_head_kv=1, n_ff=64)
    profile = random_profile(model, spread=0.1, **options).write(tmp_path / "profile.gguf")
    with lib.Context(model, "q8_0/q8_0", profile=profile) as context:
        context.decode(TOKENS[:16])
        lib.llama_cpp.llama_memory_seq_add(context.memory, 0, 0, -1, 10)
        assert np.isfinite(context.decode(TOKENS[16:17], pos=26)).all()


@BOTH
def test_flash_attention_off_with_mapped_keys(models, profile_of, options):
    model, profile = models("gqa"), profile_of("gqa", v=False, **options)
    reference = logits_of(model, "f16/f16", flash="off")
    plain = far_from(reference, "q8_0/f16", model, flash="off")
    assert 0 < far_from(reference, "q8_0/f16", model, flash="off", profile=profile) < 6 * plain + 1e-5


def test_f32_maps_and_sides_and_layers_alone(models, profile_of):
    model = models("plain")
    reference = logits_of(model, "f16/f16")
    limit = 6 * far_from(reference, "q8_0/q8_0", model) + 1e-5
    seen = set()
    for options in (
        {"dtype": np.float32}, {"k": False}, {"v": False}, {"mean": False}, {"layers": [1, 2]},
        {"layout": "scaled"}, {**SCALED, "mean": False}, {**SCALED, "layers": [1, 2]},
    ):
        divergence = far_from(reference, "q8_0/q8_0", model, profile=profile_of("plain", **options))
        assert 0 < divergence < limit, options
        seen.add(divergence)
    assert len(seen) == 8


@BOTH
def test_parallel_sequences(models, profile_of, options):
    profile = profile_of("gqa", **options)
    alone = [logits_of(models("gqa"), "q8_0/q8_0", TOKENS[i * 40 : i * 40 + 40], profile=profile) for i in range(3)]
    with lib.Context(models("gqa"), "q8_0/q8_0", n_ctx=3 * 256, n_seq=3, profile=profile) as context:
        for i, expected in enumerate(alone):
            np.testing.assert_allclose(context.decode(TOKENS[i * 40 : i * 40 + 40], seq=i, pos=0), expected, atol=2e-3)


# where they act


@pytest.mark.parametrize("name", ["plain", "iswa", "shared"])
@BOTH
def test_layers_that_are_not_quantized_stay_as_they_are(models, profile_of, name, options):
    profile = profile_of(name, **options)
    expected = logits_of(models(name), "f16/f16")
    for kv, protect in (("f16/f16", 0), ("bf16/f16", 0), ("kvq3/kvq2", 100)):
        plain = expected if "bf16" not in kv else logits_of(models(name), kv)
        np.testing.assert_array_equal(logits_of(models(name), kv, protect=protect, profile=profile), plain)


def test_log_says_what_acts(models, profile_of):
    profile = profile_of("plain")
    written = random_profile(models("plain"))
    layer = {side: 0 for side in "kv"}
    for name, data in written.tensors.items():
        if name.startswith("blk.1."):
            layer["v" if name.endswith(("v_mean", "v_map", "o_map")) else "k"] += data.nbytes
    digits = written.metadata["kvfmt.profile.hash"][:16]
    for kv, protect, n_k, n_v in (("q8_0/kvq2", 0, 4, 4), ("q8_0/f16", 0, 4, 0), ("kvq3/kvq2", 1, 2, 2), ("f16/f16", 0, 0, 0)):
        with lib.Context(models("plain"), kv, protect=protect, profile=profile) as context:
            line = profile_line(context.log)
        assert f"random ({profile}), hash {digits}" in line
        assert f"maps K in {n_k} and V in {n_v} of 4 layers" in line and (f"centres V in {n_v}," if n_v else "takes") in line
        assert f"sidecar {n_k * layer['k'] + n_v * layer['v']} bytes" in line and "scales" not in line


def test_log_says_which_keys_are_scaled(models, profile_of):
    profile = profile_of("plain", **SCALED, layers=[1, 2], types=(["q8_0", "q8_0", "f16", "kvq4"], ["f16"] * 4))
    with lib.Context(models("plain"), profile=profile) as context:
        line = profile_line(context.log)
    assert "maps K in 0 and V in 0 of 4 layers, centres or scales K in 1," in line
    assert f"sidecar {2 * 2 * 64 * 4} bytes" in line


def test_log_says_which_keys_are_ordered(models, profile_of):
    profile = profile_of("plain", **ORDERED, layers=[1, 2], types=(["q8_0", "q8_0", "f16", "kvq4"], ["q8_0"] * 4))
    with lib.Context(models("plain"), profile=profile) as context:
        line = profile_line(context.log)
    assert "maps K in 0 and V in 2 of 4 layers, orders K in 1, centres V in 2," in line


def test_no_hadamard_rotation_where_a_map_acts(models, profile_of, monkeypatch):
    """With the rotation off, mapped layers stay as they were and the others change."""
    for options, same in (({}, True), (ORDERED, True), ({"layers": [0, 1]}, False), ({"k": False}, False), (SCALED, False)):
        profile = profile_of("plain", **options)
        on = logits_of(models("plain"), "q8_0/q8_0", profile=profile)
        with monkeypatch.context() as patch:
            patch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
            off = logits_of(models("plain"), "q8_0/q8_0", profile=profile)
        assert np.array_equal(on, off) == same, options


def test_protection_is_not_automatic_with_a_profile(models, profile_of):
    with lib.Context(models("deep"), "kvq3/kvq2") as context:
        assert "protected layers: 0 1 15 16," in context.log
    profile = profile_of("deep")
    with lib.Context(models("deep"), "kvq3/kvq2", profile=profile) as context:
        assert "protected layers: none" in context.log
    with lib.Context(models("deep"), "kvq3/kvq2", protect=1, profile=profile) as context:
        assert "protected layers: 0 16," in context.log


# context shift


def moved(model, kv, by=(100, -37, 61), tokens=TOKENS[:64], **options):
    """Logits of what follows a past that was moved as a whole: positions differ, distances do not."""
    with lib.Context(model, kv, n_ctx=512, **{"protect": 0} | options) as context:
        context.decode(tokens)
        for distance in by:
            lib.llama_cpp.llama_memory_seq_add(context.memory, 0, 0, -1, distance)
            context.n_past += distance
        return context.decode(TOKENS[64:96])


@pytest.mark.parametrize("name", ["plain", "gqa", "mqa", "varying", "partial", "hybrid", "iswa", "shared", "soft_cap"])
@BOTH
def test_keys_that_moved_are_those_computed_at_their_new_place(models, profile_of, name, options):
    model, profile = models(name), profile_of(name, **options)
    reference = moved(model, "f16/f16", by=())
    for kv, protect, least in (("q8_0/q8_0", 0, 2e-5), ("kvq4/kvq4", 1, 2e-4)):
        plain = lib.kld(reference, moved(model, kv, protect=protect))
        mapped = lib.kld(reference, moved(model, kv, protect=protect, profile=profile))
        assert mapped < 6 * plain + least, kv


def test_scaled_keys_that_are_not_rotated(tmp_path):
    """Heads of 96: they cancel and move all the same."""
    model = random_gguf.llama(tmp_path / "head96.gguf", head=96, n_head=4, n_head_kv=2, n_layer=2)
    profile = random_profile(model, v=False, **SCALED).write(tmp_path / "profile.gguf")
    reference = moved(model, "f16/f16", by=())
    plain = lib.kld(reference, moved(model, "q8_0/f16"))
    assert 0 < lib.kld(reference, moved(model, "q8_0/f16", profile=profile)) < 6 * plain + 2e-5


def keys_of(state: bytes, profile: Profile | None, cells: int) -> list[np.ndarray]:
    """The keys [cells, heads, 64] that the model made, of each layer, from what is stored."""
    found = []
    for il, side in enumerate(read_state(state).caches[0].only.k):
        if side.type_id == gguf.GGMLQuantizationType.F16:
            found.append(side.f16()[:cells].astype(np.float32).reshape(cells, -1, 64))
            continue
        if side.type_id == gguf.GGMLQuantizationType.Q8_0:
            rows = gguf.quants.dequantize(side.data[:cells], gguf.GGMLQuantizationType.Q8_0)
        else:
            name = next(name for name, spec in SPECS.items() if spec.type_id == side.type_id)
            rows = registry.get(name).decode(np.ascontiguousarray(side.data[:cells]))
        stored = rows.reshape(cells, -1, 64)
        if f"blk.{il}.kv_k_order" in profile.tensors:
            order, mix, scale, mean = (profile.tensors[f"blk.{il}.kv_k_{what}"] for what in ("order", "mix", "scale", "mean"))
            slots = (stored.reshape(cells, len(order), -1, len(mix)) @ mix).reshape(stored.shape)
            found.append(np.take_along_axis(slots, np.argsort(order, axis=1)[None], axis=2) / scale + mean)
            continue
        if f"blk.{il}.kv_k_scale" in profile.tensors:
            found.append(hadamard(stored, 64) / profile.tensors[f"blk.{il}.kv_k_scale"] + profile.tensors[f"blk.{il}.kv_k_mean"])
            continue
        back = profile.tensors[f"blk.{il}.kv_q_map"].astype(np.float32)  # its transpose undoes the key's map
        found.append(np.einsum("hji,chj->chi", back, stored) + profile.tensors[f"blk.{il}.kv_k_mean"])
    return found


@BOTH
def test_keys_themselves_after_a_shift(models, tmp_path, options):
    """Layers of two types under the profile, and one that stayed f16 in the same cache."""
    model = models("plain")
    profile = random_profile(model, v=False, types=(["q8_0", "f16", "q8_0", "kvq4"], ["f16"] * 4), **options)
    path = profile.write(tmp_path / "profile.gguf")
    n = 40

    def kept(distance, **options):
        """Computed at 200 - distance, moved to 200."""
        with lib.Context(model, n_ctx=512, protect=0, **options) as context:
            context.decode(TOKENS[:n], pos=200 - distance)
            if distance:
                lib.llama_cpp.llama_memory_seq_add(context.memory, 0, 0, -1, distance)
            context.decode(TOKENS[n : n + 1], pos=200 + n)
            return keys_of(context.save(0), profile, n)

    wanted = kept(0)
    for il, (there, moved_there, truth) in enumerate(zip(kept(0, profile=path), kept(123, profile=path), wanted)):
        error, moved_error = (np.sqrt(np.mean((keys - truth) ** 2) / np.mean(truth**2)) for keys in (there, moved_there))
        assert error < (0.2 if il == 3 else 0.03), il
        assert moved_error < 2 * error + 0.002, il


@pytest.mark.parametrize("scale", [0.3, 10.0])
@BOTH
def test_the_mean_does_not_move_along(models, profile_of, scale, options):
    """Keys that moved meet keys that did not: a mean that was rotated with the first would lie between the two."""

    def change(profile: Profile) -> None:
        for name, data in profile.tensors.items():
            if name.endswith("kv_k_mean"):
                profile.tensors[name] = (scale * data).astype(np.float32)

    model, profile = models("plain"), profile_of("plain", change=change, **options)
    reference = moved(model, "f16/f16", by=())
    noise = lib.kld(reference, moved(model, "q8_0/q8_0", by=(), profile=profile))
    assert lib.kld(reference, moved(model, "q8_0/q8_0", profile=profile)) < 6 * noise + 2e-5


@BOTH
def test_shift_within_a_conversation(models, profile_of, options):
    def run(kv, **options):
        logits = []
        with lib.Context(models("gqa"), kv, n_ctx=256, **{"protect": 0} | options) as context:
            context.decode(TOKENS[:224])
            for at in range(224, 224 + 20 * 32, 32):
                context.shift(4, 32)
                logits.append(context.decode(TOKENS[at : at + 32]))
        return logits

    reference = run("f16/f16")
    plain = [lib.kld(a, b) for a, b in zip(reference, run("q8_0/q8_0"))]
    mapped = [lib.kld(a, b) for a, b in zip(reference, run("q8_0/q8_0", profile=profile_of("gqa", **options)))]
    assert np.mean(mapped) < 6 * np.mean(plain) + 1e-5
    assert np.mean(mapped[-5:]) < 3 * np.mean(mapped[:5]) + 1e-5


# types chosen by the profile

TYPES = (["f16", "kvq4", "q8_0", "kvq4"], ["q8_0", "kvq4", "f16", "kvq2"])


def test_types_of_each_layer(models, profile_of):
    profile = profile_of("plain", types=TYPES)
    with lib.Context(models("plain"), profile=profile) as context:
        log = context.log
        first = context.decode(TOKENS[:64])
        state = context.save(0)
        expected = context.decode(TOKENS[64:96])
    assert "chooses the types" in profile_line(log)
    assert "K f16 x 1 + kvq4 x 2 + q8_0 x 1 layers" in log and "V q8_0 x 1 + kvq4 x 1 + f16 x 1 + kvq2 x 1 layers" in log
    assert "maps K in 3 and V in 3 of 4 layers" in profile_line(log)
    described = re.search(rb"rotated: none; profile (\w{16}); layers 0-0: f16/q8_0; layers 1-1: kvq4#\w{16}/kvq4#\w{16}; layers 2-2: q8_0/f16; layers 3-3: kvq4", state)
    assert described, state[:300]
    with lib.Context(models("plain"), profile=profile) as context:
        assert context.load(state, 0)
        context.n_past = 64
        np.testing.assert_array_equal(context.decode(TOKENS[64:96]), expected)
    assert 0 < lib.kld(logits_of(models("plain"), "f16/f16", TOKENS[:64]), first) < 0.2
    np.testing.assert_array_equal(logits_of(models("plain"), "f16/f16", TOKENS[:64], protect=-1, profile=profile), first)


def test_types_without_maps(models, profile_of):
    """Uniform types chosen by a profile without maps are the types asked for by name, state and all."""
    profile = profile_of("plain", k=False, v=False, types=(["kvq4"] * 4, ["q8_0"] * 4))
    with lib.Context(models("plain"), profile=profile) as context:
        chosen, state = context.decode(TOKENS[:64]), context.save(0)
    with lib.Context(models("plain"), "kvq4/q8_0", protect=0) as context:
        np.testing.assert_array_equal(context.decode(TOKENS[:64]), chosen)
        assert context.save(0) == state


def test_types_of_hybrids_and_of_two_caches(models, profile_of):
    for name in ("hybrid", "iswa", "shared"):
        facts = facts_of(models(name))
        sides = [[side[il % 4] if il in facts.owners else "" for il in range(facts.n_layer)] for side in TYPES]
        first = logits_of(models(name), "f16/f16", profile=profile_of(name, types=sides))
        assert 0 < lib.kld(logits_of(models(name), "f16/f16"), first) < 0.3


@pytest.mark.parametrize("kv, protect", [("q8_0/f16", 0), ("f16/kvq2", 0), ("f16/f16", 1)])
def test_types_are_not_asked_for_twice(models, profile_of, kv, protect):
    with pytest.raises(lib.Refused, match="chooses the cache type of every layer"):
        lib.Context(models("plain"), kv, protect=protect, profile=profile_of("plain", types=TYPES))


def test_chosen_quantized_values_need_flash_attention(models, profile_of):
    profile = profile_of("plain", types=(["f16"] * 4, ["f16", "f16", "q8_0", "f16"]))
    with pytest.raises(lib.Refused, match="quantized V cache requires flash_attn"):
        lib.Context(models("plain"), flash="off", profile=profile)
    with lib.Context(models("plain"), flash="auto", profile=profile) as context:
        assert np.isfinite(context.decode(TOKENS[:8])).all()


# saved states


@pytest.mark.parametrize("seq", [0, None], ids=["sequence", "whole"])
def test_a_state_of_another_profile_is_refused(models, profile_of, seq):
    variants = [
        None,
        profile_of("plain"),
        profile_of("plain", seed=6),
        profile_of("plain", v=False),
        profile_of("plain", layers=[0, 1]),
        profile_of("plain", v=False, **SCALED),
        profile_of("plain", v=False, **SCALED, seed=6),
        profile_of("plain", v=False, layout="scaled"),
    ]
    contexts = [lib.Context(models("plain"), "q8_0/q8_0", profile=profile) for profile in variants]
    lib.assert_states_refuse_each_other(contexts, seq, TOKENS, "saved from another kind of KV cache")


@pytest.mark.parametrize("name", ["iswa", "shared", "hybrid"])
@BOTH
def test_a_restored_state_goes_on(models, profile_of, name, options):
    profile = profile_of(name, **options)
    with lib.Context(models(name), "kvq3/kvq2", profile=profile) as context:
        context.decode(TOKENS[:64])
        state = context.save(None)
        expected = context.decode(TOKENS[64:80])
    with lib.Context(models(name), "kvq3/kvq2", profile=profile) as context:
        assert context.load(state, None)
        context.n_past = 64
        np.testing.assert_array_equal(context.decode(TOKENS[64:80]), expected)


# refusals


def set_(**metadata):
    def change(profile: Profile) -> None:
        for key, value in metadata.items():
            name = key.replace("__", ".")
            if value is None:
                del profile.metadata[name]
            else:
                profile.metadata[name] = value

    return change


def tensor(name, edit):
    def change(profile: Profile) -> None:
        data = edit(profile.tensors.pop(name))
        if data is not None:
            profile.tensors[name] = data

    return change


def poke(value):
    def edit(data):
        data = data.copy()
        data.flat[17] = value
        return data

    return edit


def other_layers_q(profile: Profile) -> None:
    profile.tensors["blk.0.kv_q_map"], profile.tensors["blk.3.kv_q_map"] = (
        profile.tensors["blk.3.kv_q_map"],
        profile.tensors["blk.0.kv_q_map"],
    )


def transposed_o(profile: Profile) -> None:
    profile.tensors["blk.2.kv_o_map"] = profile.tensors["blk.2.kv_o_map"].transpose(0, 2, 1).copy()


def extra(name, shape=(2, 64, 64)):
    def change(profile: Profile) -> None:
        profile.tensors[name] = np.zeros(shape, np.float16)

    return change


P = "kvfmt__profile__"
REFUSALS = [
    (set_(general__architecture="llama"), r"general.architecture is 'llama', a profile says 'kvfmt-profile'"),
    (set_(**{P + "version": VERSION - 1}), f"version is {VERSION - 1}, this build reads version {VERSION}"),
    (set_(**{P + "version": VERSION + 1}), f"version is {VERSION + 1}, this build reads version {VERSION}"),
    (set_(**{P + "version": None}), "kvfmt.profile.version is missing"),
    (set_(**{P + "version": "1"}), "kvfmt.profile.version is of type str, it must be u32"),
    (set_(**{P + "hash": "abc"}), "hash is 'abc', it must be 64 hexadecimal digits"),
    (set_(**{P + "hash": 7}), "kvfmt.profile.hash is of type u32, it must be a string"),
    (set_(**{P + "model__architecture": "qwen2"}), "made for a model of architecture 'qwen2', this one is 'llama'"),
    (set_(**{P + "model__layers": 5}), "made for a model of 5 layers, this one has 4"),
    (set_(**{P + "model__fingerprint": "0123456789abcdef"}), r"made for another model: its fingerprint is 0123456789abcdef, this model's is \w{16}"),
    (set_(**{P + "layout_k": ["flat"] * 3}), "layout_k has 3 entries, it must have one for each of 4 layers"),
    (set_(**{P + "layout_v": "flat"}), "layout_v must be an array of strings"),
    (set_(**{P + "layout_v": [1, 2, 3, 4]}), "layout_v must be an array of strings"),
    (set_(**{P + "layout_k": ["flat", "f16", "flat", "flat"]}), "layout_k of layer 1 is 'f16', it must be"),
    (set_(**{P + "layout_k": ["flat", "kvx", "flat", "flat"]}), "layout_k of layer 1 is 'kvx', it must be"),
    (set_(**{P + "layout_k": ["flat", "", "flat", "flat"]}), "layout_k of layer 1 is '', but the layer has a kv_k_map"),
    (set_(**{P + "layout_v": ["flat", "kvq4", "flat", "flat"]}), "layout_v of layer 1 is kvq4, which kvfmt.profile.formats does not list"),
    (set_(**{P + "formats": ["kvq4=" + "0" * 64]}), "made for another definition of kvq4"),
    (set_(**{P + "formats": ["kvz4=" + "0" * 64]}), "formats has 'kvz4=0+', which is not NAME=HASH"),
    (set_(**{P + "formats": ["q8_0"]}), "formats has 'q8_0', which is not NAME=HASH"),
    (set_(**{P + "types_k": ["f16"] * 4}), "types_k without types_v"),
    (set_(**{P + "types_k": ["f16"] * 5, P + "types_v": ["f16"] * 4}), "types_k has 5 entries"),
    (set_(**{P + "types_k": ["f16"] * 4, P + "types_v": ["f16", "", "f16", "f16"]}), "types_v of layer 1 is '', but the layer owns KV"),
    (set_(**{P + "types_k": ["f16"] * 4, P + "types_v": ["f16", "q9", "f16", "f16"]}), "types_v of layer 1 is 'q9', which is no cache type"),
    (set_(**{P + "types_k": ["i32"] * 4, P + "types_v": ["f16"] * 4}), "types_k of layer 0 is 'i32', which is no cache type"),
    (tensor("blk.1.kv_q_map", lambda data: None), "layer 1 has kv_k_map without kv_q_map"),
    (tensor("blk.1.kv_k_map", lambda data: None), "layer 1 has kv_q_map without kv_k_map"),
    (tensor("blk.2.kv_v_map", lambda data: None), "layer 2 has kv_o_map without kv_v_map"),
    (tensor("blk.1.kv_k_map", lambda data: data[:1]), r"blk.1.kv_k_map has shape \[64, 64, 1, 1\], this model needs \[64, 64, 2, 1\]"),
    (tensor("blk.1.kv_k_map", lambda data: data[:, :32]), r"blk.1.kv_k_map has shape \[64, 32, 2, 1\]"),
    (tensor("blk.1.kv_k_mean", lambda data: data[:, :32]), r"blk.1.kv_k_mean has shape \[32, 2, 1, 1\], this model needs \[64, 2, 1, 1\]"),
    (tensor("blk.1.kv_k_mean", lambda data: data.astype(np.float16)), "blk.1.kv_k_mean is of type f16, it must be f32"),
    (tensor("blk.1.kv_v_map", lambda data: data.astype(np.float64)), "blk.1.kv_v_map is of type f64, it must be f16 or f32"),
    (tensor("blk.1.kv_v_map", poke(np.nan)), "blk.1.kv_v_map: value 17 is -?nan; a map is finite"),
    (tensor("blk.3.kv_k_mean", poke(np.inf)), "blk.3.kv_k_mean: value 17 is inf"),
    (other_layers_q, "blk.0.kv_q_map: head 0 does not undo kv_k_map"),
    (transposed_o, "blk.2.kv_o_map: head 0 does not undo kv_v_map"),
    (extra("blk.4.kv_k_map"), "tensor blk.4.kv_k_map: layer 4 of this model owns no KV"),
    (extra("blk.1.kv_z_map"), "tensor blk.1.kv_z_map means nothing to this build"),
    (extra("token_embd.weight"), "tensor token_embd.weight means nothing to this build"),
]


LAYOUTS = P + "layout_k"
SCALED_REFUSALS = [
    (tensor("blk.1.kv_k_scale", poke(0)), r"blk.1.kv_k_scale: value 17 is 0; a scale is from 5.96046e-08 to 1.67772e\+07"),
    (tensor("blk.1.kv_k_scale", poke(-1.5)), "blk.1.kv_k_scale: value 17 is -1.5; a scale is from"),
    (tensor("blk.1.kv_k_scale", poke(LEAST_SCALE * 0.999)), "blk.1.kv_k_scale: value 17 is 5.95.*e-08; a scale is from"),
    (tensor("blk.1.kv_k_scale", poke(LARGEST_SCALE * 1.001)), r"blk.1.kv_k_scale: value 17 is 1.679.*e\+07; a scale is from"),
    (tensor("blk.1.kv_k_mean", poke(-LARGEST_MEAN * 1.001)), "blk.1.kv_k_mean: value 17 is -65569.*; a mean key is at most 65504"),
    (tensor("blk.1.kv_k_scale", poke(np.inf)), "blk.1.kv_k_scale: value 17 is inf; a map is finite"),
    (tensor("blk.1.kv_k_mean", poke(np.nan)), "blk.1.kv_k_mean: value 17 is -?nan; a map is finite"),
    (tensor("blk.1.kv_k_scale", lambda data: data[:1]), r"blk.1.kv_k_scale has shape \[64, 1, 1, 1\], this model needs \[64, 2, 1, 1\]"),
    (tensor("blk.1.kv_k_scale", lambda data: data.astype(np.float16)), "blk.1.kv_k_scale is of type f16, it must be f32"),
    (extra("blk.1.kv_k_map"), "layer 1 has kv_k_map without kv_q_map"),
    (set_(**{LAYOUTS: ["scaled", "flat", "scaled", "scaled"]}), "layer 1 has kv_k_mean without kv_k_map, and its layout_k is 'flat', not 'scaled'"),
    (set_(**{LAYOUTS: ["scaled", "", "scaled", "scaled"]}), "layer 1 has kv_k_mean without kv_k_map, and its layout_k is '', not 'scaled'"),
    (set_(**{P + "layout_v": ["scaled", "flat", "scaled", "scaled"]}), "layer 1 has kv_v_mean without kv_v_map, and its layout_v is 'flat', not 'scaled'"),
    (set_(**{P + "layout_v": ["scaled", "", "scaled", "scaled"]}), "layer 1 has kv_v_mean without kv_v_map, and its layout_v is '', not 'scaled'"),
    (tensor("blk.1.kv_v_mean", lambda data: None), "layout_v of layer 1 is 'scaled', but the layer has no kv_v_mean"),
    (tensor("blk.1.kv_v_mean", lambda data: data[:, :32]), r"blk.1.kv_v_mean has shape \[32, 2, 1, 1\], this model needs \[64, 2, 1, 1\]"),
    (tensor("blk.1.kv_v_mean", poke(LARGEST_MEAN * 1.001)), "blk.1.kv_v_mean: value 17 is 65569.*; a mean value is at most 65504"),
    (tensor("blk.1.kv_v_mean", poke(np.nan)), "blk.1.kv_v_mean: value 17 is -?nan; a map is finite"),
]
MAPPED_REFUSALS = [
    (set_(**{LAYOUTS: ["flat", "scaled", "flat", "flat"]}), "layout_k of layer 1 is 'scaled', but the layer has a kv_k_map, which mixes channels"),
    (lambda profile: profile.tensors.update({"blk.2.kv_k_scale": np.ones((2, 64), np.float32)}), "layer 2 has kv_k_scale beside kv_k_map, which does that already"),
    (set_(**{P + "layout_v": ["flat", "scaled", "flat", "flat"]}), "layout_v of layer 1 is 'scaled', but the layer has a kv_v_map, which mixes channels"),
]
ORDERED_REFUSALS = [
    (tensor("blk.1.kv_k_order", poke(64)), "blk.1.kv_k_order: value 17 is 64; each head names channels 0 to 63 once"),
    (tensor("blk.1.kv_k_order", poke(-1)), "blk.1.kv_k_order: value 17 is -1; each head"),
    (tensor("blk.1.kv_k_order", lambda data: 0 * data), "blk.1.kv_k_order: value 1 is 0; each head"),
    (tensor("blk.1.kv_k_order", lambda data: data.astype(np.float32)), "blk.1.kv_k_order is of type f32, it must be i32"),
    (tensor("blk.1.kv_k_order", lambda data: data[:1]), r"blk.1.kv_k_order has shape \[64, 1, 1, 1\], this model needs \[64, 2, 1, 1\]"),
    (tensor("blk.1.kv_k_mix", lambda data: 1.001 * data), "blk.1.kv_k_mix: is not orthogonal: rows 0 and 0 have product 1.002"),
    (tensor("blk.1.kv_k_mix", lambda data: data[[0, 0, *range(2, 16)]]), "blk.1.kv_k_mix: is not orthogonal: rows 0 and 1 have product 1"),
    (tensor("blk.1.kv_k_mix", lambda data: np.eye(24, dtype=np.float32)), r"blk.1.kv_k_mix has shape \[24, 24, 1, 1\]"),
    (tensor("blk.1.kv_k_mix", lambda data: data[:8]), r"blk.1.kv_k_mix has shape \[16, 8, 1, 1\]"),
    (tensor("blk.1.kv_k_mix", lambda data: data.astype(np.float16)), "blk.1.kv_k_mix is of type f16, it must be f32"),
    (tensor("blk.1.kv_k_mix", lambda data: None), "layer 1 has kv_k_order without kv_k_mix"),
    (tensor("blk.1.kv_k_scale", lambda data: None), "layer 1 has kv_k_order without kv_k_scale"),
    (tensor("blk.1.kv_k_order", lambda data: None), "layer 1 has kv_k_mean without kv_k_map, and its layout_k is 'flat', not 'scaled'"),
    (set_(**{LAYOUTS: ["flat", "scaled", "flat", "flat"]}), "layout_k of layer 1 is 'scaled', but the layer has a kv_k_order, which mixes channels"),
    (set_(**{LAYOUTS: ["flat", "", "flat", "flat"]}), "layout_k of layer 1 is '', but the layer has a kv_k_order"),
]
CASES = [({}, *case) for case in (*REFUSALS, *MAPPED_REFUSALS)] + [(SCALED, *case) for case in SCALED_REFUSALS]
CASES += [(ORDERED, *case) for case in ORDERED_REFUSALS]
CASES.append(({"k": False}, set_(**{LAYOUTS: ["", "scaled", "", ""]}), "layout_k of layer 1 is 'scaled', but the layer has neither kv_k_mean nor kv_k_scale"))


@pytest.mark.parametrize("options, change, words", CASES, ids=range(len(CASES)))
def test_refusals_name_the_file_and_the_value(models, profile_of, options, change, words):
    profile = profile_of("plain", change=change, **options)
    with pytest.raises(lib.Refused) as refused:
        lib.Context(models("plain"), "q8_0/q8_0", protect=0, profile=profile)
    assert re.search(f"KV profile {re.escape(str(profile))}: .*{words}", str(refused.value)), str(refused.value)


def test_other_files_are_refused(models, profile_of, tmp_path):
    whole = profile_of("plain").read_bytes()
    for i, data in enumerate((None, b"", b"GGUF", b"not a model" * 100, whole[: len(whole) // 2], whole[:-1], whole[:200])):
        path = tmp_path / f"bad{i}.gguf"
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(lib.Refused, match=f"KV profile {re.escape(str(path))}: .*(cannot be read as a GGUF file|the file is truncated)"):
            lib.Context(models("plain"), "q8_0/q8_0", profile=path)
    with pytest.raises(lib.Refused, match="general.architecture is 'llama'"):
        lib.Context(models("plain"), "q8_0/q8_0", profile=models("plain"))


@BOTH
def test_damaged_files_never_crash(models, profile_of, tmp_path, options):
    whole = profile_of("plain", **options).read_bytes()
    rng = np.random.default_rng(5)
    header = whole.find(b"blk.3.kv_o_map") + 100
    for trial in range(60):
        damaged = bytearray(whole)
        damaged[int(rng.integers(0, header if trial % 3 else len(whole)))] ^= 1 << int(rng.integers(0, 8))
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            logits_of(models("plain"), "q8_0/q8_0", TOKENS[:4], profile=path)
        except lib.Refused as refused:
            assert "KV profile" in str(refused)


def test_a_profile_of_another_model_is_refused(models, profile_of):
    with pytest.raises(lib.Refused, match="made for another model"):
        lib.Context(models("other"), "q8_0/q8_0", profile=profile_of("plain"))
    with pytest.raises(lib.Refused, match=r"owns no KV|made for a model of (architecture|4 layers)"):
        lib.Context(models("hybrid"), "q8_0/q8_0", profile=profile_of("plain"))


def test_a_folded_model_is_another_model(models, tmp_path):
    folded = tmp_path / "folded.gguf"
    add = gguf.GGUFWriter.add_vocab_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda self, n: (add(self, n), self.add_string("kvfmt.fold.hash", "ab" * 32))[0])
        random_gguf.llama(folded)
    assert facts_of(folded).fingerprint != facts_of(models("plain")).fingerprint
    plain = random_profile(models("plain")).write(tmp_path / "plain-profile.gguf")
    own = random_profile(folded).write(tmp_path / "own-profile.gguf")
    with pytest.raises(lib.Refused, match="made for another model"):
        lib.Context(folded, "q8_0/q8_0", profile=plain)
    lib.Context(folded, "q8_0/q8_0", profile=own).close()


@pytest.mark.parametrize("name, why", [("soft_cap", "a logit soft-cap"), ("sinks", "sinks")])
@BOTH
def test_centring_is_refused_where_a_mean_does_not_cancel(models, profile_of, name, why, options):
    with pytest.raises(lib.Refused, match=f"layer 0 was made with centring, but its attention has {why}"):
        lib.Context(models(name), "q8_0/q8_0", profile=profile_of(name, mean=True, **options))


def test_values_are_centred_where_the_weights_sum_to_one(models, profile_of):
    """A soft-cap leaves their sum as it is, a sink takes of it."""
    options = {"k": False, "mean": True, **SCALED}
    with pytest.raises(lib.Refused, match="layer 0 was made with centred values, but its attention has sinks"):
        lib.Context(models("sinks"), "q8_0/q8_0", profile=profile_of("sinks", **options))
    reference = logits_of(models("soft_cap"), "f16/f16")
    plain = far_from(reference, "q8_0/q8_0", models("soft_cap"))
    assert 0 < far_from(reference, "q8_0/q8_0", models("soft_cap"), profile=profile_of("soft_cap", **options)) < 6 * plain + 1e-5


def test_a_profile_that_changes_nothing_says_so(models, profile_of):
    for kv, words in (("f16/f16", True), ("f16/q8_0", False)):
        with lib.Context(models("plain"), kv, protect=0, profile=profile_of("plain", **SCALED)) as context:
            assert ("changes nothing: no layer that it serves has a quantized cache" in context.log) == words


def test_models_without_separate_values_are_refused(models, tmp_path):
    plain = random_profile(models("plain"))
    mla = facts_of(models("mla"))
    plain.metadata |= {"kvfmt.profile.model.architecture": mla.arch, "kvfmt.profile.model.layers": mla.n_layer}
    with pytest.raises(lib.Refused, match="deepseek2 models take no profile"):
        lib.Context(models("mla"), "q8_0/q8_0", profile=plain.write(tmp_path / "mla.gguf"))


def test_a_layout_is_for_one_type(models, profile_of):
    profile = profile_of("plain", layout="kvq4")
    lib.Context(models("plain"), "kvq4/kvq4", profile=profile).close()
    lib.Context(models("plain"), "kvq4/f16", profile=profile).close()
    lib.Context(models("plain"), "q8_0/q8_0", protect=2, profile=profile).close()
    with pytest.raises(lib.Refused, match=r"K cache type kvq3 \(layer 0\): KV profile .* has layout_k = 'kvq4' there; ask for kvq4"):
        lib.Context(models("plain"), "kvq3/kvq4", profile=profile)
    with pytest.raises(lib.Refused, match=r"V cache type q8_0 \(layer 1\): .* layout_v = 'kvq4'"):
        lib.Context(models("plain"), "kvq4/q8_0", protect=1, profile=profile)


def test_formats_that_need_a_profile_are_refused_without_one_made_for_them(models, profile_of):
    for name in (name for name, spec in SPECS.items() if spec.needs_profile):
        with pytest.raises(lib.Refused, match=f"K cache type {name} needs a calibration profile"):
            lib.Context(models("plain"), f"{name}/f16", protect=1)
        for profile, layout in (
            (profile_of("plain"), "flat"), (profile_of("plain", k=False), ""), (profile_of("plain", layout="kvq4"), "kvq4"), (profile_of("plain", **SCALED), "scaled"),
        ):
            with pytest.raises(lib.Refused, match=rf"K cache type {name} \(layer 0\): .* has layout_k = '{layout}' there; .*calibrate for {name}"):
                lib.Context(models("plain"), f"{name}/f16", profile=profile)
        lib.Context(models("plain"), f"{name}/f16", profile=profile_of("plain", layout=name)).close()
        typed = profile_of("plain", types=([name] * 4, ["f16"] * 4))
        with pytest.raises(lib.Refused, match=rf"K cache type {name} \(layer 0\): .*calibrate for {name}"):
            lib.Context(models("plain"), profile=typed)


def test_heads_that_no_block_divides(tmp_path):
    model = random_gguf.llama(tmp_path / "head80.gguf", head=80, n_head=2, n_head_kv=1)
    profile = random_profile(model).write(tmp_path / "profile.gguf")
    with pytest.raises(lib.Refused, match="K cache type kvq3 with block size 64 does not divide n_embd_head_k=80"):
        lib.Context(model, "kvq3/f16", profile=profile)


# Python


def test_the_bindings(models, profile_of):
    import pickle

    profile = profile_of("plain")
    options = {"n_ctx": 256, "n_threads": 1, "verbose": False}
    one = open_model(models("plain"), "q8_0/q8_0", profile=profile, **options)
    assert one.context_params.kv_profile == os.fsencode(profile)
    assert pickle.loads(pickle.dumps(one)).context_params.kv_profile == os.fsencode(profile)
    one.eval(TOKENS[:32])
    last = np.ctypeslib.as_array(one._ctx.get_logits_ith(-1), shape=(random_gguf.N_VOCAB,))
    np.testing.assert_allclose(last, logits_of(models("plain"), "q8_0/q8_0", TOKENS[:32], profile=profile)[-1], atol=1e-3)
    typed = profile_of("plain", types=TYPES)
    open_model(models("plain"), profile=typed, **options).close()
    with pytest.raises(ValueError):
        open_model(models("plain"), "q8_0/q8_0", profile=typed, **options)
    with pytest.raises(ValueError, match="no such file"):
        lib.llama_cpp.Llama(str(models("plain")), kv_profile="/nowhere.gguf", **options)


def test_cache_arguments(profile_of, tmp_path):
    plain, typed = profile_of("plain"), profile_of("plain", types=TYPES)
    assert cache_arguments("q8_0", profile=plain) == {"kv_profile": str(plain), "type_k": 8, "type_v": 8, "flash_attn": True}
    assert cache_arguments(profile=typed) == {"kv_profile": str(typed), "flash_attn": True}
    assert cache_arguments() == cache_arguments("kvq3/kvq2")
    with pytest.raises(KvfmtError, match="nowhere"):
        cache_arguments(profile=tmp_path / "nowhere")
    (tmp_path / "text").write_text("no profile")
    with pytest.raises(KvfmtError):
        cache_arguments(profile=tmp_path / "text")
