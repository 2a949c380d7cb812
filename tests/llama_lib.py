"""One llama_context per object, through the low-level bindings: what the log said, logits, shifts, saved states."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Sequence

import numpy as np

try:
    import llama_cpp
    from llama_cpp import kv_types
except ImportError as error:
    raise ImportError(f"{error}: the patched llama-cpp-python is not installed, run `kvfmt build` first") from None

_lines: list[str] = []


@llama_cpp.llama_log_callback
def _collect(level, text, user_data):  # noqa: ARG001
    _lines.append(text.decode("utf-8", "replace"))


llama_cpp.llama_backend_init()

FLASH = {
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
}


class Refused(Exception):
    """The library would not make the context; the text is its log."""


def params(**fields) -> "llama_cpp.llama_context_params":
    result = llama_cpp.llama_context_default_params()
    for name, value in fields.items():
        setattr(result, name, value)
    return result


class Context:
    """A model with one context. ``kv`` is "K/V" by type name."""

    def __init__(
        self,
        model: Path,
        kv: str = "f16/f16",
        *,
        protect: int = -1,
        flash: str = "on",
        n_ctx: int = 256,
        n_seq: int = 1,
        n_batch: int = 256,
        threads: int = 1,
        profile: Path | None = None,
    ):
        llama_cpp.llama_log_set(_collect, ctypes.c_void_p(0))
        _lines.clear()
        type_k, type_v = (kv_types.kv_cache_type(name) for name in kv.split("/"))
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), model_params)
        if not self.model:
            raise RuntimeError("".join(_lines))
        _lines.clear()
        self.ctx = llama_cpp.llama_init_from_model(
            self.model,
            params(
                n_ctx=n_ctx,
                n_batch=n_batch,
                n_ubatch=n_batch,
                n_seq_max=n_seq,
                n_threads=threads,
                n_threads_batch=threads,
                type_k=type_k,
                type_v=type_v,
                kv_protect=protect,
                kv_profile=None if profile is None else str(profile).encode(),
                flash_attn_type=FLASH[flash],
            ),
        )
        self.log = "".join(_lines)
        if not self.ctx:
            llama_cpp.llama_model_free(self.model)
            raise Refused(self.log)
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.n_past = 0

    def close(self) -> None:
        if self.ctx:
            llama_cpp.llama_free(self.ctx)
            llama_cpp.llama_model_free(self.model)
            self.ctx = None

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        space = (llama_cpp.llama_token * (4 * len(data) + 8))()
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        n = llama_cpp.llama_tokenize(vocab, data, len(data), space, len(space), True, False)
        return list(space[:n])

    def decode(self, tokens: Sequence[int], seq: int = 0, pos: int | None = None) -> np.ndarray:
        """Feed tokens to one sequence; the logits after each of them."""
        start = self.n_past if pos is None else pos
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i] = token
                batch.pos[i] = start + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = seq
                batch.logits[i] = True
            status = llama_cpp.llama_decode(self.ctx, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode: {status}\n" + "".join(_lines[-5:]))
            rows = [llama_cpp.llama_get_logits_ith(self.ctx, i) for i in range(len(tokens))]
            logits = np.stack([np.ctypeslib.as_array(row, shape=(self.n_vocab,)).copy() for row in rows])
        finally:
            llama_cpp.llama_batch_free(batch)
        if pos is None:
            self.n_past += len(tokens)
        return logits

    def shift(self, keep: int, discard: int) -> None:
        """Forget ``discard`` tokens after the first ``keep``, the later ones move up."""
        llama_cpp.llama_memory_seq_rm(self.memory, 0, keep, keep + discard)
        llama_cpp.llama_memory_seq_add(self.memory, 0, keep + discard, -1, -discard)
        self.n_past -= discard

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)
        self.n_past = 0

    def save(self, seq: int | None = 0) -> bytes:
        if seq is None:
            size = llama_cpp.llama_state_get_size(self.ctx)
            space = (ctypes.c_uint8 * size)()
            n = llama_cpp.llama_state_get_data(self.ctx, space, size)
        else:
            size = llama_cpp.llama_state_seq_get_size(self.ctx, seq)
            space = (ctypes.c_uint8 * size)()
            n = llama_cpp.llama_state_seq_get_data(self.ctx, space, size, seq)
        return bytes(space[:n])

    def load(self, state: bytes, seq: int | None = 0) -> bool:
        _lines.clear()
        space = (ctypes.c_uint8 * max(1, len(state))).from_buffer_copy(state or b"\0")
        if seq is None:
            n = llama_cpp.llama_state_set_data(self.ctx, space, len(state))
        else:
            n = llama_cpp.llama_state_seq_set_data(self.ctx, space, len(state), seq)
        self.log = "".join(_lines)
        return n > 0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kld(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of the second from the first, over rows of logits."""
    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def assert_states_refuse_each_other(contexts: Sequence[Context], seq: int | None, tokens: Sequence[int], refusal: str) -> None:
    """Each context takes back its own state alone; every other is refused in words that match, and leaves it usable. Closes them."""
    states = []
    for context in contexts:
        context.decode(tokens[:32])
        states.append(context.save(seq))
    for i, context in enumerate(contexts):
        context.clear()
        expected = context.decode(tokens[100:132])
        for j, state in enumerate(states):
            assert context.load(state, seq) == (i == j), (i, j, context.log)
            if i != j:
                assert re.search(refusal, context.log), context.log
                context.clear()
                assert np.array_equal(context.decode(tokens[100:132]), expected)
        context.close()
