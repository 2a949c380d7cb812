"""Where the built ggml and the unpatched tree lie. A missing one fails the tests that need it; none is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any library with OpenMP is loaded: threads that wait for work sleep, instead of keeping the core from others' work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from kvfmt.build.paths import bin_dir, build_dir
from kvfmt.build.pins import get_pin

PIN = get_pin()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes that share the tests with `-n auto`: one a core, four at most, since each may have a model and torch in memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores)


def _built(path: Path, what: str) -> Path:
    if not path.exists():
        pytest.fail(f"{what} is not at {path}: run `kvfmt build` first, or point KVFMT_BIN at another build", pytrace=False)
    return path


@pytest.fixture(scope="session")
def ggml_libdir() -> Path:
    """The folder with the programs and shared libraries of one build: $KVFMT_BIN, or what `kvfmt build` made."""
    folder = bin_dir(PIN.name)
    _built(folder / "libggml-base.so", "the patched ggml")
    return folder


@pytest.fixture(scope="session")
def ggml(ggml_libdir):
    from ggml_lib import Ggml

    return Ggml(ggml_libdir)


@pytest.fixture(scope="session")
def pristine() -> Path:
    """The unpatched source distribution of the default pin: $KVFMT_PRISTINE, or what `kvfmt build` unpacked."""
    own = os.environ.get("KVFMT_PRISTINE")
    return _built(Path(own).resolve() if own else build_dir(PIN.name) / "pristine", "the unpatched tree")


@pytest.fixture(scope="session")
def patched() -> Path:
    """The patched llama.cpp of the default pin, as `kvfmt build` left it."""
    return _built(build_dir(PIN.name) / "src" / "vendor" / "llama.cpp", "the patched tree")


@pytest.fixture(scope="session")
def device(ggml, ggml_libdir, patched):
    """The CUDA kernels, compiled for the host: see tests/simt/simt.h."""
    from simt_build import device_library

    return device_library(patched, "device.cpp", ggml_libdir)
