"""The built ggml, called through ctypes: what really runs, for comparison with the Python reference."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

FLOATS = ctypes.POINTER(ctypes.c_float)
TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
VEC_DOT = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
)

GGML_TYPE_F32 = 0
GGML_TYPE_F16 = 1
GGML_TYPE_Q8_0 = 8
GGML_TYPE_I32 = 26
GGML_TYPE_I64 = 27


class TypeTraits(ctypes.Structure):
    """struct ggml_type_traits of ggml.h."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", TO_FLOAT),
        ("from_float_ref", TO_FLOAT),
    ]


class CpuTraits(ctypes.Structure):
    """struct ggml_type_traits_cpu of ggml-cpu.h."""

    _fields_ = [
        ("from_float", TO_FLOAT),
        ("vec_dot", VEC_DOT),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    ]


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def pointer(array: np.ndarray) -> int:
    return array.ctypes.data


class Ggml:
    """Shared libraries of one build. ``libdir`` holds libggml-base.so and libggml-cpu.so."""

    def __init__(self, libdir: Path):
        self.base = ctypes.CDLL(str(libdir / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(libdir / "libggml-cpu.so"))
        self._declare()
        self.cpu.ggml_cpu_init()

    def _declare(self) -> None:
        void_p, i64, size_t, c_int, c_float = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_float,
        )
        for name, result, arguments in [
            ("ggml_get_type_traits", ctypes.POINTER(TypeTraits), [c_int]),
            ("ggml_row_size", size_t, [c_int, i64]),
            ("ggml_quantize_chunk", size_t, [c_int, void_p, void_p, i64, i64, i64, void_p]),
            ("ggml_validate_row_data", ctypes.c_bool, [c_int, void_p, size_t]),
            ("ggml_kvq_spec_hash", ctypes.c_char_p, [c_int]),
            ("ggml_kvq_type", c_int, [c_int]),
            ("ggml_init", void_p, [InitParams]),
            ("ggml_free", None, [void_p]),
            ("ggml_new_tensor_4d", void_p, [void_p, c_int, i64, i64, i64, i64]),
            ("ggml_get_data", void_p, [void_p]),
            ("ggml_set_rows", void_p, [void_p, void_p, void_p, void_p]),
            ("ggml_get_rows", void_p, [void_p, void_p, void_p]),
            ("ggml_cpy", void_p, [void_p, void_p, void_p]),
            ("ggml_mul_mat", void_p, [void_p, void_p, void_p]),
            ("ggml_flash_attn_ext", void_p, [void_p, void_p, void_p, void_p, void_p, c_float, c_float, c_float]),
            ("ggml_flash_attn_ext_add_sinks", None, [void_p, void_p]),
            ("ggml_permute", void_p, [void_p, void_p, c_int, c_int, c_int, c_int]),
            ("ggml_cont", void_p, [void_p, void_p]),
            ("ggml_dup", void_p, [void_p, void_p]),
            ("ggml_new_graph", void_p, [void_p]),
            ("ggml_build_forward_expand", None, [void_p, void_p]),
            ("ggml_nbytes", size_t, [void_p]),
        ]:
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        for name, result, arguments in [
            ("ggml_get_type_traits_cpu", ctypes.POINTER(CpuTraits), [c_int]),
            ("ggml_cpu_kvq_to_float", void_p, [c_int]),
            ("ggml_graph_compute_with_ctx", c_int, [void_p, void_p, c_int]),
        ]:
            function = getattr(self.cpu, name)
            function.restype, function.argtypes = result, arguments

    def traits(self, type_id: int) -> TypeTraits:
        return self.base.ggml_get_type_traits(type_id).contents

    def cpu_traits(self, type_id: int) -> CpuTraits:
        return self.cpu.ggml_get_type_traits_cpu(type_id).contents

    def cpu_to_float(self, type_id: int) -> TO_FLOAT:
        """What flash attention on the CPU dequantizes values with."""
        return TO_FLOAT(self.cpu.ggml_cpu_kvq_to_float(type_id))

    def quantize(self, function, x: np.ndarray, row_bytes: int) -> np.ndarray:
        """Call a from_float function on the rows of ``x`` (float32 [rows, n])."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.full((x.shape[0], row_bytes), 0xA5, np.uint8)
        for i in range(x.shape[0]):
            function(pointer(x[i]), pointer(out[i]), x.shape[1])
        return out

    def dequantize(self, function, data: np.ndarray, n: int) -> np.ndarray:
        """Call a to_float function on the rows of ``data`` (uint8 [rows, bytes])."""
        out = np.full((data.shape[0], n), np.nan, np.float32)
        for i in range(data.shape[0]):
            function(pointer(data[i]), pointer(out[i]), n)
        return out


class Graph:
    """A small graph on the CPU backend; tensors live in one arena."""

    def __init__(self, ggml: Ggml, megabytes: int = 64):
        self.ggml = ggml
        self.ctx = ggml.base.ggml_init(InitParams(megabytes << 20, None, False))

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *exc) -> None:
        self.ggml.base.ggml_free(self.ctx)

    def tensor(self, type_id: int, shape: tuple[int, ...], data: np.ndarray | None = None, fill: int = 0) -> int:
        """A tensor with ggml's order of extents (innermost first), filled with ``data`` or with one byte."""
        extents = tuple(shape) + (1,) * (4 - len(shape))
        tensor = self.ggml.base.ggml_new_tensor_4d(self.ctx, type_id, *extents)
        size = self.ggml.base.ggml_nbytes(tensor)
        if data is None:
            ctypes.memset(self.ggml.base.ggml_get_data(tensor), fill, size)
        else:
            data = np.ascontiguousarray(data)
            assert data.nbytes == size, (data.nbytes, size)
            ctypes.memmove(self.ggml.base.ggml_get_data(tensor), pointer(data), size)
        return tensor

    def bytes_of(self, tensor: int) -> np.ndarray:
        size = self.ggml.base.ggml_nbytes(tensor)
        raw = ctypes.string_at(self.ggml.base.ggml_get_data(tensor), size)
        return np.frombuffer(raw, np.uint8).copy()

    def swapped(self, tensor: int) -> int:
        """A view with the second and third extents exchanged, as attention sees a cache of [head, heads, tokens]."""
        return self.ggml.base.ggml_permute(self.ctx, tensor, 0, 2, 1, 3)

    def compute(self, result: int, threads: int = 2) -> np.ndarray:
        """Run the graph that ends in ``result``; returns its raw bytes."""
        graph = self.ggml.base.ggml_new_graph(self.ctx)
        self.ggml.base.ggml_build_forward_expand(graph, result)
        status = self.ggml.cpu.ggml_graph_compute_with_ctx(self.ctx, graph, threads)
        assert status == 0, f"graph failed with status {status}"
        return self.bytes_of(result)
