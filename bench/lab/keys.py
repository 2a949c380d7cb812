"""The keys on their way into the cache: W_k's output, norm, RoPE, what is stored. And the queries that meet them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

from bench.lab.cache import Geometry, Slot, Stored
from bench.lab.session import LabError, Session, Watch
from converters import state as states

#: Relative error (of norms) up to which keys count as the same: f16 storage leaves 2^-12, float32 angles less.
SAME = 2e-3
#: RoPE of sliding-window layers, where it differs from the base in the GGUF (Gemma-3's report, arXiv 2503.19786).
LOCAL_BASE = 10000.0


def rope(x: np.ndarray, positions: np.ndarray, base: float, n_rot: int, neox: bool, inverse: bool = False) -> np.ndarray:
    """Rotary embedding of float32 [tokens, heads, dim]. ``neox`` pairs i with i + n_rot / 2, else 2i with 2i + 1."""
    half = n_rot // 2
    angle = positions[:, None].astype(np.float64) * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :] * (-1 if inverse else 1)
    first, second = (slice(0, half), slice(half, n_rot)) if neox else (slice(0, n_rot, 2), slice(1, n_rot, 2))
    out = x.astype(np.float32).copy()
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Root-mean-square norm over the head, float32 [tokens, heads, dim]."""
    x = x.astype(np.float64)
    return (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight).astype(np.float32)


def watch_qk() -> Watch:
    """Watches the queries and keys of every layer."""
    return Watch(lambda name: name.partition("-")[0] in ("Qcur", "Kcur") and name.partition("-")[2].isdigit())


@dataclass(frozen=True)
class Keys:
    """Keys of a prompt. ``projected[i]`` is W_k's output of layer i, bias included, float32 [tokens, heads, dim].

    ``bases[i]`` is the RoPE base that turns it into what layer i stores, which was checked.
    """

    geometry: Geometry
    projected: tuple[np.ndarray, ...]
    order: tuple[Slot, ...]
    bases: tuple[float, ...]
    neox: bool

    def normed(self, layer: int, projected: np.ndarray) -> np.ndarray:
        """W_k's output -> the key before RoPE. The same array for models without a key norm."""
        weight = self.geometry.key_norms[layer]
        return projected if weight is None else rms_norm(projected, weight, self.geometry.norm_eps)

    def rotated(self, layer: int, normed: np.ndarray, positions: np.ndarray, inverse: bool = False) -> np.ndarray:
        """The key before RoPE -> the stored key; with ``inverse`` the other way."""
        return rope(normed, positions, self.bases[layer], self.geometry.n_rot, self.neox, inverse)


def evaluate(session: Session, tokens: Sequence[int], geometry: Geometry) -> tuple[bytes, Keys, np.ndarray]:
    """Runs a prompt in a session made with ``watch=watch_qk()``: its state, its keys, its last logits.

    Finds which layer of the state is which of the model, and checks the arithmetic from W_k's output to the stored
    key on every one. Raises LabError if a layer does not come out as it is stored.
    """
    watch = session.watch
    session.clear()
    watch.seen.clear()
    with watch.watching():
        last = session.decode(tokens, "last")
    data = session.save()
    state = states.read(data)
    slots = [Slot(c, i) for c, cache in enumerate(state.caches) for i in range(len(cache.only.k))]
    neox = session.llama.llama_model_rope_type(session.model) == session.llama.LLAMA_ROPE_TYPE_NEOX
    n, shape = len(tokens), (len(tokens), geometry.kv_heads, geometry.k_dim)
    order, bases, projected = [], [], []
    for layer in range(geometry.layers):
        stored = watch.take(f"Kcur-{layer}", -1, n)
        slot = _slot_of(stored, state, slots)
        if slot is None:
            raise LabError(f"no layer of the state holds the keys of layer {layer}", "The lab does not know this model's graph.")
        slots.remove(slot)
        order.append(slot)
        projected.append(watch.take(f"Kcur-{layer}", -2, n).reshape(shape))
    keys = Keys(geometry, tuple(projected), tuple(order), (0.0,) * geometry.layers, neox)
    positions = np.arange(n)
    for layer in range(geometry.layers):
        stored = watch.take(f"Kcur-{layer}", -1, n).reshape(shape)
        normed = keys.normed(layer, projected[layer])
        errors = {
            base: np.linalg.norm(rope(normed, positions, base, geometry.n_rot, neox) - stored) / np.linalg.norm(stored)
            for base in dict.fromkeys((geometry.rope_base, LOCAL_BASE))
        }
        base = min(errors, key=errors.get)
        if errors[base] > SAME:
            raise LabError(
                f"layer {layer}: W_k's output, normed and rotated, is {errors[base]:.1%} off the stored key",
                "The lab does not know this model's norm or RoPE; experiments before RoPE would measure something else.",
            )
        bases.append(base)
    return data, Keys(geometry, tuple(projected), tuple(order), tuple(bases), neox), last


def _slot_of(keys: np.ndarray, state: states.State, slots: list[Slot]) -> Optional[Slot]:
    """The slot whose stored rows are these keys, float32 [tokens, values], rounded to f16."""
    for slot in slots:
        stream = state.caches[slot.cache].only
        if np.array_equal(keys[stream.positions].astype(np.float16), stream.k[slot.index].f16()):
            return slot
    return None


def attention_received(session: Session, stored: Stored, tokens: Sequence[int]) -> np.ndarray:
    """Share of attention that each old token gets from a continuation, float64 [layers, old tokens].

    Loads the state, evaluates the continuation, and takes softmax(q.k / sqrt(dim)) of its own queries with its own
    and the old keys, mean over queries and heads. Rows sum to 1 less what the continuation pays to itself.
    """
    geometry, watch = stored.geometry, session.watch
    session.load(stored.bytes())
    n_old, n_new = session.n_past, len(tokens)
    watch.seen.clear()
    with watch.watching():
        session.decode(tokens, "last")
    found = np.zeros((geometry.layers, n_old))
    group = geometry.heads // geometry.kv_heads
    windowed = len(stored.state.caches) > 1
    for layer in range(geometry.layers):
        q = watch.take(f"Qcur-{layer}", -1, n_new).reshape(n_new, geometry.heads, geometry.k_dim)
        new = watch.take(f"Kcur-{layer}", -1, n_new).reshape(n_new, geometry.kv_heads, geometry.k_dim)
        at = np.concatenate([stored.positions(layer), n_old + np.arange(n_new)])
        k = np.concatenate([stored.f16(layer, "k").astype(np.float32), new])
        reach = (at[None, :] <= n_old + np.arange(n_new)[:, None])
        if windowed and stored.order[layer].cache == 1:
            reach &= at[None, :] > n_old + np.arange(n_new)[:, None] - geometry.window
        for head in range(geometry.heads):
            logits = (q[:, head] @ k[:, head // group].T) / np.sqrt(geometry.k_dim)
            logits = np.where(reach, logits, -np.inf)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            found[layer, at[at < n_old]] += weights.mean(axis=0)[at < n_old] / geometry.heads
    return found
