"""The quality bench: against llama-perplexity on a real model, and its own rules on random ones."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import random_gguf
from conftest import PIN
from typer.testing import CliRunner

from bench import divergence, quality
from bench.caches import F16, Cache, default_caches, parse_caches
from bench.cli import app
from bench.engine import Engine
from bench.records import Metric, Results, build_id
from kvfmt import perplexity, policy, registry
from kvfmt.errors import KvfmtError, UnknownName
from kvfmt.subjects import ModelFile, Text, find_model, find_text

RANDOM_TEXT = Text("numbers", " ".join(str(i * i) for i in range(4000)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> ModelFile:
    """A random model with a vocabulary of 259 that wants a first token."""
    path = random_gguf.llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    return find_model(str(path))


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine(tiny.path, threads=1) as engine:
        yield engine


def test_figures_are_those_of_llama_perplexity(ggml_libdir, tmp_path):
    """To three digits on SmolLM2."""
    model, text, plan = find_model("smollm2"), find_text("docs"), quality.make_plan(256, 1, None)
    with Engine(model.path, threads=2) as engine:
        f16, *rows = quality.measure(engine, model, text, (F16, Cache("q4_0"), Cache("kvq3/kvq2", 1)), plan, Results(tmp_path / "r.jsonl"))
    assert all(f16.metrics[name].value == 0 for name in ("kld", "kld_cut", "kld_max"))
    source, base, program = tmp_path / "text", tmp_path / "base", ggml_libdir / "llama-perplexity"
    source.write_text(text.content, "utf-8")
    common = ["-m", str(model.path), "-f", str(source), "-c", "256", "-b", "256", "-t", "2", "--chunks", "1"]
    common += ["--kl-divergence-base", str(base)]
    perplexity.run(program, [*common, *F16.arguments()])
    for row in rows:
        theirs = perplexity.run(program, [*common, "--kl-divergence", *Cache(f"{row.k}/{row.v}", row.protect).arguments()], compared=True)
        same = Metric(*(100 * x for x in row.metrics["same_top"]))
        ours = {**row.metrics, "kld": row.metrics["kld_cut"], "same_top": same}
        for name in ("ppl", "ppl_base", "ppl_ratio", "kld", "same_top"):
            assert ours[name] == pytest.approx(theirs.statistics[name], rel=5e-4, abs=5e-6), name
        for name in ("kld_999", "kld_max"):
            assert ours[name].value == pytest.approx(theirs.statistics[name][0], rel=1e-3), name
        assert row.metrics["kld"].value == pytest.approx(ours["kld"].value, rel=3e-3)
        assert row.bits_per_value == pytest.approx(theirs.bits_per_value, abs=1e-3)


@pytest.mark.parametrize("first_token", [True, False])
def test_chunks_are_those_of_llama_perplexity(ggml_libdir, tmp_path, first_token):
    """Its file of f16's predictions: the same tokens, positions and probabilities in every chunk, with and without a
    first token that the model wants."""
    path = random_gguf.llama(tmp_path / "m.gguf")
    if not first_token:
        path = without_first_token(path)
    plan = quality.make_plan(256, 3, None)
    source, base = tmp_path / "text", tmp_path / "base"
    source.write_text(RANDOM_TEXT.content)
    command = [ggml_libdir / "llama-perplexity", "-m", path, "-f", source, "-c", "256", "-b", "256", "-t", "1", "--chunks", "3"]
    subprocess.run([*command, "--kl-divergence-base", base, *F16.arguments()], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    raw = base.read_bytes()
    assert raw[:8] == b"_logits_"
    n_ctx, n_vocab, n_chunk = np.frombuffer(raw, np.int32, 3, 8)
    assert (n_ctx, n_vocab, n_chunk) == (256, random_gguf.N_VOCAB, 3)
    tokens = np.frombuffer(raw, np.int32, 256 * 3, 20).reshape(3, 256)
    width = 2 * ((n_vocab + 1) // 2) + 4
    rows = np.frombuffer(raw, np.uint16, 3 * plan.per_chunk * width, 20 + 4 * 256 * 3).reshape(3, plan.per_chunk, width)
    scale, low = np.moveaxis(np.ascontiguousarray(rows[:, :, :4]).view(np.float32), 2, 0)
    theirs = rows[:, :, 4 : 4 + n_vocab] * scale[:, :, None] + low[:, :, None]
    with Engine(path, threads=1) as engine, engine.open(F16, 256, 256) as session:
        assert engine.add_bos is first_token
        pieces = quality.chunks_of(engine, RANDOM_TEXT, plan)
        np.testing.assert_array_equal(pieces[:, 1:], tokens[:, 1:])
        assert (pieces[:, 0] == 1).all() if first_token else (pieces[1:, 0] == tokens[1:, 0]).all()
        for piece, expected in zip(pieces, theirs):
            session.clear()
            logits = session.decode(piece, plan.first)[: plan.per_chunk].astype(np.float64)
            ours = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            # 16 nats in 65,535 steps; what lies deeper is stored as 16.
            shown = ours > ours.max(1, keepdims=True) - 15.9
            assert shown.mean() > 0.5 and abs(ours - expected)[shown].max() < 3e-4


def without_first_token(path):
    """A copy whose tokenizer adds nothing: the one byte of that switch is another."""
    data = bytearray(path.read_bytes())
    name = b"tokenizer.ggml.add_bos_token"
    at = data.index(name) + len(name) + 4  # the value's type comes first
    assert data[at] == 1
    data[at] = 0
    copy = path.with_name("bare.gguf")
    copy.write_bytes(data)
    return copy


def test_bits_are_those_of_the_policy(engine):
    for cache in default_caches():
        with engine.open(cache, 256) as session:
            cost = policy.cache_cost(256, 128, 128, 4, *policy.parse_kv(cache.kv), cache.protect)
            assert session.allocated.bits_per_value == pytest.approx(cost.bits_per_value, abs=1e-3)
            assert session.allocated.n_bytes == pytest.approx(cost.total, abs=0.01 * 2**20)


def test_scores_are_those_of_one_token_at_a_time(engine):
    """Against float64 numpy on logits that were made singly, at every split of a chunk into batches."""
    tokens = engine.tokenize(RANDOM_TEXT.content)[:700]
    cache, wanted = Cache("q4_0"), []
    logits = []
    for kind in (F16, cache):
        with engine.open(kind, 768) as session:
            logits.append(np.array([session.decode(tokens[i : i + 1], 0)[0].copy() for i in range(len(tokens))], np.float64))
    base, other = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True) for x in logits)
    kld = (np.exp(base) * (base - other)).sum(1)
    for first in (0, 300, 600, 698):
        for rows in (7, 512):
            with engine.open(F16, 768, rows) as a, engine.open(cache, 768, rows) as b:
                (scores,) = quality.score_chunk(a, [b], tokens, first)
            wanted = np.arange(first, 699)
            # Batches of several tokens round otherwise than single ones.
            np.testing.assert_allclose(scores.kld, kld[wanted], rtol=0.1, atol=2e-3)
            np.testing.assert_allclose(scores.nll_base, -base[wanted, tokens[wanted + 1]], atol=0.05)
            np.testing.assert_allclose(scores.nll, -other[wanted, tokens[wanted + 1]], atol=0.1)


def test_divergence_is_the_definition_in_float64():
    rng = np.random.default_rng(3)
    base = (4 * rng.standard_normal((50, 300))).astype(np.float32)
    other = base + (0.3 * rng.standard_normal(base.shape)).astype(np.float32)
    targets = rng.integers(0, 300, 50).astype(np.int32)
    scores = divergence.Scores.empty(50)
    with ThreadPoolExecutor(2) as pool:
        divergence.compare(base, other, targets, scores, pool, 2)
    p, q = (x.astype(float) - np.log(np.exp(x.astype(float)).sum(1, keepdims=True)) for x in (base, other))
    terms = np.exp(p) * (p - q)
    np.testing.assert_allclose(scores.kld, terms.sum(1), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(scores.kld_cut, np.where(p > -16, terms, 0).sum(1), rtol=1e-5, atol=1e-7)
    assert abs(scores.kld - scores.kld_cut).max() > 1e-6, "no word lies below the floor: the test shows nothing"
    np.testing.assert_allclose(scores.nll, -q[np.arange(50), targets], rtol=1e-5)
    np.testing.assert_array_equal(scores.same, p.argmax(1) == q.argmax(1))


def test_statistics():
    scores = divergence.Scores.empty(101)
    scores.kld[:] = np.arange(101) / 100
    scores.nll[:] = 1.5
    scores.nll_base[:] = 1.0
    scores.same[:50] = True
    found = divergence.metrics(scores)
    assert found["kld"] == pytest.approx((0.5, np.sqrt(0.085 / 100)))
    assert found["kld_90"].value == pytest.approx(0.9) and found["kld_99"].value == pytest.approx(0.99)
    assert found["ppl_ratio"] == pytest.approx((np.exp(0.5), 0), abs=1e-12)
    assert found["same_top"].value == 50 / 101
    buckets = divergence.by_position(scores, np.arange(101) + 10, np.array([0, 10, 60, 200]))
    assert [(b["from"], b["n"]) for b in buckets] == [(10, 50), (60, 51)]
    assert buckets[0]["kld"] == pytest.approx(0.245) and buckets[0]["same_top"] == 1


def test_an_interrupted_run_goes_on_where_it_stopped(engine, tiny, tmp_path):
    caches, plan = (Cache("q8_0"), Cache("kvq3/kvq2", 1)), quality.make_plan(128, 3, None)
    whole = quality.measure(engine, tiny, RANDOM_TEXT, caches, plan, Results(tmp_path / "whole.jsonl"))
    results = Results(tmp_path / "r.jsonl")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quality.measure(engine, tiny, RANDOM_TEXT, caches, plan, results, stop)
    assert not results.rows and list(tmp_path.glob(".r.jsonl*.npz"))
    counts = []
    resumed = quality.measure(engine, tiny, RANDOM_TEXT, caches, plan, results, lambda done, _: counts.append(done))
    assert counts[0] == 128 * len(caches), "the first chunk was measured again"
    assert [r.metrics for r in resumed] == [r.metrics for r in whole]
    assert not list(tmp_path.glob("*.npz")) and not list(tmp_path.glob(".r.jsonl*.npz"))
    # Nothing is left to do; another cache alone is measured.
    quality.measure(engine, tiny, RANDOM_TEXT, caches, plan, results, lambda *_: pytest.fail("measured again"))
    assert len(quality.measure(engine, tiny, RANDOM_TEXT, (*caches, F16), plan, results)) == 3 == len(results.rows)


def test_a_damaged_part_is_measured_again(engine, tiny, tmp_path):
    plan = quality.make_plan(64, 1, None)
    path = tmp_path / "p.npz"
    path.write_bytes(b"PK\x03\x04 not an archive")
    assert quality.Progress(path, 1, plan).done == []


def test_positions_and_where_scoring_begins(engine, tiny, tmp_path):
    results = Results(tmp_path / "r.jsonl")
    half, late = (quality.measure(engine, tiny, RANDOM_TEXT, (Cache("q4_0"),), quality.make_plan(256, 2, first), results)[0] for first in (None, 200))
    assert half.metrics["positions"].value == 2 * 127 and late.metrics["positions"].value == 2 * 55
    assert half.detail["by_position"][0]["from"] == 128 and half.detail["by_position"][-1]["to"] == 256
    assert sum(b["n"] for b in late.detail["by_position"]) == 110
    assert np.mean(half.detail["kld_by_chunk"]) == pytest.approx(half.metrics["kld"].value)


def test_an_f16_cache_that_differs_from_itself_is_a_fault(engine, tiny, tmp_path):
    (row,) = quality.measure(engine, tiny, RANDOM_TEXT, (F16,), quality.make_plan(64, 1, None), Results(tmp_path / "r.jsonl"))
    quality.check_identity(row)
    with pytest.raises(KvfmtError, match="f16 cache differs from itself by a KLD of up to 1.00e-09"):
        quality.check_identity(replace(row, metrics={**row.metrics, "kld_max": Metric(1e-9)}))


def test_bad_input_is_named(engine, tiny, tmp_path):
    results = Results(tmp_path / "r.jsonl")
    short = Text("short.txt", "one two three")
    with pytest.raises(KvfmtError, match=r"'short.txt' has 18 tokens, 1 chunks of 64 need 64") as caught:
        quality.measure(engine, tiny, short, (F16,), quality.make_plan(64, 1, None), results)
    assert "shorter than one chunk" in caught.value.hint
    with pytest.raises(KvfmtError, match="8192 tokens is more than the model's 4096"):
        quality.measure(engine, tiny, RANDOM_TEXT, (F16,), quality.make_plan(8192, 1, None), results)
    with pytest.raises(KvfmtError, match="position 63 leaves nothing of 64"):
        quality.make_plan(64, 1, 63)
    with pytest.raises(UnknownName, match="unknown cache type 'kvq9'"):
        parse_caches("q8_0 kvq9/kvq2", ())
    with pytest.raises(KvfmtError, match="'-1' in cache 'q8_0:-1'"):
        parse_caches("q8_0:-1", ())
    with pytest.raises(KvfmtError, match="no cache to measure"):
        parse_caches("  ", ())
    with pytest.raises(UnknownName, match="no model 'mymodel'"):
        find_model("mymodel")
    with pytest.raises(UnknownName, match="no text 'nowhere.txt'"):
        find_text("nowhere.txt")
    fake = tmp_path / "fake.gguf"
    fake.write_text("no model")
    with pytest.raises(KvfmtError, match="fake.gguf is not a GGUF file"):
        find_model(str(fake))
    fake.write_bytes(tiny.path.read_bytes()[:5000])
    with pytest.raises(KvfmtError, match="fake.gguf could not be loaded:\n.*(fail|error)"):
        Engine(fake)
    with engine.open(F16, 64) as session, pytest.raises(KvfmtError, match="do not fit a context of 64"):
        session.prefill(np.zeros(65, np.int32))


def test_a_type_that_the_model_cannot_have_is_refused_in_the_librarys_words(tmp_path):
    path = random_gguf.llama(tmp_path / "h80.gguf", head=80)
    with Engine(path, threads=1) as engine, pytest.raises(KvfmtError, match="kvq3 with block size 64 does not divide n_embd_head_k=80"):
        engine.open(Cache("kvq3"), 64)


def test_a_cache_without_room_is_refused_before_it_is_made(tmp_path):
    with Engine(random_gguf.llama(tmp_path / "long.gguf", n_ctx=1 << 30), threads=1) as engine:
        assert engine.least_bytes(F16, 512) == 512 * 4 * 2 * 128 * 2
        with pytest.raises(KvfmtError, match=r"cache q8_0 of 1000000000 tokens takes 1088.0 GB, \d+\.\d GB of memory are free"):
            engine.open(Cache("q8_0"), 10**9)


def test_the_command(tiny, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text(RANDOM_TEXT.content)
    arguments = ["quality", "--model", str(tiny.path), "--text", str(text), "--n-ctx", "64", "--chunks", "2"]
    arguments += ["--caches", "f16 q8_0", "--output", str(tmp_path / "r.jsonl"), "--threads", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert [row.method for row in Results(tmp_path / "r.jsonl")] == ["f16", "q8_0"]
    assert CliRunner().invoke(app, [*arguments, "--caches", "q8_1"]).exit_code == 1
    assert CliRunner().invoke(app, [*arguments, "--n-ctx", "5000"]).exit_code == 1


def test_kvfmt_does_not_import_the_benchmarks():
    code = "import sys, kvfmt.cli; assert not [m for m in sys.modules if m.split('.')[0] in ('bench', 'converters', 'cpp_patch')]"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
    done = subprocess.run([sys.executable, "-m", "kvfmt.cli", "bench", "--help"], capture_output=True, text=True, check=True)
    assert "quality" in done.stdout


def test_every_format_that_needs_no_profile_is_among_the_default_caches():
    caches = {c.kv for c in default_caches()}
    assert {f.spec.name for f in registry.plain_formats()} < caches
    assert not {f.spec.name for f in registry.all_formats() if f.spec.needs_profile} & caches
    assert PIN.version in build_id()
