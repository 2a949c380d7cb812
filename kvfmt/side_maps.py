"""What a profile does to heads of K or V before they are stored, and how it is undone: outside llama.cpp all go through here.

Stored is A (k - mean), B (v - mean), or (k - mean) * scale and v - mean, which mix no channels, so that llama.cpp's rotation still
follows them; or M P ((k - mean) * scale), whose channels are ordered and mixed in groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import numpy as np

from kvfmt.profile import LayerMaps

#: A damaged cache may hold anything, and a model may give what no type holds.
_QUIET = np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")


@dataclass(frozen=True, eq=False)
class SideMaps:
    """One side of one layer. ``mean``, ``scale`` float32 [H, d], ``forward`` A or B and ``backward``, its inverse, float16 or
    float32 [H, d, d], or ``order`` int32 [H, d] and ``mix`` float32 [g, g]; each may be None. Heads are [..., H, tokens, d]."""

    mean: Optional[np.ndarray] = None
    scale: Optional[np.ndarray] = None
    forward: Optional[np.ndarray] = None
    backward: Optional[np.ndarray] = None
    order: Optional[np.ndarray] = None
    mix: Optional[np.ndarray] = None

    @classmethod
    def of(cls, maps: Optional[LayerMaps], keys: bool) -> Optional[SideMaps]:
        """Those of a layer's K or V; None where the profile leaves that side as it is."""
        if maps is None:
            return None
        if keys:
            # q_map is A^-T.
            backward = None if maps.q_map is None else maps.q_map.transpose(0, 2, 1)
            found = cls(maps.k_mean, maps.k_scale, maps.k_map, backward, maps.k_order, maps.k_mix)
        else:
            found = cls(maps.v_mean, None, maps.v_map, maps.o_map)
        return found if found._arrays else None

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(array for array in (self.forward, self.mean, self.scale, self.order) if array is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """(H, d)."""
        return self._arrays[0].shape[:2]

    @property
    def mixes(self) -> bool:
        """Whether a matrix mixes the channels of a head: then llama.cpp does not rotate it."""
        return self.forward is not None or self.order is not None

    @cached_property
    def undo(self) -> np.ndarray:
        """The matrix that takes what is stored back to channels, still scaled and centred, float32 [H, d, d], contiguous; only if ``mixes``."""
        if self.order is None:
            return np.ascontiguousarray(self.backward, np.float32)
        size = self.order.shape[1]
        back = np.empty((*self.order.shape, size), np.float32)
        # Row c: what channel c is made of.
        np.put_along_axis(back, self.order[:, :, None], np.kron(np.eye(size // len(self.mix), dtype=np.float32), self.mix.T)[None], axis=1)
        return back

    @cached_property
    def _single(self) -> np.ndarray:
        return self.forward.astype(np.float32)

    @_QUIET
    def store(self, heads: np.ndarray, precision: type = np.float32, as_ggml: bool = False) -> np.ndarray:
        """Heads as they are, float32 -> as they are stored, float32, still to be rotated unless ``mixes``.

        Vectors act in float32, so that their results are llama.cpp's to the bit. A matrix acts in ``precision``; ``as_ggml``: what
        it is applied to is rounded to f16 first where it is f16, as llama.cpp does.
        """
        x = heads.astype(precision if self.forward is not None else np.float32, copy=False)
        if self.mean is not None:
            x = x - self.mean[:, None, :]
        if self.scale is not None:
            x = x * self.scale[:, None, :]
        if self.order is not None:
            slots = np.take_along_axis(x, np.broadcast_to(self.order[:, None, :], x.shape), axis=-1)
            return np.matmul(slots.reshape(*x.shape[:-1], -1, len(self.mix)), self.mix.T).reshape(x.shape)
        if self.forward is None:
            return x
        if as_ggml and self.forward.dtype == np.float16:
            x = x.astype(np.float16).astype(precision)
        forward = self._single if precision is np.float32 else self.forward.astype(precision)
        return np.matmul(x, forward.transpose(0, 2, 1)).astype(np.float32, copy=False)

    @_QUIET
    def restore(self, heads: np.ndarray) -> np.ndarray:
        """What is stored, float32, turned back if it was rotated -> heads as they were, float32."""
        x = np.matmul(heads, self.undo.transpose(0, 2, 1)) if self.mixes else heads
        if self.scale is not None:
            x = x / self.scale[:, None, :]
        return x if self.mean is None else x + self.mean[:, None, :]
