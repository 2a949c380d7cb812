"""Rows of K and V as a quantized cache would be given them: out of a real run, in the rotation of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from converters import state
from kvfmt.bindings import open_model
from kvfmt.errors import KvfmtError
from kvfmt.transform import hadamard, rotation_size


def sequence_state(model, tokens: list[int]) -> bytes:
    """Evaluates tokens in a ``llama_cpp.Llama`` and returns its saved sequence. Raises StateError."""
    model.reset()
    model.eval(tokens)
    return state.saved(model.ctx)


def head_sizes(metadata: dict[str, str]) -> tuple[int, int]:
    """(keys, values): the head sizes in a GGUF's metadata. Raises KvfmtError if it does not say."""
    arch = metadata.get("general.architecture", "")
    try:
        default = int(metadata[f"{arch}.embedding_length"]) // int(metadata[f"{arch}.attention.head_count"])
    except (KeyError, ValueError):
        # A list: heads that differ by layer. Then the lengths must be given.
        default = 0
    sizes = tuple(int(metadata.get(f"{arch}.attention.{side}_length", default)) for side in ("key", "value"))
    if not all(sizes):
        raise KvfmtError(f"the model's metadata does not give the head size of architecture '{arch}'", "It needs attention.key_length.")
    return sizes


def rotated_heads(sides: list[np.ndarray], head: int, keys: bool) -> np.ndarray:
    """float16 [cells, heads * head] of each layer -> float32 [rows, head] in the domain in which llama.cpp quantizes.

    Rows come layer by layer, token by token, head by head. Raises KvfmtError if a layer's width is not whole heads.
    """
    for index, side in enumerate(sides):
        if side.shape[1] % head:
            raise KvfmtError(f"layer {index} stores {side.shape[1]} values a token, not whole heads of {head}", "Heads of several sizes are not read here.")
    rows = np.concatenate([side.reshape(-1, head) for side in sides]).astype(np.float32)
    return hadamard(rows, rotation_size(head, keys))


def cache_rows(path: Path, text: str, n_tokens: int, threads: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """(K, V) of all layers for the first ``n_tokens`` of ``text``: float32 [layers * tokens * KV heads, head], rotated.

    The cache of the run is f16, which llama.cpp does not rotate. Raises KvfmtError if the text is shorter, or the
    model's cache cannot be read.
    """
    if n_tokens < 1:
        raise KvfmtError(f"{n_tokens} tokens make no cache", "Give at least 1.")
    n_ctx = -(-n_tokens // 256) * 256
    model = open_model(str(path), kv="f16", n_ctx=n_ctx, n_batch=min(n_ctx, 512), n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False)
    try:
        # 16 characters a token are more than any text needs; the tokenizer of a whole corpus takes seconds.
        tokens = model.tokenize(text[: 16 * n_tokens].encode())
        if len(tokens) < n_tokens:
            raise KvfmtError(f"the text has {len(tokens)} tokens, not {n_tokens}", "Ask for fewer tokens, or give a longer text.")
        head_k, head_v = head_sizes(model.metadata)
        saved = state.read(sequence_state(model, tokens[:n_tokens]))
    finally:
        model.close()
    streams = [cache.only for cache in saved.caches]
    k = [side.f16() for stream in streams for side in stream.k]
    v = [side.f16() for stream in streams for side in stream.v]
    return rotated_heads(k, head_k, True), rotated_heads(v, head_v, False)
