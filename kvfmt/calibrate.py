"""Calibration: runs a model over text, and keeps the statistics of the keys, values and queries that attention really has.

They are taken where they enter the cache and the attention, by operation and not by name, so that every architecture with
a KV cache and flash attention is read alike: what SET_ROWS writes to cache_k_l{N} and cache_v_l{N}, and the queries of the
FLASH_ATTN_EXT that reads them (of several layers, where they share a cache).

Keys and queries are weighed by what an error does. Storing adds noise of its own to each key; with dl_i the error of logit i
the output of attention, o = sum p_i v_i, is off by sum p_i dl_i (v_i - o), whose expected square is sum p_i^2 |v_i - o|^2 var(dl_i).
So each pair of a query and a key weighs p_i^2 |v_i - o|^2: a key what its queries give it, a query what its keys do. The first token
needs this most: its key, an attention sink, lies far from all others and takes much of the attention. Counted as one key
in a thousand it is stored so badly that the maps do more harm than good.

Values are weighed likewise for their centre: noise of v_i reaches the output times p_i, and grows with |v_i - c| if c is taken off
before it is stored, so the best c is the mean with weights p_i^2. The first token decides it again: its value is small, and
nearly the same in every text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence

import numpy as np

from kvfmt.blas import one_thread
from kvfmt.errors import KvfmtError
from kvfmt.geometry import FLAT, KeyMaps, Layout, key_maps, value_mean
from kvfmt.moments import LayerStatistics, Moments
from kvfmt.profile import LARGEST_SCALE, LEAST_SCALE, LayerMaps, Profile, fingerprint_of, formats_of, layers_of, read_model
from kvfmt.reach import spans_to, turned_moments
from kvfmt.runtime import UBATCH, LoadedModel
from kvfmt.subjects import ModelFile, Text
from kvfmt.transform import rotation_size
from kvfmt.watch import Node, Watch

#: Characters that a token has at most, nearly always: so much text is taken for a context.
CHARACTERS = 16
#: Context lengths that are run by default; longer ones are reached by turning what was seen (kvfmt/reach.py).
LENGTHS = (1024,)
#: Tokens of the longest context that a profile is made for by default, as far as the model goes.
REACH = 8192
#: Tokens that are calibrated on if nobody says otherwise, shared by texts and lengths.
TOKENS = 16384
#: Queries that are looked at in a pass; they are spread evenly over it.
QUERIES = 128
#: How much of the noise of a 4-bit type f16 maps may add, by their rounding, before they are stored as f32.
ROUNDING = 0.01 * 0.007

_CACHE = re.compile(r"cache_([kv])_l(\d+)")
_SAME_VALUES = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT")


class CalibrationError(KvfmtError):
    """The model, the text or the activations cannot be calibrated on."""


@dataclass(frozen=True)
class Rope:
    """What RoPE did to a head: ``rotated`` values are turned, ``frequencies`` float64 [rotated / 2] in radians a token, None where
    they are not a constant of each pair; ``adjacent``: a pair is 2i and 2i + 1, else i and i + rotated / 2."""

    rotated: int = 0
    adjacent: bool = False
    frequencies: Optional[np.ndarray] = None


class _Layer:
    """What is gathered of one layer that owns KV; keys and queries apart for each length of context."""

    def __init__(self, heads: int, k_size: int, v_size: int) -> None:
        self._heads, self._k_size = heads, k_size
        self._seen: dict[int, tuple[Moments, Moments]] = {}
        # The key at position 0 does not move in longer contexts: it has moments, and so a weight, of its own.
        self.anchor = Moments(heads, k_size)
        self.v, self.first = Moments(heads, v_size), Moments(heads, k_size)
        # Values, weighed by the square of the attention that they get.
        self.attended = Moments(heads, v_size)
        self.tokens = self.queries = 0
        self.shift_free, self.rope = True, Rope()

    def at(self, length: int) -> tuple[Moments, Moments]:
        """Moments of keys and of queries in contexts of that length."""
        return self._seen.setdefault(length, (Moments(self._heads, self._k_size), Moments(self._heads, self._k_size)))

    def statistics(self, reach: int) -> LayerStatistics:
        """For contexts up to ``reach`` tokens; those that were seen where RoPE's frequencies are not known."""
        k_parts = [(self.anchor.weight, self.anchor.mean, self.anchor.second())]
        q_parts = []
        for length, (k, q) in sorted(self._seen.items()):
            for parts, found in ((k_parts, k), (q_parts, q)):
                mean, second = found.mean, found.second()
                if reach > length and self.rope.frequencies is not None:
                    mean, second = turned_moments(mean, second, self.rope.frequencies, self.rope.adjacent, spans_to(length, reach))
                parts.append((found.weight, mean, second))
        k_mean, k_second = _pooled(k_parts)
        return LayerStatistics(
            self.tokens, self.queries, k_mean, k_second - k_mean[:, :, None] * k_mean[:, None, :], _pooled(q_parts)[1],
            self.v.mean, self.v.second(), self.attended.mean, self.first.mean, self.shift_free, self.rope.rotated, self.rope.adjacent,
        )


def _pooled(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean [H, d] and second moment [H, d, d] of several sets, given as weight [H], mean and second moment."""
    total = sum(weight for weight, _, _ in parts)
    shares = [weight / np.where(total > 0, total, 1) for weight, _, _ in parts]
    return (
        sum(share[:, None] * mean for share, (_, mean, _) in zip(shares, parts)),
        sum(share[:, None, None] * second for share, (_, _, second) in zip(shares, parts)),
    )


class Collector:
    """Gathers statistics from a watched forward pass. Act within ``watch.watching()``; call ``begin(position)`` before every pass."""

    def __init__(self) -> None:
        self.layers: dict[int, _Layer] = {}
        self.watch = Watch(self._wanted, self._seen)
        self._position = self._length = 0
        # What was written in this pass and not yet asked, by the root tensor's address: [tokens, heads * size] and RoPE.
        self._written: dict[int, tuple[np.ndarray, Rope]] = {}

    def begin(self, position: int, length: int = 0) -> None:
        """The next pass starts at this position of its context, which will have ``length`` tokens."""
        self._position, self._length = position, length
        self._written.clear()

    def statistics(self, reach: int = 0) -> dict[int, LayerStatistics]:
        """By layer that owns KV, for contexts of up to ``reach`` tokens where that is more than was run. Raises CalibrationError if nothing was seen."""
        if not self.layers:
            raise CalibrationError("no attention over a KV cache was seen", "The model has none, or this build computes it in another way.")
        found = {layer: self.layers[layer].statistics(reach) for layer in sorted(self.layers)}
        for layer, statistics in found.items():
            statistics.check(f"layer {layer}")
        return found

    def _wanted(self, node: Node) -> bool:
        op = node.op
        return op == "FLASH_ATTN_EXT" or op == "SET_ROWS" and _CACHE.fullmatch(node.root.name) is not None

    def _seen(self, node: Node) -> None:
        if node.op == "SET_ROWS":
            rows = node.source(0)
            values = rows.values()
            self._written[node.root.address] = (values.reshape(-1, values.shape[-1]), _rope_of(rows))
            return
        q, k, v = (node.source(i) for i in range(3))
        match = _CACHE.fullmatch(k.root.name)
        if match is None:
            return  # attention within the batch, as in an encoder: nothing is stored
        layer = int(match[2])
        if v.root.address == k.root.address:
            raise CalibrationError(f"layer {layer} reads its values out of its keys (latent attention)", "Such a cache has no maps.")
        size, heads = k.shape[0], k.shape[2]
        known = self.layers.get(layer)
        if known is None:
            known = self.layers[layer] = _Layer(heads, size, v.shape[0])
        written = self._written.pop(k.root.address, None)
        if written is not None:
            rows, known.rope = written
            # What does not fit into an f16 becomes infinite there.
            with np.errstate(over="ignore"):
                rows = _finite(rows.astype(np.float16), f"keys of layer {layer}").reshape(-1, heads, size)
            known.tokens += len(rows)
            if self._position == 0:
                known.first.add(rows[:1].transpose(1, 0, 2))
        written = self._written.pop(v.root.address, None)
        if written is not None:
            known.v.add(_finite(written[0], f"values of layer {layer}").reshape(-1, heads, v.shape[0]).transpose(1, 0, 2))
        self._ask(known, node, layer)

    def _ask(self, known: _Layer, node: Node, layer: int) -> None:
        """Adds every key of the cache, and the sampled queries, each with its weight."""
        attention = Attention.of(node)
        asked = _finite(attention.queries, f"queries of layer {layer}")
        if not attention.shift_free:
            known.shift_free = False
        heads = len(attention.keys)
        group = len(asked) // heads
        k, q = known.at(self._length)
        for head in range(heads):
            weights = np.zeros(attention.keys.shape[1])
            of_queries = np.empty((group, asked.shape[1]))
            squares = np.zeros_like(weights)
            for i in range(group):
                p = attention.probabilities(head * group + i)
                squares += np.square(p).sum(axis=0, dtype=np.float64)
                pairs = attention.weights(p, head)
                weights += pairs.sum(axis=0, dtype=np.float64)
                of_queries[i] = pairs.sum(axis=1, dtype=np.float64)
            known.attended.add_head(head, attention.values[head], squares)
            known.anchor.add_head(head, attention.keys[head][:1], weights[:1])
            weights[0] = 0
            k.add_head(head, attention.keys[head][weights > 0], weights[weights > 0])
            q.add_head(head, asked[head * group : (head + 1) * group].reshape(group * asked.shape[1], -1) * attention.scale, of_queries.reshape(-1))
        known.queries += group * asked.shape[1]


@dataclass(frozen=True)
class Attention:
    """One FLASH_ATTN_EXT: ``queries`` float32 [query heads, n, d], a sample of the pass; ``keys``, ``values`` float32 [KV heads, cells, d] as stored;
    ``mask`` float32 [n, cells], -inf where a query does not look; ``slopes`` [query heads] of ALiBi; ``sinks`` [query heads] or None."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    scale: float
    cap: float
    slopes: np.ndarray
    sinks: Optional[np.ndarray]

    @classmethod
    def of(cls, node: Node) -> Attention:
        """Reads its inputs. The parameters are the scale, the largest ALiBi bias and the logit soft-cap (ggml_flash_attn_ext)."""
        q, k, mask, sinks = (node.source(i) for i in (0, 1, 3, 4))
        scale, bias, cap = (node.float_parameter(i) for i in range(3))
        queries = q.values()[0]
        step = max(1, queries.shape[1] // QUERIES)
        heads, n = queries.shape[:2]
        # ggml: two geometric series of slopes, around the largest power of two that is not above the number of heads.
        power = 2 ** int(np.log2(heads))
        h = np.arange(heads)
        slopes = np.ones(heads) if bias <= 0 else np.where(h < power, 2 ** (-bias / power * (h + 1)), 2 ** (-bias / 2 / power * (2 * (h - power) + 1)))
        seen = np.zeros((n, k.shape[1]), np.float32) if mask is None else mask.values()[0, 0, :n]
        return cls(
            queries[:, step - 1 :: step], k.values()[0], node.source(2).values()[0], seen[step - 1 :: step], scale, cap, slopes, None if sinks is None else sinks.values().reshape(-1)
        )

    @property
    def shift_free(self) -> bool:
        """Whether one number added to all logits of a query changes nothing."""
        return self.cap == 0 and self.sinks is None

    def weights(self, p: np.ndarray, kv_head: int) -> np.ndarray:
        """What the square of an error of each logit adds to that of the output, float32 [n, cells]: p^2 |v - o|^2, from ``probabilities``."""
        v = self.values[kv_head]
        o = p @ v
        away = (v * v).sum(axis=1)[None, :] - 2 * (o @ v.T) + (o * o).sum(axis=1)[:, None]
        return p * p * np.maximum(away, 0)

    def probabilities(self, head: int) -> np.ndarray:
        """Softmax of one query head, float32 [n, cells]; with a sink its rows sum to less than 1."""
        group = len(self.queries) // len(self.keys)
        logits = (self.queries[head] * np.float32(self.scale)) @ self.keys[head // group].T
        if self.cap:
            logits = np.float32(self.cap) * np.tanh(logits / np.float32(self.cap))
        logits += self.mask * np.float32(self.slopes[head])
        top = logits.max(axis=1, keepdims=True)
        extra = 0.0
        if self.sinks is not None:
            top = np.maximum(top, self.sinks[head])
            extra = np.exp(self.sinks[head] - top)
        np.exp(logits - top, out=logits)
        return logits / (logits.sum(axis=1, keepdims=True) + extra)


def _finite(values: np.ndarray, what: str) -> np.ndarray:
    if not np.isfinite(values).all():
        raise CalibrationError(
            f"the {what} have values that are not finite, or too large for the f16 cache", "The model is damaged, or needs a cache of another type."
        )
    return values


def _rope_of(node: Optional[Node]) -> Rope:
    """What RoPE did on the way to ``node``; nothing if it is not RoPE's output."""
    while node is not None and node.op in (*_SAME_VALUES, "NONE"):
        node = node.source(0) if node.op in _SAME_VALUES else None
    if node is None or node.op != "ROPE":
        return Rope()
    # ggml_rope: the parameters are n_past, n_dims, mode ..., then as floats from the sixth on the base, the scale and YaRN's
    # extrapolation; mode 0 pairs 2i with 2i + 1, mode 2 pairs i with i + n_dims / 2, others turn by several positions.
    rotated, mode = node.parameter(1), node.parameter(2)
    base, scale, extrapolation = (node.float_parameter(i) for i in (5, 6, 7))
    frequencies = None
    if mode in (0, 2) and extrapolation == 0 and base > 0:
        factors = node.source(2)
        frequencies = scale * base ** (-np.arange(0, rotated, 2) / rotated)
        if factors is not None:
            frequencies = frequencies / factors.values().reshape(-1)[: rotated // 2]
    return Rope(rotated, mode == 0, frequencies)


class Context:
    """An f16 cache of one sequence, on the CPU, watched. No logits are asked for."""

    def __init__(self, model: LoadedModel, n_ctx: int, collector: Collector) -> None:
        model.check_ctx(n_ctx)
        self._lib, self._collector = model.lib, collector
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = min(UBATCH, n_ctx)
        params.n_outputs_max = params.n_outputs_max_per_seq = 1
        params.n_threads = params.n_threads_batch = model.threads
        params.type_k = params.type_v = lib.GGML_TYPE_F16
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.swa_full, params.offload_kqv, params.no_perf = False, False, True
        params.cb_eval = collector.watch.callback
        self._context = model.create_context(params)
        self._memory = lib.llama_get_memory(self._context)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_free(self._context)

    def feed(self, tokens: np.ndarray, on_tokens: Callable[[int], None]) -> None:
        """Forgets everything, then takes tokens, int32 [n]. Raises KvfmtError, with what was raised while watching."""
        self._lib.llama_memory_clear(self._memory, True)
        batch = self._lib.llama_batch_init(UBATCH, 0, 1)
        watch = self._collector.watch
        try:
            with watch.watching():
                for start in range(0, len(tokens), UBATCH):
                    part = tokens[start : start + UBATCH]
                    batch.n_tokens = len(part)
                    for i, token in enumerate(part):
                        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), start + i, 1, False
                        batch.seq_id[i][0] = 0
                    self._collector.begin(start, len(tokens))
                    status = self._lib.llama_decode(self._context, batch)
                    # Without logits the call returns before the work is done.
                    self._lib.llama_synchronize(self._context)
                    watch.check()
                    if status:
                        raise CalibrationError(f"llama.cpp could not decode at token {start}: status {status}", "A smaller context may fit.")
                    on_tokens(len(part))
        finally:
            self._lib.llama_batch_free(batch)


def contexts_of(model: LoadedModel, text: Text, n_ctx: int, count: int) -> list[np.ndarray]:
    """``count`` pieces of a text, spread evenly over it, in tokens, int32 [n_ctx] each, with what the model wants at the start.

    Raises CalibrationError if the text is too short.
    """
    pieces, seen_tokens, seen_characters = [], 0, 0
    for i in range(count):
        start = len(text.content) * i // count
        piece = text.content[start : start + CHARACTERS * n_ctx]
        tokens = model.tokenize(piece)
        if len(tokens) < n_ctx:
            # The last one may be too short: it begins earlier then.
            tail = model.tokenize(text.content[-CHARACTERS * n_ctx :], special=False)[-(n_ctx - model.add_bos) :]
            tokens = np.concatenate([np.array([model.bos] * model.add_bos, np.int32), tail])
        else:
            seen_tokens, seen_characters = seen_tokens + len(tokens), seen_characters + len(piece)
        pieces.append(tokens[:n_ctx])
    there = int(seen_tokens * len(text.content) / seen_characters) if seen_characters else len(model.tokenize(text.content))
    if there * 1.05 < n_ctx * count or any(len(piece) < n_ctx for piece in pieces):
        raise CalibrationError(
            f"text '{text.name}' has about {there} tokens, {count} contexts of {n_ctx} need {n_ctx * count}",
            "Give a longer text or several (--text), or ask for fewer tokens (--tokens).",
        )
    return pieces


def plan(texts: Sequence[Text], lengths: Sequence[int], tokens: int) -> list[tuple[Text, int, int]]:
    """(text, context length, count): about ``tokens`` in all, shared evenly by texts and by lengths, at least one each."""
    if not texts or not lengths or tokens < 1 or any(n < 2 for n in lengths):
        raise CalibrationError("nothing to calibrate on", "Give at least one text, one context length of at least 2 and a number of tokens.")
    share = tokens / (len(texts) * len(lengths))
    return [(text, n, max(1, round(share / n))) for text in texts for n in lengths]


def measure(
    model: LoadedModel, texts: Sequence[Text], lengths: Sequence[int], tokens: int,
    update: Callable[[int, int], None] = lambda done, of: None, reach: int = 0,
) -> dict[int, LayerStatistics]:
    """Runs the model over the texts; statistics by layer that owns KV. The memory does not depend on ``tokens``.

    ``reach``: tokens of the longest context that they are for, if that is more than the longest of ``lengths``.

    ``update(done, total)`` counts tokens. Raises KvfmtError for a text that is too short, a context that is too long, a
    model whose attention cannot be read, and activations that are not finite.
    """
    steps = [(n, piece) for text, n, count in plan(texts, lengths, tokens) for piece in contexts_of(model, text, n, count)]
    total, done = sum(len(piece) for _, piece in steps), 0
    collector = Collector()

    def count(n: int) -> None:
        nonlocal done
        done += n
        update(done, total)

    for n_ctx in dict.fromkeys(n for n, _ in steps):
        with one_thread(), Context(model, n_ctx, collector) as context:
            for n, piece in steps:
                if n == n_ctx:
                    context.feed(piece, count)
    return collector.statistics(reach)


def stored_maps(maps: KeyMaps, statistics: LayerStatistics) -> LayerMaps:
    """Maps as a profile has them: f16, or f32 where their rounding would add to the error of a 4-bit type.

    A diagonal is stored as such where llama.cpp rotates heads of this size itself, and one that only says how large a head is not
    at all: every block has a scale of its own. So it is with an order of channels, whose groups are mixed alike.
    """
    mean = None if maps.mean is None else maps.mean.astype(np.float32)
    if maps.scale is not None and (maps.order is not None or rotation_size(maps.scale.shape[1], keys=True) > 1):
        even = maps.order is None and (maps.scale == maps.scale[:, :1]).all()
        scale = None if even else np.clip(maps.scale, LEAST_SCALE, LARGEST_SCALE).astype(np.float32)
        order, mix = (None, None) if maps.order is None else (maps.order.astype(np.int32), maps.mix.astype(np.float32))
        return LayerMaps(k_mean=mean, k_scale=scale, k_order=order, k_mix=mix)
    with np.errstate(over="ignore"):
        key, query = maps.key.astype(np.float16), maps.query.astype(np.float16)
    if not (np.isfinite(key).all() and np.isfinite(query).all()) or rounding(key, query, maps, statistics) > ROUNDING:
        key, query = maps.key.astype(np.float32), maps.query.astype(np.float32)
    return LayerMaps(k_mean=mean, k_map=key, q_map=query)


def rounding(key: np.ndarray, query: np.ndarray, maps: KeyMaps, statistics: LayerStatistics) -> float:
    """Squared logit error of rounded maps [H, d, d] that no longer undo each other, as a share of ``maps.error``: the worst head."""
    size = key.shape[-1]
    off = query.astype(np.float64).transpose(0, 2, 1) @ key.astype(np.float64) - np.eye(size)
    seen = statistics.k_moment() if maps.mean is None else statistics.k_cov
    error = np.einsum("hij,hij->h", off @ seen @ off.transpose(0, 2, 1), statistics.q_moment)
    return float(np.max(np.divide(error, maps.error, out=np.zeros_like(error), where=maps.error > 0)))


@dataclass(frozen=True)
class Calibration:
    """A profile, and by layer the maps that it was made of, in full precision and with their errors."""

    profile: Profile
    maps: Mapping[int, KeyMaps]


def make_profile(
    subject: ModelFile,
    statistics: Mapping[int, LayerStatistics],
    layout: Layout = FLAT,
    kind: str = "full",
    centre: bool = True,
    provenance: Mapping[str, object] | None = None,
    centre_values: bool = False,
) -> Calibration:
    """The profile of a model from its statistics: ``kind`` is one of geometry.MAPS; ``centre`` is of keys, ``centre_values`` of
    values, both only where softmax is shift-invariant. Raises KvfmtError."""
    file = read_model(subject.path)
    layers = layers_of(file)
    maps = {layer: key_maps(found, layout, kind, centre) for layer, found in statistics.items()}
    stored = {layer: stored_maps(found, statistics[layer]) for layer, found in maps.items()}
    if centre_values:
        stored = {layer: replace(made, v_mean=value_mean(statistics[layer])) for layer, made in stored.items()}
    stored = {layer: made for layer, made in stored.items() if made.arrays()}
    layout_k = tuple(stored[layer].layout_k(layout.name) if layer in stored else "" for layer in range(layers))
    profile = Profile(
        name=f"{subject.name}, keys {' and '.join(sorted({*layout_k} - {''})) or 'as they are'}, map {kind}{', centred' if centre else ''}",
        architecture=file.architecture, layers=layers, fingerprint=fingerprint_of(file),
        layout_k=layout_k, layout_v=tuple(stored[layer].layout_v("") if layer in stored else "" for layer in range(layers)), formats=formats_of(layout_k),
        maps=stored,
        statistics=statistics, provenance={"map": kind, "centre": centre, "centre.values": centre_values, **(provenance or {})},
    )
    return Calibration(profile, maps)


def default_reach(model: LoadedModel) -> int:
    """Tokens of the longest context that a profile of this model is made for, unless somebody says otherwise."""
    return min(REACH, model.n_ctx_train)


def calibrate(
    subject: ModelFile,
    texts: Sequence[Text],
    lengths: Sequence[int] | None,
    tokens: int,
    layout: Layout = FLAT,
    kind: str = "full",
    centre: bool = True,
    threads: int | None = None,
    update: Callable[[int, int], None] = lambda done, of: None,
    reach: int | None = None,
    centre_values: bool = False,
) -> Calibration:
    """Measures and makes the profile. ``lengths`` None: LENGTHS, ``reach`` None: REACH, as far as the model goes. Raises what ``measure`` and ``make_profile`` raise."""
    import llama_cpp

    with LoadedModel(subject.path, threads) as model:
        lengths = lengths or sorted({min(n, model.n_ctx_train) for n in LENGTHS})
        reach = default_reach(model) if reach is None else reach
        statistics = measure(model, texts, lengths, tokens, update, reach)
    return make_profile(subject, statistics, layout, kind, centre, {
        "tokens": max(found.tokens for found in statistics.values()), "context": [int(n) for n in lengths], "reach": reach,
        "text.name": [text.name for text in texts], "text.sha256": [text.sha256 for text in texts],
        "model.file": Path(subject.path).name, "model.sha256": subject.sha256, "build": llama_cpp.__version__,
    }, centre_values)


def again(subject: ModelFile, profile: Profile, layout: Layout = FLAT, kind: str = "full", centre: bool = True, centre_values: bool = False) -> Calibration:
    """A profile with other maps from the statistics of ``profile``. Raises KvfmtError if it is another model's, or has none."""
    profile.check_model(subject.path)
    if not profile.statistics:
        raise CalibrationError(f"profile '{profile.name}' has no statistics", "Calibrate again, without --statistics.")
    known = {key: value for key, value in profile.provenance.items() if key not in ("map", "centre", "centre.values")}
    return make_profile(subject, profile.statistics, layout, kind, centre, known, centre_values)
