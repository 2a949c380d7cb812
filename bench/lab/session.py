"""A model with one f16 context: evaluate, save, load, continue, and watch tensors of the forward pass."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Callable, Optional, Sequence

import numpy as np

from bench.engine import Engine
from converters.state import saved
from kvfmt import watch
from kvfmt.bindings import patched_bindings
from kvfmt.errors import KvfmtError
from kvfmt.runtime import UBATCH, listen


class LabError(KvfmtError):
    """The model or the state cannot serve the experiment."""


class Watch(watch.Watch):
    """Collects tensors of the forward pass by name, such as "Kcur-3", in the order in which they are computed.

    A name may come several times in a pass: llama.cpp calls the keys "Kcur" as W_k gives them, with the bias
    added, and after RoPE. ``seen[name]`` has one list per occurrence, of float32 [values] per pass.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        # Views have names such as "Kcur-3 (reshaped)": the same values once more, perhaps with gaps.
        super().__init__(lambda node: wanted(node.name), self._collect)
        self.seen: dict[str, list[list[np.ndarray]]] = {}
        self._in_pass: dict[str, int] = {}

    def begin_pass(self) -> None:
        """Occurrences are counted anew in every forward pass."""
        self._in_pass.clear()

    def _collect(self, node: watch.Node) -> None:
        turn = self._in_pass.get(node.name, 0)
        self._in_pass[node.name] = turn + 1
        turns = self.seen.setdefault(node.name, [])
        if len(turns) <= turn:
            turns.append([])
        turns[turn].append(node.values().reshape(-1))

    def take(self, name: str, turn: int, tokens: int) -> np.ndarray:
        """float32 [tokens, values] of the ``turn``-th occurrence, -1 the last. Raises LabError if it was not seen."""
        self.check()
        turns = self.seen.get(name)
        if not turns:
            raise LabError(f"the forward pass has no tensor {name!r}", "The lab knows models whose graph names Qcur and Kcur.")
        data = np.concatenate(turns[turn])
        if data.size % tokens:
            raise LabError(f"{name} has {data.size} values, not a multiple of {tokens} tokens", "The model's layout is unknown.")
        return data.reshape(tokens, -1)


def _last_words() -> str:
    """What the library said last."""
    return "".join(list(listen())[-6:]).strip()


class Session:
    """One model, one f16 context of ``n_ctx`` tokens, flash attention on or off.

    Raises LabError, with the library's own words, if the model does not load or the context is refused.
    """

    def __init__(self, model: Path, n_ctx: int, threads: int = 0, flash: bool = True, watch: Optional[Watch] = None) -> None:
        llama = self.llama = patched_bindings()
        self.ctx = None
        self.path, self.n_ctx, self.watch = Path(model), n_ctx, watch
        if not self.path.is_file():
            raise LabError(f"no model at {model}", "Fetch one: kvfmt models fetch")
        try:
            self.engine = Engine(self.path, threads or None)
        except KvfmtError as error:
            raise LabError(error.message, error.hint) from None
        self.model = self.engine.model
        if n_ctx > self.engine.n_ctx_train:
            self.close()
            raise LabError(f"{n_ctx} tokens are more than the {self.engine.n_ctx_train} that {self.path.name} was trained for", "Ask for fewer.")
        params = llama.llama_context_default_params()
        # The shape of the work decides the last bits of a float: it is the same for all.
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, UBATCH, UBATCH
        params.n_threads = params.n_threads_batch = self.engine.threads
        params.type_k = params.type_v = llama.GGML_TYPE_F16
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        # Sliding-window layers hold what they hold in use, not the whole context.
        params.swa_full = False
        if watch is not None:
            params.cb_eval = watch.callback
        self.ctx = llama.llama_init_from_model(self.model, params)
        if not self.ctx:
            words = _last_words()
            self.close()
            raise LabError(f"no context of {n_ctx} tokens for {self.path.name}: {words}", "Ask for fewer tokens.")
        self._memory = llama.llama_get_memory(self.ctx)
        self.n_past = 0

    def close(self) -> None:
        if self.ctx:
            self.llama.llama_free(self.ctx)
        self.ctx = None
        self.engine.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tokenize(self, text: str, begin: bool = True) -> list[int]:
        """Tokens of a text; with ``begin`` those that the model wants at the beginning are added."""
        return self.engine.tokenize(text, special=begin).tolist()

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
                raise LabError(f"llama_decode failed with {status}: {_last_words()}", "The context may be too small.")
        finally:
            llama.llama_batch_free(batch)
        self.n_past += len(tokens)
        n = len(tokens) if every else int(last_part)
        if not n:
            return None
        return np.ctypeslib.as_array(llama.llama_get_logits(self.ctx), shape=(n, self.engine.n_vocab)).copy()

    def clear(self) -> None:
        """Forgets everything."""
        self.llama.llama_memory_clear(self._memory, True)
        self.n_past = 0

    def save(self) -> bytes:
        """The sequence's state. Raises StateError if there is none."""
        return saved(self.ctx)

    def load(self, state: bytes) -> None:
        """Replaces what the context holds. Raises LabError, with the library's words, if it refuses the state."""
        self.clear()
        listen().clear()
        space = (ctypes.c_uint8 * max(1, len(state))).from_buffer_copy(state or b"\0")
        n = self.llama.llama_state_seq_set_data(self.ctx, space, len(state), 0)
        if n != len(state) or n == 0:
            self.clear()
            raise LabError(
                f"the state was refused ({n} of {len(state)} bytes read): {_last_words()}",
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

