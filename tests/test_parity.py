"""The built ggml against the Python reference: what llama.cpp really calls, bit for bit where bits are defined.

Runs against the build that `kvfmt build` made, or any other: KVFMT_BIN=<folder with libggml-*.so>.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import pytest
from blocks import assert_same_blocks, assert_same_floats
from edge_inputs import edge_rows, random_rows, rounding_rows, structured_rows, tie_rows
from ggml_lib import GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_I32, GGML_TYPE_I64, GGML_TYPE_Q8_0, Graph, pointer

from kvfmt import registry

ALL = registry.all_formats()
BY_NAME = {f.spec.name: f for f in ALL}
each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.spec.name)


@lru_cache
def _inputs(name: str, kind: str) -> np.ndarray:
    """float32 [n, 64]."""
    return {
        "edge": edge_rows,
        "ties": lambda: tie_rows(BY_NAME[name].spec),
        "random": lambda: random_rows(6000, 31),
        "gaussian": lambda: np.random.default_rng(32).standard_normal((6000, 64)).astype(np.float32),
        "structured": lambda: structured_rows(2100, 33),
        "rounding": lambda: rounding_rows(BY_NAME[name]),
    }[kind]()


each_kind = pytest.mark.parametrize("kind", ["edge", "ties", "random", "gaussian", "structured", "rounding"])


def _some_blocks(fmt, n: int, seed: int) -> np.ndarray:
    """Packed blocks of any codes, with finite scales of either sign: uint8 [n, size]."""
    data = np.random.default_rng(seed).integers(0, 256, (n, fmt.spec.size), dtype=np.uint8)
    data[:, 1] &= 0xFB
    return data


# --- what the build says about the types -----------------------------------------------------------------------------


@each_format
def test_type_traits(ggml, fmt):
    traits = ggml.traits(fmt.spec.type_id)
    assert traits.type_name.decode() == fmt.spec.name
    assert (traits.blck_size, traits.type_size, traits.is_quantized) == (fmt.spec.block, fmt.spec.size, True)
    assert ggml.base.ggml_row_size(fmt.spec.type_id, 4 * fmt.spec.block) == 4 * fmt.spec.size
    cpu = ggml.cpu_traits(fmt.spec.type_id)
    assert cpu.from_float and cpu.vec_dot
    assert (cpu.vec_dot_type, cpu.nrows) == (GGML_TYPE_Q8_0, 1)


def test_sizes_as_literals(ggml):
    sizes = {f.spec.name: ggml.traits(f.spec.type_id).type_size for f in ALL}
    assert sizes.items() >= {"kvq2": 18, "kvq3": 26, "kvq4": 34, "kvnf4": 34, "kve8_2": 18, "kve8_3": 26, "kvt3": 26, "kvt4": 34}.items()
    assert all(ggml.traits(i).type_size == s for i, s in {770: 18, 771: 26, 772: 34, 773: 34, 774: 18, 775: 26, 776: 26, 777: 34}.items())


@each_format
def test_the_build_is_of_this_spec(ggml, fmt):
    assert ggml.base.ggml_kvq_spec_hash(fmt.spec.type_id).decode() == fmt.spec.hash


def test_the_build_has_these_types_and_no_others(ggml):
    assert [ggml.base.ggml_kvq_type(i) for i in range(len(ALL))] == [f.spec.type_id for f in ALL]
    ours = {f.spec.type_id for f in ALL}
    for type_id in set(range(ALL[-1].spec.type_id + 1)) - ours:
        assert ggml.base.ggml_kvq_spec_hash(type_id) is None
        if type_id > 42:
            assert ggml.traits(type_id).type_size == 0, f"id {type_id} is taken"


# --- bytes -----------------------------------------------------------------------------------------------------------


@each_format
@each_kind
def test_encoders(ggml, fmt, kind):
    x = _inputs(fmt.spec.name, kind)
    want = fmt.encode(x)
    type_id, size = fmt.spec.type_id, fmt.spec.size
    reference, cpu = ggml.traits(type_id).from_float_ref, ggml.cpu_traits(type_id).from_float
    assert_same_blocks(fmt, x, want, ggml.quantize(reference, x, size), f"from_float_ref, {kind}")
    assert_same_blocks(fmt, x, want, ggml.quantize(cpu, x, size), f"cpu from_float, {kind}")
    whole = np.full_like(want, 0xA5)
    cpu(pointer(x), pointer(whole), x.size)
    assert_same_blocks(fmt, x, want, whole, f"cpu from_float of one long row, {kind}")
    chunk = np.full_like(want, 0xA5)
    written = ggml.base.ggml_quantize_chunk(type_id, pointer(x), pointer(chunk), 0, len(x), 64, None)
    assert written == want.nbytes
    assert_same_blocks(fmt, x, want, chunk, f"ggml_quantize_chunk, {kind}")


@each_format
def test_a_chunk_starts_where_it_is_told(ggml, fmt):
    x = random_rows(12, 34)
    out = np.full((12, fmt.spec.size), 0xA5, np.uint8)
    written = ggml.base.ggml_quantize_chunk(fmt.spec.type_id, pointer(x), pointer(out), 4 * 128, 2, 128, None)
    assert written == 4 * fmt.spec.size
    assert_same_blocks(fmt, x[8:], fmt.encode(x[8:]), out[8:], "the third of three chunks")
    assert (out[:8] == 0xA5).all()


@each_format
@pytest.mark.parametrize("kind", ["edge", "ties", "random", "gaussian", "structured", "any bytes"])
def test_decoders(ggml, fmt, kind):
    data = _some_blocks(fmt, 4000, 35) if kind == "any bytes" else fmt.encode(_inputs(fmt.spec.name, kind))
    want = fmt.decode(data)
    to_float, cpu = ggml.traits(fmt.spec.type_id).to_float, ggml.cpu_to_float(fmt.spec.type_id)
    assert_same_floats(fmt, data, want, ggml.dequantize(to_float, data, 64), f"to_float, {kind}")
    assert_same_floats(fmt, data, want, ggml.dequantize(cpu, data, 64), f"to_float of the cpu backend, {kind}")
    whole = np.empty_like(want)
    cpu(pointer(data), pointer(whole), whole.size)
    assert_same_floats(fmt, data, want, whole, f"one long row, {kind}")


# --- validation ------------------------------------------------------------------------------------------------------


def _valid(ggml, fmt, data: np.ndarray, nbytes: int | None = None) -> bool:
    return ggml.base.ggml_validate_row_data(fmt.spec.type_id, pointer(data), data.nbytes if nbytes is None else nbytes)


@each_format
@each_kind
def test_what_is_encoded_is_valid(ggml, fmt, kind):
    assert _valid(ggml, fmt, fmt.encode(_inputs(fmt.spec.name, kind)))


@each_format
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x8001, 0xBC00])
@pytest.mark.parametrize("block", [0, 3])
def test_scales_that_no_encoder_writes_are_refused(ggml, fmt, scale, block):
    """Infinities, NaNs and negative scales."""
    data = fmt.encode(random_rows(4, 36))
    assert _valid(ggml, fmt, data)
    data[block, :2] = scale & 0xFF, scale >> 8
    assert not _valid(ggml, fmt, data)


@each_format
def test_a_row_that_is_not_whole_blocks_is_refused(ggml, fmt):
    data = fmt.encode(random_rows(4, 37))
    assert not _valid(ggml, fmt, data, data.nbytes - 1)
    assert not _valid(ggml, fmt, data, fmt.spec.size + 2)


# --- the ops of a cache ----------------------------------------------------------------------------------------------


def _cells(seed: int, tokens: int, heads: int, head: int) -> np.ndarray:
    """float32 [heads, tokens, head] that mixes edge, random and structured blocks."""
    need = tokens * heads * head // 64
    rows = np.concatenate([edge_rows(), structured_rows(40, seed), random_rows(max(need, 1), seed)])
    order = np.random.default_rng(seed).permutation(len(rows))[:need]
    return rows[order].reshape(heads, tokens, head)


@each_format
@pytest.mark.parametrize("index", [GGML_TYPE_I64, GGML_TYPE_I32], ids=["i64", "i32"])
@pytest.mark.parametrize("source", [GGML_TYPE_F32, GGML_TYPE_F16], ids=["f32", "f16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_set_rows(ggml, fmt, index, source, threads):
    head, tokens, slots, heads = 128, 9, 24, 3
    x = _cells(38, tokens, heads, head)
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype(np.float16 if source == GGML_TYPE_F16 else np.float32)
    where = np.random.default_rng(39).permutation(slots)[:tokens]
    want = np.full((heads, slots, fmt.spec.row_bytes(head)), 0xA5, np.uint8)
    want[:, where] = fmt.encode(x)
    with Graph(ggml) as g:
        cache = g.tensor(fmt.spec.type_id, (head, slots, heads), fill=0xA5)
        rows = g.tensor(source, (head, tokens, heads), x)
        at = g.tensor(index, (tokens,), where.astype(np.int64 if index == GGML_TYPE_I64 else np.int32))
        g.compute(ggml.base.ggml_set_rows(g.ctx, cache, rows, at), threads)
        got = g.bytes_of(cache)
    written = np.zeros((heads, slots, head), np.float32)
    written[:, where] = x
    assert_same_blocks(fmt, written, want, got, "SET_ROWS (blocks of zeros were not to be written)")


@each_format
def test_get_rows(ggml, fmt):
    x = _cells(40, 24, 1, 192)[0]
    data = fmt.encode(x)
    where = np.array([23, 0, 7, 7, 11], np.int32)
    with Graph(ggml) as g:
        cache = g.tensor(fmt.spec.type_id, (192, 24), data)
        got = g.compute(ggml.base.ggml_get_rows(g.ctx, cache, g.tensor(GGML_TYPE_I32, (5,), where)))
    assert_same_floats(fmt, data[where], fmt.decode(data[where]), got.view(np.float32), "GET_ROWS")


@each_format
@pytest.mark.parametrize("source", [GGML_TYPE_F32, GGML_TYPE_F16], ids=["f32", "f16"])
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("threads", [1, 2])
def test_copy_into(ggml, fmt, source, permuted, threads):
    x = _cells(41, 11, 3, 128)
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype(np.float16 if source == GGML_TYPE_F16 else np.float32)
    with Graph(ggml) as g:
        src = g.tensor(source, (128, 11, 3), x)
        shape = (128, 3, 11) if permuted else (128, 11, 3)
        dst = g.tensor(fmt.spec.type_id, shape, fill=0xA5)
        got = g.compute(ggml.base.ggml_cpy(g.ctx, g.swapped(src) if permuted else src, dst), threads)
    order = x.swapaxes(0, 1) if permuted else x
    assert_same_blocks(fmt, order, fmt.encode(order), got, "CPY to the type")


@each_format
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("threads", [1, 2])
def test_copy_out_of(ggml, fmt, permuted, threads):
    data = fmt.encode(_cells(42, 11, 3, 128))
    with Graph(ggml) as g:
        src = g.tensor(fmt.spec.type_id, (128, 11, 3), data)
        dst = g.tensor(GGML_TYPE_F32, (128, 3, 11) if permuted else (128, 11, 3), fill=0xFF)
        got = g.compute(ggml.base.ggml_cpy(g.ctx, g.swapped(src) if permuted else src, dst), threads)
    order = data.swapaxes(0, 1) if permuted else data
    assert_same_floats(fmt, order, fmt.decode(order), got.view(np.float32), "CPY to f32")


@each_format
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
def test_copy_within_the_type(ggml, fmt, permuted):
    data = fmt.encode(_cells(43, 11, 3, 128))
    with Graph(ggml) as g:
        src = g.tensor(fmt.spec.type_id, (128, 11, 3), data)
        dst = g.tensor(fmt.spec.type_id, (128, 3, 11) if permuted else (128, 11, 3), fill=0xA5)
        got = g.compute(ggml.base.ggml_cpy(g.ctx, g.swapped(src) if permuted else src, dst))
    assert_same_blocks(fmt, None, data.swapaxes(0, 1) if permuted else data, got, "CPY to the same type")


# --- dot products ----------------------------------------------------------------------------------------------------


def _q8_0(ggml, query: np.ndarray, reference: bool) -> np.ndarray:
    traits = ggml.traits(GGML_TYPE_Q8_0) if reference else ggml.cpu_traits(GGML_TYPE_Q8_0)
    function = traits.from_float_ref if reference else traits.from_float
    return ggml.quantize(function, query[None], query.size // 32 * 34)[0]


def _vec_dot(ggml, fmt, data: np.ndarray, query: np.ndarray, reference: bool) -> np.ndarray:
    packed = _q8_0(ggml, query, reference)
    function = ggml.cpu_traits(fmt.spec.type_id).vec_dot
    out = np.full(len(data), np.nan, np.float32)
    for i in range(len(data)):
        function(query.size, pointer(out[i : i + 1]), 0, pointer(data[i]), 0, pointer(packed), 0, 1)
    return out


def _bound(decoded: np.ndarray, query: np.ndarray) -> np.ndarray:
    return (2.0**-7 * np.abs(query).max() + 2.0**-18) * np.abs(decoded).sum(axis=-1)


@each_format
@pytest.mark.parametrize("n", [64, 128, 256, 576])
def test_vec_dot(ggml, fmt, n):
    keys = np.concatenate([edge_rows(), structured_rows(70, 44), random_rows(400, 45)])
    keys = keys[np.random.default_rng(46).permutation(len(keys))]
    keys = keys[: len(keys) // (n // 64) * (n // 64)].reshape(-1, n)
    data = fmt.encode(keys)
    decoded = fmt.decode(data).astype(np.float64)
    rng = np.random.default_rng(47)
    for octave in (-20, -6, 0, 6, 16):
        query = (rng.standard_normal(n) * 2.0**octave).astype(np.float32)
        exact = decoded @ query.astype(np.float64)
        for reference in (True, False):
            got = _vec_dot(ggml, fmt, data, query, reference)
            assert (np.abs(got - exact) <= _bound(decoded, query)).all(), f"query at 2**{octave}"
        same = fmt.dot(data, query)
        got = _vec_dot(ggml, fmt, data, query, True)
        assert np.array_equal(got.view(np.uint32), same.view(np.uint32)), (
            f"{np.count_nonzero(got != same)} of {len(same)} differ from the Python dot in a bit"
        )


@each_format
@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_mul_mat(ggml, fmt, columns, threads):
    data = fmt.encode(np.concatenate([structured_rows(33, 48), random_rows(33, 49)]).reshape(-1, 192))
    query = np.random.default_rng(50).standard_normal((columns, 192)).astype(np.float32)
    with Graph(ggml) as g:
        a = g.tensor(fmt.spec.type_id, (192, len(data)), data)
        b = g.tensor(GGML_TYPE_F32, (192, columns), query)
        got = g.compute(ggml.base.ggml_mul_mat(g.ctx, a, b), threads).view(np.float32).reshape(columns, len(data))
    decoded = fmt.decode(data).astype(np.float64)
    for column in range(columns):
        error = np.abs(got[column] - decoded @ query[column].astype(np.float64))
        assert (error <= _bound(decoded, query[column])).all()


# --- flash attention -------------------------------------------------------------------------------------------------


class Stored:
    """A cache type: how ggml stores values, and what Python says they are."""

    def __init__(self, ggml, name: str):
        self.ggml, self.name = ggml, name
        self.fmt = BY_NAME.get(name)
        self.type_id = self.fmt.spec.type_id if self.fmt else {"f16": GGML_TYPE_F16, "q8_0": GGML_TYPE_Q8_0}[name]

    def pack(self, x: np.ndarray) -> np.ndarray:
        if self.fmt:
            return self.fmt.encode(x)
        if self.name == "f16":
            return x.astype(np.float16)
        flat = x.reshape(-1, x.shape[-1])
        return self.ggml.quantize(self.ggml.traits(self.type_id).from_float_ref, flat, x.shape[-1] // 32 * 34)

    def unpack(self, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if self.fmt:
            return self.fmt.decode(data).astype(np.float64).reshape(shape)
        if self.name == "f16":
            return data.astype(np.float64).reshape(shape)
        blocks = data.reshape(-1, 34)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)

    def query(self, q: np.ndarray) -> np.ndarray:
        """A query as this type's dot product sees it."""
        if self.name == "f16":
            return q.astype(np.float64)
        q8 = Stored(self.ggml, "q8_0")
        flat = q.reshape(-1, q.shape[-1])
        rounded = self.ggml.quantize(self.ggml.cpu_traits(GGML_TYPE_Q8_0).from_float, flat, q.shape[-1] // 32 * 34)
        return q8.unpack(rounded, q.shape)


def _attention(q, k, v, mask, scale) -> np.ndarray:
    """float64 [batch, heads, head] of q [heads, batch, head], k and v [heads_kv, n_kv, head], mask [batch, n_kv]."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = np.einsum("hbd,hnd->hbn", q, k) * scale + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hbn,hnd->bhd", weights, v)


def _kv_values(kind: str, rng, heads: int, n_kv: int, head: int, ours: bool) -> np.ndarray:
    shape = (n_kv * heads * head // 64, 64)
    if kind == "structured":
        rows = structured_rows(shape[0], int(rng.integers(2**31))).clip(-6, 6)
    else:
        rows = rng.standard_normal(shape).astype(np.float32)
    if kind == "edge" and ours:  # f16 would keep the infinities
        edges = edge_rows()
        at = rng.permutation(len(rows))[: len(edges)]
        rows[at] = edges[: len(at)]
    return rows.reshape(n_kv, heads, head)


def _mask(rng, batch: int, n_kv: int) -> np.ndarray:
    """f16 [batch, n_kv]: causal towards the end, a few holes, and biases in between."""
    mask = np.where(rng.random((batch, n_kv)) < 0.3, rng.uniform(-2, 0, (batch, n_kv)), 0.0)
    mask[rng.random((batch, n_kv)) < 0.1] = -np.inf
    for row in range(batch):
        mask[row, n_kv - batch + row + 1 :] = -np.inf
        mask[row, row] = 0.0
    return mask.astype(np.float16)


#: Largest difference from float64, relative to the largest value of each output channel: f32 sums of some 75 terms
#: stay below the first. Without one of our types, an f16 V sums in f16 and an f16 K takes the query as f16.
EXACT = 1e-5
HALF = 8e-3
TYPES = ["f16", "q8_0", *BY_NAME]


@pytest.mark.parametrize("kind", ["random", "structured", "edge"])
@pytest.mark.parametrize("v_name", TYPES)
@pytest.mark.parametrize("k_name", TYPES)
def test_flash_attention(ggml, k_name, v_name, kind):
    """Every K x V pair, against float64 attention over what Python decodes."""
    k_type, v_type = Stored(ggml, k_name), Stored(ggml, v_name)
    n_kv, heads_kv = 75, 2
    rng = np.random.default_rng(51)
    for head in (64, 128, 256):
        k_values = _kv_values(kind, rng, heads_kv, n_kv, head, k_type.fmt is not None)
        v_values = _kv_values(kind, rng, heads_kv, n_kv, head, v_type.fmt is not None)
        k_data, v_data = k_type.pack(k_values), v_type.pack(v_values)
        k = k_type.unpack(k_data, k_values.shape).swapaxes(0, 1)
        v = v_type.unpack(v_data, v_values.shape).swapaxes(0, 1)
        scale = 1 / np.sqrt(head)
        for group, batch in ((1, 1), (4, 1), (1, 7), (4, 7)):
            q = rng.standard_normal((heads_kv * group, batch, head)).astype(np.float32)
            if kind == "edge":
                q *= np.float32(1e-3)  # keys reach 65504
            mask = _mask(rng, batch, n_kv)
            ours = k_type.fmt or v_type.fmt
            query = q.astype(np.float64) if ours else k_type.query(q)
            want = _attention(query, k, v, mask.astype(np.float64), scale)
            results = []
            for threads in (1, 2):
                with Graph(ggml, 16) as g:
                    result = ggml.base.ggml_flash_attn_ext(
                        g.ctx,
                        g.tensor(GGML_TYPE_F32, (head, batch, len(q)), q),
                        g.swapped(g.tensor(k_type.type_id, (head, heads_kv, n_kv), k_data)),
                        g.swapped(g.tensor(v_type.type_id, (head, heads_kv, n_kv), v_data)),
                        g.tensor(GGML_TYPE_F16, (n_kv, batch), mask),
                        scale,
                        0.0,
                        0.0,
                    )
                    results.append(g.compute(result, threads).view(np.float32).reshape(want.shape))
            largest = np.repeat(np.abs(v).max(axis=1), group, axis=0)[None]
            error = (np.abs(results[0] - want) / largest).max()
            allowed = HALF if "f16" in (k_name, v_name) and not ours else EXACT
            if ours:
                # few rows: the query becomes 16-bit integers, and each weight moves by the error of two scores
                rounding = np.abs(q).max() * 2.0**-16 * np.sqrt(np.square(k).sum(axis=-1).max()) * scale
                allowed += np.expm1(2 * rounding)
            case = f"K {k_name}, V {v_name}, {kind}, head {head}, {len(q)} on {heads_kv} heads, batch {batch}"
            assert error < allowed, f"{case}: off by {error:.2e} of the largest value"
            if ours:
                assert np.array_equal(results[0], results[1]), f"{case}: two threads differ from one"


@each_format
def test_flash_attention_on_a_query_that_is_not_rounded(ggml, fmt):
    """Against the query itself: what the rounding to q8_0 costs stays within the bound of the dot product."""
    rng = np.random.default_rng(52)
    head, n_kv = 128, 75
    k_data = fmt.encode(rng.standard_normal((n_kv, 1, head)).astype(np.float32))
    v_data = fmt.encode(rng.standard_normal((n_kv, 1, head)).astype(np.float32))
    q = rng.standard_normal((1, 1, head)).astype(np.float32)
    with Graph(ggml, 16) as g:
        result = ggml.base.ggml_flash_attn_ext(
            g.ctx,
            g.tensor(GGML_TYPE_F32, (head, 1, 1), q),
            g.swapped(g.tensor(fmt.spec.type_id, (head, 1, n_kv), k_data)),
            g.swapped(g.tensor(fmt.spec.type_id, (head, 1, n_kv), v_data)),
            None,
            1 / np.sqrt(head),
            0.0,
            0.0,
        )
        got = g.compute(result).view(np.float32).reshape(1, 1, head)
    k, v = (fmt.decode(d).astype(np.float64).swapaxes(0, 1) for d in (k_data, v_data))
    want = _attention(q.astype(np.float64), k, v, 0.0, 1 / np.sqrt(head))
    score_error = (_bound(k, q) / np.sqrt(head)).max()
    assert np.abs(got - want).max() < np.expm1(2 * score_error) * np.abs(v).max()
    assert np.square(got - want).sum() < 1e-4 * np.square(want).sum()


def _pairs() -> list[tuple[str, str]]:
    """Each of our types as K and as V, beside f16, q8_0 and itself."""
    return [pair for name in BY_NAME for pair in ((name, "f16"), ("f16", name), (name, "q8_0"), ("q8_0", name), (name, name))]


def _streams_attention(q, k, v, mask, scale, bias, softcap, sinks) -> np.ndarray:
    """float64 [streams, batch, heads, head]: q [streams, heads, batch, head], k and v [streams, n_kv, heads_kv, head],
    mask [streams, batch, n_kv], bias (ALiBi slopes) and sinks [heads]."""
    group = q.shape[1] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("shbd,snhd->shbn", q, k) * scale
    scores = softcap * np.tanh(scores / softcap) + bias[:, None, None] * mask[:, None]
    most = np.maximum(scores.max(axis=-1, keepdims=True), sinks[:, None, None])
    weights = np.exp(scores - most)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - most)
    return np.einsum("shbn,snhd->sbhd", weights, v)


def _alibi(heads: int, max_bias: float) -> np.ndarray:
    """The slopes of the ALiBi paper for any number of heads."""
    power = 2 ** int(np.log2(heads))
    first = 2.0 ** (-max_bias / power * np.arange(1, power + 1))
    return np.concatenate([first, 2.0 ** (-max_bias / 2 / power * (2 * np.arange(heads - power) + 1))])


@pytest.mark.parametrize("batch", [1, 2, 23], ids=["one token", "few rows", "many rows"])
@pytest.mark.parametrize("k_name, v_name", _pairs())
def test_flash_attention_with_everything(ggml, k_name, v_name, batch):
    """A context that is split, streams, ALiBi, a soft-cap and sinks; and what no query sees may hold any bytes."""
    k_type, v_type = Stored(ggml, k_name), Stored(ggml, v_name)
    head, heads_kv, group, streams, n_kv, max_bias, softcap = 64, 2, 3, 2, 700, 8.0, 5.0
    rng = np.random.default_rng(53)
    heads = heads_kv * group
    shape = (streams, n_kv, heads_kv, head)
    k_data, v_data = (t.pack(rng.standard_normal(shape).astype(np.float32)).reshape(streams, n_kv, -1) for t in (k_type, v_type))
    k, v = (t.unpack(d, shape) for t, d in ((k_type, k_data), (v_type, v_data)))
    q = rng.standard_normal((streams, heads, batch, head)).astype(np.float32)
    mask = np.stack([_mask(rng, batch, n_kv) for _ in range(streams)])
    hidden = rng.random((streams, n_kv)) < 0.2
    hidden[:, 64:150] = True  # a tile that is skipped, and more
    hidden[:, :batch] = False
    mask[np.repeat(hidden[:, None], batch, axis=1)] = -np.inf
    sinks = rng.uniform(-3, 3, heads).astype(np.float32)
    scale = 1 / np.sqrt(head)

    results = []
    for junk in (0x00, 0xFF, 0x7C):  # an infinite or NaN scale; in f16, NaNs
        for data in (k_data, v_data):
            data.view(np.uint8).reshape(streams, n_kv, -1)[hidden] = junk
        for threads in (1, 2):
            with Graph(ggml, 16) as g:
                caches = [
                    g.swapped(g.tensor(t.type_id, (head, heads_kv, n_kv, streams), d)) for t, d in ((k_type, k_data), (v_type, v_data))
                ]
                result = ggml.base.ggml_flash_attn_ext(
                    g.ctx,
                    g.tensor(GGML_TYPE_F32, (head, batch, heads, streams), q),
                    *caches,
                    g.tensor(GGML_TYPE_F16, (n_kv, batch, 1, streams), mask),
                    scale,
                    max_bias,
                    softcap,
                )
                ggml.base.ggml_flash_attn_ext_add_sinks(result, g.tensor(GGML_TYPE_F32, (heads,), sinks))
                results.append(g.compute(result, threads).view(np.float32).reshape(streams, batch, heads, head))
    with np.errstate(over="ignore", invalid="ignore"):
        want = _streams_attention(q.astype(np.float64), k, v, mask.astype(np.float64), scale, _alibi(heads, max_bias), softcap, sinks)
    assert np.abs(results[0] - want).max() < 2e-5 * np.abs(v).max()
    for other in results[1:]:
        assert np.array_equal(results[0], other), "hidden cells or the number of threads changed the result"


def test_the_structures_of_ctypes_are_those_of_the_library(ggml):
    """The last members of both traits structs read back what ggml's own accessors say."""
    q8 = ggml.traits(GGML_TYPE_Q8_0)
    assert (q8.type_name, q8.blck_size, q8.type_size) == (b"q8_0", 32, 34) and q8.from_float_ref
    cpu = ggml.cpu_traits(GGML_TYPE_Q8_0)
    assert cpu.vec_dot_type == GGML_TYPE_Q8_0 and ctypes.cast(cpu.vec_dot, ctypes.c_void_p).value
