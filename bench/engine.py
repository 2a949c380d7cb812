"""One loaded model and as many KV caches on it as wanted, through llama-cpp-python.

``llama_cpp.Llama`` loads a model per cache; its lower layer does not, and gives the logits without a copy.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.caches import Cache
from converters.state import saved
from kvfmt import perplexity
from kvfmt.errors import KvfmtError
from kvfmt.policy import cache_cost, parse_kv
from kvfmt.runtime import UBATCH, LoadedModel

#: What all logits of one batch may take, in bytes: it bounds the rows at a large vocabulary.
LOGITS_BYTES = 64 << 20

_WORK = re.compile(r"(?:compute|output) +buffer size (?:=|is) +([\d.]+) MiB")


def free_memory() -> int | None:
    """Bytes that this machine can still give; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


class Engine(LoadedModel):
    """A model in memory; caches are opened with ``open`` and closed before it."""

    def least_bytes(self, cache: Cache, n_ctx: int) -> int:
        """Bytes that this cache takes at least; 0 for a model whose layers are not alike."""
        if not cache.kv:
            return 0  # a profile's types, layer by layer
        lib, k_v = self.lib, parse_kv(cache.kv)
        heads, all_heads = lib.llama_model_n_head_kv(self.model), lib.llama_model_n_head(self.model)
        if not heads or self._setting("attention.head_count_kv") is None:
            return 0
        usual = lib.llama_model_n_embd(self.model) // all_heads
        rows = [heads * (self._setting(f"attention.{side}_length") or usual) for side in ("key", "value")]
        window = lib.llama_model_n_swa(self.model)
        cells = min(n_ctx, window) if window else n_ctx
        if any(row % side.block for row, side in zip(rows, k_v)):
            return 0  # refused by the library, in its own words
        return cache_cost(cells, *rows, lib.llama_model_n_layer(self.model), *k_v, cache.protect).total

    def check_memory(self, cache: Cache, n_ctx: int) -> None:
        """Raises KvfmtError if the cache does not fit into the memory that is free: the system would end the process."""
        needed, free = self.least_bytes(cache, n_ctx), free_memory()
        if self.gpu_layers == 0 and free is not None and needed > free:
            raise KvfmtError(
                f"a cache {cache.title} of {n_ctx} tokens takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free",
                "Take a shorter context, or free some memory.",
            )

    def logit_rows(self, wanted: int = UBATCH) -> int:
        """Rows of logits that a batch may ask for, at most ``wanted``."""
        return int(min(wanted, max(8, LOGITS_BYTES // (4 * self.n_vocab))))

    def open(self, cache: Cache, n_ctx: int, rows: int = 1) -> Session:
        """A cache of ``n_ctx`` tokens; a batch may ask for ``rows`` rows of logits.

        Raises KvfmtError with the library's words if it refuses, if ``n_ctx`` is more than the model's,
        or if there is no memory for it.
        """
        self.check_ctx(n_ctx)
        self.check_memory(cache, n_ctx)
        lib = self.lib
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = min(UBATCH, n_ctx)
        # Buffers for the logits of a whole batch would be half a gigabyte at 262,000 words, for each cache.
        params.n_outputs_max = params.n_outputs_max_per_seq = rows
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k, params.type_v = cache.type_ids
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_protect = cache.protect
        if cache.profile is not None:
            params.kv_profile = str(cache.profile).encode()
        params.swa_full = False
        params.no_perf = True
        context = self.create_context(params, f"the cache {cache.title}", "Choose another type or a smaller context.")
        log = "".join(self._log)
        found = perplexity.allocation(log)
        work = sum(float(size) for size in _WORK.findall(log))
        allocated = Allocation(int(found.mib * (1 << 20)), found.sidecar, int(work * (1 << 20)), found.bits_per_value, found.bits_without_maps, found.policy)
        return Session(self, context, cache, n_ctx, rows, allocated)


@dataclass(frozen=True)
class Allocation:
    """What the library says it allocated, to 0.01 MiB: bytes of the cache, of a profile's maps, of the buffers for logits and for
    computing, bits per value with the maps and without, its own words."""

    n_bytes: int
    sidecar_bytes: int
    work_bytes: int
    bits_per_value: float
    bits_without_maps: float
    policy: tuple[str, ...]


class Session:
    """One cache of one model, one sequence. A context manager, or ``close()`` it before the engine."""

    def __init__(self, engine: Engine, context: Any, cache: Cache, n_ctx: int, rows: int, allocated: Allocation) -> None:
        self.engine, self.cache, self.n_ctx, self.rows, self.allocated = engine, cache, n_ctx, rows, allocated
        self.context = context  # for calls of the library that are not wrapped here
        self.length = 0
        self._lib = engine.lib
        self._memory = self._lib.llama_get_memory(context)
        self._batch = self._lib.llama_batch_init(UBATCH, 0, 1)
        room = (UBATCH,)
        self._token = np.ctypeslib.as_array(self._batch.token, room)
        self._pos = np.ctypeslib.as_array(self._batch.pos, room)
        self._wanted = np.ctypeslib.as_array(self._batch.logits, room)
        for i in range(UBATCH):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self.context:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self.context)
            self.context = None

    def clear(self) -> None:
        """Empties the cache."""
        self._lib.llama_memory_clear(self._memory, True)
        self.length = 0

    def forget(self, length: int) -> None:
        """Keeps the first ``length`` tokens. Raises KvfmtError if this cache cannot (recurrent, sliding window)."""
        if length == self.length:
            return
        if not self._lib.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise KvfmtError(f"the cache cannot go back from {self.length} to {length} tokens", "This kind of model cannot do that.")
        self.length = length

    def snapshot(self) -> tuple[bytes, int]:
        """What the cache holds, to go back to; exact for every kind of cache."""
        return saved(self.context), self.length

    def restore(self, taken: tuple[bytes, int]) -> None:
        """Goes back to a snapshot of this cache. Raises KvfmtError if it is another's."""
        data, length = taken
        self.clear()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if not self._lib.llama_state_seq_set_data(self.context, buffer, len(data), 0):
            raise KvfmtError(f"the saved state does not fit the cache {self.cache.title}", "Restore it into the cache that it was saved from.")
        self.length = length

    def decode(self, tokens: np.ndarray, logits_from: int | None = None) -> np.ndarray:
        """Appends tokens, at most a batch of them; logits of ``tokens[logits_from:]``, float32 [rows, n_vocab].

        None: of none. The array is the library's own: it is overwritten by the next call. Raises KvfmtError.
        """
        n = len(tokens)
        if self.length + n > self.n_ctx:
            raise KvfmtError(f"{self.length} + {n} tokens do not fit a context of {self.n_ctx}", "Open a longer one.")
        wanted = 0 if logits_from is None else n - logits_from
        if not 0 < n <= UBATCH or not 0 <= wanted <= self.rows:
            raise ValueError(f"{n} tokens with {wanted} rows of logits, at most {UBATCH} and {self.rows}")
        self._batch.n_tokens = n
        self._token[:n] = tokens
        self._pos[:n] = np.arange(self.length, self.length + n)
        self._wanted[:n] = 0
        if wanted:
            self._wanted[n - wanted : n] = 1
        status = self._lib.llama_decode(self.context, self._batch)
        if status:
            raise KvfmtError(f"llama.cpp could not decode at token {self.length}: status {status}", "A smaller context may fit.")
        self.length += n
        if not wanted:
            return np.empty((0, self.engine.n_vocab), np.float32)
        pointer = self._lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, (wanted, self.engine.n_vocab))

    def prefill(self, tokens: np.ndarray, last: bool = False) -> np.ndarray:
        """Appends any number of tokens in batches; with ``last``, the logits of the last one, float32 [n_vocab]."""
        out = np.empty((0, self.engine.n_vocab), np.float32)
        for start in range(0, len(tokens), UBATCH):
            piece = tokens[start : start + UBATCH]
            out = self.decode(piece, len(piece) - 1 if last and start + UBATCH >= len(tokens) else None)
        # Without logits the call returns before the work is done.
        self._lib.llama_synchronize(self.context)
        return out[0] if last and len(out) else out

    def greedy(self, logits: np.ndarray, count: int) -> list[int]:
        """Up to ``count`` most likely tokens after ``logits`` [n_vocab], each appended; ends with the model's end token."""
        made: list[int] = []
        while len(made) < count:
            token = int(np.argmax(logits))
            made.append(token)
            if len(made) == count or self.engine.ends(token):
                break
            logits = self.decode(np.array([token], np.int32), 0)[0]
        return made
