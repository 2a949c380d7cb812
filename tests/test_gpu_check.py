"""bench/gpu_check.sh on the CPU: what can be tried of it without a GPU."""

from __future__ import annotations

import dataclasses
import json
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
    found = gpu_check.parity(cpu, gpu_check.recorded())
    assert all(f["same_spec"] and f["same_floats"] and f["blocks_that_differ"] == 0 and f["blocks"] > 50 for f in found.values())
    assert gpu_check.verdict({"parity": found | {"seconds": 1.0}}) == 0


def test_one_bit_is_a_failure(cpu, capsys):
    (first, *_) = gpu_check.recorded()
    broken = dataclasses.replace(first, blocks=bytes([first.blocks[0] ^ 1]) + first.blocks[1:])
    found = gpu_check.parity(cpu, [broken])
    assert found[first.name]["blocks_that_differ"] == 1 and not found[first.name]["same_floats"]
    assert gpu_check.verdict({"parity": found | {"seconds": 1.0}}) == 1
    assert f"parity of {first.name}" in capsys.readouterr().err


def test_what_is_missing_is_said_at_once(tmp_path):
    done = subprocess.run([SCRIPT, "--model", str(tmp_path / "no.gguf"), "--bin", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for part in ("--model", "no.gguf is not there", "--text", "--tree", "llama-perplexity is not there", "Nothing is downloaded"):
        assert part in done.stderr, done.stderr
    assert "kvfmt build" in subprocess.run([SCRIPT], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib, as the script says")
def test_it_needs_nothing_but_python():
    command = [sys.executable, "-S", "-c", "import bench.gpu_check"]  # -S: no installed packages
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_a_step_without_time_is_named_and_what_was_measured_is_kept(tmp_path, capsys):
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 10, "CPU", [], [])
    check.step("parity", 5, dict)
    check.step("speed", 60, lambda: pytest.fail("there was no time for it"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert "seconds" in written["parity"] and "60 s that it takes" in written["speed"]["left_out"]
    assert gpu_check.verdict(written) == 2 and "left out: speed" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_a_fault_of_its_step(tmp_path):
    check = gpu_check.Check(tmp_path, tmp_path / "out.json", time.monotonic() + 100, "CPU", ["kvq3"], [])
    check.step("operations", 1, lambda: check.all_operations(["kvq3-kvq2"]))
    assert "test-backend-ops" in json.loads((tmp_path / "out.json").read_text())["operations"]["fault"]
    assert gpu_check.verdict(check.report) == 1


def test_the_caches_are_ones_that_the_kernel_serves(patched):
    assert sorted(p.name for p in pairs()) == gpu_check.pairs_of(patched)
    assert {cache.replace("/", "-") for cache in gpu_check.OURS} <= {p.name for p in pairs()}
    bits = gpu_check.type_bits(gpu_check.recorded())
    for fmt in registry.all_formats():
        assert bits[fmt.spec.name] == fmt.spec.bits_per_value


def _tools(folder: Path, monkeypatch, cmake: str) -> None:
    """A PATH with a compiler that is never asked and a cmake that does this."""
    for name, script in (("cmake", cmake), ("nvcc", "exit 1"), ("c++", "exit 1")):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_build_that_fails_shows_its_end(tmp_path, monkeypatch):
    _tools(tmp_path, monkeypatch, "echo no cuBLAS here; exit 3")
    with pytest.raises(BuildFailed, match="no cuBLAS here"):
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
    check.step("speed", 1, lambda: check.speed(str(model), caches, (0, 32), 2))
    check.step("fidelity", 1, lambda: check.fidelity(str(model), str(text), caches[1:], 1))
    assert gpu_check.verdict(check.report) == 0, check.report
    turns = check.report["speed"]["caches"]
    assert set(turns) == set(caches)
    for cache in caches:
        assert set(turns[cache]) == {"prefill@0", "decode@0", "prefill@32", "decode@32"}
        assert all(len(each) == 2 and min(each) > 0 for each in turns[cache].values())
    scored = check.report["fidelity"][caches[1]]
    assert 0 < scored["mean_kld"] < 5 and 0 < scored["same_top_percent"] < 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "random.gguf", "text"], "a file is left behind"
