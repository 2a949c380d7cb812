"""Looks at the forward pass from inside: llama.cpp's cb_eval, with a view of each tensor of the graph."""

from __future__ import annotations

import ctypes
import signal
import threading
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import numpy as np

from kvfmt.bindings import patched_bindings
from kvfmt.errors import KvfmtError


class _Tensor(ctypes.Structure):
    """struct ggml_tensor of the pinned ggml.h. Its size is checked against the library's own when it is first used."""


_Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * 10),
    ("view_src", ctypes.POINTER(_Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]

_DTYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float16)}


class _Library:
    """What is called of libggml-base, the one that the bindings loaded."""

    def __init__(self) -> None:
        folder = Path(patched_bindings().__file__).parent
        lib = ctypes.CDLL(str(next(folder.glob("lib/libggml-base*.so"))))
        self.nbytes, self.get, self.op_name = lib.ggml_nbytes, lib.ggml_backend_tensor_get, lib.ggml_op_name
        self.nbytes.restype, self.nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self.get.restype, self.get.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self.op_name.restype, self.op_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        lib.ggml_tensor_overhead.restype = ctypes.c_size_t
        # The overhead is a 32-byte object header and the tensor.
        if lib.ggml_tensor_overhead() != 32 + ctypes.sizeof(_Tensor):
            raise KvfmtError("this build's ggml_tensor is not laid out as kvfmt knows it", "Run: kvfmt build")

    @lru_cache(maxsize=None)
    def op(self, number: int) -> str:
        return self.op_name(number).decode()


@lru_cache(maxsize=None)
def _library() -> _Library:
    return _Library()


class Node:
    """A tensor of the graph, valid only while the callback that was given it runs."""

    def __init__(self, pointer: Any) -> None:
        self._tensor, self._lib = pointer, _library()

    @property
    def name(self) -> str:
        """Views are called after their source: "Kcur-3 (reshaped)"."""
        return self._tensor.name.decode("utf-8", "replace")

    @property
    def address(self) -> int:
        """What tells two tensors apart within a pass."""
        return ctypes.addressof(self._tensor)

    @property
    def op(self) -> str:
        """"MUL_MAT", "FLASH_ATTN_EXT" ..."""
        return self._lib.op(self._tensor.op)

    @property
    def shape(self) -> tuple[int, ...]:
        """ggml's order: ne0 first, four of them."""
        return tuple(self._tensor.ne)

    @property
    def root(self) -> Node:
        """The tensor whose memory this one looks at; itself if it has its own."""
        return Node(self._tensor.view_src.contents) if self._tensor.view_src else self

    def source(self, index: int) -> Optional[Node]:
        """What it was computed from; None if there is no such input."""
        return Node(self._tensor.src[index].contents) if self._tensor.src[index] else None

    def parameter(self, index: int) -> int:
        """One of the operation's parameters, a whole number."""
        return int(self._tensor.op_params[index])

    def float_parameter(self, index: int) -> float:
        """One of the operation's parameters, read as a float."""
        return float(np.array([self._tensor.op_params[index]], np.int32).view(np.float32)[0])

    def values(self) -> np.ndarray:
        """A copy, float32 [ne3, ne2, ne1, ne0], of a view with gaps too. Raises KvfmtError if it is neither f32 nor f16."""
        dtype = _DTYPES.get(self._tensor.type)
        if dtype is None:
            raise KvfmtError(f"tensor {self.name!r} is not stored as floats", "Only f32 and f16 can be looked at.")
        raw = np.empty(self._lib.nbytes(self.address), np.uint8)
        self._lib.get(self.address, raw.ctypes.data, 0, raw.nbytes)
        # nbytes spans from the first to the last value, whatever the strides.
        laid = np.lib.stride_tricks.as_strided(raw.view(dtype), self.shape[::-1], tuple(self._tensor.nb)[::-1])
        return np.array(laid, np.float32, order="C")


class Watch:
    """The callback. ``wanted(node)`` is asked of every node before it is computed, ``seen(node)`` is called after, within ``watching()``.

    Every wanted node ends a stretch of the graph that runs at once, and stops fusions across it. An exception in
    either ends the pass early; llama_decode does not say so: call ``check()`` after it.
    """

    def __init__(self, wanted: Callable[[Node], bool], seen: Callable[[Node], None]) -> None:
        self._ask, self._tell, self._on = wanted, seen, False
        self.error: Optional[BaseException] = None
        _library()
        # The library holds only the pointer: the object must live as long as the context.
        self.callback = patched_bindings().llama_cpp.ggml_backend_sched_eval_callback(self._call)

    def _call(self, tensor: int, ask: bool, _: Any) -> bool:
        # An exception must not cross the C frames above.
        try:
            if not self._on:
                return not ask
            node = Node(_Tensor.from_address(tensor))
            if ask:
                return bool(self._ask(node))
            self._tell(node)
            return self.error is None
        except BaseException as error:  # noqa: BLE001
            self.error = self.error or error
            return False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks on while the block runs.

        What handlers of SIGINT and SIGTERM raise meanwhile is kept for ``check``, which the end of the block calls: raised on the way into
        the callback, or out of it, it would be printed and forgotten, and the work would go on.
        """
        kept = {}
        if threading.current_thread() is threading.main_thread():
            kept = {number: handler for number in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(number))}

        def keep(number: int, frame: Any) -> None:
            try:
                kept[number](number, frame)
            except BaseException as error:  # noqa: BLE001
                self.error = self.error or error

        for number in kept:
            signal.signal(number, keep)
        self._on = True
        try:
            yield
        finally:
            self._on = False
            for number, handler in kept.items():
                signal.signal(number, handler)
        self.check()

    def check(self) -> None:
        """Raises what was raised within the callback, or by a signal's handler."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
