"""Calibration: statistics of real runs against a direct computation, and what cannot be calibrated on."""

from __future__ import annotations

import ctypes
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import random_gguf
from converters import state as states
from kvfmt import calibrate as c
from kvfmt.bindings import patched_bindings
from kvfmt.build.models import fetch_model
from kvfmt.cli import app
from kvfmt.errors import KvfmtError
from kvfmt.geometry import MAPS
from kvfmt.moments import Moments
from kvfmt.profile import Profile
from kvfmt.runtime import UBATCH, LoadedModel
from kvfmt.subjects import ModelFile, Text, find_model
from kvfmt.watch import Watch

TEXT = Text("words", " ".join(f"The {a} {b} of {a * b} words, said {chr(65 + a)}." for a in range(40) for b in range(40)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 9), min_size=1, max_size=6), st.floats(-1e6, 1e6))
def test_moments_in_blocks_are_those_of_the_whole(seed, blocks, offset):
    rng = np.random.default_rng(seed)
    n = sum(blocks) + 2
    x, w = rng.standard_normal((2, n, 5)) + offset, rng.uniform(0, 2, (2, n))
    w[:, 0] = 0
    found, start = Moments(2, 5), 0
    for size in [*blocks, 2]:
        for head in range(2):
            found.add_head(head, x[head, start : start + size], w[head, start : start + size])
        start += size
    for head in range(2):
        np.testing.assert_allclose(found.mean[head], np.average(x[head], axis=0, weights=w[head]), rtol=1e-9)
        np.testing.assert_allclose(found.covariance()[head], np.cov(x[head].T, aweights=w[head], ddof=0), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found.second()[head], (x[head].T * w[head]) @ x[head] / w[head].sum(), rtol=1e-6, atol=1e-9)


def test_moments_of_nothing_are_zero():
    found = Moments(1, 3)
    found.add(np.ones((1, 0, 3)))
    found.add_head(0, np.ones((4, 3)), np.zeros(4))
    assert not found.covariance().any() and not found.mean.any()
    with pytest.raises(ValueError):
        found.add(np.ones((2, 4, 3)))
    with pytest.raises(ValueError):
        found.add_head(0, np.ones((4, 3)), np.ones(3))


class Recorder(c.Collector):
    """Keeps every attention that was read, beside the statistics."""

    def __init__(self) -> None:
        self.read: dict[int, list[c.Attention]] = {}
        super().__init__()

    def _ask(self, known, node, layer) -> None:
        self.read.setdefault(layer, []).append(c.Attention.of(node))
        super()._ask(known, node, layer)


def run(path, n_tokens: int, n_ctx: int = 512, text: Text = TEXT) -> tuple[Recorder, bytes]:
    """One context through the collector, and the state that it left, as saved."""
    collector = Recorder()
    with LoadedModel(path, 1) as model:
        (tokens,) = c.contexts_of(model, text, n_tokens, 1)
        with c.Context(model, n_ctx, collector) as context:
            context.feed(tokens, lambda n: None)
            return collector, states.saved(context._context)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def smollm2():
    """300 tokens of SmolLM2: collector, its statistics, and keys and values as the saved state has them, float64 [tokens, heads, d]."""
    collector, state = run(fetch_model("smollm2"), 300)
    stream = states.read(state).caches[0].only
    assert (stream.positions == np.arange(300)).all()
    k, v = ([side.f16().astype(np.float64).reshape(300, 3, 64) for side in sides] for sides in (stream.k, stream.v))
    return collector, collector.statistics(), k, v


@pytest.mark.parametrize("layer", [0, 13, 29])
def test_statistics_are_those_of_the_saved_cache(smollm2, layer):
    collector, found, k, v = smollm2
    k, v, found = k[layer], v[layer], found[layer]
    (attention,) = collector.read[layer]
    step = 300 // c.QUERIES
    asked = attention.queries.astype(np.float64)
    at = np.arange(step - 1, 300, step)
    assert asked.shape == (9, len(at), 64) and found.tokens == 300 and found.queries == 3 * len(at)
    assert found.shift_free and found.rotated == 64 and found.adjacent
    np.testing.assert_allclose(found.k_first, k[0], rtol=1e-3, atol=1e-3)
    # f16 rounding of what is stored is the only difference.
    np.testing.assert_allclose(found.v_mean, v.mean(axis=0), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.v_moment, np.einsum("thi,thj->hij", v, v) / 300, rtol=1e-2, atol=1e-3)
    reach = np.arange(300)[None, :] <= at[:, None]
    for head in range(3):
        keys, values, w, u, squares = k[:, head], v[:, head], np.zeros(300), [], np.zeros(300)
        for i in range(3):
            p = softmax(np.where(reach, asked[3 * head + i] @ keys.T / 8, -np.inf))
            out = p @ values
            each = p**2 * ((values[None] - out[:, None]) ** 2).sum(axis=-1)
            squares += (p**2).sum(axis=0)
            w += each.sum(axis=0)
            u.append(each.sum(axis=1))
        mean = np.average(keys, axis=0, weights=w)
        np.testing.assert_allclose(found.k_mean[head], mean, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(found.v_centre[head], np.average(values, axis=0, weights=squares), rtol=1e-3, atol=1e-3)
        # The first token has much of the attention, and its value is small: the mean of all is another.
        assert np.abs(found.v_centre[head] - found.v_mean[head]).max() > 0.01
        np.testing.assert_allclose(found.k_cov[head], np.cov(keys.T, aweights=w, ddof=0), rtol=1e-2, atol=2e-3 * np.abs(found.k_cov[head]).max())
        q, u = asked[3 * head : 3 * head + 3].reshape(-1, 64) / 8, np.concatenate(u)
        np.testing.assert_allclose(found.q_moment[head], (q.T * u) @ q / u.sum(), rtol=1e-2, atol=2e-3 * np.abs(found.q_moment[head]).max())


def test_what_is_asked_is_what_attention_uses(smollm2):
    """The queries are those after norm and RoPE: with the stored keys and values they give the very output of the layer."""
    outputs = {}
    watch = Watch(lambda node: node.op == "FLASH_ATTN_EXT", lambda node: outputs.setdefault(len(outputs), node.values()))
    collector, _, k, v = smollm2
    with LoadedModel(fetch_model("smollm2"), 1) as model:
        (tokens,) = c.contexts_of(model, TEXT, 300, 1)
        params = collector_params(model, watch)
        context = model.create_context(params)
        space = (ctypes.c_int32 * 300)(*tokens.tolist())
        batch = model.lib.llama_batch_get_one(space, 300)
        with watch.watching():
            assert model.lib.llama_decode(context, batch) == 0
        model.lib.llama_free(context)
    for layer in (0, 29):
        (attention,) = collector.read[layer]
        step = 300 // c.QUERIES
        # The last layer computes only the rows whose logits were asked for, after the attention.
        seen = outputs[layer][0][step - 1 :: step]
        for head in (0, 8):
            mine = attention.probabilities(head) @ attention.values[head // 3]
            np.testing.assert_allclose(mine, seen[:, head], atol=5e-3 * np.abs(seen).max())


def collector_params(model: LoadedModel, watch: Watch):
    params = model.lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.flash_attn_type = model.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.n_threads = params.n_threads_batch = 1
    params.cb_eval = watch.callback
    return params


def test_several_passes_and_contexts_are_added_up(tmp_path):
    path = random_gguf.llama(tmp_path / "m.gguf", n_layer=2)
    n = UBATCH + 100
    collector, state = run(path, n, 1024)
    found = collector.statistics()
    stored = states.read(state).caches[0].only.v[1].f16().astype(np.float64).reshape(n, 2, 64)
    assert found[1].tokens == n and [len(a) for a in collector.read.values()] == [2, 2]
    np.testing.assert_allclose(found[1].v_mean, stored.mean(axis=0), atol=1e-3)
    # The second pass asks all keys, those of the first too.
    assert [np.isfinite(a.mask[-1]).sum() for a in collector.read[1]] == [UBATCH, n]
    with LoadedModel(path, 1) as model:
        done = []
        twice = c.measure(model, [TEXT, TEXT], [128, 64], 1024, lambda *x: done.append(x))
    assert twice[0].tokens == 1024 and done[-1] == (1024, 1024)


def test_sliding_windows_shared_heads_and_hybrids(tmp_path):
    iswa = random_gguf.iswa(tmp_path / "iswa.gguf", window=128)
    collector, _ = run(iswa, 400)
    found = collector.statistics()
    assert sorted(found) == list(range(7)) and all(s.heads == 1 and s.k_size == 64 for s in found.values())
    windowed = [layer for layer in found if np.isfinite(collector.read[layer][0].mask[-1]).sum() <= 128]
    assert len(windowed) == 6 and not found[0].adjacent and found[0].rotated == 64
    hybrid = random_gguf.hybrid(tmp_path / "hybrid.gguf")
    assert sorted(run(hybrid, 64)[0].statistics()) == [2, 5, 8, 10]
    varying = random_gguf.llama(tmp_path / "deci.gguf", n_head_kv=[1, 2, 4, 2])
    assert [s.heads for s in run(varying, 64)[0].statistics().values()] == [1, 2, 4, 2]
    # Layers without a cache of their own ask another's: their queries count there.
    shared = run(random_gguf.shared_kv(tmp_path / "shared.gguf"), 64)[0]
    asked = {layer: len(reads) for layer, reads in shared.read.items()}
    assert sum(asked.values()) > len(asked) == len(shared.statistics()), asked
    partial = random_gguf.llama(tmp_path / "partial.gguf", n_rot=32)
    assert {s.rotated for s in run(partial, 64)[0].statistics().values()} == {32}


@pytest.mark.parametrize("make", [random_gguf.llama, random_gguf.iswa, random_gguf.shared_kv, random_gguf.soft_cap, random_gguf.sinks])
def test_values_are_centred_on_the_mean_weighed_by_the_square_of_their_attention(tmp_path, make):
    """Over several passes, query heads that share a KV head, windows, sinks, and layers that ask another's values."""
    collector, _ = run(make(tmp_path / "m.gguf"), UBATCH + 40, 1024)
    for layer, found in collector.statistics().items():
        reads = collector.read[layer]
        group = len(reads[0].queries) // found.heads
        for head in range(found.heads):
            total, weighed = 0.0, np.zeros(found.v_size)
            for attention in reads:
                for i in range(head * group, (head + 1) * group):
                    logits = attention.queries[i].astype(np.float64) @ attention.keys[head].T.astype(np.float64) * attention.scale
                    logits = attention.cap * np.tanh(logits / attention.cap) if attention.cap else logits
                    weight = np.exp(logits + attention.mask)
                    all_of_it = weight.sum(axis=1) + (0 if attention.sinks is None else np.exp(attention.sinks[i]))
                    squares = ((weight / all_of_it[:, None]) ** 2).sum(axis=0)
                    total += squares.sum()
                    weighed += squares @ attention.values[head]
            np.testing.assert_allclose(found.v_centre[head], weighed / total, rtol=1e-4, atol=1e-5 * np.abs(attention.values).max())
    assert len(reads) >= 2


def test_latent_attention_is_refused(tmp_path):
    with pytest.raises(KvfmtError, match="layer 0 reads its values out of its keys"):
        run(random_gguf.mla(tmp_path / "mla.gguf"), 64)


def test_activations_that_are_not_finite_name_their_layer(tmp_path):
    import gguf

    path = random_gguf.llama(tmp_path / "m.gguf", n_layer=3)
    reader = gguf.GGUFReader(path, "r+")
    weights = next(t for t in reader.tensors if t.name == "blk.1.attn_k.weight").data
    weights[:] *= 1e6
    weights.flush()
    with pytest.raises(KvfmtError, match="keys of layer 1 have values that are not finite, or too large"):
        run(path, 64)


def test_texts_that_are_too_short(tmp_path):
    path = random_gguf.llama(tmp_path / "m.gguf", n_layer=1)
    with LoadedModel(path, 1) as model:
        with pytest.raises(KvfmtError, match="text 'short' has about .* tokens, 1 contexts of 256 need 256"):
            c.measure(model, [Text("short", "A few words.")], [256], 256)
        with pytest.raises(KvfmtError, match="need 2560"):
            c.measure(model, [Text("short", "word " * 300)], [256], 2560)
        with pytest.raises(KvfmtError, match="more than the model's 4096"):
            c.measure(model, [TEXT], [8192], 8192)
        exact = Text("exact", "x" * 255)
        (piece,) = c.contexts_of(model, exact, 256, 1)
        assert len(piece) == 256 and piece[0] == model.bos
        spread = c.contexts_of(model, TEXT, 64, 5)
        assert len({tuple(p) for p in spread}) == 5 and all(len(p) == 64 and p[0] == model.bos for p in spread)
    with pytest.raises(KvfmtError, match="nothing to calibrate"):
        c.plan([], [64], 64)


def test_the_command_makes_a_profile_for_this_model(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "p.gguf"
    text.write_text(TEXT.content)
    arguments = ["calibrate", "smollm2", "--text", str(text), "--tokens", "512", "--n-ctx", "256", "--map", "full", "--centre-values", "-o", str(out), "--threads", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    profile = Profile.read(out)
    subject = find_model("smollm2")
    profile.check_model(subject.path)
    assert profile.layout_k == ("flat",) * 30 and profile.layout_v == ("scaled",) * 30 and profile.types_k is None and profile.formats == {}
    assert profile.provenance["tokens"] == 512 and profile.provenance["context"] == [256] and profile.provenance["model.sha256"] == subject.sha256
    assert profile.provenance["text.name"] == ["text.txt"] and len(profile.provenance["text.sha256"][0]) == 64
    maps = profile.maps[3]
    assert maps.k_map.dtype == np.float16 and maps.k_mean.shape == maps.v_mean.shape == (3, 64) and maps.v_map is None
    np.testing.assert_array_equal(maps.v_mean, profile.statistics[3].v_centre)
    shown = CliRunner().invoke(app, ["profile", "show", str(out)])
    assert shown.exit_code == 0 and profile.hash[:16] in shown.output and "dB" in shown.output
    again = tmp_path / "q.gguf"
    assert CliRunner().invoke(app, [*arguments[:-3], str(again), "--threads", "1", "--no-centre", "--map", "pairs"]).exit_code == 0
    pairs = Profile.read(again)
    assert pairs.layout_k == ("scaled",) * 30 and pairs.maps[3].k_scale.shape == (3, 64) and "keys scaled, map pairs" in pairs.name
    # Values were asked to be centred, keys not to be.
    assert set(pairs.maps[3].arrays()) == {"k_scale", "v_mean"} and set(pairs.layout_v) == {"scaled"} and pairs.sidecar_bytes == 30 * 2 * 3 * 64 * 4
    shown = CliRunner().invoke(app, ["profile", "show", str(again)])
    assert shown.exit_code == 0 and "scaled" in shown.output and "dB" in shown.output
    # The same run gives the same statistics, bit for bit.
    np.testing.assert_array_equal(pairs.statistics[3].k_cov, profile.statistics[3].k_cov)
    # Other maps from the same statistics need no run.
    back = tmp_path / "r.gguf"
    assert CliRunner().invoke(app, ["calibrate", "smollm2", "--statistics", str(again), "--map", "full", "-o", str(back)]).exit_code == 0
    remade = Profile.read(back)
    remade.check_model(subject.path)
    assert remade.layout_k == profile.layout_k and remade.provenance["tokens"] == 512 and remade.provenance["map"] == "full"
    np.testing.assert_allclose(remade.maps[3].k_mean, profile.maps[3].k_mean, rtol=1e-6)
    # Unless they are asked for there are no matrices, for a type that orders channels either.
    ordered = tmp_path / "o.gguf"
    assert CliRunner().invoke(app, ["calibrate", "smollm2", "--statistics", str(again), "--k", "kvt4", "-o", str(ordered)]).exit_code == 0
    channels = Profile.read(ordered)
    channels.check_model(subject.path)
    assert channels.layout_k == ("kvt4",) * 30 and set(channels.formats) == {"kvt4"} and "keys kvt4, map channels, centred" in channels.name
    assert set(channels.maps[3].arrays()) == {"k_mean", "k_scale", "k_order", "k_mix"} and set(channels.layout_v) == {""}
    assert channels.sidecar_bytes == 30 * (3 * 3 * 64 * 4 + 16 * 16 * 4) < profile.sidecar_bytes / 10
    # Which vectors span nearly equal entries of the spectrum is chance; what they do together is not.
    gram = [np.swapaxes(p.maps[3].k_map, 1, 2).astype(float) @ p.maps[3].k_map.astype(float) for p in (remade, profile)]
    np.testing.assert_allclose(gram[0], gram[1], atol=0.01 * np.abs(gram[1]).max())
    for wrong, said in ((["--map", "odd"], "unknown map"), (["--k", "q9"], "unknown cache type"), (["--v", "kvq2"], "no layout for values"),
                        (["--k", "kvt3", "--map", "pairs", "--statistics", str(again)], "Use one of: channels, full")):
        result = CliRunner().invoke(app, [*arguments, *wrong])
        assert result.exit_code == 1 and said in result.output


def attention(**more) -> c.Attention:
    rng = np.random.default_rng(0)
    queries, keys = rng.standard_normal((2, 4, 64)).astype(np.float32), rng.standard_normal((1, 8, 64)).astype(np.float32)
    fields = dict(queries=queries, keys=keys, values=keys, mask=np.zeros((4, 8), np.float32), scale=0.5, cap=0.0, slopes=np.ones(2), sinks=None)
    return c.Attention(**fields | more)


def test_soft_cap_and_sinks_in_the_softmax():
    plain = attention()
    logits = plain.queries[1] @ plain.keys[0].T * 0.5
    np.testing.assert_allclose(plain.probabilities(1), softmax(logits), rtol=1e-5)
    cap = attention(cap=2.0)
    np.testing.assert_allclose(cap.probabilities(1), softmax(2 * np.tanh(logits / 2)), rtol=1e-5)
    sink = attention(sinks=np.array([0.0, 3.0], np.float32))
    extended = softmax(np.concatenate([logits, np.full((4, 1), 3.0)], axis=1))[:, :8]
    np.testing.assert_allclose(sink.probabilities(1), extended, rtol=1e-5)
    assert plain.shift_free and not cap.shift_free and not sink.shift_free


@pytest.mark.parametrize("make", [random_gguf.soft_cap, random_gguf.sinks])
def test_nothing_is_centred_where_it_would_matter(tmp_path, make):
    path = make(tmp_path / "m.gguf")
    made = c.calibrate(find_subject(path), [TEXT], [64], 256, centre=True, threads=1, centre_values=True)
    assert made.profile.maps and all(maps.k_mean is None and maps.v_mean is None for maps in made.profile.maps.values())
    assert set(made.profile.layout_v) == {""}
    # Not with vectors either.
    channels = c.again(find_subject(path), made.profile, kind="channels", centre_values=True).profile
    assert channels.maps and all(set(maps.arrays()) == {"k_scale"} for maps in channels.maps.values())
    assert not any(found.shift_free for found in made.profile.statistics.values())
    out = tmp_path / "p.gguf"
    text = tmp_path / "text.txt"
    text.write_text(TEXT.content)
    result = CliRunner().invoke(app, ["calibrate", str(path), "--text", str(text), "--tokens", "256", "--n-ctx", "64", "--centre-values", "-o", str(out), "--threads", "1"])
    assert result.exit_code == 0 and "keys and values are not centred in layers 0, 1, 2, 3" in result.output.replace("\n", " ")


def find_subject(path) -> ModelFile:
    return ModelFile("m", path, "0" * 64)


@pytest.mark.parametrize("kind", MAPS)
def test_profiles_of_odd_models(tmp_path, kind):
    path = random_gguf.hybrid(tmp_path / "hybrid.gguf")
    made = c.calibrate(find_subject(path), [TEXT], [64], 128, kind=kind, threads=1)
    made.profile.write(tmp_path / "p.gguf")
    profile = Profile.read(tmp_path / "p.gguf")
    profile.check_model(path)
    assert [i for i, name in enumerate(profile.layout_k) if name] == [2, 5, 8, 10]
    assert {*profile.layout_k} == {"", "flat" if kind == "full" else "scaled"}


def test_vectors_save_the_keys_of_a_model_with_large_offsets(tmp_path):
    """Qwen2.5's q4_0 keys: a mean and a scale take most of their distance, for a fiftieth of a bit."""
    import llama_lib as lib
    from kvfmt.subjects import find_text

    subject = find_model("qwen")
    made = c.calibrate(subject, [find_text("cpp")], (128,), 128, kind="channels", threads=2).profile
    assert {*made.layout_k} == {"scaled"} and {*made.layout_v} == {""} and made.sidecar_bytes == 2 * 24 * 2 * 64 * 4
    made.write(tmp_path / "p.gguf")
    logits = []
    for kv, profile in (("f16/f16", None), ("q4_0/f16", None), ("q4_0/f16", tmp_path / "p.gguf")):
        with lib.Context(subject.path, kv, profile=profile, threads=2) as context:
            tokens = context.tokenize(find_text("docs").content[:1500])[:96]
            logits.append(context.decode(tokens))
    plain, scaled = (lib.kld(logits[0], other) for other in logits[1:])
    assert scaled < 0.3 * plain


def test_default_lengths_end_where_the_model_does(tmp_path):
    path = random_gguf.llama(tmp_path / "m.gguf", n_layer=1, n_ctx=96)
    assert c.calibrate(find_subject(path), [TEXT], None, 96, threads=1).profile.provenance["context"] == [96]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_the_way_into_the_callback_ends_the_pass(number):
    """Raised there it would be printed and forgotten: it is kept, the pass ends, and it is raised when the call is back."""
    seen = []

    def ask(node) -> bool:
        seen.append(node.op)
        return True

    watch = Watch(ask, lambda node: None)
    call, calls = watch._call, []

    def interrupted(tensor, asked, data):
        calls.append(asked)
        if len(calls) == 5:
            signal.raise_signal(number)  # where a signal finds the callback before its first line
        return call(tensor, asked, data)

    watch.callback = patched_bindings().llama_cpp.ggml_backend_sched_eval_callback(interrupted)
    before = signal.signal(number, signal.default_int_handler)
    try:
        with LoadedModel(fetch_model("smollm2"), 1) as model:
            (tokens,) = c.contexts_of(model, TEXT, 64, 1)
            context = model.create_context(collector_params(model, watch))
            space = (ctypes.c_int32 * 64)(*tokens.tolist())
            with pytest.raises(KeyboardInterrupt):
                with watch.watching():
                    model.lib.llama_decode(context, model.lib.llama_batch_get_one(space, 64))
                    model.lib.llama_synchronize(context)
            assert signal.getsignal(number) is signal.default_int_handler and len(seen) < 20
            model.lib.llama_free(context)
    finally:
        signal.signal(number, before)
