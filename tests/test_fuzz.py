"""A short run of the fuzzer against the normal build; ``make fuzz`` has the long one, under AddressSanitizer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "fuzz"))

from fuzz_run import compile_fuzzer, fuzz  # noqa: E402
from fuzz_subjects import SUBJECTS  # noqa: E402

from kvfmt.build.paths import build_dir  # noqa: E402
from kvfmt.build.pins import get_pin  # noqa: E402


@pytest.fixture(scope="module")
def fuzzer(ggml_libdir, tmp_path_factory):
    source = build_dir(get_pin(None).name) / "src" / "vendor" / "llama.cpp"
    return compile_fuzzer(ggml_libdir, source, tmp_path_factory.mktemp("fuzz") / "state_fuzz", sanitize=False)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_mutated_states_end_no_process(fuzzer, subject, tmp_path):
    accepted, crashes = fuzz(fuzzer, subject, tmp_path, 0, 200, 7)
    assert not crashes, "\n".join(crashes)
    # Changed values of K and V are legal, so that some are; most meet a number that is not.
    assert 0 < accepted < 150
