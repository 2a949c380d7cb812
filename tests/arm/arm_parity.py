"""The kvq code on 64-bit ARM, under qemu-user: ``make test-arm``. Needs g++-aarch64-linux-gnu and qemu-user.

Not collected with the other tests: they would need the cross compiler.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import any_bytes  # noqa: E402
from blocks import assert_same_blocks  # noqa: E402
from conftest import PIN  # noqa: E402
from test_patch import ALL, NAMES, _inputs, _program, _split  # noqa: E402

from kvfmt.build.paths import build_dir  # noqa: E402

LLAMA = build_dir(PIN.name) / "src" / "vendor" / "llama.cpp"
ARCH = "armv8.2-a+dotprod+fp16"


def _run(*command: str | Path, **more) -> subprocess.CompletedProcess:
    done = subprocess.run([str(c) for c in command], capture_output=True, **more)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{(done.stdout[-3000:] + done.stderr[-3000:]).decode(errors='replace')}"
    return done


@pytest.fixture(scope="session", autouse=True)
def tools():
    for name, package in (("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"), ("qemu-aarch64", "qemu-user")):
        if not shutil.which(name):
            pytest.exit(f"{name} is not installed. On Debian: apt-get install {package}", returncode=2)
    if not LLAMA.is_dir():
        pytest.exit(f"no patched tree at {LLAMA}: run `kvfmt build` first", returncode=2)


def _compiled(tmp_path: Path, text: str, *options: str) -> Path:
    source, program = tmp_path / "all.c", tmp_path / "all"
    source.write_text(text)
    _run("aarch64-linux-gnu-gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-static", *options,
         f"-I{LLAMA / 'ggml/src/kvq'}", source, "-o", program)  # fmt: skip
    return program


@pytest.mark.parametrize("arch", [ARCH, "armv8-a"])
@pytest.mark.parametrize("options", ["-O0", "-O3"])
def test_any_bytes_are_unpacked_as_in_python(tmp_path, options, arch):
    """With the dot product instruction and without."""
    program = _compiled(tmp_path, any_bytes.program(), options, f"-march={arch}")
    data = any_bytes.blocks()
    done = _run("qemu-aarch64", program, input=b"".join(d.tobytes() for d in data.values()))
    any_bytes.check(data, done.stdout, f"{arch} {options}")


@pytest.mark.parametrize("options", ["-O0", "-O3"])
def test_bytes_and_levels(tmp_path, options):
    program = _compiled(tmp_path, _program(), options, f"-march={ARCH}")
    x = _inputs()
    (tmp_path / "input.f32").write_bytes(x.tobytes())
    with (tmp_path / "input.f32").open("rb") as handle:  # a file: the program reads it once for each format
        found = _split(_run("qemu-aarch64", program, stdin=handle).stdout, len(x))
    for fmt in ALL:
        want = fmt.encode(x)
        assert_same_blocks(fmt, x, want, found[fmt.spec.name][0], f"aarch64 {options}")
        assert np.array_equal(fmt.decode(want).view(np.uint32), found[fmt.spec.name][1].view(np.uint32))


@pytest.fixture(scope="session")
def backend_ops() -> Path:
    """test-backend-ops for ARM; made once, then kept up to date in the build folder."""
    home = build_dir(PIN.name) / "cmake-arm"
    _run("cmake", "-S", HERE, "-B", home, f"-DLLAMA={LLAMA}", f"-DCMAKE_TOOLCHAIN_FILE={HERE / 'aarch64.cmake'}",
         "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_EXE_LINKER_FLAGS=-static", "-DGGML_NATIVE=OFF", f"-DGGML_CPU_ARM_ARCH={ARCH}",
         "-DBUILD_SHARED_LIBS=OFF", "-DGGML_OPENMP=OFF")  # fmt: skip
    _run("cmake", "--build", home, "--target", "test-backend-ops", "-j2")
    return home / "bin" / "test-backend-ops"


#: Emulation is slow: attention on each type with itself and, one side only, with f16.
@pytest.mark.parametrize(
    "op, cases",
    [
        ("SET_ROWS", "type_dst={0}(,|$)"),
        ("GET_ROWS", "type={0}(,|$)"),
        ("MUL_MAT", "type_a={0}(,|$)"),
        ("FLASH_ATTN_EXT", "type_K=({0},type_V={0}|f16,type_V={0}|{0},type_V=f16),"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_operations(backend_ops, name, op, cases):
    done = _run("qemu-aarch64", backend_ops, "test", "-b", "CPU", "-o", op, "-p", cases.format(name))
    passed, total = map(int, re.search(rb"(\d+)/(\d+) tests passed", done.stdout).groups())
    assert passed == total >= 1
