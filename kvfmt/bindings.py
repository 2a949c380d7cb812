"""Cache types by name for llama-cpp-python."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from .errors import KvfmtError, MissingTool
from .gguf_read import parse_gguf, read_gguf
from .policy import parse_kv
from .profile import AUTO, attached

#: The pair that the project recommends.
DEFAULT_KV = "kvq3/kvq2"


def profile_chooses_types(profile: str | os.PathLike, model: str | os.PathLike | None = None) -> bool:
    """Whether the calibration profile says which cache type each layer has; "auto": the one that the file of ``model`` carries.

    Raises KvfmtError if it is no GGUF file, or the model carries none.
    """
    if profile != AUTO:
        return "kvfmt.profile.types_k" in read_gguf(Path(profile)).metadata
    if model is None:
        raise KvfmtError("profile 'auto' is the one that a model's file carries, and no model was named", "Name the profile's file.")
    carried = attached(read_gguf(Path(model), lambda key: not key.startswith("tokenizer.")))
    if carried is None:
        raise KvfmtError(f"{Path(model).name} carries no profile", "Attach one: kvfmt profile attach, or name the profile's file.")
    return "kvfmt.profile.types_k" in parse_gguf("the attached profile", memoryview(carried)).metadata


def cache_arguments(
    kv: str | None = None,
    protect: int | None = None,
    profile: str | os.PathLike | None = None,
    model: str | os.PathLike | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``llama_cpp.Llama`` for ``kv`` such as "kvq3/kvq2".

    ``protect`` layers at each end stay f16; None leaves the choice to the library. ``profile`` is the path of a
    calibration profile, or "auto" for the one that the file of ``model`` carries; if it chooses the types, ``kv`` must be
    None. Without ``kv`` and such a profile the types are those of ``DEFAULT_KV``.
    Raises UnknownName for a type that no cache can have, KvfmtError for a profile that cannot be read.
    """
    arguments: dict[str, Any] = {}
    if profile is not None:
        arguments["kv_profile"] = os.fspath(profile)
    if kv is None and profile is not None and profile_chooses_types(profile, model):
        arguments["flash_attn"] = True
    else:
        k, v = parse_kv(kv or DEFAULT_KV)
        arguments |= {"type_k": k.type_id, "type_v": v.type_id}
        if k.is_quantized or v.is_quantized:
            arguments["flash_attn"] = True
    if protect is not None:
        arguments["kv_protect"] = protect
    return arguments


def patched_bindings() -> Any:
    """The module ``llama_cpp``.

    Raises MissingTool if the installed llama-cpp-python is not the one that ``kvfmt build`` makes: an unpatched
    library would read a foreign type id as garbage.
    """
    try:
        import llama_cpp
    except ImportError:
        raise MissingTool("llama-cpp-python is not installed", "Run: kvfmt build") from None
    if "+kvfmt" not in llama_cpp.__version__:
        raise MissingTool(
            f"llama-cpp-python {llama_cpp.__version__} does not have the kvfmt types", "Run: kvfmt build"
        )
    return llama_cpp


def open_model(
    path: str,
    kv: str | None = None,
    protect: int | None = None,
    profile: str | os.PathLike | None = None,
    **more: Any,
):
    """``llama_cpp.Llama`` with a cache of those types, see ``cache_arguments``. ``more`` goes to Llama.

    Raises UnknownName for an unknown type, MissingTool without the patched bindings, ValueError if the library refuses.
    """
    arguments = {**cache_arguments(kv, protect, profile, path), **more}
    bindings = patched_bindings()
    # One callback serves the whole process. Who set it last (the benchmarks keep the log) must not silence `verbose`.
    bindings.llama_log_set(bindings._logger.llama_log_callback, ctypes.c_void_p(0))
    return bindings.Llama(model_path=str(path), **arguments)
