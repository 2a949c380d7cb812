"""The supported llama.cpp versions, read from cpp_patch/pins.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from kvfmt.build.paths import ROOT
from kvfmt.errors import UnknownPin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PINS_FILE = ROOT / "cpp_patch" / "pins.toml"


@dataclass(frozen=True)
class Pin:
    """One supported version: a llama-cpp-python source distribution and the llama.cpp inside it."""

    name: str
    package: str
    version: str
    sdist: str
    sha256: str
    bytes: int
    llama_commit: str
    ggml_version: str
    series: int


def load_pins(file: Path = PINS_FILE) -> dict[str, Pin]:
    """All pins by name, in file order; the first is the default."""
    return {entry["name"]: Pin(**entry) for entry in tomllib.loads(file.read_text("utf-8"))["pin"]}


def get_pin(name: str | None = None) -> Pin:
    """The pin of that name, or the default one. Raises UnknownPin."""
    pins = load_pins()
    if name is None:
        return next(iter(pins.values()))
    if name not in pins:
        raise UnknownPin(f"unknown llama.cpp version '{name}'", "Supported: " + ", ".join(pins))
    return pins[name]
