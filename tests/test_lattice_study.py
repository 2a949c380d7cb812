"""The E8 codes of the study: their points, exact nearest words, overload, and what is stored is enough to decode."""

from __future__ import annotations

import numpy as np
import pytest

from bench import lattice_study as study
from kvfmt import registry
from kvfmt.errors import KvfmtError

ONE = np.ones(1, np.float32)
ROOTS = study.e8_points(2)[1:]
NO_ROWS = np.zeros((0, 8), np.float32)


def gauss(n: int, size: int = 8, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, size)).astype(np.float32)


def words_for(code: study.Code, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices, words) that a code takes for the rows of y."""
    room, out, indices = np.empty((2, 256), np.float32), np.empty_like(y), np.empty(len(y), np.int64)
    for i, row in enumerate(y):
        indices[i] = study.quantize(row, code, out[i], room)
    return indices, out


def distances(points: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Squared distance of each row of y to the nearest of the points."""
    return np.array([np.square(points - row).sum(axis=1).min() for row in y.astype(np.float64)])


def test_e8_has_as_many_points_as_its_theta_series_says():
    norms = np.square(study.e8_points(6)).sum(axis=1)
    assert [int((norms == n).sum()) for n in (0, 2, 4, 6)] == [1, 240, 2160, 6720]
    assert set(norms) == {0, 2, 4, 6}


def test_the_nearest_point_of_e8_is_that_of_all_points_around():
    points = study.e8_points(12)
    y = np.concatenate([gauss(150) * 0.6, np.round(gauss(100) * 0.6 * 4) / 4])  # ties among the latter
    y = y[np.square(y).sum(axis=1) < 4.9]  # the covering radius is 1: the nearest point is then within the norm
    assert len(y) > 100
    out = np.empty(8, np.float32)
    for row, least in zip(y, distances(points, y)):
        assert study.nearest_e8(row, out) == pytest.approx(least, abs=1e-5)
        assert np.square(row - out).sum() == pytest.approx(least, abs=1e-5)
        assert (points == out).all(axis=1).any()


@pytest.mark.parametrize("offset", [0.0, 0.25])
@pytest.mark.parametrize("q", [2, 3])
def test_a_voronoi_code_has_one_word_in_the_region_for_every_index(q, offset):
    words = study.all_words(study.voronoi(q, offset))
    assert len(np.unique(words, axis=0)) == len(words) == q**8
    points = words - np.float32(offset)
    assert np.isin(points * 2, np.rint(points * 2)).all() and (points.sum(axis=1) % 2 == 0).all()  # in E8
    # No root of q E8 brings a word nearer to the origin: its relevant vectors are these and those of norm 4.
    relevant = study.e8_points(4)[1:] * q
    length = np.square(words).sum(axis=1)
    for v in relevant[:: max(1, len(relevant) // 400)]:
        assert (np.square(words - v).sum(axis=1) >= length - 1e-4).all()
    for index in (0, 1, len(words) // 3, len(words) - 1):
        assert study.point_index(points[index], q) == index


@pytest.mark.parametrize("offset", [0.0, 0.25])
@pytest.mark.parametrize("q", [2, 3])
def test_overload(q, offset):
    """Inside the region the nearest word of all; outside a word, the same that its digits decode to, and the nearer the more is done."""
    y = gauss(120) * np.float32(0.3 * q)
    words = study.all_words(study.voronoi(q, offset))
    least = distances(words, y).astype(np.float32)
    found = {}
    for name, code in {
        "wrap": study.voronoi(q, offset, halvings=0, descend=False),
        "shrink": study.voronoi(q, offset, descend=False),
        "descend": study.voronoi(q, offset),
    }.items():
        indices, out = words_for(code, y)
        assert np.array_equal(words[indices], out)
        found[name] = np.square(y - out).sum(axis=1)
        assert (found[name] >= least - 1e-4).all()
    overloaded = found["wrap"] > least + 1e-4
    assert 20 < overloaded.sum() < 100
    for name in ("shrink", "descend"):
        assert np.allclose(found[name][~overloaded], found["wrap"][~overloaded], atol=1e-5)
    assert (found["descend"] <= found["shrink"] + 1e-5).all()
    mean = {name: error[overloaded].mean() for name, error in found.items()}
    assert mean["descend"] < mean["shrink"] < mean["wrap"] and mean["descend"] < 1.05 * least[overloaded].mean()


def test_e8p_is_a_code_of_16_bits_with_its_nearest_word():
    code = study.tables(study.e8p_rows())
    words = study.all_words(code)
    assert code.bits == 2 and len(np.unique(words, axis=0)) == len(words) == 2**16
    # Differences are in E8, and its 227 whole rows are all that are as short.
    difference = words[:: 2**16 // 500] - words[0]
    assert np.array_equal(difference * 2, np.rint(difference * 2)) and (difference.sum(axis=1) % 2 == 0).all()
    y = np.concatenate([gauss(60), gauss(60, seed=6) * 2])
    indices, out = words_for(code, y)
    assert np.array_equal(words[indices], out)
    assert np.allclose(np.square(y - out).sum(axis=1), distances(words, y), atol=1e-4)


def test_two_stages_are_searched_one_after_the_other():
    code = study.tables(NO_ROWS, study.one_bit(), study.one_bit() * np.float32(0.5))
    words = study.all_words(code)
    assert code.bits == 2 and len(words) == 2**16
    y = gauss(60)
    indices, out = words_for(code, y)
    assert np.array_equal(words[indices], out)
    first = study.one_bit()[indices >> 8]
    assert np.allclose(np.square(y - first).sum(axis=1), distances(study.one_bit(), y), atol=1e-4)
    rest = y - first
    assert np.allclose(np.square(rest - (out - first)).sum(axis=1), distances(study.one_bit() * 0.5, rest), atol=1e-4)
    # Less than what both stages together could do, at times.
    assert (np.square(y - out).sum(axis=1) > distances(words, y) + 1e-4).any()


@pytest.mark.parametrize("bits", [2, 3])
def test_every_contender_has_its_rate_and_decodes_from_what_it_stores(bits):
    x = gauss(12, 64)
    makers = study.contenders(bits, gauss(16, 64, seed=7))
    for name, make in makers.items():
        if name.endswith("exact"):  # searched through 65,536 words; of its kind is the second stage
            continue
        code = make()
        assert code.bits == bits, name
        stored, scales = study.encoded(code, x, np.array([0.9, 1.1], np.float32))
        assert stored.min() >= 0 and stored.max() < 2 ** (8 * bits)
        assert np.array_equal(scales, scales.astype(np.float16))
        best, rounded = study.errors(x, study.decode(stored, scales, code), scales)
        assert 0.01 < best <= rounded < 1.001 * best < 0.7, name


def test_zeros_are_encoded():
    code = study.voronoi(4, 0.25)
    stored, scales = study.encoded(code, np.zeros((1, 64), np.float32), ONE)
    assert not np.nan_to_num(study.decode(stored, scales, code), nan=1).any()


@pytest.mark.parametrize("name, book", [(name, book) for _, name, book in study.BOOKS.values()], ids=lambda v: v if isinstance(v, str) else "")
def test_the_lattices_own_points_lie_where_the_digits_say(name, book):
    fmt = study.of_lattice_points(registry.get(name), book)
    shift, classes, digits = (np.array(fmt.spec.table(t).values) for t in ("shift", "classes", "digits"))
    assert np.array_equal(classes, 2 * shift[0] * (2 * digits + 1))
    x = gauss(300, 64)
    packed = fmt.encode(x)
    scales = packed[:, :2].copy().view(np.float16)[:, 0].astype(np.float32)
    ours = registry.get(name).encode(x)
    found = study.errors(x, fmt.decode(packed), scales)[0] / study.errors(x, registry.get(name).decode(ours), scales)[0]
    assert 1.02 < found < 1.25  # centroids are worth it


def test_the_bench_prints_a_row_a_code_and_a_verdict_a_rate():
    found = study.compare([3], 20, 16, 0)
    text = study.report(found)
    rows = [line for line in text.splitlines() if line.startswith((" Voronoi", " residual", " kve8_3", " kvq3"))]
    assert len(rows) == len(found[3]) == 3 + len(study.contenders(3, gauss(16, 64)))
    assert all(len(line) <= 100 for line in text.splitlines()) and "3 bits: kve8_3 is" in text
    assert found[3][0].codes == min(row.codes for row in found[3])


def test_the_verdict_says_which_is_better():
    ours = study.Row("ours", True, "climb", 0.08, 0.08, 100, 1, 2048)
    other = study.Row("other", False, "9", 0.1, 0.1, 300, 2, 0)
    assert "0.97 dB better than the best of the others, other, which takes 3.0 times" in study.verdict(2, [ours, other])
    assert "0.51 dB WORSE than" in study.verdict(2, [ours, other, study.Row("good", False, "9", 0.0711, 0.08, 1, 1, 0)])


def test_a_rate_without_a_format_is_refused_by_name():
    with pytest.raises(KvfmtError, match="no E8 format of 5 bits"):
        study.compare([5], 8, 16, 0)
