"""Compiled kernels on disk: found again by the next process, and never in place of others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvfmt import jit, registry

ALL = registry.all_formats()

RUN = """
import hashlib, json, sys
import numpy as np
from kvfmt import registry
calls, names = sys.argv[1].split(), sys.argv[2].split()
for name in names:
    fmt = registry.get(name)
    data = np.random.default_rng(3).integers(0, 256, (40, fmt.spec.size), np.uint8)
    data[:, :2] = (0, 0x3C)
    x = np.random.default_rng(4).standard_normal((40, fmt.spec.block)).astype(np.float32)
    made = {"encode": lambda: fmt.encode(x), "decode": lambda: fmt.decode(data), "dot": lambda: fmt.dot(data, x[0])}
    for call in calls:
        result = made[call]()
        stats = getattr(fmt, f"_{call}").stats
        print(json.dumps([name, call, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), float(np.abs(result).sum())]))
"""


def run(calls: str, names: str, cache: Path | None = None, package: Path = jit.PACKAGE) -> dict[tuple[str, str], tuple[int, int, float]]:
    """(hits, misses, sum of the magnitudes of the result) by format and call, from a process of its own."""
    # Without .pyc files: Python itself misses a change that leaves time and size of a source as they were.
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    if cache:
        environment["KVFMT_CACHE"] = str(cache)
    done = subprocess.run([sys.executable, "-c", RUN, calls, names], env=environment, cwd=package.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {(name, call): tuple(rest) for name, call, *rest in map(json.loads, done.stdout.splitlines())}


def test_a_second_process_compiles_nothing():
    calls, names = "encode decode dot", " ".join(f.spec.name for f in ALL)
    run(calls, names)
    again = run(calls, names)
    assert len(again) == 3 * len(ALL)
    assert {key: counts[:2] for key, counts in again.items()} == dict.fromkeys(again, (1, 0))


def test_kernels_from_two_processes_do_not_stand_in_for_each_other(tmp_path):
    """The kernels of both E8 formats have the same names."""
    want = run("decode", "kve8_2", tmp_path) | run("decode", "kve8_3", tmp_path)
    assert [counts[:2] for counts in want.values()] == [(0, 1), (0, 1)]
    for order in ("kve8_2 kve8_3", "kve8_3 kve8_2"):
        assert run("decode", order, tmp_path) == {key: (1, 0, total) for key, (_, _, total) in want.items()}


def test_a_change_in_another_file_is_seen_and_a_damaged_file_is_not_used(tmp_path):
    package, cache = tmp_path / "kvfmt", tmp_path / "cache"
    shutil.copytree(jit.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    key = ("kvnf4", "decode")
    total = run("decode", "kvnf4", cache, package)[key][2]
    (decode,) = cache.glob("kernels/*/codec.decode-*.nbc")

    source = package / "scalar.py"
    before, time = source.read_text(), source.stat().st_mtime_ns
    after = before.replace("+ np.uint32(0x38000000))).view", "+ np.uint32(0x38800000))).view")
    assert after != before and len(after) == len(before)
    source.write_text(after)
    os.utime(source, ns=(time, time))
    assert run("decode", "kvnf4", cache, package)[key] == (0, 1, 2 * total), "every scale is twice what it was"

    source.write_text(before)
    assert run("decode", "kvnf4", cache, package)[key] == (1, 0, total)
    decode.write_bytes(decode.read_bytes()[:-1])
    assert run("decode", "kvnf4", cache, package)[key] == (0, 1, total)
    assert run("decode", "kvnf4", cache, package)[key] == (1, 0, total)
    assert not list(cache.glob("kernels/*/*.part"))


def test_formats_work_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        hits, misses, total = run("decode", "kvnf4", tmp_path / "file" / "cache")["kvnf4", "decode"]
        assert (hits, misses) == (0, 1) and total > 0


def test_every_file_that_the_formats_load_counts():
    command = "import sys, kvfmt.registry as r; r.all_formats(); print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'kvfmt'))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=jit.PACKAGE.parent)
    loaded = {Path(name) for name in done.stdout.split()} - {Path(registry.__file__)}
    assert len(loaded) > len(ALL) and loaded == jit._FILES


def test_a_changed_text_has_another_digest(tmp_path):
    package = tmp_path / "kvfmt"
    shutil.copytree(jit.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert jit.sources_digest(package) == jit.sources_digest()
    for name in ("scalar.py", "formats/_lloyd.py", "formats/kvq2.py"):
        before = jit.sources_digest(package)
        with open(package / name, "a") as file:
            file.write("\n")
        assert jit.sources_digest(package) != before, name


def made(held, path: Path = jit.PACKAGE / "codec.py"):
    """A function with ``held`` in its closure, as if from the file ``path``."""
    space = {"__name__": "kvfmt.codec"}
    exec(compile("def make(held):\n    def kernel(x):\n        return held\n    return kernel", str(path), "exec"), space)
    return space["make"](held)


def fingerprint(held) -> str:
    return jit.KernelCache(made(held), {}).fingerprint


def test_closures_count_by_their_contents():
    values = (2, 3, 2.0, np.float32(2), np.array([1, 2]), np.array([1, 3]), np.array([[1, 2]]), np.array([1, 2], np.int32))
    values += (jit.jit(made(2)), jit.jit(made(3)))
    assert len({fingerprint(v) for v in values}) == len(values)
    assert fingerprint(np.array([1, 2])) == fingerprint(np.array([1, 2]))
    assert fingerprint(jit.jit(made(2))) == fingerprint(jit.jit(made(2)))


def test_what_the_cache_cannot_tell_apart_is_refused(tmp_path):
    with pytest.raises(TypeError, match="kernel: held is a list"):
        jit.jit(made([1]))
    with pytest.raises(ValueError, match="add it to kvfmt.jit.SOURCES"):
        jit.jit(made(1, tmp_path / "elsewhere.py"))


def test_kernels_of_sources_long_unused_go(tmp_path):
    for age in range(jit.KEPT + 3):
        (tmp_path / f"{age}").mkdir()
        (tmp_path / f"{age}" / "kernel.nbc").touch()
        os.utime(tmp_path / f"{age}", (10**9 - age, 10**9 - age))
    jit._prune(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {str(age) for age in range(jit.KEPT)}
