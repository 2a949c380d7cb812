"""Statistics of longer contexts, against keys that are really turned."""

from __future__ import annotations

import numpy as np
import pytest

from bench.lab.keys import rope
from kvfmt.reach import spans_to, turned_moments


@pytest.mark.parametrize("adjacent", (True, False))
@pytest.mark.parametrize(("size", "rotated"), ((16, 16), (16, 10)))
def test_moments_are_those_of_turned_vectors(adjacent, size, rotated):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((40, 2, size)) @ rng.standard_normal((size, size)) + 3 * rng.standard_normal((2, size))).astype(np.float32)
    base, spans = 50.0, (0, 5, 37)
    frequencies = base ** (-np.arange(rotated // 2) / (rotated // 2))
    means, seconds = [], []
    for span in spans:
        turned = np.stack([rope(x, np.full(len(x), start), base, rotated, not adjacent) for start in range(span + 1)]).reshape(-1, 2, size).astype(np.float64)
        means.append(turned.mean(axis=0))
        seconds.append(np.einsum("nhi,nhj->hij", turned, turned) / len(turned))
    wide = x.astype(np.float64)
    mean, second = turned_moments(wide.mean(axis=0), np.einsum("nhi,nhj->hij", wide, wide) / len(x), frequencies, adjacent, spans)
    np.testing.assert_allclose(mean, np.mean(means, axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(second, np.mean(seconds, axis=0), rtol=1e-4, atol=1e-4 * np.abs(second).max())


def test_no_reach_changes_nothing():
    rng = np.random.default_rng(2)
    mean, second = rng.standard_normal((1, 8)), np.eye(8)[None] * rng.uniform(1, 2, 8)
    found = turned_moments(mean, second, np.ones(4), False, (0,))
    np.testing.assert_allclose(found[0], mean, atol=1e-12)
    np.testing.assert_allclose(found[1], second, atol=1e-12)


def test_power_is_kept_and_a_fast_pair_forgets_its_mean():
    mean = np.array([[5.0, 0.0, 7.0, 1.0]])
    second = np.einsum("hi,hj->hij", mean, mean)
    turned, square = turned_moments(mean, second, np.array([1.0, 1e-9]), True, (100_000,))
    assert np.trace(square[0]) == pytest.approx(75.0) and np.abs(turned[0, :2]).max() < 1e-3
    np.testing.assert_allclose(turned[0, 2:], [7, 1], rtol=1e-3)
    np.testing.assert_allclose(square[0, :2, :2], 12.5 * np.eye(2), atol=1e-2)


def test_spans():
    assert spans_to(1024, 1024) == (0,) == spans_to(1024, 0)
    assert spans_to(1024, 8192) == (0, 1024, 3072, 7168)
    assert spans_to(1000, 2500) == (0, 1000, 1500)
