"""The encoders of a built libggml-cpu, called through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from kvfmt import registry
from kvfmt.build.paths import bin_dir
from kvfmt.build.pins import get_pin
from kvfmt.errors import MissingTool
from kvfmt.policy import CacheType

FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class CpuTraits(ctypes.Structure):
    """The beginning of struct ggml_type_traits_cpu of ggml-cpu.h."""

    _fields_ = [("from_float", FROM_FLOAT)]


class Encoders:
    """from_float of each type: what a cache write calls.

    Raises MissingTool if there is no such build.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or bin_dir(get_pin().name)
        base, cpu = (self.folder / f"libggml-{name}.so" for name in ("base", "cpu"))
        for file in (base, cpu):
            if not file.exists():
                raise MissingTool(f"there is no {file}", "Run: kvfmt build, or let KVFMT_BIN name the folder of another build")
        self._base = ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL)
        self._cpu = ctypes.CDLL(str(cpu))
        if not hasattr(self._base, "ggml_kvq_spec_hash"):
            raise MissingTool(f"{base} is not patched", "Run: kvfmt build")
        self._base.ggml_kvq_spec_hash.restype, self._base.ggml_kvq_spec_hash.argtypes = ctypes.c_char_p, [ctypes.c_int]
        self._cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CpuTraits)
        self._cpu.ggml_get_type_traits_cpu.argtypes = [ctypes.c_int]
        self._cpu.ggml_cpu_init()

    def encoder(self, kind: CacheType) -> FROM_FLOAT:
        """``f(source address, target address, n)`` of a type: n float32 values into whole blocks.

        Raises MissingTool if the build has another version of one of our formats, or none.
        """
        for fmt in registry.all_formats():
            # Asked first: the table of traits has no end that could be checked.
            if fmt.spec.type_id == kind.type_id and (found := self._base.ggml_kvq_spec_hash(kind.type_id)) != fmt.spec.hash.encode():
                built = f"another {kind.name} (spec {found[:8].decode()}, not {fmt.spec.hash[:8]})" if found else f"no {kind.name}"
                raise MissingTool(f"the build in {self.folder} has {built}", "Run: kvfmt build")
        return self._cpu.ggml_get_type_traits_cpu(kind.type_id).contents.from_float

    def encode(self, kind: CacheType, x: np.ndarray) -> np.ndarray:
        """float32 [..., n] -> packed blocks, uint8 [..., bytes]."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((*x.shape[:-1], kind.row_bytes(x.shape[-1])), np.uint8)
        self.encoder(kind)(x.ctypes.data, out.ctypes.data, x.size)
        return out
