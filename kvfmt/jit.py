"""Numba with a disk cache that knows everything a kernel is made of.

Numba's own cache serves neither need here. The key of a closure holds its pickled cells, and a jitted function
pickles under a random number: kernels built from kernels are compiled in every process. And a kernel is thought
unchanged as long as its own file is, whatever happens to the functions it calls in other files.

Here a kernel is one file, named by a digest of what its code follows from: the text of all sources of kernels, the
contents of its closure, its argument types, the CPU, and the versions and settings of the compiler.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import secrets
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import llvmlite
import numba
import numpy as np
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import NullCache, _cache_log
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

from .build.paths import cache_dir

PACKAGE = Path(__file__).resolve().parent

#: What importing the formats loads: nothing else can change a kernel.
SOURCES = ("__init__.py", "build/__init__.py", "build/paths.py", "codec.py", "formats/*.py", "jit.py", "scalar.py", "spec.py")

#: So many states of the sources keep their kernels, the last used ones: several checkouts share the cache.
KEPT = 8

# Symbols of compiled functions carry a number that Numba counts up from 1 in each process. Two formats' loops have
# one name; compiled in two processes, they could get one number too, and a third process that loads both would run
# one in place of the other. Random numbers keep them apart.
FunctionIdentity._unique_ids = iter(functools.partial(secrets.randbits, 60), None)


def _source_files(package: Path) -> list[Path]:
    return sorted(path for pattern in SOURCES for path in package.glob(pattern))


def sources_digest(package: Path = PACKAGE) -> str:
    """Hex digest of the text of the kernels' sources, and of what compiles them."""
    settings = (numba.config.OPT, numba.config.BOUNDSCHECK, numba.config.DEBUGINFO_DEFAULT)
    versions = (platform.python_version(), numba.__version__, llvmlite.__version__, np.__version__)
    digest = hashlib.sha256(repr((versions, settings)).encode())
    for path in _source_files(package):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:20]


_FILES = frozenset(_source_files(PACKAGE))
_imported = sources_digest()


def jit(function: Callable | None = None, **options):
    """Decorator: :func:`numba.njit` with the cache of this module; ``options`` as there, without ``cache``.

    Raises ValueError for a function of a file that is not in SOURCES, TypeError for a closure variable whose
    contents have no digest.
    """
    if function is None:
        return functools.partial(jit, **options)
    kernel = numba.njit(**options)(function)
    if isinstance(kernel, Dispatcher):  # NUMBA_DISABLE_JIT leaves the function as it is
        kernel._cache = KernelCache(function, options)
    return kernel


class KernelCache(NullCache):
    """The compiled forms of one kernel on disk. A fault of the disk costs time, never a result."""

    def __init__(self, function: Callable, options: dict) -> None:
        path = Path(function.__code__.co_filename).resolve()
        if path not in _FILES:
            raise ValueError(f"{function.__qualname__}: the cache would not see changes of {path}; add it to kvfmt.jit.SOURCES")
        self.name = f"{path.stem}.{function.__name__}"
        made_of = [_imported, function.__module__, function.__qualname__, str(function.__code__.co_firstlineno), repr(sorted(options.items()))]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            made_of.append(f"{name} = {_contents(cell.cell_contents, f'{function.__qualname__}: {name}')}")
        self.fingerprint = hashlib.sha256("\n".join(made_of).encode()).hexdigest()

    @property
    def cache_path(self) -> str:
        return str(_folder())

    def load_overload(self, sig, target_context):
        """The compiled form for these argument types, or None."""
        target_context.refresh()
        if _edited():
            return None
        try:
            path = self._path(sig, target_context.codegen())
            content = path.read_bytes()
        except (OSError, RuntimeError):
            return None
        if content[:32] != hashlib.sha256(content[32:]).digest():
            return None
        with suppress(OSError):
            os.utime(path.parent)  # when it was last used
        _cache_log("[cache] data loaded from %r", str(path))
        return CompileResult._rebuild(target_context, *pickle.loads(content[32:]))

    def save_overload(self, sig, data) -> None:
        """Writes a compiled form."""
        if data.lifted or data.library.has_dynamic_globals or _edited():
            return
        payload = dumps(data._reduce())
        with suppress(OSError, RuntimeError):  # RuntimeError: no home folder
            path = self._path(sig, data.codegen)
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                _prune(path.parent.parent)
            part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
            try:
                part.write_bytes(hashlib.sha256(payload).digest() + payload)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            _cache_log("[cache] data saved to %r", str(path))

    def _path(self, sig, codegen) -> Path:
        key = hashlib.sha256(f"{self.fingerprint} {sig} {codegen.magic_tuple()}".encode()).hexdigest()
        return _folder() / f"{self.name}-{key[:20]}.nbc"


def _contents(value, where: str) -> str:
    """What a closure variable holds, as text that is the same in every process."""
    if isinstance(value, Dispatcher) and isinstance(value._cache, KernelCache):
        return value._cache.fingerprint
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, (bool, int, float, np.number)):
        return f"{type(value).__name__} {value!r}"
    raise TypeError(f"{where} is a {type(value).__name__}; a kernel takes numbers, arrays and functions of kvfmt.jit")


def _edited() -> bool:
    """Whether the files changed since the import: then what was imported may be either state, or some of both."""
    return sources_digest() != _imported


def _folder() -> Path:
    return cache_dir() / "kernels" / _imported


def _prune(folder: Path) -> None:
    """Removes the kernels of all but the last used states of the sources."""
    states = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in states[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
