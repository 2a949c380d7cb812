"""Two texts that are always there: the documentation and the C++ source of the pinned llama.cpp.

They are read out of the unpatched tree, so that a change of the patches never changes what is measured.
"""

from __future__ import annotations

from pathlib import Path

from kvfmt.build.pins import Pin, get_pin
from kvfmt.build.tree import ensure_pristine
from kvfmt.errors import UnknownName

CORPORA = {
    "docs": ("README.md", "docs/**/*.md", "tools/**/*.md", "examples/**/*.md", "grammars/*.md"),
    "cpp": ("src/*.cpp", "src/*.h", "common/*.cpp", "common/*.h"),
}


def corpus(name: str, pin: Pin | None = None) -> str:
    """The text "docs" (Markdown) or "cpp" (C++), the same at every call for one pin. Raises UnknownName."""
    return "\n\n".join(f.read_text("utf-8", "replace") for f in corpus_files(name, pin))


def corpus_files(name: str, pin: Pin | None = None) -> list[Path]:
    """The files of a corpus in order. Raises UnknownName."""
    if name not in CORPORA:
        raise UnknownName(f"unknown corpus '{name}'", "Known: " + ", ".join(CORPORA))
    root = ensure_pristine(pin or get_pin()) / "vendor" / "llama.cpp"
    found = {f for pattern in CORPORA[name] for f in root.glob(pattern) if f.is_file()}
    return sorted(found, key=lambda f: f.relative_to(root).as_posix())
