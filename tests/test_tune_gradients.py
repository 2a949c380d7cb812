"""Costs from gradients: they are the KLD that quantizing does, in every layer, on both sides; and what has no gradients is said."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest
from typer.testing import CliRunner

if sys.version_info < (3, 11):
    pytest.skip("transformers itself needs Python 3.11", allow_module_level=True)

import random_gguf
import torch
from bench import quality
from bench import tune as t
from bench import tune_gradients as g
from bench.engine import Engine
from bench.tune_cli import app
from kvfmt.calibrate import calibrate
from kvfmt.profile import Profile
from kvfmt.subjects import Text, find_model, find_text
from kvfmt.torch import PackedCache, logits, open_gguf

CANDIDATES = {"k": ("kve8_3:scaled", "kvt4", "kvt4:scaled", "f16"), "v": ("kve8_2", "kvq4")}
N_CTX, CHUNKS = 128, 2
WORDS = Text("words", " ".join(f"The {a} {b} of {a * b} words, said {chr(65 + a)}." for a in range(40) for b in range(40)))


@pytest.fixture(scope="module")
def subject():
    return find_model("smollm2")


@pytest.fixture(scope="module")
def profiles(subject):
    return t.Profiles(calibrate(subject, [find_text("cpp")], (256,), 1024, threads=1).profile)


@pytest.fixture(scope="module")
def pieces(subject):
    with Engine(subject.path, 1) as engine:
        return quality.chunks_of(engine, find_text("docs"), quality.make_plan(N_CTX, CHUNKS, None))


@pytest.fixture(scope="module")
def costs(subject, profiles, pieces):
    seen = []
    with Engine(subject.path, 1) as engine:
        found = g.gradient_costs(engine, subject.path, profiles, pieces, N_CTX // 2, CANDIDATES, lambda *at: seen.append(at))
    assert seen == [(1, CHUNKS), (2, CHUNKS)]
    return found


@pytest.fixture(scope="module")
def opened(subject):
    return open_gguf(subject.path)[0]


def predictions(model, pieces, profile):
    return [torch.cat(list(logits(model, piece, PackedCache(model.config, None if profile else "f16", 0, profile), N_CTX)))[N_CTX // 2 : -1].double() for piece in pieces]


def moved(model, pieces, profile) -> float:
    """Mean KLD that the profile's types do to the same model in transformers."""
    base, other = (predictions(model, pieces, p) for p in (None, profile))
    pairs = [(torch.log_softmax(a, -1), torch.log_softmax(b, -1)) for a, b in zip(base, other)]
    return float(np.mean([(a.exp() * (a - b)).sum(-1).mean() for a, b in pairs]))


def test_every_candidate_of_every_layer_has_a_cost_but_f16(costs):
    assert set(costs) == {(layer, side, kind) for layer in range(30) for side in "kv" for kind in CANDIDATES[side] if kind != "f16"}
    assert all(np.isfinite(cost) and cost > 0 for cost in costs.values())


@pytest.mark.parametrize("k, v", (("kve8_3:scaled", "f16"), ("kvt4", "f16"), ("kvt4:scaled", "f16"), ("f16", "kve8_2"), ("f16", "kvq4")))
def test_the_sum_over_layers_is_what_quantizing_all_of_them_does(costs, profiles, pieces, opened, k, v):
    predicted = sum(cost for (_, _, kind), cost in costs.items() if kind == (k if v == "f16" else v))
    found = moved(opened, pieces, profiles.make((k,) * 30, (v,) * 30, "all"))
    # Few tokens, and errors that are not small everywhere; keys in another order would be off by tens.
    assert 0.6 < predicted / found < 1.6


@pytest.mark.parametrize("layer, side, kind", ((1, "v", "kve8_2"), (29, "v", "kve8_2"), (19, "k", "kve8_3:scaled"), (0, "k", "kve8_3:scaled")))
def test_the_cost_of_one_place_is_what_it_does_alone(costs, profiles, pieces, opened, layer, side, kind):
    types = {s: ["f16"] * 30 for s in "kv"}
    types[side][layer] = kind
    found = moved(opened, pieces, profiles.make(types["k"], types["v"], "alone"))
    assert 0.4 < costs[layer, side, kind] / found < 2.5


def test_errors_weigh_by_their_power(costs):
    """From E8's 2 bits to 4, a value's error falls to a thirteenth (bench/tune_costs.py: noise)."""
    ratios = [costs[layer, "v", "kve8_2"] / costs[layer, "v", "kvq4"] for layer in range(30)]
    assert 9 < np.median(ratios) < 18


def test_another_models_predictions_are_noticed(subject, profiles, pieces, monkeypatch):
    right = g.Perturbed.logits
    monkeypatch.setattr(g.Perturbed, "logits", lambda self, tokens: right(self, tokens).roll(1, dims=0))
    with Engine(subject.path, 1) as engine, pytest.raises(g.Unsuitable, match="nats from llama.cpp's"):
        g.gradient_costs(engine, subject.path, profiles, pieces[:1], N_CTX // 2, CANDIDATES)


def test_layers_that_share_kv_are_left_to_llama_cpp(subject, profiles, pieces, monkeypatch):
    monkeypatch.setattr(t.Profiles, "owners", (0, 1, 2))
    with Engine(subject.path, 1) as engine, pytest.raises(g.Unsuitable, match="3 of 30 layers own KV"):
        g.gradient_costs(engine, subject.path, profiles, pieces[:1], N_CTX // 2, CANDIDATES)


def test_a_model_that_does_not_fit_is_refused_before_it_is_opened(subject, profiles, pieces, monkeypatch):
    monkeypatch.setattr(g, "free_memory", lambda: 10**9)
    monkeypatch.setattr(g, "Perturbed", lambda *_: pytest.fail("it was opened"))
    with Engine(subject.path, 1) as engine, pytest.raises(g.Unsuitable, match="gradients take 1.1 GB, 1.0 GB of memory are free"):
        g.gradient_costs(engine, subject.path, profiles, pieces[:1], N_CTX // 2, CANDIDATES)


def run(tmp_path, make, *more):
    """`kvfmt tune` on a model of random weights."""
    path, text = make(tmp_path / "model.gguf"), tmp_path / "words.txt"
    text.write_text(WORDS.content)
    calibrate(find_model(str(path)), [WORDS], (128,), 128).profile.write(tmp_path / "base.gguf")
    out = tmp_path / "tuned.gguf"
    arguments = [str(path), "--bits", "8", "--context", "512", "--profile", str(tmp_path / "base.gguf"), "--text", str(text), "--n-ctx", "64", "--threads", "1",
                 "--k", "kvt3,q8_0", "--v", "kve8_2,q8_0", "-o", str(out), *more]
    return CliRunner().invoke(app, arguments), out


def test_gradients_are_what_tune_takes(tmp_path):
    found, out = run(tmp_path, random_gguf.llama)
    assert found.exit_code == 0, found.output
    assert Profile.read(out).provenance["tuned.costs"] == "gradients"


def test_without_gradients_each_layer_is_quantized_alone_and_that_is_said(tmp_path):
    found, out = run(tmp_path, random_gguf.hybrid)
    assert found.exit_code == 0, found.output
    assert "layers own KV; gradients are taken where all do: each layer is quantized alone instead" in " ".join(found.output.split())
    assert Profile.read(out).provenance["tuned.costs"] == "alone"


def test_gradients_that_were_asked_for_are_not_replaced(tmp_path):
    found, out = run(tmp_path, random_gguf.hybrid, "--costs", "gradients")
    assert found.exit_code == 1 and "layers own KV" in found.output and "--costs alone" in found.output
    assert not out.exists()


@pytest.mark.parametrize("missing", ("transformers", "torch"))
def test_without_transformers_there_are_no_gradients(subject, profiles, pieces, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with Engine(subject.path, 1) as engine, pytest.raises(g.Unsuitable, match="gradients need transformers"):
        g.gradient_costs(engine, subject.path, profiles, pieces[:1], N_CTX // 2, CANDIDATES)


def test_unknown_costs_are_refused(tmp_path):
    found = CliRunner().invoke(app, ["no-such-model", "--bits", "3", "--costs", "guessed", "-o", str(tmp_path / "p.gguf")])
    assert found.exit_code == 1 and "no costs 'guessed'" in found.output and "gradients, alone" in found.output


def test_the_model_is_let_go_before_caches_are_measured(subject):
    model = g.Perturbed(subject.path, 1)
    held = weakref.ref(model.model)
    model.logits(np.arange(8, dtype=np.int32))
    del model
    gc.collect()
    assert held() is None
