"""Distance of a model's predictions from the f16 cache's: per position in compiled code, then its statistics.

The definitions are llama-perplexity's, so that figures can be compared; but nothing is rounded to 16 bits in
between, and the KLD is over the whole vocabulary: identical caches are at a distance of exactly 0.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numba import njit

from bench.records import Metric


#: llama-perplexity leaves out of its KLD what the f16 cache gives a log probability of -16 or less.
UPSTREAM_FLOOR = -16.0


@njit(nogil=True, cache=True)
def _compare(base, other, targets, kld, kld_cut, nll_base, nll, same):
    weights = np.empty(base.shape[1], np.float32)
    for row in range(len(targets)):
        b, o = base[row], other[row]
        top_b, top_o = 0, 0
        for i in range(1, len(b)):
            if b[i] > b[top_b]:
                top_b = i
            if o[i] > o[top_o]:
                top_o = i
        max_b, max_o = b[top_b], o[top_o]
        sum_b, sum_o, moved = 0.0, 0.0, 0.0
        for i in range(len(b)):
            w = np.exp(b[i] - max_b)
            weights[i] = w
            sum_b += w
            sum_o += np.exp(o[i] - max_o)
            moved += w * (np.float64(b[i]) - np.float64(o[i]))
        lse_b = np.float64(max_b) + np.log(sum_b)
        lse_o = np.float64(max_o) + np.log(sum_o)
        floor = lse_b + UPSTREAM_FLOOR
        tail, tail_moved = 0.0, 0.0
        for i in range(len(b)):
            if b[i] <= floor:
                tail += weights[i]
                tail_moved += weights[i] * (np.float64(b[i]) - np.float64(o[i]))
        kld[row] = moved / sum_b - lse_b + lse_o
        kld_cut[row] = kld[row] - (tail_moved - (lse_b - lse_o) * tail) / sum_b
        nll_base[row] = lse_b - b[targets[row]]
        nll[row] = lse_o - o[targets[row]]
        same[row] = top_b == top_o


@dataclass
class Scores:
    """Per scored position: KLD from the f16 cache, the same without the words that llama-perplexity leaves out, both
    negative log likelihoods, all in nats; whether the most likely token is the same. float64 [n] and bool [n]."""

    kld: np.ndarray
    kld_cut: np.ndarray
    nll_base: np.ndarray
    nll: np.ndarray
    same: np.ndarray

    @classmethod
    def empty(cls, n: int) -> Scores:
        return cls(*(np.zeros(n) for _ in range(4)), np.zeros(n, bool))

    @classmethod
    def concatenate(cls, parts: list[Scores]) -> Scores:
        return cls(*(np.concatenate([getattr(p, f) for p in parts]) for f in cls.__dataclass_fields__))

    def part(self, index: slice | np.ndarray) -> Scores:
        """The scores at some positions; a slice shares memory."""
        return Scores(*(getattr(self, f)[index] for f in self.__dataclass_fields__))


def compare(base: np.ndarray, other: np.ndarray, targets: np.ndarray, out: Scores, pool: ThreadPoolExecutor, threads: int) -> None:
    """Scores logits float32 [n, n_vocab] against those of the f16 cache, where ``targets`` int32 [n] came next."""
    bounds = np.linspace(0, len(targets), threads + 1).astype(int)

    def work(i: int) -> None:
        s = slice(bounds[i], bounds[i + 1])
        _compare(base[s], other[s], targets[s], out.kld[s], out.kld_cut[s], out.nll_base[s], out.nll[s], out.same[s])

    list(pool.map(work, range(threads)))


def mean(values: np.ndarray) -> Metric:
    """Mean and standard error, taking positions as independent, as llama-perplexity does."""
    n = len(values)
    return Metric(float(values.mean()), float(values.std() / np.sqrt(n - 1)) if n > 1 else None)


def share(flags: np.ndarray) -> Metric:
    """Share of true flags and its standard error."""
    n, p = len(flags), float(flags.mean())
    return Metric(p, float(np.sqrt(p * (1 - p) / (n - 1))) if n > 1 else None)


def share_of_few(flags: np.ndarray) -> Metric:
    """As ``share`` for a few trials: the error by the rule of succession, so that 3 of 3 is not certain."""
    n, k = len(flags), float(flags.sum())
    p = (k + 1) / (n + 2)
    return Metric(k / n, float(np.sqrt(p * (1 - p) / (n + 2))))


def metrics(scores: Scores) -> dict[str, Metric]:
    """What every quality row has. KLD in nats; ``ppl_ratio`` is to the f16 cache, its error from paired positions.

    ``kld_cut`` is the one to hold against llama-perplexity's: the words it leaves out are about a thousandth. Its
    PPL(base) and the ratio to it are other figures where a text surprises the model: its file of f16's predictions
    knows no probability more than 16 nats below the highest, so that even f16 is not at a ratio of 1 to itself.
    """
    kld = scores.kld
    ln_ppl, ln_base, ln_ratio = mean(scores.nll), mean(scores.nll_base), mean(scores.nll - scores.nll_base)

    def exp(m: Metric) -> Metric:
        return Metric(float(np.exp(m.value)), None if m.error is None else float(np.exp(m.value)) * m.error)

    found = {"ppl": exp(ln_ppl), "ppl_base": exp(ln_base), "ppl_ratio": exp(ln_ratio), "kld": mean(kld), "kld_cut": mean(scores.kld_cut)}
    for name, q in (("kld_median", 0.5), ("kld_90", 0.9), ("kld_99", 0.99), ("kld_999", 0.999), ("kld_max", 1.0)):
        found[name] = Metric(float(np.quantile(kld, q)))
    return {**found, "same_top": share(scores.same)}


def by_position(scores: Scores, positions: np.ndarray, edges: np.ndarray) -> list[dict]:
    """One entry a bucket of positions, ``edges[i] <= position < edges[i+1]``; buckets without positions are left out."""
    out = []
    for low, high in zip(edges[:-1], edges[1:]):
        inside = (positions >= low) & (positions < high)
        if not inside.any():
            continue
        part = scores.part(inside)
        kld, same = mean(part.kld), share(part.same)
        ratio = float(np.exp((part.nll - part.nll_base).mean()))
        out.append({
            "from": int(low), "to": int(high), "n": int(inside.sum()), "kld": kld.value, "kld_error": kld.error,
            "same_top": same.value, "same_top_error": same.error, "ppl_ratio": ratio,
        })
    return out
