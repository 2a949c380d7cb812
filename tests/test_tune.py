"""kvfmt tune: the choice is optimal, the budget is held by what llama.cpp allocates, and what cannot be tuned is said."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import random_gguf
from bench import quality
from bench import tune as t
from bench import tune_costs
from bench.caches import Cache
from bench.engine import Engine
from bench.tune_cli import app, size_of, table
from kvfmt import registry
from kvfmt.calibrate import calibrate
from kvfmt.distortion import gaussian_distortion
from kvfmt.errors import KvfmtError
from kvfmt.profile import Profile
from kvfmt.subjects import ModelFile, Text, find_model

TEXT = Text("words", " ".join(f"The {a} {b} of {a * b} words, said {chr(65 + a)}." for a in range(40) for b in range(40)))
CANDIDATES = {"k": ("kvt3", "q8_0"), "v": ("kve8_2", "q8_0")}


def options(seed: int, layers: int = 3) -> list[t.Option]:
    rng = np.random.default_rng(seed)
    sizes = {"a": 26, "b": 34, "c": 128}
    return [
        t.Option(layer, side, name, size, float(rng.uniform(0, 1) / size))
        for layer in range(layers) for side in t.SIDES for name, size in sizes.items()
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bits", (0.3, 0.5, 1.1))
def test_the_choice_is_the_best_of_all(seed, bits):
    given = options(seed)
    places = sorted({(o.layer, o.side) for o in given})
    budget = int(bits * 6 * 128 * 8 / 8)
    every = itertools.product(*[[o for o in given if (o.layer, o.side) == place] for place in places])
    least = min(sum(o.kld for o in pick) for pick in every if sum(o.n_bytes for o in pick) <= budget)
    found = t.choose(given, budget, 1000)
    assert found.predicted == pytest.approx(least)
    assert sum(o.n_bytes for o in found.options) <= budget
    assert found.bits_per_value == pytest.approx(8 * sum(o.n_bytes for o in found.options) / 1000)


def test_exactly_the_smallest_fits_and_a_byte_less_does_not():
    given = options(1)
    assert {o.type for o in t.choose(given, 6 * 26, 1000).options} == {"a"}
    with pytest.raises(KvfmtError, match="less than the smallest cache"):
        t.choose(given, 6 * 26 - 1, 1000)


@pytest.mark.parametrize(("text", "size"), (("2GiB", 2 << 30), ("900M", 900 << 20), ("32k", 32768), ("4096", 4096), ("1.5g", 3 << 29)))
def test_sizes(text, size):
    assert size_of(text, "memory") == size


@pytest.mark.parametrize("text", ("", "-1", "0", "lots", "3 TB"))
def test_no_sizes(text):
    with pytest.raises(KvfmtError, match="is no size"):
        size_of(text, "memory")


def subject_of(path) -> ModelFile:
    return find_model(str(path))


@pytest.mark.parametrize("kind", ("llama", "iswa", "hybrid"))
def test_the_budget_is_what_llama_allocates(tmp_path, kind):
    path = getattr(random_gguf, kind)(tmp_path / "model.gguf")
    subject, n_ctx = subject_of(path), 512
    base = calibrate(subject, [TEXT], (128,), 256).profile
    with Engine(path) as engine:
        made = t.tune(engine, subject, base, TEXT, quality.make_plan(128, 1, None), n_ctx, t.Budget(7.0), CANDIDATES)
        made.profile.write(tmp_path / "tuned.gguf")
        with engine.open(Cache("", 0, tmp_path / "tuned.gguf"), n_ctx) as session:
            allocated = session.allocated
    assert made.tuned.bits_per_value <= 7.0
    # The library says sizes to 0.01 MiB.
    values = 8 * (allocated.n_bytes + allocated.sidecar_bytes) / allocated.bits_per_value
    assert allocated.bits_per_value == pytest.approx(made.tuned.bits_per_value, abs=8 * 0.02 * 2**20 / values)
    # More than one type is in use, or the budget was no constraint and the test nothing worth.
    assert len({*made.profile.types_k, *made.profile.types_v} - {""}) > 1
    again = Profile.read(tmp_path / "tuned.gguf")
    assert again.types_k == made.profile.types_k and again.hash == made.profile.hash


def test_layers_that_cost_more_get_more(tmp_path):
    path = random_gguf.llama(tmp_path / "model.gguf")
    subject = subject_of(path)
    base = calibrate(subject, [TEXT], (128,), 256).profile
    with Engine(path) as engine:
        few, many = (t.tune(engine, subject, base, TEXT, quality.make_plan(128, 1, None), 512, t.Budget(bits), CANDIDATES) for bits in (6.0, 16.0))
    assert few.tuned.predicted > many.tuned.predicted == 0
    assert set(many.profile.types_k) == set(many.profile.types_v) == {"f16"} and not many.profile.maps
    assert few.best_uniform is None or few.best_uniform[1].predicted >= few.tuned.predicted


def sides(profiles: t.Profiles, layer: int, side: str, kinds: tuple[str, ...]) -> list[int]:
    return [t.allocated(profiles, layer, side, kind, 512) for kind in kinds]


def test_keys_and_values_without_maps_are_a_choice_and_bring_none(tmp_path):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=3)
    base = calibrate(subject_of(path), [TEXT], (128,), 128, centre_values=True).profile
    profiles = t.Profiles(base)
    made = profiles.make(["kve8_2:plain", "kve8_2", "q8_0:plain"], ["kve8_2", "q8_0:plain", "q8_0:plain"], "two kinds")
    assert made.types_k == ("kve8_2", "kve8_2", "q8_0") and made.types_v == ("kve8_2", "q8_0", "q8_0")
    assert made.layout_k == ("", "flat", "") and made.layout_v == ("scaled", "", "")
    assert {layer: set(maps.arrays()) for layer, maps in made.maps.items()} == {0: {"v_mean"}, 1: {"k_mean", "k_map", "q_map"}}
    with_maps, without = sides(profiles, 0, "k", ("kve8_2", "kve8_2:plain"))
    assert with_maps - without == made.maps[1].nbytes
    centred, plain = sides(profiles, 0, "v", ("kve8_2", "kve8_2:plain"))
    assert centred - plain == made.maps[0].nbytes == 2 * 64 * 4
    made.write(tmp_path / "two.gguf")
    with Engine(path) as engine, engine.open(Cache("", 0, tmp_path / "two.gguf"), 512) as session:
        assert session.allocated.sidecar_bytes == made.sidecar_bytes


def test_channels_in_order_are_a_choice(tmp_path):
    """A type that orders channels takes vectors in place of matrices; nothing of another candidate of the layer is in the way."""
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=4)
    base = calibrate(subject_of(path), [TEXT], (128,), 128, centre_values=True).profile
    profiles = t.Profiles(base)
    made = profiles.make(["kvt3:scaled", "kvt3", "kvt4:scaled", "kve8_2:scaled"], ["f16", "kve8_2", "kve8_2", "kvq4"], "four kinds")
    assert made.types_k == ("kvt3", "kvt3", "kvt4", "kve8_2") and made.layout_k == ("kvt3", "kvt3", "kvt4", "scaled")
    assert made.layout_v == ("", "scaled", "scaled", "scaled")
    order = {"k_mean", "k_scale", "k_order", "k_mix"}
    assert [set(made.maps[layer].arrays()) for layer in range(4)] == [order, {"k_mean", "k_map", "q_map", "v_mean"}, order | {"v_mean"}, {"k_mean", "k_scale", "v_mean"}]
    for layer in range(1, 4):
        np.testing.assert_array_equal(made.maps[layer].v_mean, base.statistics[layer].v_centre.astype(np.float32))
    ordered, vectors, flat = sides(profiles, 0, "k", ("kvt3:scaled", "kve8_3:scaled", "kve8_3:plain"))
    assert ordered - flat == made.maps[0].nbytes == 3 * 2 * 64 * 4 + 16 * 16 * 4 and vectors - flat == 2 * 2 * 64 * 4
    # Every option's bytes are a part of the profile's, and of the budget.
    total = sum(t.allocated(profiles, layer, side, kind, 512) for side, kinds in (("k", ("kvt3:scaled", "kvt3", "kvt4:scaled", "kve8_2:scaled")), ("v", ("f16", "kve8_2", "kve8_2", "kvq4"))) for layer, kind in enumerate(kinds))
    rows = {"kvt3": 26, "kvt4": 34, "kve8_2": 18, "kvq4": 34, "f16": 128}
    assert total == made.sidecar_bytes + 512 * 2 * sum(rows[name] for name in (*made.types_k, *made.types_v))
    made.write(tmp_path / "four.gguf")
    assert Profile.read(tmp_path / "four.gguf").hash == made.hash
    with Engine(path) as engine, engine.open(Cache("", 0, tmp_path / "four.gguf"), 512) as session:
        assert session.allocated.sidecar_bytes == made.sidecar_bytes


def test_a_value_is_measured_with_its_mean(tmp_path):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=2)
    profiles = t.Profiles(calibrate(subject_of(path), [TEXT], (128,), 128, centre_values=True).profile)
    centred, plain = (Profile.read(profiles.alone(1, "v", kind, tmp_path).profile) for kind in ("kve8_2", "kve8_2:plain"))
    assert centred.types_v == plain.types_v == ("f16", "kve8_2") and centred.types_k == ("f16", "f16")
    assert centred.layout_v == ("", "scaled") and plain.layout_v == ("", "") and not plain.maps
    assert set(centred.maps) == {1} and set(centred.maps[1].arrays()) == {"v_mean"}


def test_values_are_not_centred_where_attention_does_not_sum_to_one(tmp_path):
    path = random_gguf.sinks(tmp_path / "model.gguf")
    profiles = t.Profiles(calibrate(subject_of(path), [TEXT], (64,), 128, centre_values=True).profile)
    layers = profiles.base.layers
    made = profiles.make(["q8_0:scaled"] * layers, ["kve8_2"] * layers, "sinks")
    assert set(made.layout_v) == {""} and all(set(maps.arrays()) == {"k_scale"} for maps in made.maps.values())
    centred, plain = sides(profiles, 0, "v", ("kve8_2", "kve8_2:plain"))
    assert centred == plain


def test_keys_with_vectors_alone_are_a_choice(tmp_path):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=3)
    base = calibrate(subject_of(path), [TEXT], (128,), 128).profile
    profiles = t.Profiles(base)
    made = profiles.make(["kve8_2:scaled", "kve8_2", "q8_0:plain"], ["f16"] * 3, "three kinds")
    assert made.types_k == ("kve8_2", "kve8_2", "q8_0") and made.layout_k == ("scaled", "flat", "") and sorted(made.maps) == [0, 1]
    assert set(made.maps[0].arrays()) == {"k_mean", "k_scale"} and made.maps[0].nbytes == 2 * 2 * 64 * 4
    vectors, without = (t.allocated(profiles, 0, "k", kind, 512) for kind in ("kve8_2:scaled", "kve8_2:plain"))
    assert vectors - without == made.maps[0].nbytes
    made.write(tmp_path / "three.gguf")
    with Engine(path) as engine, engine.open(Cache("", 0, tmp_path / "three.gguf"), 512) as session:
        assert session.allocated.sidecar_bytes == made.sidecar_bytes


def test_a_short_cache_gets_vectors_where_matrices_do_not_fit(tmp_path):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=2)
    subject = subject_of(path)
    base = calibrate(subject, [TEXT], (128,), 256).profile
    candidates = {"k": ("kve8_2", "kve8_2:scaled", "kve8_3", "kve8_3:scaled"), "v": ("kve8_2", "q8_0")}
    with Engine(path) as engine:
        made = t.tune(engine, subject, base, TEXT, quality.make_plan(128, 1, None), 512, t.Budget(3.0), candidates)
        made.profile.write(tmp_path / "tuned.gguf")
        with engine.open(Cache("", 0, tmp_path / "tuned.gguf"), 512) as session:
            allocated = session.allocated
    assert set(made.profile.layout_k) == {"scaled"} and allocated.sidecar_bytes == made.profile.sidecar_bytes > 0
    assert made.tuned.bits_per_value <= 3.0 and allocated.bits_per_value == pytest.approx(made.tuned.bits_per_value, abs=0.3)
    assert made.best_uniform[0].split("/")[0].endswith(":scaled")


def test_the_tables_of_all_candidates_fit_a_terminal():
    given = [t.Option(layer, side, kind, 1 + i, 0.01 * i) for layer in (0, 47) for side in t.SIDES for i, kind in enumerate((*t.CANDIDATES[side], "f16"))]
    picked = tuple(o for o in given if o.type in ("kve8_2:scaled", "kve8_2") and (o.side == "v" or o.type != "kve8_2"))
    made = t.Outcome(None, t.Tuned(picked, 0.1, 3.0), tuple(given), 0.1, None, 0.1)
    out = io.StringIO()
    for side in t.SIDES:
        Console(width=80, file=out).print(table(made, side))
    text = out.getvalue()
    assert "\u2026" not in text and text.count("kve8_2*") == 3
    assert max(map(len, text.splitlines())) <= 80 and "60.00" in text


def test_heads_that_are_not_rotated_are_not_scaled(tmp_path, monkeypatch):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=2, head=96, n_head=2, n_head_kv=1)
    base = calibrate(subject_of(path), [TEXT], (128,), 128).profile
    monkeypatch.setattr(t, "alone_costs", lambda *_: pytest.fail("it was measured"))
    # Channels in order are mixed by the profile: such a candidate is no matter of the rotation, here of its blocks.
    t.Profiles(base).check_rotated(("kvt3:scaled",))
    with Engine(path) as engine, pytest.raises(KvfmtError, match="kvt3 with block 64 does not divide 96 values"):
        t.tune(engine, subject_of(path), base, TEXT, quality.make_plan(128, 1, None), 512, t.Budget(9.0), {"k": ("q4_0", "kvt3:scaled"), "v": ("q8_0",)})
    with Engine(path) as engine, pytest.raises(KvfmtError, match="candidate 'q8_0:scaled' for K: layer 0 has heads of 96, which llama.cpp does not rotate"):
        t.tune(engine, subject_of(path), base, TEXT, quality.make_plan(128, 1, None), 512, t.Budget(9.0), {"k": ("q4_0", "q8_0:scaled"), "v": ("q8_0",)})


def test_what_is_chosen_is_also_measured_together(tmp_path):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=2)
    base = calibrate(subject_of(path), [TEXT], (128,), 128).profile
    with Engine(path) as engine:
        plan = quality.make_plan(128, 1, None)
        made = t.tune(engine, subject_of(path), base, TEXT, plan, 4096, t.Budget(6.0), {"k": ("kvt3", "q8_0"), "v": ("kve8_2", "q8_0")})
        made.profile.write(tmp_path / "tuned.gguf")
        again = t.distances(engine, TEXT, plan, [Cache("", 0, tmp_path / "tuned.gguf")])
    assert made.together == pytest.approx(again[0], rel=1e-6) and made.together > 0
    assert made.best_uniform is not None and made.best_uniform[2] >= made.together


def test_where_one_pair_for_all_layers_is_closer_it_is_what_is_written(tmp_path, monkeypatch):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=2)
    base = calibrate(subject_of(path), [TEXT], (128,), 128).profile
    given = {"k": ("kvt3", "kvt4", "q8_0"), "v": ("kve8_2", "q8_0")}
    seen = []

    def found(engine, text, plan, caches, update=None):
        # What is measured together comes without progress: the choice by layers, then pairs for all, of which the second is closest.
        seen.append(caches)
        return [0.3, 0.25, 0.2, 0.28][: len(caches)]

    monkeypatch.setattr(t, "alone_costs", lambda *_: {(i, s, kind): 1.0 / (1 + j + i) for i in range(2) for s in "kv" for j, kind in enumerate(given[s])})
    monkeypatch.setattr(t, "distances", found)
    with Engine(path) as engine:
        made = t.tune(engine, subject_of(path), base, TEXT, quality.make_plan(128, 1, None), 4096, t.Budget(6.0), given)
    assert len(seen) == 1 and len(seen[0]) == 1 + t.RIVALS
    name, choice, kld = made.best_uniform
    assert made.tuned is choice and made.together == kld == 0.2 and made.by_layer == 0.3
    k, v = name.split("/")
    assert set(made.profile.types_k) == {k} and set(made.profile.types_v) == {v} and made.profile.provenance["tuned.kld"] == pytest.approx(0.2)
    assert choice.bits_per_value <= 6.0


def test_a_budget_that_nothing_fits_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=2)
    base = calibrate(subject_of(path), [TEXT], (128,), 128).profile
    monkeypatch.setattr(t, "alone_costs", lambda *_: pytest.fail("it was measured"))
    with Engine(path) as engine, pytest.raises(KvfmtError, match="less than the smallest cache"):
        t.tune(engine, subject_of(path), base, TEXT, quality.make_plan(128, 1, None), 512, t.Budget(2.0), CANDIDATES)


def test_a_profile_of_another_model_is_refused(tmp_path):
    one, other = (random_gguf.llama(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    base = calibrate(subject_of(one), [TEXT], (128,), 128).profile
    with Engine(other) as engine, pytest.raises(KvfmtError, match="not for 2"):
        t.tune(engine, subject_of(other), base, TEXT, quality.make_plan(128, 1, None), 512, t.Budget(6.0), CANDIDATES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        ([], "a budget is needed"),
        (["--bits", "3", "--memory", "1G"], "a budget is needed, and only one"),
        (["--memory", "1G"], "--memory says nothing without --context"),
        (["--bits", "3", "--k", "kvq9"], "unknown cache type 'kvq9'"),
        (["--bits", "3", "--k", "kvt3:plain"], "candidate 'kvt3:plain' for K: kvt3 needs its channels in order"),
        (["--bits", "3", "--v", "q8_0:scaled"], "candidate 'q8_0:scaled' for V: values are centred, not scaled"),
        (["--bits", "3", "--v", "f16:plain"], "candidate 'f16:plain' for V: f16 values are stored as they are"),
        (["--bits", "3", "--k", "kvt4:scaled", "--v", "kve8_2:plain"], "no model 'no-such-model'"),
        (["--bits", "3", "--k", "f16:scaled"], "candidate 'f16:scaled' for K: f16 keys are stored as they are"),
        (["--bits", "3", "--k", "q8_0:plain:scaled"], "unknown cache type"),
        (["--memory", "much", "--context", "1k"], "memory 'much' is no size"),
    ),
)
def test_what_is_asked_is_checked_first(arguments, words, tmp_path):
    found = CliRunner().invoke(app, ["no-such-model", *arguments, "-o", str(tmp_path / "p.gguf")])
    assert found.exit_code == 1 and words in " ".join(found.output.split())
    assert not list(tmp_path.iterdir())


def test_the_costs_of_a_place_follow_the_noise_of_its_types_above_a_floor_that_falls(tmp_path, monkeypatch):
    path = random_gguf.llama(tmp_path / "model.gguf", n_layer=4)
    profiles = t.Profiles(calibrate(subject_of(path), [TEXT], (128,), 128).profile)
    candidates = {"k": ("kvt3", "kvt4", "kve8_2:plain", "kve8_2:scaled", "q8_0:scaled", "kvt3:scaled"), "v": ("kve8_2", "kve8_3", "q8_0", "kve8_2:plain")}
    part = {"scaled": 0.5, "plain": 2, "": 1}
    floor = {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}
    asked, rng = [], np.random.default_rng(5)

    def found(engine, text, plan, caches, update):
        asked.extend(caches)
        klds = []
        for cache in caches:
            layer, side, kind = cache.profile.name.removesuffix(".gguf").split(".", 2)
            name, _, how = kind.partition(".")
            clean = (1 + int(layer)) * tune_costs.noise(name) * part[how] if kind != "f32" else 0.0
            klds.append(floor[int(layer)] + clean + 1e-3 * rng.standard_normal())
        return klds

    monkeypatch.setattr(t, "distances", found)
    options = t.options_of(profiles, dict.fromkeys(range(4), 512), t.alone_costs(None, profiles, TEXT, None, candidates, tmp_path))
    assert len(asked) == 4 * 10 + 8
    costs = {(o.layer, o.side, o.type): o.kld for o in options}
    for layer in range(4):
        assert costs[layer, "k", "f16"] == costs[layer, "v", "f16"] == 0
        for side in "kv":
            for kind in candidates[side]:
                expected = (1 + layer) * tune_costs.noise(tune_costs.type_of(kind)) * part[tune_costs.treatment(kind)[1:]]
                # q8_0 alone lies far below the noise of the measurement: its neighbours say what it costs.
                assert costs[layer, side, kind] == pytest.approx(expected, rel=0.1), (layer, side, kind)


def test_noise_is_that_of_the_type():
    assert tune_costs.noise("kve8_2") == pytest.approx(gaussian_distortion(registry.get("kve8_2")).stored, rel=0.03)
    assert tune_costs.noise("q8_0") < tune_costs.noise("q4_0") < tune_costs.noise("kve8_2")
    assert tune_costs.floor_of([(3, 0.25)])(7) == pytest.approx(0.25)
