"""A model with one f16 context: evaluate, save, load, continue, and watch tensors of the forward pass."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Callable, Optional, Sequence

import numpy as np

from kvfmt.errors import KvfmtError, MissingTool

#: Tokens of one forward pass. The shape of the work decides the last bits of a float: it is the same for all.
UBATCH = 512


class LabError(KvfmtError):
    """The model or the state cannot serve the experiment."""


def bindings():
    """``llama_cpp``, silenced but for what is asked of it. Raises MissingTool."""
    try:
        import llama_cpp
    except ImportError:
        raise MissingTool("llama-cpp-python is not installed", "Run: kvfmt build") from None
    return llama_cpp


class _Log:
    """What the library says. There is one, for ever: the library keeps a pointer to its callback."""

    lines: list[str] = []
    callback = None

    @classmethod
    def listen(cls) -> None:
        llama = bindings()
        if cls.callback is None:
            cls.callback = llama.llama_log_callback(lambda level, text, data: cls.lines.append(text.decode("utf-8", "replace")))
        cls.lines.clear()
        llama.llama_log_set(cls.callback, ctypes.c_void_p(0))

    @classmethod
    def tail(cls) -> str:
        return "".join(cls.lines[-6:]).strip()


class Watch:
    """Collects tensors of the forward pass by name, such as "Kcur-3", in the order in which they are computed.

    A name may come several times in a pass: llama.cpp calls the keys "Kcur" as W_k gives them, with the bias
    added, and after RoPE. ``seen[name]`` has one list per occurrence, of float32 [tokens, values] per pass.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        llama = bindings()
        lib = ctypes.CDLL(str(next(Path(llama.__file__).parent.glob("lib/libggml-base*.so"))))
        self._name, self._bytes, self._get = lib.ggml_get_name, lib.ggml_nbytes, lib.ggml_backend_tensor_get
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._bytes.restype, self._bytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self.wanted, self.on = wanted, False
        self.seen: dict[str, list[list[np.ndarray]]] = {}
        self._in_pass: dict[str, int] = {}
        self.error: Optional[BaseException] = None
        self.callback = llama.llama_cpp.ggml_backend_sched_eval_callback(self._call)

    def begin_pass(self) -> None:
        """Occurrences are counted anew in every forward pass."""
        self._in_pass.clear()

    def _call(self, tensor, ask, _):
        # An exception must not cross the C frames above.
        try:
            if not self.on:
                return not ask
            # Views have names such as "Kcur-3 (reshaped)": the same values once more, perhaps with gaps.
            name = (self._name(tensor) or b"").decode("utf-8", "replace")
            if ask:
                return self.wanted(name)
            data = np.empty(self._bytes(tensor) // 4, np.float32)
            self._get(tensor, data.ctypes.data, 0, data.nbytes)
            turn = self._in_pass.get(name, 0)
            self._in_pass[name] = turn + 1
            turns = self.seen.setdefault(name, [])
            if len(turns) <= turn:
                turns.append([])
            turns[turn].append(data)
            return True
        except BaseException as error:  # noqa: BLE001
            self.error = error
            return False

    def take(self, name: str, turn: int, tokens: int) -> np.ndarray:
        """float32 [tokens, values] of the ``turn``-th occurrence, -1 the last. Raises LabError if it was not seen."""
        if self.error is not None:
            raise self.error
        turns = self.seen.get(name)
        if not turns:
            raise LabError(f"the forward pass has no tensor {name!r}", "The lab knows models whose graph names Qcur and Kcur.")
        data = np.concatenate(turns[turn])
        if data.size % tokens:
            raise LabError(f"{name} has {data.size} values, not a multiple of {tokens} tokens", "The model's layout is unknown.")
        return data.reshape(tokens, -1)


class Session:
    """One model, one f16 context of ``n_ctx`` tokens, flash attention on or off.

    Raises LabError, with the library's own words, if the model does not load or the context is refused.
    """

    def __init__(self, model: Path, n_ctx: int, threads: int = 0, flash: bool = True, watch: Optional[Watch] = None) -> None:
        llama = self.llama = bindings()
        _Log.listen()
        llama.llama_backend_init()
        self.ctx = self.model = None
        self.path, self.n_ctx, self.watch = Path(model), n_ctx, watch
        if not self.path.is_file():
            raise LabError(f"no model at {model}", "Fetch one: kvfmt models fetch")
        wanted = llama.llama_model_default_params()
        wanted.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(str(model).encode(), wanted)
        if not self.model:
            raise LabError(f"{self.path.name} does not load: {_Log.tail()}", "It is damaged, or this llama.cpp does not know the model.")
        trained = llama.llama_model_n_ctx_train(self.model)
        if n_ctx > trained:
            self.close()
            raise LabError(f"{n_ctx} tokens are more than the {trained} that {self.path.name} was trained for", "Ask for fewer.")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, UBATCH, UBATCH
        params.n_threads = params.n_threads_batch = threads or os.cpu_count() or 1
        params.type_k = params.type_v = llama.GGML_TYPE_F16
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        # Sliding-window layers hold what they hold in use, not the whole context.
        params.swa_full = False
        if watch is not None:
            params.cb_eval = watch.callback
        self.ctx = llama.llama_init_from_model(self.model, params)
        if not self.ctx:
            words = _Log.tail()
            self.close()
            raise LabError(f"no context of {n_ctx} tokens for {self.path.name}: {words}", "Ask for fewer tokens.")
        self._vocab = llama.llama_model_get_vocab(self.model)
        self._memory = llama.llama_get_memory(self.ctx)
        self.n_vocab = llama.llama_vocab_n_tokens(self._vocab)
        self.n_past = 0

    def close(self) -> None:
        if self.ctx:
            self.llama.llama_free(self.ctx)
        if self.model:
            self.llama.llama_model_free(self.model)
        self.ctx = self.model = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tokenize(self, text: str, begin: bool = True) -> list[int]:
        """Tokens of a text; with ``begin`` those that the model wants at the beginning are added."""
        data = text.encode()
        space = (self.llama.llama_token * (len(data) + 8))()
        n = self.llama.llama_tokenize(self._vocab, data, len(data), space, len(space), begin, False)
        return list(space[:n])

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        out = b""
        for token in tokens:
            space = ctypes.create_string_buffer(256)
            n = self.llama.llama_token_to_piece(self._vocab, token, space, len(space), 0, False)
            out += space.raw[: max(0, n)]
        return out.decode("utf-8", "replace")

    def decode(self, tokens: Sequence[int], logits: str = "all") -> np.ndarray:
        """Appends tokens. Returns float32 [tokens, vocabulary], or [1, vocabulary] if ``logits`` is "last".

        Raises LabError if the context is full or the library fails.
        """
        if self.n_past + len(tokens) > self.n_ctx:
            raise LabError(f"{self.n_past} + {len(tokens)} tokens do not fit in a context of {self.n_ctx}", "Ask for fewer.")
        rows = []
        for start in range(0, len(tokens), UBATCH):
            part = tokens[start : start + UBATCH]
            last_part = start + len(part) == len(tokens)
            rows.append(self._decode_pass(part, logits == "all", last_part))
        return np.concatenate([r for r in rows if r is not None])

    def _decode_pass(self, tokens: Sequence[int], every: bool, last_part: bool) -> Optional[np.ndarray]:
        llama = self.llama
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.n_past + i, 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = every or (last_part and i == len(tokens) - 1)
            if self.watch is not None:
                self.watch.begin_pass()
            status = llama.llama_decode(self.ctx, batch)
            if status != 0:
                raise LabError(f"llama_decode failed with {status}: {_Log.tail()}", "The context may be too small.")
        finally:
            llama.llama_batch_free(batch)
        self.n_past += len(tokens)
        n = len(tokens) if every else int(last_part)
        if not n:
            return None
        return np.ctypeslib.as_array(llama.llama_get_logits(self.ctx), shape=(n, self.n_vocab)).copy()

    def clear(self) -> None:
        """Forgets everything."""
        self.llama.llama_memory_clear(self._memory, True)
        self.n_past = 0

    def save(self) -> bytes:
        """The sequence's state. Raises LabError if there is none."""
        size = self.llama.llama_state_seq_get_size(self.ctx, 0)
        space = (ctypes.c_uint8 * size)()
        n = self.llama.llama_state_seq_get_data(self.ctx, space, size, 0)
        if n == 0 or n != size:
            raise LabError(f"the state was not saved: {n} of {size} bytes: {_Log.tail()}", "Report it.")
        return bytes(space)

    def load(self, state: bytes) -> None:
        """Replaces what the context holds. Raises LabError, with the library's words, if it refuses the state."""
        self.clear()
        _Log.listen()
        space = (ctypes.c_uint8 * max(1, len(state))).from_buffer_copy(state or b"\0")
        n = self.llama.llama_state_seq_set_data(self.ctx, space, len(state), 0)
        if n != len(state) or n == 0:
            self.clear()
            raise LabError(
                f"the state was refused ({n} of {len(state)} bytes read): {_Log.tail()}",
                f"It has to come from {self.path.name} with an f16 cache and the same flash attention setting.",
            )
        self.n_past = self.llama.llama_memory_seq_pos_max(self._memory, 0) + 1

    def greedy(self, first: int, count: int) -> list[int]:
        """The ``count`` most likely tokens, one after the other, after ``first`` is appended."""
        found, token = [], first
        for _ in range(count):
            token = int(self.decode([token], "last")[0].argmax())
            found.append(token)
        return found

