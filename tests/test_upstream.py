"""Upstream's own tests, from the patched build, on our types. A filter that matches nothing fails: upstream exits 0 then."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from kvfmt import registry

NAMES = [f.spec.name for f in registry.all_formats()]
TYPES = ["f16", "q8_0", *NAMES]
OURS = f"({'|'.join(NAMES)})"


def _run(libdir: Path, *command: str) -> str:
    program = libdir / command[0]
    if not program.exists():
        pytest.fail(f"{program} is not there: run `kvfmt build` first", pytrace=False)
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run([program, *command[1:]], cwd=libdir, capture_output=True, text=True, errors="replace", env=environment)
    output = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    failed = "\n".join(line for line in output.splitlines() if "FAIL" in line)
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{failed or done.stderr[-3000:]}"
    return output


def test_quantize_fns(ggml_libdir):
    output = _run(ggml_libdir, "test-quantize-fns", "-v")
    assert re.search(r"^0 tests failed$", output, re.M)
    for name in NAMES:
        for kind in ("absolute quantization error", "reference implementation error", "dot product error"):
            assert re.search(rf"^ *{name} {kind}: +ok ", output, re.M), f"{name}: no '{kind}'"


def test_gguf(ggml_libdir):
    passed, total = re.search(r"^(\d+)/(\d+) tests passed$", _run(ggml_libdir, "test-gguf"), re.M).groups()
    assert passed == total and int(total) > 50


def _cases(libdir: Path, ops: str, parameters: str) -> list[tuple[str, dict[str, str], str]]:
    """(op, parameters, verdict) of each case that test-backend-ops ran on the CPU."""
    output = _run(libdir, "test-backend-ops", "test", "-b", "CPU", "-o", ops, "-p", parameters)
    passed, total = map(int, re.search(r"^ *(\d+)/(\d+) tests passed$", output, re.M).groups())
    lines = re.findall(r"^ *([A-Z_]+)\((.*)\): (.*)$", output, re.M)
    cases = [(op, dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,]*)", vars)), verdict) for op, vars, verdict in lines]
    # Upstream counts what the backend does not support as neither.
    assert passed == total == sum(verdict == "OK" for _, _, verdict in cases), f"{passed} of {total}"
    return cases


def test_the_ops_of_a_cache(ggml_libdir):
    cases = _cases(ggml_libdir, "SET_ROWS,GET_ROWS,CPY,MUL_MAT", rf"={OURS}(,|$)")
    ran = Counter()
    for op, given, verdict in cases:
        if verdict != "OK":
            continue
        for key in ("type", "type_a", "type_src", "type_dst"):
            if given.get(key) in NAMES:
                ran[op, key, given[key]] += 1
    wanted = [("SET_ROWS", "type_dst"), ("GET_ROWS", "type"), ("CPY", "type_src"), ("CPY", "type_dst"), ("MUL_MAT", "type_a")]
    for (op, key), name in product(wanted, NAMES):
        assert ran[op, key, name] >= 1, f"{op} with {key}={name} did not run; ran: {dict(ran)}"


@pytest.mark.parametrize("k", TYPES)
def test_flash_attention_on_every_pair(ggml_libdir, k):
    """K of one type with V of every type; f16 and q8_0 with ours alone, since the rest is upstream's."""
    values = TYPES if k in NAMES else NAMES
    cases = _cases(ggml_libdir, "FLASH_ATTN_EXT", rf"type_K={k},type_V=" + ("" if k in NAMES else OURS + "(,|$)"))
    assert all(verdict == "OK" for _, _, verdict in cases), [c for c in cases if c[2] != "OK"][:5]
    by_v = {v: [given for _, given, _ in cases if given["type_V"] == v] for v in values}
    assert {given["type_K"] for _, given, _ in cases} == {k}
    for v, of_pair in by_v.items():
        assert len(of_pair) >= 10, f"K {k}, V {v}: {len(of_pair)} cases"
        assert {(given["hsk"], given["nb"]) for given in of_pair} >= set(product(("64", "128", "256"), ("1", "7", "65"))), f"K {k}, V {v}"
