"""The kvq code of the CPU backend without AVX-512, and without any SIMD beyond the baseline: the same parity tests."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from relink import relink

#: x86-64-v3 is AVX2 with FMA. The baseline takes every scalar branch.
LEVELS = ["x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else []
WHICH = "(encoders or decoders) and (random or rounding) or vec_dot or everything and rows"


@pytest.mark.parametrize("march", LEVELS)
def test_parity_at(ggml_libdir, tmp_path, march):
    assert relink(ggml_libdir.parent, march, tmp_path / "lib") == ["kvq-attn.cpp", "kvq-rows.cpp", "kvq.c"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", WHICH, str(Path(__file__).with_name("test_parity.py"))]
    done = subprocess.run(command, env={**os.environ, "KVFMT_BIN": str(tmp_path / "lib")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
