"""The CUDA kernels against the Python reference, bit for bit: run on the host by the shim of tests/simt."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
from blocks import assert_same_blocks, assert_same_floats
from edge_inputs import edge_rows, random_rows, rounding_rows, structured_rows, tie_rows
from ggml_lib import GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_I32, GGML_TYPE_I64, Graph, pointer
from simt_build import device_library

from kvfmt import registry

GGML_TYPE_BF16 = 30
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


@each_format
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_set_rows_places(ggml, device, fmt, dtype):
    """Rows of three blocks go where the indices say, indices repeat over the planes, and nothing else is written."""
    x = random_rows(4 * 5 * 3, 64).reshape(4, 5, 192)
    index = np.array([[6, 2, 0, 8, 3], [1, 0, 8, 7, 4]], dtype)
    got = _set_rows(ggml, device, fmt, x, index, 9)
    want = np.full(got.shape, 0xA5, np.uint8)
    blocks = fmt.encode(x.reshape(-1, 64)).reshape(4, 5, 3, -1)
    for plane in range(4):
        want[plane, index[plane % 2]] = blocks[plane]
    assert_same_blocks(fmt, None, want, got, "SET_ROWS with indices")


@each_format
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
def test_copy_into(ggml, device, fmt, permuted):
    x = random_rows(11 * 3 * 2, 65).reshape(3, 11, 128)
    with Node(ggml, device) as node:
        src = node.g.tensor(GGML_TYPE_F32, (128, 11, 3), x)
        dst = node.g.tensor(fmt.spec.type_id, (128, 3, 11) if permuted else (128, 33), fill=0xA5)
        got = node.run(ggml.base.ggml_cpy(node.g.ctx, node.g.swapped(src) if permuted else src, dst))
    order = np.ascontiguousarray(x.swapaxes(0, 1) if permuted else x)
    assert_same_blocks(fmt, order, fmt.encode(order), got, "CPY to the type")


@each_format
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
def test_copy_out_of(ggml, device, fmt, permuted):
    data = fmt.encode(random_rows(11 * 3 * 2, 66).reshape(3, 11, 128))
    with Node(ggml, device) as node:
        src = node.g.tensor(fmt.spec.type_id, (128, 11, 3), data)
        dst = node.g.tensor(GGML_TYPE_F32, (128, 3, 11) if permuted else (128 * 33,), fill=0xFF)
        got = node.run(ggml.base.ggml_cpy(node.g.ctx, node.g.swapped(src) if permuted else src, dst))
    order = np.ascontiguousarray(data.swapaxes(0, 1) if permuted else data)
    assert_same_floats(fmt, order, fmt.decode(order), got.view(np.float32), "CPY to f32")


@each_format
def test_get_rows(ggml, device, fmt):
    data = fmt.encode(random_rows(2 * 9 * 3, 67).reshape(2, 9, 192))
    index = np.array([[6, 2, 2, 8, 3], [1, 0, 8, 7, 4]], np.int32)
    with Node(ggml, device) as node:
        src = node.g.tensor(fmt.spec.type_id, (192, 9, 2), data)
        got = node.run(ggml.base.ggml_get_rows(node.g.ctx, src, node.g.tensor(GGML_TYPE_I32, (5, 2), index)))
    picked = np.stack([data[plane, index[plane]] for plane in range(2)])
    assert_same_floats(fmt, picked, fmt.decode(picked), got.view(np.float32), "GET_ROWS")


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _f16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint16)


KINDS = {GGML_TYPE_F32: lambda x: x.view(np.uint32), GGML_TYPE_F16: _f16, GGML_TYPE_BF16: _bf16}
each_output = pytest.mark.parametrize("kind", KINDS, ids=["f32", "f16", "bf16"])


def _any_blocks(fmt, n: int) -> np.ndarray:
    """What edge inputs encode to, and blocks of any codes with finite scales: uint8 [n or more, size]."""
    data = np.random.default_rng(68).integers(0, 256, (n, fmt.spec.size), dtype=np.uint8)
    data[:, 1] &= 0xFB
    return np.concatenate([fmt.encode(edge_rows()), fmt.encode(structured_rows(64, 69)), data])


@each_format
@each_output
def test_conversion(device, fmt, kind):
    data = _any_blocks(fmt, 900)
    want = KINDS[kind](fmt.decode(data))
    got = np.zeros_like(want)
    device.simt_convert.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    assert device.simt_convert(fmt.spec.type_id, kind, pointer(data), pointer(got), want.size) == 1
    assert np.array_equal(want, got)


@each_format
@each_output
def test_conversion_of_rows_apart(device, fmt, kind):
    """Extents 128, 5, 3, 2 out of a tensor with more of each, as attention sees a cache of several heads and streams."""
    data = np.resize(_any_blocks(fmt, 900), (2, 4, 7, 3, fmt.spec.size)).copy()
    want = KINDS[kind](fmt.decode(np.ascontiguousarray(data[:, :3, :5, :2])))
    got = np.zeros_like(want)
    extents, strides = np.array([128, 5, 3, 2], np.int64), np.array([3, 21, 84], np.int64)
    device.simt_convert_nc.argtypes = [ctypes.c_int, ctypes.c_int] + [ctypes.c_void_p] * 4
    assert device.simt_convert_nc(fmt.spec.type_id, kind, pointer(data), pointer(got), pointer(extents), pointer(strides)) == 1
    assert np.array_equal(want.ravel(), got.ravel())


@each_format
@each_output
def test_get_rows_of_other_types(device, fmt, kind):
    data = _any_blocks(fmt, 100)[: 3 * 40].reshape(40, 3 * fmt.spec.size)
    index = np.array([39, 0, 7, 7, 21], np.int32)
    want = KINDS[kind](fmt.decode(data[index].reshape(-1, fmt.spec.size)))
    got = np.zeros_like(want)
    device.simt_get_rows.argtypes = [ctypes.c_int, ctypes.c_int] + [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_size_t]
    device.simt_get_rows(fmt.spec.type_id, kind, pointer(data), pointer(index), pointer(got), 192, 5, data.shape[1])
    assert np.array_equal(want.ravel(), got.ravel())


# --- faults ----------------------------------------------------------------------------------------------------------


def _one_bit_in_every_table(name: str, text: str) -> str:
    """The lowest bit of one entry of each table, changed: the first, or of a single row of thresholds the middle one."""
    if name != "kvq/kvq_blocks.h":
        return text
    for fmt in ALL:
        for table in fmt.spec.tables:
            before = r"-?\d+[^-\d]+" * (len(table.values) // 2 if table.name == "thresholds" else 0)
            entry = rf"(KVQ_TABLE \w+ {fmt.spec.name}_{table.name}\[[^=]*= [^-\d]*{before})(-?\d+)"
            text, changed = re.subn(entry, lambda m: m[1] + str(int(m[2]) ^ 1), text)
            assert changed == 1, (fmt.spec.name, table.name)
    return text


def _one_bit_in_every_word(name: str, text: str) -> str:
    """The lowest bit of the first four levels or magnitudes of each format, which conversions read as one word, changed."""
    if name != "ggml-cuda/kvq-levels.cuh":
        return text
    for fmt in ALL:
        table = next(t for t in fmt.spec.tables if t.name in ("levels", "rows", "fine"))
        word = int.from_bytes(bytes(v & 255 for v in table.values[:4]), "little")
        start = re.search(rf"{fmt.spec.name}_row_words|kvq_levels4<GGML_TYPE_{fmt.spec.name.upper()}>", text).start()
        head, found, tail = text[start:].partition(f"0x{word:08X}u")
        assert found, fmt.spec.name
        text = text[:start] + head + f"0x{word ^ 1:08X}u" + tail
    return text


#: In each body, one bit of a comparison or a constant.
BODY_FAULTS = {
    "kvq/kvq_lloyd.h": ("mag > threshold[k]", "mag >= threshold[k]"),
    "kvq/kvq_allocated.h": ("m[i] > threshold ?", "m[i] >= threshold ?"),
    "kvq/kvq_e8.h": ("+ 32768) >> 16", "+ 0) >> 16"),
    "kvq/kvnf4.h": ("xi > kvnf4_thresholds[k]", "xi >= kvnf4_thresholds[k]"),
}


def _one_bit_in_every_body(name: str, text: str) -> str:
    if name not in BODY_FAULTS:
        return text
    right, wrong = BODY_FAULTS[name]
    assert right in text, f"{name} no longer says {right!r}"
    return text.replace(right, wrong)


@pytest.mark.parametrize("fault", [_one_bit_in_every_table, _one_bit_in_every_word, _one_bit_in_every_body], ids=["table", "word", "body"])
def test_a_fault_of_one_bit_is_seen(ggml, ggml_libdir, patched, fault):
    """In every format: what is encoded or decoded with the fault is not what Python says."""
    broken = device_library(patched, "encode.cpp", ggml_libdir, edit=fault)
    broken.simt_convert.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    for fmt in ALL:
        x = np.concatenate([tie_rows(fmt.spec), np.random.default_rng(70).standard_normal((1000, 64)).astype(np.float32)])
        index = np.arange(len(x), dtype=np.int64)
        encoded = fmt.encode(x)
        floats = np.zeros(x.shape, np.float32)
        assert broken.simt_convert(fmt.spec.type_id, pointer(encoded), pointer(floats), x.size) == 1
        same_bytes = np.array_equal(_set_rows(ggml, broken, fmt, x[None], index, len(x)).ravel(), encoded.ravel())
        same_floats = np.array_equal(floats, fmt.decode(encoded))
        assert not (same_bytes and same_floats), f"{fmt.spec.name}: the fault changed nothing"
