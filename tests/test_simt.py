"""The CUDA device made of one CPU thread: its warps, barriers and arithmetic are those of CUDA, and misuse is said."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from ggml_lib import pointer
from simt_build import device_library, rewritten


@pytest.fixture(scope="module")
def lib(ggml, ggml_libdir, patched):
    return device_library(patched, "selftest.cpp", ggml_libdir)


each_order = pytest.mark.parametrize("order", ["forward", "reverse"])


def _call(function, *arguments) -> None:
    function(*(ctypes.c_void_p(pointer(a)) if isinstance(a, np.ndarray) else a for a in arguments))


@each_order
def test_warps(lib, monkeypatch, order):
    monkeypatch.setenv("SIMT_ORDER", order)
    x = np.random.default_rng(71).integers(-1000, 1000, 2 * 96).astype(np.int32)
    sums, picked, ballots = np.zeros_like(x), np.zeros((x.size, 4), np.int32), np.zeros(x.size, np.uint32)
    _call(lib.run_sum_lanes, 2, 96, x, sums, picked, ballots)
    warps = x.reshape(-1, 32)
    assert np.array_equal(sums.reshape(-1, 32), np.repeat(warps.sum(axis=1, keepdims=True), 32, axis=1))
    eights, halves = x.reshape(-1, 8), x.reshape(-1, 16)
    assert np.array_equal(picked[:, 0].reshape(-1, 8), np.repeat(eights[:, 3:4], 8, axis=1))
    assert np.array_equal(picked[:, 1].reshape(-1, 16), np.concatenate([halves[:, :2], halves[:, :-2]], axis=1))
    assert np.array_equal(picked[:, 2].reshape(-1, 32), np.concatenate([warps[:, 5:], warps[:, -5:]], axis=1))
    assert np.array_equal(picked[:, 3].reshape(-1, 32), np.repeat(warps.max(axis=1, keepdims=True), 32, axis=1))
    bits = ((warps & 1).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
    assert np.array_equal(ballots.reshape(-1, 32), np.repeat(bits[:, None], 32, axis=1))


@each_order
@pytest.mark.parametrize("shape", [(32, 4), (33, 3), (1, 1), (1024, 1)])
def test_barriers(lib, monkeypatch, order, shape):
    monkeypatch.setenv("SIMT_ORDER", order)
    x = np.random.default_rng(72).integers(0, 100, shape[0] * shape[1]).astype(np.int32)
    y = np.zeros_like(x)
    _call(lib.run_scan, *shape, x, y)
    assert np.array_equal(y, np.cumsum(x))


@each_order
def test_threads_that_returned_are_not_waited_for(lib, monkeypatch, order):
    monkeypatch.setenv("SIMT_ORDER", order)
    y = np.zeros(64, np.int32)
    _call(lib.run_leavers, y)
    assert np.array_equal(y, np.where(np.arange(64) % 2, 0, 116))


def test_a_race_depends_on_the_order(lib, monkeypatch):
    forward, reverse = np.zeros(64, np.int32), np.zeros(64, np.int32)
    _call(lib.run_race, forward)
    monkeypatch.setenv("SIMT_ORDER", "reverse")
    _call(lib.run_race, reverse)
    assert not np.array_equal(forward, reverse)


def test_fast_math(lib):
    """Contraction and flushing of subnormals as -use_fast_math has them; the _rn intrinsics are not contracted."""
    a, b = np.float32(1 + 2**-13), np.float32(1 - 2**-13)
    c, y = np.float32(-1), np.zeros(6, np.float32)
    lib.run_arithmetic.argtypes = [ctypes.c_float] * 3 + [ctypes.c_void_p]
    lib.run_arithmetic(a, b, c, pointer(y))
    assert y[1] == a * b + c == 0
    assert y[0] == np.float32(-(2.0**-26)), "a * b + c was not contracted"
    assert y[2] == 0 and y[3] == 0, "subnormals were not flushed"
    assert y[4] == np.float32(2.0**-24), "a subnormal half was lost"
    assert y[5] != 0, "subnormals are flushed outside of kernels too"


@pytest.mark.parametrize("function, message", [("run_stuck", "deadlock"), ("run_too_large", "a launch that CUDA refuses")])
def test_misuse_is_said(lib, ggml_libdir, function, message):
    code = f"import ctypes; ctypes.CDLL({lib._name!r}).{function}()"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(ggml_libdir)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -signal.SIGABRT
    assert f"simt: {message}" in done.stderr


def test_launches_and_shared_memory_are_rewritten():
    text = "k<int, f(2), n> <<<dim3(1, 2), 32, n*sizeof(int), stream>>>(a, b);\n  extern __shared__ float data[];"
    assert rewritten(text) == (
        "simt::launch_config(dim3(1, 2), 32, n*sizeof(int), stream)"
        ".run([=](auto... simt_arguments) { k<int, f(2), n>(simt_arguments...); })(a, b);\n"
        "  float * data = (float *) simt::dynamic_shared();"
    )
