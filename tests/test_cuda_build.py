"""`kvfmt build --cuda`: what it asks of the machine, what it says when that is not there, and how it counts what ours costs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from kvfmt.build import compile as compiling
from kvfmt.build import cuda, nvcc, wheel
from kvfmt.build import toolkit as toolkit_of
from kvfmt.build.pins import get_pin
from kvfmt.cli import app
from kvfmt.errors import KvfmtError, MissingTool


@pytest.fixture
def toolkit(monkeypatch):
    """The nvcc that the tests compile with."""
    monkeypatch.setenv("CUDACXX", str(nvcc.ensure_nvcc()))


def _nvidia_smi(folder: Path, monkeypatch, script: str) -> None:
    """A driver's program that says this and nothing else."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_architectures_are_taken_as_given(toolkit):
    assert cuda.choose("80;90").architectures == "80;90"
    assert cuda.choose(" 80, 90-real ").architectures == "80;90-real"
    build = cuda.choose("80")
    assert "-DGGML_CUDA=ON" in build.flags and "-DCMAKE_CUDA_ARCHITECTURES=80" in build.flags


def test_programs_find_the_libraries_of_the_toolkit_that_they_are_linked_with(tmp_path):
    """Through a link to nvcc, such as /usr/local/bin/nvcc; /usr/local/cuda is not among the folders of every system's loader."""
    home = tmp_path / "cuda-13.0"
    for folder in ("bin", "lib64/stubs", "targets/x86_64-linux/lib", "nothing/lib"):
        (home / folder).mkdir(parents=True)
    (home / "bin" / "nvcc").touch(0o755)
    (home / "lib64" / "stubs" / "libcublas.so").touch()
    (home / "targets" / "x86_64-linux" / "lib" / "libcublas.so.13").touch()
    (tmp_path / "nvcc").symlink_to(home / "bin" / "nvcc")
    assert cuda.CudaBuild(str(tmp_path / "nvcc"), "90").flags[-1] == f"-DCMAKE_INSTALL_RPATH=$ORIGIN;{home}/targets/x86_64-linux/lib"


@pytest.mark.parametrize("asked, message", [("turing", "'turing' is no CUDA architecture"), ("8.0", "'8.0' is no"), ("35", "does not compile for 35"), (";", "names no CUDA")])
def test_what_is_no_architecture_is_named(toolkit, asked, message):
    with pytest.raises(KvfmtError, match=message) as error:
        cuda.choose(asked)
    assert error.value.hint


def test_without_a_choice_it_is_built_for_the_gpus_here(toolkit, monkeypatch, tmp_path):
    _nvidia_smi(tmp_path, monkeypatch, "printf '9.0\\n8.0\\n9.0\\n'")
    assert cuda.choose(None).architectures == "80;90"
    assert cuda.choose("native").architectures == "80;90"


def test_without_a_gpu_a_choice_is_asked_for(toolkit, monkeypatch, tmp_path):
    _nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    with pytest.raises(KvfmtError, match="no NVIDIA GPU is seen here") as error:
        cuda.choose(None)
    assert "--cuda-arch" in error.value.hint


def test_a_missing_toolkit_is_said_before_anything_is_downloaded(monkeypatch, tmp_path):
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit_of, "USUAL_HOMES", (str(tmp_path),))
    for name in ("cc", "c++"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KVFMT_BUILD", str(tmp_path / "build"))
    result = CliRunner().invoke(app, ["build", "--cuda", "--cuda-arch", "80"])
    assert result.exit_code == 1 and "no CUDA toolkit" in result.output and "CUDACXX" in result.output
    assert not (tmp_path / "build").exists()


def test_a_compiler_that_does_not_run_is_named(monkeypatch):
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    with pytest.raises(MissingTool, match="CUDACXX=/nowhere/nvcc does not run"):
        cuda.find_nvcc()


def test_the_wheel_says_that_cuda_is_in_it():
    version = wheel.wheel_version(get_pin(), "deadbeef" * 8, True, cuda=True)
    assert str(Version(version)) == version and version.endswith(".hdeadbeef.cuda")


def test_what_ours_costs_is_counted_from_ninjas_log(tmp_path):
    """Objects of the backend alone, ours apart; the last of several compilations; nothing that is no longer there."""
    at = "ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir"
    ours = {f"{at}/kvq.cu.o": 300, f"{at}/template-instances/kvq-fattn-vec-instance-a-b.cu.o": 200}
    theirs = {f"{at}/fattn.cu.o": 5000}
    for name, size in {**ours, **theirs, "src/CMakeFiles/llama.dir/llama.cpp.o": 9}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    log = [(0, 50_000, f"{at}/kvq.cu.o"), (0, 9_000, "src/CMakeFiles/llama.dir/llama.cpp.o"), (1_000, 8_000, f"{at}/gone.cu.o")]
    log += [(100, 4_100, f"{at}/kvq.cu.o"), (0, 16_000, next(n for n in ours if "instance" in n)), (0, 30_000, f"{at}/fattn.cu.o")]
    (tmp_path / ".ninja_log").write_text("# ninja log v7\n" + "".join(f"{a}\t{b}\t0\t{name}\t0\n" for a, b, name in log))
    found = cuda.measured(tmp_path)
    assert found.ours == cuda.Share(2, 20.0, 500) and found.all == cuda.Share(3, 50.0, 5500) and found.library == 0
    assert len(found.lines()) == 3
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "libggml-cuda.so").write_bytes(bytes(7000))
    assert cuda.measured(tmp_path).library == 7000 and len(cuda.measured(tmp_path).lines()) == 4


#: What CMake prints where the toolkit is nvcc alone.
NO_CUBLAS = """CMake Error at ggml/src/ggml-cuda/CMakeLists.txt:178 (target_link_libraries):
  Target "ggml-cuda" links to:

    CUDA::cublas

  but the target was not found.  Possible reasons include:
"""


def test_a_toolkit_without_cublas_is_named(toolkit, monkeypatch, tmp_path):
    (tmp_path / "said").write_text(NO_CUBLAS)
    cmake = tmp_path / "cmake"
    cmake.write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2\nexit 1\n")
    cmake.chmod(0o755)
    monkeypatch.setattr(compiling, "program", lambda name: str(cmake))
    with pytest.raises(MissingTool, match="has no cublas") as error:
        compiling._configure(tmp_path, tmp_path, compiling.FLAGS, cuda.choose("80"))
    assert "whole toolkit" in error.value.hint
