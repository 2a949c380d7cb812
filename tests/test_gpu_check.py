"""bench/gpu_check.sh on the CPU: what can be tried of it without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import random_gguf

from bench import gpu_check
from cpp_patch.fattn_pairs import pairs
from kvfmt import registry
from kvfmt.build.paths import ROOT
from kvfmt.errors import BuildFailed, MissingTool

SCRIPT = Path(gpu_check.__file__).with_suffix(".sh")


@pytest.fixture(scope="module")
def cpu(ggml_libdir):
    return gpu_check.Backend(ggml_libdir, 0)


def test_the_recorded_formats_are_the_registered_ones():
    assert {g.name: g.facts["spec_hash"] for g in gpu_check.recorded()} == {f.spec.name: f.spec.hash for f in registry.all_formats()}


def test_parity_holds_on_a_device_that_is_right(cpu):
    found = dict(gpu_check.parity(cpu, gpu_check.recorded()))
    assert all(f["same_spec"] and f["same_floats"] and f["blocks_that_differ"] == 0 and f["blocks"] > 50 for f in found.values())
    assert gpu_check.verdict({"parity": found | {"seconds": 1.0}}) == 0


def test_one_bit_is_a_failure(cpu, capsys):
    (first, *_) = gpu_check.recorded()
    broken = dataclasses.replace(first, blocks=bytes([first.blocks[0] ^ 1]) + first.blocks[1:])
    found = dict(gpu_check.parity(cpu, [broken]))
    assert found[first.name]["blocks_that_differ"] == 1 and not found[first.name]["same_floats"]
    assert gpu_check.verdict({"parity": found | {"seconds": 1.0}}) == 1
    assert f"parity of {first.name}" in capsys.readouterr().err


def test_what_is_missing_is_said_at_once(tmp_path):
    def said(*arguments: str) -> str:
        done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "Nothing is downloaded" in done.stderr
        return done.stderr

    text = said("--model", str(tmp_path / "no.gguf"), "--bin", str(tmp_path))
    for part in ("--model", "no.gguf is not there", "--text", "llama-perplexity is not there"):
        assert part in text, text
    assert "--tree" not in text and "--tree" in said("--model", str(SCRIPT), "--text", str(SCRIPT))
    assert "kvfmt build" in subprocess.run([SCRIPT], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib, as the script says")
def test_it_needs_nothing_but_python():
    command = [sys.executable, "-S", "-c", "import bench.gpu_check"]  # -S: no installed packages
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_a_step_without_time_is_named_and_what_was_measured_is_kept(tmp_path, capsys):
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 10, "CPU", [], [])
    check.step("parity", 5, lambda found: None)
    check.step("speed", 60, lambda found: pytest.fail("there was no time for it"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert "seconds" in written["parity"] and "60 s that it takes" in written["speed"]["left_out"]
    assert gpu_check.verdict(written) == 2 and "left out: speed" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_a_fault_of_its_step(tmp_path):
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 100, "CPU", ["kvq3"], [])
    check.step("operations", 1, lambda found: check.all_operations(found, ["kvq3-kvq2"]))
    assert "test-backend-ops" in json.loads((tmp_path / "out.json").read_text())["operations"]["fault"]
    assert gpu_check.verdict(check.report) == 1


def test_the_device_is_asked_by_a_process_of_its_own(ggml_libdir, tmp_path):
    check = gpu_check.Check(ggml_libdir, tmp_path / "out.json", time.monotonic() + 100, "", [], [])
    check.step("parity", 1, lambda found: check.parity(found, 0))
    assert check.device == "CPU" and check.report["device"]
    assert {name for name, found in check.report["parity"].items() if isinstance(found, dict)} == {f.spec.name for f in registry.all_formats()}
    assert gpu_check.verdict(check.report) == 0


def test_libraries_that_do_not_load_are_a_fault_of_parity(tmp_path):
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 100, "", [], [])
    check.step("parity", 1, lambda found: check.parity(found, 0))
    assert not check.device and "LD_LIBRARY_PATH" in json.loads((tmp_path / "out.json").read_text())["parity"]["fault"]


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_crash_leaves_the_formats_before_it(tmp_path, monkeypatch):
    """As an error of CUDA ends the process."""
    right = '{"kvq3": {"same_spec": true, "same_floats": true, "blocks_that_differ": 0}}'
    crash = _script(tmp_path / "python", f"echo '{{\"device\": \"CUDA0\", \"description\": \"a GPU\"}}'\necho '{right}'\nkill -ABRT $$")
    monkeypatch.setattr(sys, "executable", str(crash))
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 100, "", [], [])
    check.step("parity", 1, lambda found: check.parity(found, 1))
    assert check.device == "CUDA0" and "kvq3" in check.report["parity"] and "signal 6" in check.report["parity"]["fault"]
    assert gpu_check.verdict(check.report) == 1


def test_what_the_sanitizer_finds_is_a_failure_and_where_it_does_not_run_it_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def checked(script: str) -> tuple[dict, int]:
        _script(tmp_path / "compute-sanitizer", script)
        check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 100, "CUDA0", [], [])
        check.step("sanitizer", 1, check.sanitizer)
        return check.report["sanitizer"], gpu_check.verdict(check.report)

    found, status = checked('echo "========= ERROR SUMMARY: 0 errors"')
    assert status == 0 and all(found[tool] == ["========= ERROR SUMMARY: 0 errors"] for tool in gpu_check.SANITIZERS)
    found, status = checked('case "$*" in *racecheck*--probe*) echo "RACECHECK SUMMARY: 1 hazard"; exit 99 ;; esac')
    assert status == 1 and found["fault"].startswith("racecheck: ") and found["racecheck"] == ["RACECHECK SUMMARY: 1 hazard"]
    found, status = checked('echo "Device not supported"; exit 1')
    assert status == 2 and "Device not supported" in found["left_out"]


def test_an_operation_that_crashes_leaves_the_others(tmp_path):
    _script(tmp_path / "test-backend-ops", 'case "$*" in *GET_ROWS*) kill -ABRT $$ ;; esac\necho "  7/7 tests passed"')
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 100, "CUDA0", ["kvq3"], [])
    check.step("operations", 1, lambda found: check.all_operations(found, ["kvq3-kvq2"]))
    found = json.loads((tmp_path / "out.json").read_text())["operations"]
    assert "signal 6" in found.pop("GET_ROWS")["fault"] and found.pop("seconds") >= 0
    assert len(found) == 4 and all(op["passed"] == 7 for op in found.values())
    assert gpu_check.verdict(check.report) == 1


def test_bandwidth_that_takes_too_long_keeps_what_was_timed(tmp_path):
    line = "FLASH_ATTN_EXT(hsk=128,type_K=kvq3,type_V=kvq2,permute=[0,1,2,3]):   100 runs -   250.00 us/run"
    _script(tmp_path / "test-backend-ops", f"echo '{line}'\nexec sleep 300")
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 1, "CUDA0", [], [])
    check.step("bandwidth", 0, lambda found: check.bandwidth(found, {"kvq3": 3.25, "kvq2": 2.25}, ["kvq3-kvq2", "kvq4-kvq4"], 4e12))
    found = check.report["bandwidth"]
    assert found["pairs"]["kvq3/kvq2"]["us"] == 250 and "1 of 2 pairs" in found["fault"] and "took longer" in found["fault"]


def test_a_cache_that_fails_leaves_the_others(tmp_path):
    row = '[{"n_gen": 0, "n_depth": 0, "avg_ts": 10.0}, {"n_gen": 32, "n_depth": 0, "avg_ts": 5.0}]'
    _script(tmp_path / "llama-bench", f"case \"$*\" in *kvq4*) exit 3 ;; esac\necho '{row}'")
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 100, "CUDA0", [], [])
    check.step("speed", 1, lambda found: check.speed(found, "model", ["kvq4/kvq4", "kvq3/kvq2"], (0,), 2))
    found = json.loads((tmp_path / "out.json").read_text())["speed"]
    assert found["caches"] == {"kvq4/kvq4": {}, "kvq3/kvq2": {"prefill@0": [10.0, 10.0], "decode@0": [5.0, 5.0]}}
    assert found["turns"] == 2 and "kvq4/kvq4" in found["fault"] and "status 3" in found["fault"]


def test_the_caches_are_ones_that_the_kernel_serves():
    assert sorted(p.name for p in pairs()) == gpu_check.compiled_pairs()
    assert {cache.replace("/", "-") for cache in gpu_check.OURS} <= {p.name for p in pairs()}
    bits = gpu_check.type_bits(gpu_check.recorded())
    for fmt in registry.all_formats():
        assert bits[fmt.spec.name] == fmt.spec.bits_per_value


def _tools(folder: Path, monkeypatch, cmake: str, libraries: tuple[str, ...] = ("cudart", "cublas", "cublasLt", "cuda")) -> Path:
    """A PATH with a compiler that is never asked, a cmake that does this, and a toolkit with these libraries; its nvcc."""
    home = folder / "toolkit"
    for part in ("bin", "lib64", "include"):
        (home / part).mkdir(parents=True, exist_ok=True)
    for library in libraries:
        (home / "lib64" / f"lib{library}.so").touch()
    (home / "include" / "cuda.h").write_text("CUresult CUDAAPI cuInit(unsigned int Flags);")
    _script(folder / "cmake", cmake)
    _script(folder / "c++", f'case "$*" in *libcuda.so*) exec {shutil.which("c++")} "$@" ;; esac; exit 1')
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{folder}:{home}/bin:/usr/bin:/bin")
    return _script(home / "bin" / "nvcc", "echo release 13.0,")


def test_a_build_that_fails_shows_its_end(tmp_path, monkeypatch):
    _tools(tmp_path, monkeypatch, "echo no ninja here; exit 3")
    with pytest.raises(BuildFailed, match="no ninja here"):
        gpu_check.build(tmp_path, tmp_path / "work", "90", 30)


def test_a_build_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    _tools(tmp_path, monkeypatch, f"sleep 300 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(BuildFailed, match="the time is over") as error:
        gpu_check.build(tmp_path, tmp_path / "work", "90", 1)
    assert "goes on" in error.value.hint
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 20
    while Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert time.monotonic() < until, "what cmake started runs on"


def test_a_build_is_made_with_the_toolkit_that_is_there(tmp_path, monkeypatch):
    nvcc = _tools(tmp_path, monkeypatch, 'echo "$@"; exit 3')
    with pytest.raises(BuildFailed, match=f"-DCMAKE_CUDA_COMPILER={nvcc} -DCMAKE_CUDA_ARCHITECTURES=90"):
        gpu_check.build(tmp_path, tmp_path / "work", "90", 30)
    _script(nvcc, "echo release 11.8,")
    monkeypatch.setattr(gpu_check.toolkit, "USUAL_HOMES", ())
    with pytest.raises(MissingTool, match="nvcc of CUDA 12 or later is missing"):
        gpu_check.build(tmp_path, tmp_path / "work", "90", 30)


def test_a_toolkit_without_cublas_is_built_with_that_of_pythons_packages(tmp_path, monkeypatch):
    """As where PyTorch is installed beside nvcc alone; the runtime and the driver's stub are found too."""
    _tools(tmp_path, monkeypatch, 'echo "$@"; exit 3', libraries=())
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    with pytest.raises(MissingTool, match="has no cuBLAS") as error:
        gpu_check.build(tmp_path, tmp_path / "work", "90", 30)
    assert "nvidia-cublas of CUDA 13" in error.value.hint
    home = tmp_path / "site" / "nvidia" / "cu13"
    for name in ("lib/libcublas.so.13", "lib/libcublasLt.so.13", "lib/libcudart.so.13", "include/cublas_v2.h"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    libraries = tmp_path / "work" / "libraries"
    with pytest.raises(BuildFailed, match=f"{home}/lib -DCMAKE_LIBRARY_PATH={libraries} "):
        gpu_check.build(tmp_path, tmp_path / "work", "90", 30)
    assert (libraries / "libcublas.so").resolve() == home / "lib" / "libcublas.so.13"
    assert {p.name for p in libraries.iterdir()} == {"libcublas.so", "libcublasLt.so", "libcudart.so", "stubs"}


def test_a_build_brought_along_finds_its_libraries_here(tmp_path, monkeypatch):
    """Real libraries: what was linked is no longer where it was, but among Python's packages; or nowhere, which is said by name."""
    package = tmp_path / "site" / "nvidia" / "cu13" / "lib"
    package.mkdir(parents=True)
    source = tmp_path / "called.cpp"
    source.write_text("int called() { return 7; }")
    subprocess.run(["c++", "-shared", "-fPIC", "-Wl,-soname,libcublas.so.13", source, "-o", package / "libcublas.so.13"], check=True)
    source.write_text("int called(); int calls() { return called(); }")
    subprocess.run(["c++", "-shared", "-fPIC", source, package / "libcublas.so.13", "-o", tmp_path / "libggml-cuda.so"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingTool, match="needs libcublas.so.13, which the loader does not find"):
        gpu_check.find_libraries(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    gpu_check.find_libraries(tmp_path)
    assert os.environ["LD_LIBRARY_PATH"].endswith(f":{package}") and not gpu_check.toolkit.not_found(tmp_path / "libggml-cuda.so")


def test_a_build_without_a_compiler_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match="cmake is missing, and without --bin"):
        gpu_check.build(tmp_path, tmp_path / "work", "90", 30)


def test_speed_and_fidelity_read_what_the_programs_print(ggml_libdir, tmp_path):
    """The real programs on a random model, on the CPU."""
    model = random_gguf.llama(tmp_path / "random.gguf")
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 150)
    check = gpu_check.Check(ggml_libdir, tmp_path / "out.json", time.monotonic() + 250, "CPU", [], ["-t", "1"])
    caches = list(gpu_check.REHEARSAL.caches)
    check.step("speed", 1, lambda found: check.speed(found, str(model), caches, (0, 32), 2))
    check.step("fidelity", 1, lambda found: check.fidelity(found, str(model), str(text), caches[1:], 1, (caches[1],)))
    assert gpu_check.verdict(check.report) == 0, check.report
    turns = check.report["speed"]["caches"]
    assert set(turns) == set(caches)
    for cache in caches:
        assert set(turns[cache]) == {"prefill@0", "decode@0", "prefill@32", "decode@32"}
        assert all(len(each) == 2 and min(each) > 0 for each in turns[cache].values())
    scored, singly = (check.report["fidelity"][name] for name in (caches[1], f"{caches[1]}, single tokens"))
    for each in (scored, singly):
        assert 0 < each["mean_kld"] < 5 and 0 < each["same_top_percent"] < 100
    assert singly["mean_kld"] == pytest.approx(scored["mean_kld"], rel=0.1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "random.gguf", "text"], "a file is left behind"
