"""The trellis codes of the bench: the search is optimal, what is stored is enough to decode, more states are better."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench import trellis
from kvfmt.distortion import rate_distortion_bound
from kvfmt.errors import KvfmtError

ONE = np.ones(1, np.float32)
SMALL = [trellis.set_partitioned(2, 2), trellis.set_partitioned(3, 3), trellis.bit_shift(2, 2), trellis.bit_shift(1, 3)]


def _ids(t: trellis.Trellis) -> str:
    return f"{t.family}{t.bits}-{t.states}"


def gauss(n: int, size: int = 64, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, size)).astype(np.float32)


def all_walks(t: trellis.Trellis, n: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, last state) of every sequence of n symbols from a state, by the decoder alone."""
    stored = np.array(list(itertools.product(range(1 << t.bits), repeat=n)), np.int32)
    entering, members = np.divmod(stored, t.levels.shape[1])
    values, state = np.empty(stored.shape, np.float32), np.full(len(stored), start)
    for i in range(n):
        window = (state << t.shift) | entering[:, i]
        values[:, i] = t.levels[t.labels[window], members[:, i]]
        state = window & (t.states - 1)
    return values, state


def walk(t: trellis.Trellis, x: np.ndarray, start: int, end: int) -> tuple[float, np.ndarray, np.ndarray]:
    steps, members = np.zeros(len(x), np.int32), np.zeros(len(x), np.int32)
    room = trellis.scratch(t.labels, t.memory, t.shift, len(x))
    error = trellis.search(x, t.labels, t.levels, t.memory, t.shift, start, end, steps, members, room)
    return error, steps, members


@pytest.mark.parametrize("t", SMALL, ids=_ids)
@pytest.mark.parametrize("fixed", [False, True], ids=["free-end", "fixed-end"])
def test_the_search_finds_the_best_of_all_walks(t, fixed):
    n = 6 if t.bits < 3 else 4
    for start in range(t.states):
        values, last = all_walks(t, n, start)
        for x in gauss(3, n, seed=start):
            allowed = values[last == start] if fixed else values
            best = ((allowed - x) ** 2).sum(axis=1).min()
            error, steps, members = walk(t, x, start, start if fixed else -1)
            assert error == pytest.approx(best, rel=1e-5)
            assert ((t.levels[t.labels[steps], members] - x) ** 2).sum() == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("t", SMALL, ids=_ids)
def test_a_walk_is_one_that_the_trellis_allows(t):
    _, steps, _ = walk(t, gauss(1)[0], 1, -1)
    assert steps[0] >> t.shift == 1
    assert ((steps[:-1] & (t.states - 1)) == steps[1:] >> t.shift).all()


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("t", [*SMALL, trellis.set_partitioned(3, 8), trellis.bit_shift(2, 6)], ids=_ids)
def test_symbols_and_scales_are_enough_to_decode(t, tail):
    x = gauss(20)
    codes = trellis.encoded(t, x, tail, ONE)
    stored = trellis.symbols(t, codes)
    assert stored.min() >= 0 and stored.max() < 1 << t.bits
    assert (codes.scales == codes.scales.astype(np.float16)).all()
    again = codes.scales[:, None] * t.levels[t.labels[codes.steps], codes.members]
    assert np.array_equal(trellis.decoded(t, stored, codes.scales, tail), again)
    first, last = codes.steps[:, 0] >> t.shift, codes.steps[:, -1] & (t.states - 1)
    assert np.array_equal(first, last) if tail else (first == 0).all()


@pytest.mark.parametrize("make", [trellis.set_partitioned, trellis.bit_shift])
def test_error_falls_with_states_and_training_and_stays_above_the_bound(make):
    train, score = gauss(300), gauss(300, seed=6)
    found = []
    for memory in (2, 4, 6):
        raw = make(2, memory)
        t = trellis.trained(raw, train, 3, ONE)
        found.append(trellis.distortion(t, score, False, ONE))
        assert found[-1] < trellis.distortion(raw, score, False, ONE)
    assert found == sorted(found, reverse=True)
    assert found[-1] > rate_distortion_bound(2 + trellis.SCALE_BITS / trellis.BLOCK)


def test_more_scales_and_a_bitten_tail_never_and_rarely_hurt():
    t, x = trellis.trained(trellis.set_partitioned(2, 4), gauss(200), 2, ONE), gauss(200, seed=7)
    one = trellis.distortion(t, x, False, ONE)
    assert trellis.distortion(t, x, False, np.array([0.85, 1, 1.15], np.float32)) < one
    assert trellis.distortion(t, x, True, ONE) < one


def test_zeros_and_large_blocks_are_encoded():
    t = trellis.set_partitioned(2, 4)
    x = np.zeros((2, 64), np.float32)
    x[1] = 1000 * gauss(1)[0]
    codes = trellis.encoded(t, x, False, ONE)
    out = trellis.decoded(t, trellis.symbols(t, codes), codes.scales, False)
    assert np.abs(out[0]).max() < 1e-6 and np.mean((out[1] - x[1]) ** 2) < 0.2 * np.mean(x[1] ** 2)


def test_what_cannot_be_asked_is_refused_by_name():
    with pytest.raises(KvfmtError, match="at least 8 states, not 4"):
        trellis.bit_shift(3, 2)
    with pytest.raises(KvfmtError, match="no registered format takes 1.25 bits"):
        trellis.rivals(1)
    with pytest.raises(KvfmtError, match="24 states are not a power of two"):
        trellis.compare([24], [2], 8, 8, 1, 1)
    with pytest.raises(KvfmtError, match="'16;64' is not a list"):
        trellis.numbers("16;64")


def test_the_bench_prints_a_row_a_code_and_a_verdict_a_rate():
    with trellis.console.capture() as printed:
        trellis.compare([16], [2, 3], 16, 16, 1, 1)
    text = printed.get()
    assert sum(line.startswith((" set ", " shift ")) for line in text.splitlines()) == 16
    for bits in (2, 3):
        assert f"{bits} bits, against {trellis.rivals(bits)[0]}" in text


def test_the_verdict_follows_its_rule():
    t = trellis.set_partitioned(2, 4)

    def row(gain: float, searches: int) -> trellis.Row:
        return trellis.Row(t, False, searches, 0.08, gain, 100.0 * searches)

    cheap, dear = 1, 1000
    assert row(0, cheap).simd_ms < trellis.BUDGET_MS < row(0, dear).simd_ms
    assert " WORTH a format" in trellis.verdict(2, "x", [row(0.6, cheap), row(0.1, dear)]).replace("NOT WORTH", "NOT")
    assert "NOT worth a format" in trellis.verdict(2, "x", [row(0.4, cheap), row(0.6, dear)])
    assert "none here gains 0.5 dB" in trellis.verdict(2, "x", [row(0.4, cheap)])
