"""One loaded model through the lower layer of llama-cpp-python: ``llama_cpp.Llama`` loads one for each context."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import Any, Sequence

import numpy as np
from typing_extensions import Self

from kvfmt.bindings import patched_bindings
from kvfmt.errors import KvfmtError

#: Tokens that are computed at a time where no logits are wanted; also upstream's default.
UBATCH = 512

_said: deque[str] = deque(maxlen=4096)


@lru_cache(maxsize=None)
def _log_callback() -> Any:
    # Called from within the library as long as the process lives: it must not be collected.
    return patched_bindings().llama_log_callback(lambda level, text, _: _said.append(text.decode("utf-8", "replace")))


def listen() -> deque[str]:
    """From now on the library's log is kept, its last 4,096 pieces, instead of printed."""
    patched_bindings().llama_log_set(_log_callback(), ctypes.c_void_p(0))
    return _said


class LoadedModel:
    """A model in memory. A context manager, or ``close()`` it after its contexts."""

    def __init__(self, path: Path, threads: int | None = None, gpu_layers: int = 0) -> None:
        """Raises KvfmtError with the library's words if the file cannot be loaded, MissingTool before `kvfmt build`."""
        self.lib = lib = patched_bindings()
        lib.llama_backend_init()
        self._log = listen()
        self.gpu_layers = gpu_layers
        self.threads = threads or os.cpu_count() or 1
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        self._log.clear()
        self.model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise KvfmtError(f"{Path(path).name} could not be loaded:\n{self._complaints()}", "Is it a whole GGUF model, and is there memory for it?")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(self.model)
        self.bos: int = lib.llama_vocab_bos(self.vocab)
        self.add_bos: bool = lib.llama_vocab_get_add_bos(self.vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model. Its caches must be closed before."""
        if self.model:
            self.lib.llama_model_free(self.model)
            self.model = None

    def create_context(self, params: Any, what: str = "the context", hint: str = "Choose a smaller context.") -> Any:
        """A ``llama_context`` that the caller frees. Raises KvfmtError with the library's words if it refuses ``what``."""
        self._log.clear()
        context = self.lib.llama_init_from_model(self.model, params)
        if not context:
            raise KvfmtError(f"llama.cpp refuses {what}:\n{self._complaints()}", hint)
        return context

    def _complaints(self) -> str:
        lines = "".join(self._log).splitlines()
        words = ("error", "fail", "not supported", "requires", "does not", "invalid", "cannot", "unknown")
        return "\n".join([line for line in lines if any(w in line.lower() for w in words)][-4:] or lines[-4:])

    def tokenize(self, text: str, special: bool = True, parse_special: bool = False) -> np.ndarray:
        """Tokens, int32 [n]. ``special`` adds what the model wants at the start; llama-perplexity does so."""
        raw = text.encode("utf-8")
        room = len(raw) + 8
        while True:
            tokens = (self.lib.llama_token * room)()
            count = self.lib.llama_tokenize(self.vocab, raw, len(raw), tokens, room, special, parse_special)
            if count >= 0:
                return np.array(tokens[:count], dtype=np.int32)
            room = -count

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of tokens; bytes that are no UTF-8 are replaced."""
        pieces = bytearray()
        room = 256
        for token in tokens:
            buffer = ctypes.create_string_buffer(room)
            size = self.lib.llama_token_to_piece(self.vocab, int(token), buffer, room, 0, False)
            pieces += buffer.raw[: max(size, 0)]
        return pieces.decode("utf-8", "replace")

    def ends(self, token: int) -> bool:
        """Whether the model ends its text with this token."""
        return bool(self.lib.llama_vocab_is_eog(self.vocab, int(token)))

    def check_ctx(self, n_ctx: int) -> None:
        """Raises KvfmtError if the context is longer than the model was trained for."""
        if n_ctx > self.n_ctx_train:
            raise KvfmtError(
                f"a context of {n_ctx} tokens is more than the model's {self.n_ctx_train}",
                f"Give at most {self.n_ctx_train} tokens.",
            )

    def _setting(self, name: str) -> int | None:
        """A whole number from the model's file, under its architecture; None if it is not there or a list."""
        buffer = ctypes.create_string_buffer(128)
        self.lib.llama_model_meta_val_str(self.model, b"general.architecture", buffer, len(buffer))
        found = self.lib.llama_model_meta_val_str(self.model, buffer.value + b"." + name.encode(), buffer, len(buffer))
        return int(buffer.value) if found >= 0 and buffer.value.isdigit() else None
