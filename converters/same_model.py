"""Is a changed GGUF still the same model? Asked of llama.cpp, not of us: both files predict the same text.

A model with quantized weights is not even equal to itself: its activations are rounded to 8 bits before every product, and a
last bit that falls otherwise tips some of them over. How far that goes is measured on the unchanged file, which takes the text
in pieces of another size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvfmt.bindings import open_model
from kvfmt.errors import KvfmtError


#: llama.cpp's products of matrices take another path for so few tokens than for many.
SMALL_BATCH = 16


@dataclass(frozen=True)
class Difference:
    """Of two models' predictions: mean and largest KL divergence in nats, largest difference of a logit.

    ``own``: mean KL divergence of the first model from itself, when its batches have another size.
    """

    tokens: int
    kld: float
    kld_max: float
    logit_max: float
    own: float

    @property
    def none(self) -> bool:
        """Whether every logit has the same bits."""
        return self.logit_max == 0


def difference(reference: Path, other: Path, text: str, tokens: int, threads: int) -> Difference:
    """Runs both on the first ``tokens`` of a text, with an f16 cache. Raises KvfmtError for a shorter text."""
    before = _logits(reference, text, tokens, threads, tokens)
    own = _klds(before, _logits(reference, text, tokens, threads, SMALL_BATCH)).mean()
    after = _logits(other, text, tokens, threads, tokens)
    kld = _klds(before, after)
    return Difference(len(kld), float(kld.mean()), float(kld.max()), float(np.abs(before - after).max()), float(own))


def _logits(path: Path, text: str, tokens: int, threads: int, batch: int) -> np.ndarray:
    sizes = {"n_ctx": tokens, "n_batch": batch, "n_ubatch": batch, "n_threads": threads, "n_threads_batch": threads}
    try:
        model = open_model(str(path), kv="f16", logits_all=True, flash_attn=True, verbose=False, **sizes)
    except ValueError as error:
        raise KvfmtError(f"{path.name} could not be loaded: {error}", "Is it a whole GGUF model, and is there memory for it?") from None
    try:
        # 16 characters a token are more than any text needs.
        ids = model.tokenize(text[: 16 * tokens].encode())[:tokens]
        if len(ids) < tokens:
            raise KvfmtError(f"the text has {len(ids)} tokens, {tokens} are compared", "Give a longer text.")
        model.eval(ids)
        return model.scores[:tokens].copy()
    finally:
        model.close()


def _klds(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Row by row, float64 [rows], of logits float32 [rows, vocabulary]: all at once they would be large."""
    found = []
    for rows in zip(before, after):
        p, q = (row - row.max() - np.log(np.exp(row - row.max()).sum()) for row in (r.astype(np.float64) for r in rows))
        # Rounding can leave a hair below zero.
        found.append(max(float(np.sum(np.exp(p) * (p - q))), 0.0))
    return np.array(found)
