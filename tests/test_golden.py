"""Bytes written once must read the same for ever, and the encoder must still write them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import golden_files as files
import numpy as np
import pytest
from blocks import assert_same_blocks

from kvfmt import registry

ALL = registry.all_formats()
each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.spec.name)


@each_format
def test_the_record_is_whole(fmt):
    golden = files.load(fmt)
    assert hashlib.sha256(golden.x.tobytes()).hexdigest() == golden.facts["sha256_input"]
    assert hashlib.sha256(golden.blocks.tobytes()).hexdigest() == golden.facts["sha256_blocks"]
    assert len(golden.x) == len(golden.blocks) == golden.facts["n_blocks"] >= 200
    assert np.isnan(golden.x).any() and np.isinf(golden.x).any()


@each_format
def test_encoding_gives_the_recorded_bytes(fmt):
    golden = files.load(fmt)
    assert_same_blocks(fmt, golden.x, golden.blocks, fmt.encode(golden.x), "golden")


@each_format
def test_recorded_bytes_decode_as_they_did(fmt):
    golden = files.load(fmt)
    assert files.facts(fmt, golden.x, golden.blocks) == golden.facts, (
        f"{fmt.spec.name} v{fmt.spec.version} is not what was recorded; a changed format needs a new version and type id"
    )


def test_every_record_belongs_to_a_registered_format():
    recorded = {path.parent.parent.name for path in files.ROOT.glob("*/v*/facts.json")}
    assert recorded == {f.spec.name for f in ALL}


def test_no_two_records_share_a_type_id():
    ids = [json.loads(p.read_text())["type_id"] for p in files.ROOT.glob("*/v*/facts.json")]
    assert len(ids) == len(set(ids))


def test_a_missing_record_is_an_error_that_says_how_to_make_one():
    fmt = ALL[0]
    unrecorded = dataclasses.replace(fmt, spec=dataclasses.replace(fmt.spec, version=99))
    with pytest.raises(FileNotFoundError, match=f"python -m tests.golden.record {fmt.spec.name}"):
        files.load(unrecorded)


def test_a_record_is_never_overwritten():
    fmt = ALL[0]
    before = {p.name: p.read_bytes() for p in files.folder(fmt).iterdir()}
    command = [sys.executable, "-m", "tests.golden.record", fmt.spec.name]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 1 and "is recorded already" in done.stderr
    assert {p.name: p.read_bytes() for p in files.folder(fmt).iterdir()} == before
