"""What calibration keeps of keys, queries and values: means and second moments, a head at a time, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfmt.errors import KvfmtError


class Moments:
    """Weighted mean and covariance of vectors that come in blocks; the memory does not grow with them.

    Blocks are centred before they are multiplied and then merged (Chan, Golub and LeVeque 1983): a large common
    offset, which keys do have, costs no digits.
    """

    def __init__(self, heads: int, size: int) -> None:
        self.weight = np.zeros(heads)
        self.mean = np.zeros((heads, size))
        self._scatter = np.zeros((heads, size, size))

    def add(self, x: np.ndarray) -> None:
        """Float [heads, n, size]: n vectors of each head, all of weight 1. Raises ValueError for other shapes."""
        if len(x) != len(self.mean):
            raise ValueError(f"{len(x)} heads, not {len(self.mean)}")
        for head, vectors in enumerate(x):
            self.add_head(head, vectors, np.ones(len(vectors)))

    def add_head(self, head: int, x: np.ndarray, weights: np.ndarray) -> None:
        """Float [n, size] vectors of one head with weights, float [n], not negative. Raises ValueError for other shapes."""
        if x.shape[1:] != self.mean.shape[1:] or weights.shape != x.shape[:1]:
            raise ValueError(f"{x.shape} with weights {weights.shape} for vectors of {self.mean.shape[1]}")
        added = float(weights.sum(dtype=np.float64))
        if added == 0:
            return
        x, weights = x.astype(np.float64), weights.astype(np.float64)
        share = added / (self.weight[head] + added)
        mean = weights @ x / added
        x -= mean
        away = mean - self.mean[head]
        self._scatter[head] += (x * weights[:, None]).T @ x + self.weight[head] * share * np.outer(away, away)
        self.mean[head] += away * share
        self.weight[head] += added

    def covariance(self) -> np.ndarray:
        """Float64 [heads, size, size], divided by the weight."""
        return self._scatter / np.where(self.weight > 0, self.weight, 1)[:, None, None]

    def second(self) -> np.ndarray:
        """Mean of x x^T, float64 [heads, size, size]."""
        return self.covariance() + self.mean[:, :, None] * self.mean[:, None, :]


@dataclass(frozen=True)
class LayerStatistics:
    """One layer that owns KV. Arrays are float [KV heads, ...]; keys as they are stored (after norm and RoPE, rounded to f16).

    ``k_mean`` [H, d_k] and ``k_cov`` [H, d_k, d_k]: keys, weighed by what an error of theirs does (see calibrate.py), centred.
    ``q_moment`` [H, d_k, d_k]: mean of q q^T times the square of the attention scale, weighed likewise. ``v_mean`` [H, d_v],
    ``v_moment`` [H, d_v, d_v]: values, all of one weight, not centred. ``v_centre`` [H, d_v]: mean of the values, weighed by the square of
    the attention that they get. ``k_first`` [H, d_k]: mean of the keys at position 0.
    ``tokens``: keys and values that were stored; ``queries``: queries of each KV head that were looked at, those of its whole group.
    ``shift_free``: adding one number to all logits of a query changes nothing, so keys may be centred; not so with a logit
    soft-cap or attention sinks. ``rotated``: values of a head that RoPE turns; ``adjacent``: it pairs 2i with 2i + 1 of
    them, else i with i + rotated / 2.
    """

    tokens: int
    queries: int
    k_mean: np.ndarray
    k_cov: np.ndarray
    q_moment: np.ndarray
    v_mean: np.ndarray
    v_moment: np.ndarray
    v_centre: np.ndarray
    k_first: np.ndarray
    shift_free: bool
    rotated: int = 0
    adjacent: bool = False

    #: The arrays, and how many of their dimensions are a head's size: of K or of V.
    ARRAYS = {"k_mean": ("k", 1), "k_cov": ("k", 2), "q_moment": ("k", 2), "v_mean": ("v", 1), "v_moment": ("v", 2), "v_centre": ("v", 1), "k_first": ("k", 1)}

    @property
    def heads(self) -> int:
        return self.k_mean.shape[0]

    @property
    def k_size(self) -> int:
        return self.k_mean.shape[1]

    @property
    def v_size(self) -> int:
        return self.v_mean.shape[1]

    def k_moment(self) -> np.ndarray:
        """Mean of k k^T, float64 [H, d_k, d_k]."""
        return self.k_cov + self.k_mean[:, :, None].astype(np.float64) * self.k_mean[:, None, :]

    def check(self, where: str) -> None:
        """Raises KvfmtError naming ``where`` if shapes do not fit, counts are not positive or a number is not finite."""
        if self.tokens < 1 or self.queries < 1:
            raise KvfmtError(f"{where}: {self.tokens} tokens and {self.queries} queries", "At least one of each makes statistics.")
        sizes = {"k": self.k_mean.shape[-1:], "v": self.v_mean.shape[-1:]}
        for name, (side, times) in self.ARRAYS.items():
            array = getattr(self, name)
            if array.shape != self.k_mean.shape[:1] + sizes[side] * times or array.size == 0:
                raise KvfmtError(f"{where}: {name} has shape {array.shape}, k_mean {self.k_mean.shape}", "The statistics are damaged.")
            if not np.isfinite(array).all():
                raise KvfmtError(f"{where}: {name} has values that are not finite", "The statistics are damaged.")
        if not 0 <= self.rotated <= self.k_size or self.rotated % 2:
            raise KvfmtError(f"{where}: RoPE turns {self.rotated} of {self.k_size} values", "The statistics are damaged.")
