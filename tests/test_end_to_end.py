"""The whole path on a real model: tools and bindings of one build, SmolLM2, real text."""

from __future__ import annotations

import ctypes
import re

import llama_cpp
import pytest

from bench.caches import Cache
from bench.engine import Engine
from kvfmt import perplexity, policy
from kvfmt.bindings import open_model
from kvfmt.build.corpus import corpus
from kvfmt.build.models import fetch_model
from kvfmt.errors import BuildFailed, UnknownName

# SmolLM2-135M-Instruct
LAYERS, ROW = 30, 3 * 64
N_CTX, CHUNKS = 512, 1


@pytest.fixture(scope="module")
def smollm2():
    return fetch_model("smollm2")


@pytest.fixture(scope="module")
def score(ggml_libdir, smollm2, tmp_path_factory):
    """score(kv, protect) -> perplexity.Measured against the f16 cache on llama.cpp's documentation."""
    folder = tmp_path_factory.mktemp("kld")
    text = folder / "text"
    text.write_text(corpus("docs")[:16_000], "utf-8")
    common = ["-m", str(smollm2), "-f", str(text), "-c", str(N_CTX), "-b", str(N_CTX), "-fa", "on", "--chunks", str(CHUNKS)]
    common += ["--kl-divergence-base", str(folder / "f16.kld")]
    program = ggml_libdir / "llama-perplexity"
    perplexity.run(program, common)
    cache = {}

    def run(kv: str, protect: int = 0) -> perplexity.Measured:
        if (kv, protect) not in cache:
            k, v = policy.parse_kv(kv)
            types = ["-ctk", k.name, "-ctv", v.name, "--kv-protect", str(protect)]
            cache[kv, protect] = perplexity.run(program, [*common, "--kl-divergence", *types], compared=True)
        return cache[kv, protect]

    return run


def kld(measured: perplexity.Measured) -> float:
    return measured.statistics["kld"][0]


def test_the_f16_cache_equals_itself(score):
    assert kld(score("f16")) < 1e-5
    assert score("f16").statistics["same_top"][0] == 100


def test_kvq4_at_fewer_bits_is_not_worse_than_stock_q4_0(score):
    assert score("kvq4").bits_per_value < score("q4_0").bits_per_value
    assert kld(score("kvq4")) < kld(score("q4_0"))


def test_kld_falls_as_bits_rise(score):
    """Field fault: an asymmetric pair is garbage while the symmetric one works."""
    ladder = [score("kvq2"), score("kvq3/kvq2"), score("kvq3"), score("kvq4"), score("q8_0")]
    assert [kld(m) for m in ladder] == sorted((kld(m) for m in ladder), reverse=True)
    bits = [m.bits_per_value for m in ladder]
    assert bits == sorted(bits)
    assert kld(score("kvq3/f16")) < kld(score("kvq3/kvq2"))
    assert kld(score("f16/kvq2")) < kld(score("kvq3/kvq2"))


def test_protection_helps_and_is_paid_for(score):
    plain, kept = score("kvq3/kvq2"), score("kvq3/kvq2", 2)
    assert kld(kept) < kld(plain)
    assert kept.bits_per_value > plain.bits_per_value


@pytest.fixture(scope="module")
def engine(smollm2):
    with Engine(smollm2, threads=1) as engine:
        yield engine


def expected_cost(kv: str, protect: int) -> policy.CacheCost:
    return policy.cache_cost(N_CTX, ROW, ROW, LAYERS, *policy.parse_kv(kv), protect)


@pytest.mark.parametrize("kv, protect", [("kvq3/kvq2", 0), ("kvq3/kvq2", 2)])
def test_accounting_equals_what_a_tool_allocates(score, kv, protect):
    measured, expected = score(kv, protect), expected_cost(kv, protect)
    assert measured.cache_mib == pytest.approx(expected.total / 2**20, abs=0.006)
    assert measured.bits_per_value == pytest.approx(expected.bits_per_value, abs=0.002)


@pytest.mark.parametrize("kv, protect", [("kvq3/kvq2", 2), ("kvnf4", 1), ("f16/kvq2", 3), ("q4_0", 15)])
def test_accounting_equals_what_the_library_allocates(engine, kv, protect):
    expected = expected_cost(kv, protect)
    with engine.open(Cache(kv, protect), N_CTX) as session:
        assert session.allocated.n_bytes == pytest.approx(expected.total, abs=0.006 * 2**20)
        assert session.allocated.bits_per_value == pytest.approx(expected.bits_per_value, abs=0.002)


@pytest.mark.parametrize("kv, protect", [("kvq3/kvq2", 2), ("kvnf4/f16", 0), ("q8_0/kvq4", 1)])
def test_bindings_allocate_what_was_asked_for(smollm2, kv, protect, capfd):
    """PY#1305: type_k had no effect. The log names the types and layers of the request."""
    model = open_model(smollm2, kv, protect, n_ctx=256, verbose=True)
    log = capfd.readouterr().err
    line = re.search(r"kv policy: (.*)", log)
    assert line, log[-2000:]
    for side, asked in zip("KV", policy.parse_kv(kv)):
        assert re.search(rf"\b{side} {asked.name}\b", line[1]), line[1]
    out = model("The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in out["choices"][0]["text"]


def test_bindings_refuse_an_unknown_type(smollm2):
    with pytest.raises(UnknownName, match="unknown cache type 'kvq9'"):
        open_model(smollm2, "kvq9/kvq2")


def test_a_tool_refuses_an_unknown_type_by_name(ggml_libdir, smollm2):
    with pytest.raises(BuildFailed, match="kvq9"):
        perplexity.run(ggml_libdir / "llama-perplexity", ["-m", str(smollm2), "-f", __file__, "-ctk", "kvq9"])


def test_the_log_is_heard_whoever_listened_before(smollm2, capfd):
    """The benchmarks keep the library's log; a model opened after them was silent although verbose."""
    @llama_cpp.llama_log_callback
    def deaf(level, text, user_data):
        pass

    llama_cpp.llama_log_set(deaf, ctypes.c_void_p(0))
    open_model(smollm2, "kvq3/kvq2", n_ctx=256, verbose=True)
    assert "kv policy: K kvq3" in capfd.readouterr().err
