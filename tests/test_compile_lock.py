"""Two processes never fill Numba's cache at once: they gave one format the other's code."""

from __future__ import annotations

import numpy as np
import pytest

from kvfmt import registry
from kvfmt.build.lock import locked
from kvfmt.build.paths import cache_dir
from kvfmt.codec import Format
from kvfmt.errors import Busy


def test_the_first_call_keeps_other_processes_out(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFMT_CACHE", str(tmp_path))
    held = []

    class Kernel:
        signatures: list = []

        def __call__(self, x, out):
            # Another open file is what another process would have.
            try:
                with locked(cache_dir() / "numba"):
                    held.append(False)
            except Busy:
                held.append(True)
            self.signatures.append("compiled")

    spec = registry.all_formats()[0].spec
    fmt = Format(spec, Kernel(), Kernel(), Kernel())
    for _ in range(2):
        fmt.encode(np.zeros(spec.block, np.float32))
    assert held == [True, False]
    # Nothing is left behind that would keep the next one waiting.
    with locked(cache_dir() / "numba"):
        pass


def test_without_a_writable_cache_it_still_works(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFMT_CACHE", str(tmp_path / "file"))
    fmt = registry.all_formats()[0]
    with pytest.raises(OSError), locked(cache_dir() / "numba"):
        pass
    fresh = Format(fmt.spec, fmt._encode, fmt._decode, fmt._dot)
    assert fresh.decode(fresh.encode(np.zeros(fmt.spec.block, np.float32))).tolist() == [0.0] * fmt.spec.block
