"""`kvfmt build --cuda`: what it asks of the machine, what it says when that is not there, and how it counts what ours costs."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from kvfmt.build import compile as compiling
from kvfmt.build import cublas, cuda, engine, nvcc, wheel
from kvfmt.build import toolkit as toolkit_of
from kvfmt.build.pins import get_pin
from kvfmt.cli import app
from kvfmt.errors import DownloadFailed, KvfmtError, MissingTool


@pytest.fixture(scope="module")
def compiler() -> Path:
    """The nvcc that the tests compile with."""
    return nvcc.ensure_nvcc()


def _nvidia_smi(folder: Path, monkeypatch, script: str) -> None:
    """A driver's program that says this and nothing else."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_architectures_are_taken_as_given(compiler, tmp_path):
    assert cuda.architectures("80;90") == ["80", "90"]
    assert cuda.architectures(" 80, 90-real ") == ["80", "90-real"]
    cuda.check_known(["80", "90-real"], compiler)
    flags = cuda.CudaBuild(str(compiler), "80;90-real").flags(tmp_path)
    assert "-DGGML_CUDA=ON" in flags and "-DCMAKE_CUDA_ARCHITECTURES=80;90-real" in flags


def _rpath(flags: tuple[str, ...]) -> list[str]:
    (found,) = [flag for flag in flags if flag.startswith("-DCMAKE_INSTALL_RPATH=")]
    return found.split("=", 1)[1].split(";")


@pytest.mark.parametrize("kind", ["link", "script"])
def test_programs_find_the_libraries_of_the_toolkit_that_they_are_linked_with(tmp_path, kind):
    """Also where nvcc on PATH is not the toolkit's own; /usr/local/cuda is not among the folders of every system's loader."""
    home = tmp_path / "cuda-13.0"
    for folder in ("bin", "lib64/stubs", "targets/x86_64-linux/lib", "nothing/lib"):
        (home / folder).mkdir(parents=True)
    real = home / "bin" / "nvcc"
    real.write_text('#!/bin/sh\nhere=$(dirname "$(readlink -f "$0")")\necho "#$ _HERE_=$here" >&2\necho "#$ TOP=$here/.. " >&2\n')
    real.chmod(0o755)
    (home / "lib64" / "stubs" / "libcublas.so").touch()
    (home / "targets" / "x86_64-linux" / "lib" / "libcublas.so.13").touch()
    found = tmp_path / "bin" / "nvcc"
    found.parent.mkdir()
    if kind == "link":
        found.symlink_to(real)
    else:
        found.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
        found.chmod(0o755)
    assert toolkit_of.home_of(found) == home
    assert _rpath(toolkit_of.flags(found, "90")) == ["$ORIGIN", f"{home}/targets/x86_64-linux/lib"]


@pytest.mark.parametrize("asked, message", [("turing", "'turing' is no CUDA architecture"), ("8.0", "'8.0' is no"), (";", "names no CUDA")])
def test_what_is_no_architecture_is_named(asked, message):
    with pytest.raises(KvfmtError, match=message) as error:
        cuda.architectures(asked)
    assert error.value.hint


def test_an_architecture_that_nvcc_does_not_know_is_named(compiler):
    with pytest.raises(KvfmtError, match="does not compile for 35") as error:
        cuda.check_known(["80", "35"], compiler)
    assert "90" in error.value.hint


def test_without_a_choice_it_is_built_for_the_gpus_here(monkeypatch, tmp_path):
    _nvidia_smi(tmp_path, monkeypatch, "printf '9.0\\n8.0\\n9.0\\n'")
    assert cuda.architectures(None) == cuda.architectures("native") == ["80", "90"]


def test_without_a_gpu_a_choice_is_asked_for(monkeypatch, tmp_path):
    _nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    with pytest.raises(KvfmtError, match="no NVIDIA GPU is seen here") as error:
        cuda.architectures(None)
    assert "--cuda-arch" in error.value.hint


@pytest.fixture
def no_toolkit(monkeypatch, tmp_path):
    """A machine without nvcc and without a package index; an empty cache and build folder."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit_of, "USUAL_HOMES", (str(tmp_path),))
    for name in ("cc", "c++"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("KVFMT_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("KVFMT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_without_a_toolkit_and_without_its_packages_both_are_named(no_toolkit):
    result = CliRunner().invoke(app, ["build", "--cuda", "--cuda-arch", "80"])
    assert result.exit_code == 1 and "no CUDA toolkit has nvcc here, and pip could not install it" in result.output
    assert "install the CUDA toolkit" in " ".join(result.output.split())
    assert not (no_toolkit / "build").exists()


def test_what_is_no_architecture_is_said_before_anything_is_downloaded(no_toolkit):
    with pytest.raises(KvfmtError, match="'turing' is no CUDA architecture"):
        cuda.choose("turing")
    assert not (no_toolkit / "cache").exists()


def _toolkit_in(home: Path, version: str, libraries: tuple[str, ...] = ()) -> Path:
    """A toolkit whose nvcc only says which it is."""
    for name in ("bin", "lib64"):
        (home / name).mkdir(parents=True)
    program = home / "bin" / "nvcc"
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    program.chmod(0o755)
    for name in libraries:
        (home / "lib64" / name).touch()
    return program


def test_an_installed_toolkit_with_cublas_goes_before_packages(no_toolkit, monkeypatch):
    """No package is asked for: there is no index here."""
    compiler = _toolkit_in(no_toolkit / "cuda", "12.4", ("libcublas.so", "libcublasLt.so", "libcudart.so"))
    monkeypatch.setenv("CUDA_HOME", str(no_toolkit / "cuda"))
    build = cuda.choose("80")
    assert build.nvcc == str(compiler) and build.cublas is None


def test_the_packaged_cublas_goes_only_with_a_compiler_of_its_release(no_toolkit, monkeypatch):
    """An nvcc of another release without cuBLAS is left aside, unless it was named: CMake then says what it lacks."""
    major = nvcc.cublas_major()
    compiler = _toolkit_in(no_toolkit / "old", f"{major - 1}.4")
    monkeypatch.setenv("CUDA_HOME", str(compiler.parents[1]))
    with pytest.raises(DownloadFailed, match="pip could not install it"):
        cuda.choose("80")
    monkeypatch.setenv("CUDACXX", str(compiler))
    assert cuda.choose("80").cublas is None
    monkeypatch.setenv("CUDACXX", str(_toolkit_in(no_toolkit / "new", f"{major}.2")))
    with pytest.raises(DownloadFailed, match="no CUDA toolkit has cuBLAS here"):
        cuda.choose("80")


def test_cublas_is_pinned_for_the_compiler_that_is():
    """Both of one major version, and on the same systems: a hash for each."""
    assert re.search(rf"nvidia-cuda-nvcc=={nvcc.cublas_major()}\.", nvcc.NVCC.read_text())
    assert nvcc.CUBLAS.read_text().count("--hash=sha256:") == 2
    assert "cublas" not in nvcc.NVCC.read_text(), "the tests fetch these, and are to do without half a gigabyte"


def test_the_stub_of_the_driver_has_every_function_under_its_real_name(compiler, tmp_path):
    """cuda.h renames functions by macros; a program that calls them links without a hole, runs, and is told that this is a stub."""
    cublas._make_stub(compiler, tmp_path / "stubs")
    (tmp_path / "asks.c").write_text("""
#include <cuda.h>
int main(void) {
    CUdeviceptr p; CUcontext c; int n;
    return !(cuInit(0) == CUDA_ERROR_STUB_LIBRARY && cuMemAlloc(&p, 1) == CUDA_ERROR_STUB_LIBRARY &&
             cuMemAddressFree(0, 0) == CUDA_ERROR_STUB_LIBRARY && cuCtxPopCurrent(&c) == CUDA_ERROR_STUB_LIBRARY &&
             cuDeviceGetCount(&n) == CUDA_ERROR_STUB_LIBRARY);
}
""")
    include = toolkit_of.home_of(compiler) / "include"
    command = ["cc", "-Wl,--no-undefined", f"-I{include}", str(tmp_path / "asks.c"), f"-L{tmp_path}/stubs", "-lcuda", "-o", str(tmp_path / "asks")]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "asks"], env={"LD_LIBRARY_PATH": str(tmp_path / "stubs")}, check=False).returncode == 0
    assert "libcuda.so.1" in subprocess.run(["readelf", "-d", tmp_path / "asks"], capture_output=True, text=True, check=True).stdout
    # through which CUDA's runtime asks for all others
    assert ctypes.CDLL(str(tmp_path / "stubs" / "libcuda.so")).cuGetProcAddress_v2() == cublas.STUB_ERROR


#: As ggml-cuda asks CMake for what it is linked with.
ASKS = """
cmake_minimum_required(VERSION 3.18)
project(asks LANGUAGES CXX)
find_package(CUDAToolkit REQUIRED)
add_library(asks SHARED asks.cpp)
target_link_libraries(asks PRIVATE CUDA::cudart CUDA::cublas CUDA::cuda_driver -Wl,--no-undefined)
add_executable(main main.cpp)
target_link_libraries(main PRIVATE asks)
"""


def test_cmake_links_with_the_libraries_of_packages(tmp_path, monkeypatch):
    """A toolkit that is nvcc alone, beside a package of cuBLAS: names for the linker, the runtime path, and the driver's stub."""
    home, package = tmp_path / "toolkit", tmp_path / "site" / "nvidia" / "cu13"
    compiler = _toolkit_in(home, "13.0")
    (home / "include").mkdir()
    (package / "lib").mkdir(parents=True)
    (package / "include").mkdir()
    (home / "include" / "cuda.h").write_text("CUresult CUDAAPI cuMemCreate(int x);\n")
    (home / "include" / "cuda_runtime.h").write_text("#define CUDART_VERSION 13000\n")
    (package / "include" / "cublas_v2.h").touch()
    for folder, name in ((home / "lib64", "cudart"), (package / "lib", "cublas"), (package / "lib", "cublasLt")):
        source = tmp_path / f"{name}.cpp"
        source.write_text(f'extern "C" int {name}_call() {{ return 0; }}')
        subprocess.run(["c++", "-shared", "-fPIC", f"-Wl,-soname,lib{name}.so.13", source, "-o", folder / f"lib{name}.so.13"], check=True)
    found = cublas.of_packages(13, [tmp_path, tmp_path / "site"])
    assert found == package and cublas.of_packages(12, [tmp_path / "site"]) is None
    monkeypatch.setattr(cublas, "_of_linker", lambda file: file)  # whatever this machine has
    assert set(cublas.lacking(compiler)) == set(cublas.LINKED)
    flags = cuda.CudaBuild(str(compiler), "90", found).flags(tmp_path / "libraries")
    assert _rpath(flags) == ["$ORIGIN", str(home / "lib64"), str(package / "lib")]
    assert f"-DCMAKE_CUDA_STANDARD_INCLUDE_DIRECTORIES={package}/include" in flags

    (tmp_path / "CMakeLists.txt").write_text(ASKS)
    calls = ("cudart_call", "cublas_call", "cuMemCreate")
    (tmp_path / "asks.cpp").write_text('extern "C" {' + "".join(f"int {c}();" for c in calls) + "}\nint asks() { return " + " + ".join(f"{c}()" for c in calls) + "; }\n")
    (tmp_path / "main.cpp").write_text("int asks();\nint main() { return asks(); }\n")
    environment = {**os.environ, "CUDAToolkit_ROOT": str(home)}
    common = ["-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={compiling.program('ninja')}"]
    cmake = compiling.program("cmake")
    subprocess.run([cmake, "-S", tmp_path, "-B", tmp_path / "made", *common, *flags], check=True, env=environment)
    subprocess.run([cmake, "--build", tmp_path / "made"], check=True)
    said = subprocess.run(["readelf", "-d", tmp_path / "made" / "libasks.so"], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(\S+)\]", said))
    assert needed >= {"libcudart.so.13", "libcublas.so.13", "libcuda.so.1"} and "stubs" not in said, said
    # everything is found where it was linked but the driver's own library, for which the stub stands in
    program = tmp_path / "made" / "main"
    assert subprocess.run([program], env={"LD_LIBRARY_PATH": str(tmp_path / "libraries" / "stubs")}, check=False).returncode == cublas.STUB_ERROR


def test_a_compiler_that_does_not_run_is_named(monkeypatch):
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    with pytest.raises(MissingTool, match="CUDACXX=/nowhere/nvcc does not run"):
        cuda.find_nvcc()


def _linked(folder: Path, name: str, needs: str) -> Path:
    """A library that needs another one, which is gone."""
    (folder / "gone.cpp").write_text("int gone() { return 1; }")
    subprocess.run(["c++", "-shared", "-fPIC", f"-Wl,-soname,{needs}", folder / "gone.cpp", "-o", folder / needs], check=True)
    (folder / "asks.cpp").write_text("int gone(); int asks() { return gone(); }")
    subprocess.run(["c++", "-shared", "-fPIC", folder / "asks.cpp", folder / needs, "-o", folder / name], check=True)
    (folder / needs).unlink()
    return folder / name


def test_a_wheel_that_does_not_load_here_is_not_installed(tmp_path, monkeypatch, capsys):
    """Where no driver is, as on a machine that only compiles. What compiles and packs is left out; what is there is asked by the loader."""
    build = cuda.CudaBuild("/nowhere/nvcc", "90")
    library = _linked(tmp_path, "libggml-cuda.so", "libcuda-of-no-machine.so.1")
    assert toolkit_of.not_found(library) == ["libcuda-of-no-machine.so.1"]
    monkeypatch.setenv("KVFMT_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(engine, "choose", lambda asked: build)
    monkeypatch.setattr(engine, "sync_src", lambda pin, discard_edits: "deadbeef" * 8)
    monkeypatch.setattr(engine, "build_tools", lambda *_, **__: tmp_path)
    monkeypatch.setattr(engine, "build_wheel", lambda pin, binaries, version, names: tmp_path / f"{version}.whl")
    installed = []
    monkeypatch.setattr(engine, "install_wheel", lambda made, version: installed.append(version))
    engine.run_build(cuda_arch="90")
    said = " ".join(capsys.readouterr().out.split())
    assert not installed and "not installed, because nothing here has libcuda-of-no-machine.so.1" in said and ".cuda.whl" in said
    shutil.copy(shutil.which("c++"), tmp_path / "libggml-cuda.so")  # of this system: it finds all that it needs
    engine.run_build(cuda_arch="90")
    assert len(installed) == 1 and installed[0].endswith(".cuda")


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


def test_a_toolkit_without_cublas_is_named(compiler, monkeypatch, tmp_path):
    (tmp_path / "said").write_text(NO_CUBLAS)
    cmake = tmp_path / "cmake"
    cmake.write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2\nexit 1\n")
    cmake.chmod(0o755)
    monkeypatch.setattr(compiling, "program", lambda name: str(cmake))
    with pytest.raises(MissingTool, match="has no cublas") as error:
        compiling._configure(tmp_path, tmp_path, compiling.FLAGS, cuda.CudaBuild(str(compiler), "80"))
    assert "whole toolkit" in error.value.hint
