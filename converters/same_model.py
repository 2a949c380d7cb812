"""Is a changed GGUF still the same model? Asked of llama.cpp, not of us: both files predict the same text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvfmt.bindings import open_model
from kvfmt.errors import KvfmtError


@dataclass(frozen=True)
class Difference:
    """Of two models' predictions: mean and largest KL divergence in nats, largest difference of a logit."""

    tokens: int
    kld: float
    kld_max: float
    logit_max: float

    @property
    def none(self) -> bool:
        """Whether every logit has the same bits."""
        return self.logit_max == 0


def difference(reference: Path, other: Path, text: str, tokens: int, threads: int) -> Difference:
    """Runs both on the first ``tokens`` of a text, with an f16 cache. Raises KvfmtError for a shorter text."""
    before, after = (_logits(path, text, tokens, threads) for path in (reference, other))
    kld = np.array([_kld(p, q) for p, q in zip(before, after)])
    return Difference(len(kld), float(kld.mean()), float(kld.max()), float(np.abs(before - after).max()))


def _open(path: Path, n_ctx: int, **more):
    try:
        return open_model(str(path), kv="f16", n_ctx=n_ctx, n_batch=n_ctx, flash_attn=True, verbose=False, **more)
    except ValueError as error:
        raise KvfmtError(f"{path.name} could not be loaded: {error}", "Is it a whole GGUF model, and is there memory for it?") from None


def _logits(path: Path, text: str, tokens: int, threads: int) -> np.ndarray:
    model = _open(path, tokens, logits_all=True, n_threads=threads, n_threads_batch=threads)
    try:
        # 16 characters a token are more than any text needs.
        ids = model.tokenize(text[: 16 * tokens].encode())[:tokens]
        if len(ids) < tokens:
            raise KvfmtError(f"the text has {len(ids)} tokens, {tokens} are compared", "Give a longer text.")
        model.eval(ids)
        return model.scores[:tokens].copy()
    finally:
        model.close()


def _kld(p: np.ndarray, q: np.ndarray) -> float:
    p, q = p.astype(np.float64), q.astype(np.float64)
    p, q = p - p.max(), q - q.max()
    p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    # Rounding can leave a hair below zero.
    return max(float(np.sum(np.exp(p) * (p - q))), 0.0)
