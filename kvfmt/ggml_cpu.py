"""The encoders and decoders of a built ggml, called through ctypes: the bytes and floats of llama.cpp itself."""

from __future__ import annotations

import ctypes
import importlib.util
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


class BaseTraits(ctypes.Structure):
    """The beginning of struct ggml_type_traits of ggml.h."""

    _fields_ = [
        ("type_name", ctypes.c_char_p), ("blck_size", ctypes.c_int64), ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t), ("is_quantized", ctypes.c_bool), ("to_float", FROM_FLOAT),
    ]


def installed_folder() -> Path:
    """Where the libraries of the installed bindings lie. Raises MissingTool before `kvfmt build`."""
    # Not imported: that loads all of llama.cpp. Whether it is patched the libraries say themselves.
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise MissingTool("llama-cpp-python is not installed", "Run: kvfmt build")
    return Path(found.origin).parent / "lib"


class Encoders:
    """from_float of each type: what a cache write calls; and what reads a cache as floats. Several threads may call them at once.

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
        self._base.ggml_get_type_traits.restype = ctypes.POINTER(BaseTraits)
        self._base.ggml_get_type_traits.argtypes = [ctypes.c_int]
        self._cpu.ggml_cpu_init()

    def encoder(self, kind: CacheType) -> FROM_FLOAT:
        """``f(source address, target address, n)`` of a type: n float32 values into whole blocks.

        Raises MissingTool if the build has another version of one of our formats, or none.
        """
        self._check(kind)
        return self._cpu.ggml_get_type_traits_cpu(kind.type_id).contents.from_float

    def decoder(self, kind: CacheType) -> FROM_FLOAT:
        """``f(source address, target address, n)`` of a type: whole blocks into n float32 values. Raises MissingTool as ``encoder``."""
        self._check(kind)
        # The vector forms of the CPU library, where it has them; they give the same floats.
        found = {"f16": self._cpu.ggml_cpu_fp16_to_fp32, "bf16": self._cpu.ggml_cpu_bf16_to_fp32, "f32": self._cpu.ggml_cpu_fp32_to_fp32}.get(kind.name)
        if found is None:
            return self._base.ggml_get_type_traits(kind.type_id).contents.to_float
        return ctypes.cast(found, FROM_FLOAT)

    def _check(self, kind: CacheType) -> None:
        for fmt in registry.all_formats():
            # Asked first: the table of traits has no end that could be checked.
            if fmt.spec.type_id == kind.type_id and (found := self._base.ggml_kvq_spec_hash(kind.type_id)) != fmt.spec.hash.encode():
                built = f"another {kind.name} (spec {found[:8].decode()}, not {fmt.spec.hash[:8]})" if found else f"no {kind.name}"
                raise MissingTool(f"the build in {self.folder} has {built}", "Run: kvfmt build")

    def encode(self, kind: CacheType, x: np.ndarray) -> np.ndarray:
        """float32 [..., n] -> packed blocks, uint8 [..., bytes]."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((*x.shape[:-1], kind.row_bytes(x.shape[-1])), np.uint8)
        self.encoder(kind)(x.ctypes.data, out.ctypes.data, x.size)
        return out

    def decode(self, kind: CacheType, data: np.ndarray) -> np.ndarray:
        """Packed blocks, uint8 [..., bytes], in one piece -> float32 [..., n]."""
        out = np.empty((*data.shape[:-1], data.shape[-1] // kind.size * kind.block), np.float32)
        self.decoder(kind)(data.ctypes.data, out.ctypes.data, out.size)
        return out
