"""The CUDA kernels against the Python reference, bit for bit: run on the host by the shim of tests/simt."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from blocks import assert_same_blocks, assert_same_floats
from edge_inputs import edge_rows, random_rows, rounding_rows, structured_rows, tie_rows
from ggml_lib import GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_I32, GGML_TYPE_I64, Graph, pointer

from kvfmt import registry

ALL = registry.all_formats()
each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.spec.name)


def _inputs(fmt, kind: str) -> np.ndarray:
    """float32 [n, 64]."""
    return {
        "edge": edge_rows,
        "ties": lambda: tie_rows(fmt.spec),
        "random": lambda: np.concatenate([random_rows(600, 61), np.random.default_rng(62).standard_normal((600, 64)).astype(np.float32)]),
        "structured": lambda: structured_rows(700, 63),
        "rounding": lambda: rounding_rows(fmt),
    }[kind]()


each_kind = pytest.mark.parametrize("kind", ["edge", "ties", "random", "structured", "rounding"])


class Node:
    """One node on the device: build it with :attr:`g`, then :meth:`run`."""

    def __init__(self, ggml, device):
        self.device, self.g = device, Graph(ggml)
        self.base = ggml.base

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc) -> None:
        self.g.__exit__()

    def run(self, node: int) -> np.ndarray:
        """Raw bytes of the result."""
        self.device.simt_compute.argtypes = [ctypes.c_void_p]
        assert self.device.simt_compute(node) == 1, "the device does not know this operation"
        return self.g.bytes_of(node)


def _set_rows(ggml, device, fmt, x: np.ndarray, index: np.ndarray, rows: int) -> np.ndarray:
    """x float32 [planes, n, width] into `rows` rows of each plane; uint8 [planes, rows, width / 64, size]."""
    planes, n, width = x.shape
    with Node(ggml, device) as node:
        dst = node.g.tensor(fmt.spec.type_id, (width, rows, planes), fill=0xA5)
        src = node.g.tensor(GGML_TYPE_F32, (width, n, planes), x)
        at = node.g.tensor(GGML_TYPE_I64 if index.dtype == np.int64 else GGML_TYPE_I32, index.shape[::-1], index)
        got = node.run(ggml.base.ggml_set_rows(node.g.ctx, dst, src, at))
    return got.reshape(planes, rows, width // 64, fmt.spec.size)


@each_format
@each_kind
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_set_rows_encodes(ggml, device, monkeypatch, fmt, kind, order):
    if order == "reverse":
        monkeypatch.setenv("SIMT_ORDER", order)
    x = _inputs(fmt, kind)
    index = np.arange(len(x), dtype=np.int64)
    got = _set_rows(ggml, device, fmt, x[None], index, len(x))
    assert_same_blocks(fmt, x, fmt.encode(x), got, f"SET_ROWS, {kind}")
