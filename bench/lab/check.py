"""Is what came back what went in? Catches codecs that mix up K and V, or layers, or get a scale wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bench.lab.session import LabError

#: Sign alone, the coarsest codec, leaves 0.46 on the worst keys that were measured (Qwen2.5's), 0.29 on their worst layer.
LEAST_CORRELATION, LEAST_OF_A_LAYER = 0.35, 0.15
#: Codecs whose levels are means of what they stand for have a gain of exactly 1, but for the scale's own rounding.
CENTROID_GAIN = 0.02


@dataclass
class Check:
    """Second moments of what a codec got and gave: add each layer, then ask for the verdict.

    ``gain`` is the factor by which what came back would have to be scaled to fit best: 1 for a codec whose levels
    are means, between correlation^4 and correlation^-6, and 0.01 more, for all that were measured. The better the
    codec, the narrower: int8 with scales 2 % off is caught.
    """

    name: str
    side: str
    centroid: bool = False
    _moments: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, x: np.ndarray, back: np.ndarray) -> None:
        """Values before and after, of one layer. Raises LabError for another shape or values that are not finite."""
        if back.shape != x.shape:
            raise LabError(f"{self.name}: {self.side} came back as {back.shape}, was {x.shape}", "A codec keeps the shape.")
        a, b = x.astype(np.float64).ravel(), np.asarray(back, np.float64).ravel()
        if not np.isfinite(b).all():
            raise LabError(f"{self.name}: {int((~np.isfinite(b)).sum())} values of {self.side} are not finite", "The codec is wrong.")
        self._moments.append((a @ a, a @ b, b @ b))

    def verdict(self) -> None:
        """Raises LabError, with the figures, if what came back is not what went in."""
        moments = np.array(self._moments).reshape(-1, 3)
        if not len(moments) or moments[:, 0].sum() == 0:
            return
        xx, xy, yy = moments.sum(axis=0)
        correlation = xy / np.sqrt(xx * yy) if yy > 0 else 0.0
        each = moments[:, 1] / np.sqrt(np.maximum(moments[:, 0] * moments[:, 2], 1e-300))
        if correlation < LEAST_CORRELATION or each.min() < LEAST_OF_A_LAYER:
            raise LabError(
                f"{self.name}: {self.side} after the codec has correlation {correlation:.3f} with {self.side} before it "
                f"({each.min():.3f} in the worst layer)",
                "It stored something else: K and V, layers or heads may be swapped, or its tables are wrong.",
            )
        gain = xy / yy
        low, high = (1 - CENTROID_GAIN, 1 + CENTROID_GAIN) if self.centroid else (correlation**4 - 0.01, correlation**-6 + 0.01)
        if not low <= gain <= high:
            raise LabError(
                f"{self.name}: {self.side} fits best if scaled by {gain:.3f}; {low:.3f} to {high:.3f} would be right for its "
                f"correlation of {correlation:.3f}",
                "Its scale is wrong.",
            )
