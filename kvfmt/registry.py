"""Finds the formats: every public module of ``kvfmt.formats`` brings one ``FORMAT``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache

from . import formats
from .codec import Format


def collect(found: list[Format]) -> dict[str, Format]:
    """Formats by name, ordered by type id. Raises ValueError if two share a name or an id."""
    by_name: dict[str, Format] = {}
    by_id: dict[int, str] = {}
    for fmt in sorted(found, key=lambda f: f.spec.type_id):
        name, type_id = fmt.spec.name, fmt.spec.type_id
        if name in by_name:
            raise ValueError(f"two formats are called {name!r}")
        if type_id in by_id:
            raise ValueError(f"formats {by_id[type_id]!r} and {name!r} share type id {type_id}")
        by_name[name] = fmt
        by_id[type_id] = name
    return by_name


@lru_cache(maxsize=1)
def _registered() -> dict[str, Format]:
    names = [m.name for m in pkgutil.iter_modules(formats.__path__) if not m.name.startswith("_")]
    return collect([importlib.import_module(f"{formats.__name__}.{name}").FORMAT for name in names])


def all_formats() -> tuple[Format, ...]:
    """Every registered format, ordered by type id."""
    return tuple(_registered().values())


def names() -> tuple[str, ...]:
    """Names of every registered format, ordered by type id."""
    return tuple(_registered())


def plain_formats() -> tuple[Format, ...]:
    """Those that a cache can use without a profile, ordered by type id."""
    return tuple(fmt for fmt in all_formats() if not fmt.spec.needs_profile)


def get(name: str) -> Format:
    """The format called ``name``. Raises KeyError naming the known ones."""
    found = _registered().get(name)
    if found is None:
        raise KeyError(f"unknown format {name!r}; known: {', '.join(_registered())}")
    return found
