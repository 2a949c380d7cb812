"""In which coordinates a cache stores a row: as it is, rotated, or under a profile.

An f16 cache has K and V as they are. A quantized one has them rotated by llama.cpp's Hadamard transform, or, where a profile
has a matrix for the layer or an order of its channels, mapped by it instead; a profile's vectors alone act first, and are rotated after.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfmt.side_maps import SideMaps
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

    @property
    def rotation(self) -> Domain:
        """The part of it that is llama.cpp's rotation."""
        return self


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
    """Head by head under ``maps``, then ``turned``, where they mix nothing. ``key`` is what makes two the same."""

    key: tuple
    maps: SideMaps
    turned: Domain = PLAIN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapped) and (self.key, self.turned) == (other.key, other.turned)

    def __hash__(self) -> int:
        return hash((self.key, self.turned))

    @property
    def rotation(self) -> Domain:
        return self.turned

    def store(self, rows: np.ndarray) -> np.ndarray:
        return self.turned.store(self._rows(self.maps.store(self._heads(rows), as_ggml=True)))

    def restore(self, rows: np.ndarray) -> np.ndarray:
        return self._rows(self.maps.restore(self._heads(self.turned.restore(rows))))

    def _heads(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(len(rows), *self.maps.shape).transpose(1, 0, 2)

    @staticmethod
    def _rows(heads: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)
