"""What ggml-cuda claims for our types: every operation of a cache, and no kernel that does not know them."""

from __future__ import annotations

import ctypes
import re

import pytest
from ggml_lib import GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_I32, GGML_TYPE_I64, GGML_TYPE_Q8_0, Graph
from simt_build import device_library

from kvfmt import registry

ALL = registry.all_formats()
each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.spec.name)

#: File -> the functions of it that decide; its sizes stay too.
DECIDE = {
    "ggml-cuda/fwht.cu": ("ggml_cuda_op_mul_mat_use_fwht",),
    "ggml-cuda/mmf.cu": ("mmf_get_rows_per_block", "ggml_cuda_should_use_mmf",),
    "ggml-cuda/mmq.cu": ("ggml_cuda_should_use_mmq",),
    "ggml-cuda/mmvf.cu": ("ggml_cuda_should_use_mmvf",),
    "ggml-cuda/mmvq.cu": ("ggml_cuda_should_use_mmvq",),
    "ggml-cuda/mmf.cuh": (),
    "ggml-cuda/mmq.cuh": (),
    "ggml-cuda/ggml-cuda.cu": ("ggml_cuda_mul_mat", "ggml_backend_cuda_device_supports_op"),
}


def _only_what_decides(name: str, text: str) -> str:
    if name not in DECIDE:
        return text
    kept = re.findall(r"^#define MM[FQ]_\w+ \d+", text, re.MULTILINE)
    for function in DECIDE[name]:
        found = re.search(rf"^(?:static )?(?:__forceinline__ )?(?:bool|void|int) {function}\(.*?^\}}\n", text, re.MULTILINE | re.DOTALL)
        assert found, f"{name} has no {function}"
        kept.append(found[0])
    return "\n".join(kept)


def _library(patched, ggml_libdir, *defines: str) -> ctypes.CDLL:
    library = device_library(patched, "dispatch.cpp", ggml_libdir, edit=_only_what_decides, defines=defines)
    library.simt_supports.argtypes = [ctypes.c_void_p]
    library.simt_mul_mat.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.simt_mul_mat.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def lib(ggml, ggml_libdir, patched):
    return _library(patched, ggml_libdir)


def _set_rows(g, base, type_id: int, index: int = GGML_TYPE_I64) -> int:
    return base.ggml_set_rows(g.ctx, g.tensor(type_id, (128, 9)), g.tensor(GGML_TYPE_F32, (128, 5)), g.tensor(index, (5,)))


def _get_rows(g, base, type_id: int) -> int:
    return base.ggml_get_rows(g.ctx, g.tensor(type_id, (128, 9)), g.tensor(GGML_TYPE_I32, (5,)))


def _mul_mat(g, base, type_id: int, columns: int = 3, permuted: bool = False) -> int:
    a = g.swapped(g.tensor(type_id, (128, 4, 9))) if permuted else g.tensor(type_id, (128, 9, 4))
    return base.ggml_mul_mat(g.ctx, a, g.tensor(GGML_TYPE_F32, (128, columns, 4)))


@each_format
def test_what_a_cache_needs_is_claimed(ggml, lib, fmt):
    base, ours = ggml.base, fmt.spec.type_id
    with Graph(ggml) as g:
        cache = g.tensor(ours, (128, 4, 9))
        float_like = g.tensor(GGML_TYPE_F32, (128, 4, 9))
        nodes = {
            "SET_ROWS i64": _set_rows(g, base, ours),
            "SET_ROWS i32": _set_rows(g, base, ours, GGML_TYPE_I32),
            "GET_ROWS": _get_rows(g, base, ours),
            "MUL_MAT": _mul_mat(g, base, ours),
            "MUL_MAT permuted": _mul_mat(g, base, ours, permuted=True),
            "CPY out": base.ggml_cpy(g.ctx, cache, float_like),
            "CPY out permuted": base.ggml_cpy(g.ctx, g.swapped(cache), g.tensor(GGML_TYPE_F32, (128, 9, 4))),
            "CPY in": base.ggml_cpy(g.ctx, float_like, cache),
            "CPY whole": base.ggml_cpy(g.ctx, cache, g.tensor(ours, (128, 4, 9))),
            "CONT whole": base.ggml_cont(g.ctx, cache),
            "DUP whole": base.ggml_dup(g.ctx, cache),
        }
        refused = [name for name, node in nodes.items() if not lib.simt_supports(node)]
        assert not refused
        no_kernel = {
            "CPY from f16": base.ggml_cpy(g.ctx, g.tensor(GGML_TYPE_F16, (128, 4, 9)), cache),
            "CPY from another type": base.ggml_cpy(g.ctx, g.tensor(GGML_TYPE_Q8_0, (128, 4, 9)), cache),
            "CPY within the type, permuted": base.ggml_cpy(g.ctx, g.swapped(cache), g.tensor(ours, (128, 9, 4))),
            "CONT permuted": base.ggml_cont(g.ctx, g.swapped(cache)),
            "DUP permuted": base.ggml_dup(g.ctx, g.swapped(cache)),
        }
        assert not [name for name, node in no_kernel.items() if lib.simt_supports(node)]


def test_where_the_types_are_not_served_nothing_is_claimed(ggml, ggml_libdir, patched):
    """Builds for other vendors' GPUs, where the arithmetic has not been held to the reference."""
    lib, base = _library(patched, ggml_libdir, "GGML_CUDA_NO_KVQ"), ggml.base
    for fmt in ALL:
        ours = fmt.spec.type_id
        with Graph(ggml) as g:
            cache, floats = g.tensor(ours, (128, 4, 9)), g.tensor(GGML_TYPE_F32, (128, 4, 9))
            copies = [base.ggml_cpy(g.ctx, cache, floats), base.ggml_cpy(g.ctx, floats, cache)]
            nodes = [_set_rows(g, base, ours), _get_rows(g, base, ours), _mul_mat(g, base, ours), *copies]
            assert not any(lib.simt_supports(node) for node in nodes), fmt.spec.name
            assert lib.simt_supports(_set_rows(g, base, GGML_TYPE_Q8_0))


@each_format
@pytest.mark.parametrize("cc", [610, 700, 750, 800, 890, 900, 1200, 1210])
def test_mul_mat_dequantizes(ggml, lib, fmt, cc):
    """On every generation and for any number of columns: the kernels for quantized matrices would abort."""
    with Graph(ggml) as g:
        for columns in (1, 2, 5, 8, 9, 64, 512):
            for permuted in (False, True):
                node = _mul_mat(g, ggml.base, fmt.spec.type_id, columns, permuted)
                assert lib.simt_mul_mat(node, cc) == b"cublas", f"{columns} columns, permuted: {permuted}"


def test_other_types_keep_their_kernels(ggml, lib):
    with Graph(ggml) as g:
        assert lib.simt_mul_mat(_mul_mat(g, ggml.base, GGML_TYPE_Q8_0, 1), 800) == b"mmvq"
        assert lib.simt_mul_mat(_mul_mat(g, ggml.base, GGML_TYPE_Q8_0, 512), 800) == b"mmq"
        assert lib.simt_supports(_set_rows(g, ggml.base, GGML_TYPE_Q8_0))
