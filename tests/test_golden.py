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
OLDER = [(fmt, version) for fmt in ALL for version in files.older_versions(fmt)]
each_older = pytest.mark.parametrize("fmt, version", OLDER, ids=[f"{f.spec.name} v{v}" for f, v in OLDER])


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
        f"{fmt.spec.name} v{fmt.spec.version} is not what was recorded; a changed format needs a new version, and a type id if decoding changed"
    )


def test_older_versions_are_kept():
    assert {(fmt.spec.name, version) for fmt, version in OLDER} >= {("kvq2", 1), ("kve8_2", 1)}
    assert all(files.older_versions(fmt) == list(range(1, fmt.spec.version)) for fmt in ALL)


@each_older
def test_blocks_of_an_older_version_decode_as_they_did(fmt, version):
    golden = files.load(fmt, version)
    now = files.facts(fmt, golden.x, golden.blocks)
    assert golden.facts == {**now, "version": version, "spec_hash": golden.facts["spec_hash"]}


@pytest.mark.parametrize("name", ["kvq2", "kve8_2"])
def test_version_2_differs_from_version_1_in_the_scale_alone(name):
    fmt = registry.get(name)
    golden = files.load(fmt, 1)
    now, scale = fmt.encode(golden.x), golden.blocks[:, :2].copy().view(np.float16).ravel()
    stored = scale > 0
    assert np.array_equal(now[stored, 2:], golden.blocks[stored, 2:])
    larger = now[:, :2].copy().view(np.float16).ravel()
    assert (larger >= scale).all() and (larger > scale)[stored].mean() > 0.5


def test_every_record_belongs_to_a_registered_format():
    recorded = {path.parent.parent.name for path in files.ROOT.glob("*/v*/facts.json")}
    assert recorded == {f.spec.name for f in ALL}


def test_a_type_id_belongs_to_one_layout():
    """Versions of a format share its id, and therefore its layout; no two formats do."""
    noted = [json.loads(p.read_text()) for p in files.ROOT.glob("*/v*/facts.json")]
    layouts = {(n["type_id"], n["name"], n["block"], n["size"], tuple(n["offsets"].items())) for n in noted}
    assert len(layouts) == len({n["type_id"] for n in noted}) == len(ALL)


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
