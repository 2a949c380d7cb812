"""What is measured on: a model and texts, named or given as files, with the hashes that identify them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvfmt.build.corpus import CORPORA, corpus
from kvfmt.build.fetch import sha256_of
from kvfmt.build.models import fetch_model, load_models
from kvfmt.errors import KvfmtError, UnknownName


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file; ``name`` is what tables call it."""

    name: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class Text:
    """A text to score on."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode("utf-8")).hexdigest()


def find_path(name: str) -> Path:
    """The file of a model of models.toml by name, fetched if need be, or a GGUF file.

    Raises UnknownName if it is neither, KvfmtError if the file is no GGUF, and what ``fetch_model`` raises.
    """
    models = load_models()
    if name in models:
        return fetch_model(name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise UnknownName(f"no model '{name}'", "Give a GGUF file, or one of: " + ", ".join(models))
    with open(path, "rb") as stream:
        if stream.read(4) != b"GGUF":
            raise KvfmtError(f"{path.name} is not a GGUF file", "Give a model in llama.cpp's format.")
    return path


def find_model(name: str) -> ModelFile:
    """As ``find_path``, with the file's hash: all of it is read."""
    path, models = find_path(name), load_models()
    return ModelFile(name, path, models[name].sha256) if name in models else ModelFile(path.stem, path, sha256_of(path))


def find_text(name: str) -> Text:
    """A corpus by name ("docs", "cpp") or a text file in UTF-8. Raises UnknownName if it is neither."""
    if name in CORPORA:
        return Text(name, corpus(name))
    path = Path(name).expanduser()
    if not path.is_file():
        raise UnknownName(f"no text '{name}'", "Give a text file, or one of: " + ", ".join(CORPORA))
    return Text(path.name, path.read_text("utf-8", "replace"))
