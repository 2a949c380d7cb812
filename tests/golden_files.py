"""Frozen inputs and bytes of the formats: tests/golden/<format>/v<version>/."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvfmt.codec import Format

ROOT = Path(__file__).resolve().parent / "golden"
N_RANDOM = 200


def folder(fmt: Format, version: int | None = None) -> Path:
    """Of the format's own version, or of an older one."""
    return ROOT / fmt.spec.name / f"v{version or fmt.spec.version}"


def older_versions(fmt: Format) -> list[int]:
    """Recorded versions before the format's own."""
    found = sorted(int(path.name[1:]) for path in (ROOT / fmt.spec.name).glob("v*"))
    return [version for version in found if version < fmt.spec.version]


@dataclass(frozen=True)
class Golden:
    """What was recorded: little-endian float32 values, the blocks they encode to, and facts about both."""

    x: np.ndarray
    blocks: np.ndarray
    facts: dict


def facts(fmt: Format, x: np.ndarray, blocks: np.ndarray) -> dict:
    """What a reader needs to know, and hashes that hold the files and the decoder to it."""
    spec = fmt.spec
    decoded = np.ascontiguousarray(fmt.decode(blocks), "<f4")
    return {
        "name": spec.name,
        "version": spec.version,
        "type_id": spec.type_id,
        "block": spec.block,
        "size": spec.size,
        "offsets": {field.name: spec.offset(field.name) for field in spec.fields},
        "spec_hash": spec.hash,
        "n_blocks": len(blocks),
        "sha256_input": hashlib.sha256(x.tobytes()).hexdigest(),
        "sha256_blocks": hashlib.sha256(blocks.tobytes()).hexdigest(),
        "sha256_decoded": hashlib.sha256(decoded.tobytes()).hexdigest(),
    }


def load(fmt: Format, version: int | None = None) -> Golden:
    """Raises FileNotFoundError with the command that records if there is none."""
    where = folder(fmt, version)
    if not (where / "facts.json").is_file():
        raise FileNotFoundError(
            f"no golden bytes at {where}; once the format is final: python -m tests.golden.record {fmt.spec.name}"
        )
    noted = json.loads((where / "facts.json").read_text())
    x = np.frombuffer((where / "input.f32").read_bytes(), "<f4").reshape(-1, noted["block"])
    blocks = np.frombuffer((where / "blocks.bin").read_bytes(), np.uint8).reshape(-1, noted["size"])
    return Golden(x, blocks, noted)
