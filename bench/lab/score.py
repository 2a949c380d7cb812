"""Two sets of next-token logits, compared: what a changed cache did to the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from bench.divergence import mean
from bench.records import Metric

#: Rows at a time: float64 of a large vocabulary is 2 MB a row.
ROWS = 16


@dataclass(frozen=True)
class Scores:
    """Figures per scored token, float64 [tokens] each; nll has one less, for the last token's successor is unknown.

    ``drift`` is the root mean square change of the logits, their common shift taken out, which softmax ignores.
    """

    kld: np.ndarray
    same_top: np.ndarray
    drift: np.ndarray
    nll: np.ndarray
    nll_f16: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        return cls(*(np.concatenate([getattr(p, f) for p in parts]) for f in cls.__dataclass_fields__))

    def metrics(self) -> dict[str, Metric]:
        """Mean KLD in nats, its 99 % quantile, same-top share, logit drift, PPL ratio to f16: with standard errors.

        Errors are those of independent tokens; neighbours are not quite, so they are a lower bound.
        """
        log_ratio = mean(self.nll - self.nll_f16)
        ratio = float(np.exp(log_ratio.value))
        return {
            "kld": mean(self.kld),
            "kld_99": Metric(float(np.quantile(self.kld, 0.99))),
            "same_top": mean(self.same_top),
            "drift": mean(self.drift),
            "ppl": Metric(float(np.exp(self.nll.mean()))),
            "ppl_ratio": Metric(ratio, ratio * (log_ratio.error or 0.0)),
        }


def compare(f16: np.ndarray, other: np.ndarray, tokens: Sequence[int]) -> Scores:
    """Logits float32 [tokens, vocabulary] after each of ``tokens``, of the untouched and of the changed cache."""
    kld, same, drift, nll, nll_f16 = [], [], [], [], []
    for start in range(0, len(f16), ROWS):
        a, b = (x[start : start + ROWS].astype(np.float64) for x in (f16, other))
        p, q = log_softmax(a), log_softmax(b)
        kld.append((np.exp(p) * (p - q)).sum(axis=1))
        same.append(a.argmax(axis=1) == b.argmax(axis=1))
        change = b - a
        drift.append(change.std(axis=1))
        after = np.asarray(tokens[start + 1 : start + ROWS + 1])
        rows = np.arange(len(after))
        nll.append(-q[rows, after])
        nll_f16.append(-p[rows, after])
    return Scores(*(np.concatenate(x).astype(np.float64) for x in (kld, same, drift, nll, nll_f16)))


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Log probabilities of float64 [rows, vocabulary]."""
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))
