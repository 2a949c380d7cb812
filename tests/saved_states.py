"""States of small random models, saved by llama.cpp in every way that it has."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from llama_lib import Context
from random_profile import random_profile

from converters.model_layers import Model, read_model_layers
from kvfmt import profile as profiles

#: Text of the random models: they know bytes from 3 on.
TOKENS = np.random.default_rng(8).integers(3, 259, 400).tolist()


def layers(model: Path) -> Model:
    return read_model_layers(profiles.read_model(model))


def save_as(context: Context, kind: str, path: Path, tokens: list[int]) -> Path:
    """What the context holds as a file of this kind: memory and context as the bindings give them, session and sequence by llama.cpp."""
    c_tokens = (llama_cpp.llama_token * len(tokens))(*tokens)
    if kind == "session":
        assert llama_cpp.llama_state_save_file(context.ctx, str(path).encode(), c_tokens, len(tokens))
    elif kind == "sequence":
        assert llama_cpp.llama_state_seq_save_file(context.ctx, str(path).encode(), 0, c_tokens, len(tokens))
    else:
        path.write_bytes(context.save(None if kind == "context" else 0))
    return path


def load_as(context: Context, kind: str, path: Path) -> list[int] | None:
    """Loads such a file; the tokens in it ([] where it has none), None if it is refused."""
    room, n = (llama_cpp.llama_token * 1024)(), ctypes.c_size_t(0)
    if kind == "session":
        done = llama_cpp.llama_state_load_file(context.ctx, str(path).encode(), room, len(room), ctypes.byref(n))
    elif kind == "sequence":
        done = llama_cpp.llama_state_seq_load_file(context.ctx, str(path).encode(), 0, room, len(room), ctypes.byref(n))
    else:
        done = context.load(path.read_bytes(), None if kind == "context" else 0)
    return list(room[: n.value]) if done else None


def profile_of(model: Path, **options) -> profiles.Profile:
    """A random profile, keywords as ``random_profile``, with the hash of its content."""
    made = random_profile(model, **options)
    known = {key.removeprefix("kvfmt.profile."): value for key, value in made.metadata.items()}
    maps: dict[int, dict[str, np.ndarray]] = {}
    for name, values in made.tensors.items():
        _, layer, what = name.split(".")
        maps.setdefault(int(layer), {})[what.removeprefix("kv_")] = values
    types = {side: tuple(known[f"types_{side}"]) if f"types_{side}" in known else None for side in "kv"}
    layouts = {side: tuple(known[f"layout_{side}"]) for side in "kv"}
    named = [name for side in (*layouts.values(), *types.values()) for name in side or ()]
    return profiles.Profile(
        "random", known["model.architecture"], known["model.layers"], known["model.fingerprint"], layouts["k"], layouts["v"],
        {layer: profiles.LayerMaps(**arrays) for layer, arrays in maps.items()}, types["k"], types["v"], profiles.formats_of(named),
    )
