"""Where things lie. Everything that is made goes under build/ or the cache, nothing into the sources."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cache_dir() -> Path:
    """Downloads, models and compiled kernels, shared by all checkouts: $KVFMT_CACHE or ~/.cache/kvfmt."""
    return Path(os.environ.get("KVFMT_CACHE") or "~/.cache/kvfmt").expanduser().resolve()


def build_dir(pin_name: str) -> Path:
    """What is built for one pin: $KVFMT_BUILD/<pin> or build/<pin> in the repository."""
    return Path(os.environ.get("KVFMT_BUILD") or ROOT / "build").expanduser().resolve() / pin_name


def bin_dir(pin_name: str) -> Path:
    """The programs and shared libraries of one build: $KVFMT_BIN, or what `kvfmt build` made."""
    own = os.environ.get("KVFMT_BIN")
    return Path(own).expanduser().resolve() if own else build_dir(pin_name) / "cmake-cpu" / "bin"


def series_dir(pin_name: str) -> Path:
    """The committed patch series of one pin."""
    return ROOT / "cpp_patch" / "out" / pin_name
