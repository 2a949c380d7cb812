"""The calibration curve: one pass gives every size, and a text is best served by itself."""

from __future__ import annotations

import numpy as np
import pytest

import random_gguf
from bench import calibration
from kvfmt import calibrate
from kvfmt.runtime import LoadedModel
from kvfmt.subjects import Text

TEXTS = [
    Text("words", " ".join(f"The {a} of {b} is {a * b}." for a in range(40) for b in range(40))),
    Text("code", "".join(f"int f{i}(int x) {{ return x + {i}; }}\n" for i in range(1500))),
]


def test_sizes_and_texts(tmp_path):
    with LoadedModel(random_gguf.llama(tmp_path / "m.gguf", n_layer=2), 1) as model:
        points = calibration.curve(model, TEXTS, [64], 384)
        both = calibration.curve(model, TEXTS[:1], [32, 64], 192)
        # What a pass has after one context is what calibration of that context alone gives.
        first = calibration.growing(model, TEXTS[0], [64], 384)[64][1]
        alone = calibrate.Collector()
        with calibrate.Context(model, 64, alone) as context:
            context.feed(calibrate.contexts_of(model, TEXTS[0], 64, 6)[0], lambda n: None)
        # With a reach, maps come from statistics that are turned to later positions, and are used on what was seen.
        far, seen = calibration.growing(model, TEXTS[0], [64], 64, reach=1024)[64]
    np.testing.assert_allclose(seen[1].k_cov, first[1].k_cov, rtol=1e-9)
    assert np.abs(far[1].k_cov - seen[1].k_cov).max() > 1e-6 * np.abs(seen[1].k_cov).max()
    np.testing.assert_allclose(first[1].k_cov, alone.statistics()[1].k_cov, rtol=1e-9)
    assert len(points) == 2 * 4 * 2 and {p.tokens for p in points} == {64, 128, 256, 384}
    assert {(p.made_from, p.used_on) for p in both} == {(f"words@{a}", f"words@{b}") for a in ("32", "64", "32+64") for b in (32, 64)}
    assert {p.tokens for p in both if "+" in p.made_from} == {96, 192}
    by = {(p.made_from, p.tokens, p.used_on): p.mean for p in points}
    for a, b in (("words@64", "code@64"), ("code@64", "words@64")):
        assert by[a, 384, a] > by[b, 384, a] and by[a, 384, a] > by[a, 64, a]
        assert by[a, 384, a] > 0


def test_maps_of_the_same_statistics_gain_what_they_say(tmp_path):
    with LoadedModel(random_gguf.llama(tmp_path / "m.gguf", n_layer=1), 1) as model:
        found = calibration.growing(model, TEXTS[0], [64], 256)[256][1]
    from kvfmt.geometry import key_maps

    maps = key_maps(found[0])
    assert calibration.gain(found, found) == pytest.approx(10 * np.log10(maps.plain / maps.error), rel=1e-6)
    assert calibration.gain(found, found, "none").mean() <= calibration.gain(found, found).mean() + 1e-9
