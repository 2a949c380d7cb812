"""The kvq code without AVX-512, and without any SIMD beyond the baseline: the CPU backend passes the same parity tests, and the
headers unpack blocks of any bytes as Python does, at every level that this processor has."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import any_bytes
import pytest
from conftest import PIN
from relink import relink

from kvfmt.build.paths import build_dir

#: x86-64-v3 is AVX2 with FMA. The baseline takes every scalar branch.
LEVELS = ["x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else []
#: Of AVX-512, x86-64-v4 is what the headers ask for; `native` is all that there is.
AVX512 = LEVELS and all(f" {flag}" in Path("/proc/cpuinfo").read_text() for flag in ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"))
HEADER_LEVELS = [*LEVELS, *(["x86-64-v4"] if AVX512 else []), "native"]
WHICH = "(encoders or decoders) and (random or rounding) or vec_dot or everything and rows"


@pytest.mark.parametrize("march", LEVELS)
def test_parity_at(ggml_libdir, tmp_path, march):
    assert relink(ggml_libdir.parent, march, tmp_path / "lib") == ["kvq-attn.cpp", "kvq-rows.cpp", "kvq.c"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", WHICH, str(Path(__file__).with_name("test_parity.py"))]
    done = subprocess.run(command, env={**os.environ, "KVFMT_BIN": str(tmp_path / "lib")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("options", ["-O0", "-O3"])
@pytest.mark.parametrize("march", HEADER_LEVELS)
def test_any_bytes_are_unpacked_as_in_python(ggml_libdir, tmp_path, march, options):
    source, program = tmp_path / "unpack.c", tmp_path / "unpack"
    source.write_text(any_bytes.program())
    headers = build_dir(PIN.name) / "src/vendor/llama.cpp/ggml/src/kvq"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", options, f"-march={march}", f"-I{headers}", source, "-o", program]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    data = any_bytes.blocks()
    ran = subprocess.run([program], input=b"".join(d.tobytes() for d in data.values()), capture_output=True)
    assert ran.returncode == 0, ran.stderr
    any_bytes.check(data, ran.stdout, f"{march} {options}")
