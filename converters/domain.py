"""In which coordinates a cache stores a row: as it is, rotated, or under the maps of a profile.

An f16 cache has K and V as they are. A quantized one has them rotated by llama.cpp's Hadamard transform, or, where a profile
maps the layer, mapped by it instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfmt.transform import hadamard


@dataclass(frozen=True)
class Domain:
    """Rows as they are. Rows are float32 [cells, values]; each function returns such rows, perhaps the same array."""

    def store(self, rows: np.ndarray) -> np.ndarray:
        """From rows as they are to what is stored."""
        return rows

    def restore(self, rows: np.ndarray) -> np.ndarray:
        """From what is stored to rows as they are, as attention sees them."""
        return rows


PLAIN = Domain()


@dataclass(frozen=True)
class Rotated(Domain):
    """Each run of ``size`` values through the Hadamard transform, which undoes itself."""

    size: int

    def store(self, rows: np.ndarray) -> np.ndarray:
        return hadamard(rows, self.size)

    restore = store


@dataclass(frozen=True)
class Unknown(Domain):
    """Rotated as the size of the heads decides, which is not known: only good for what is in the same domain.

    ``rotates``: it is rotated for certain, only how far is not known.
    """

    side: str
    rotates: bool


@dataclass(frozen=True, eq=False)
class Mapped(Domain):
    """Head by head z = A (x - mean), float32 maps [heads, d, d]; ``back`` x gives x - mean again. ``key`` is what makes two the same.

    ``round_input``: llama.cpp rounds what it multiplies by a map in f16.
    """

    key: tuple
    forth: np.ndarray
    back: np.ndarray
    mean: np.ndarray | None
    round_input: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapped) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def store(self, rows: np.ndarray) -> np.ndarray:
        heads = self._heads(rows)
        if self.mean is not None:
            heads = heads - self.mean
        if self.round_input:
            with np.errstate(over="ignore"):
                heads = heads.astype(np.float16).astype(np.float32)
        return self._by_head(heads, self.forth)

    def restore(self, rows: np.ndarray) -> np.ndarray:
        found = self._by_head(self._heads(rows), self.back)
        if self.mean is not None:
            found += self.mean.reshape(-1)
        return found

    def _heads(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(len(rows), *self.forth.shape[:2])

    @staticmethod
    def _by_head(heads: np.ndarray, maps: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.matmul(heads.transpose(1, 0, 2), maps.transpose(0, 2, 1))
        return np.ascontiguousarray(found.transpose(1, 0, 2)).reshape(len(heads), -1)
