"""The CUDA vector kernel on our types, run on the host by the shim of tests/simt, against float64 attention over Python's K and V."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from blocks import assert_same_floats
from cuda_sources import attention_instances
from edge_inputs import edge_rows, random_rows, structured_rows
from ggml_lib import GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q8_0, Graph, pointer
from simt_build import CXX, device_library

from cpp_patch.fattn_pairs import HEADS, pairs
from kvfmt import registry
from kvfmt.build.paths import ROOT

ALL = registry.all_formats()
PAIRS = pairs()
#: Every pair with heads of 64; these also with the other sizes, where a logit soft-cap is compiled too.
WIDE = [PAIRS[0], next(p for p in PAIRS if p.k not in {f.spec.name for f in ALL})]
CASES = [(64, pair) for pair in PAIRS] + [(head, pair) for head in HEADS[1:] for pair in WIDE]
STOCK = {"f16": GGML_TYPE_F16, "q8_0": GGML_TYPE_Q8_0}
Q8_GROUP = 32
#: float32 sums of n terms stray from exact ones by no more than this, relative to the sum of magnitudes.
EPSILON = 2.0**-24

each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.spec.name)


@pytest.fixture(scope="module")
def attention(ggml, ggml_libdir, patched):
    """tests/simt/attention.cpp with the cases above."""
    types = "".join(f"Y({f.spec.name.upper()})" for f in ALL)
    cases = "".join(f"X({head},{pair.k.upper()},{pair.v.upper()})" for head, pair in CASES)
    defines = (f"SIMT_CASES={cases}", f"SIMT_KEYS={types}", f"SIMT_VALUES={types}")
    return device_library(patched, "attention.cpp", ggml_libdir, defines=defines)


def _blocks(fmt, n: int, seed: int) -> np.ndarray:
    """uint8 [n, size]: blocks of real encodings, of edge inputs, and of any codes with finite scales."""
    rng = np.random.default_rng(seed)
    any_codes = rng.integers(0, 256, (n, fmt.spec.size), dtype=np.uint8)
    any_codes[:, 1] &= 0xBB  # scales below 2: sums stay in range
    made = np.concatenate([fmt.encode(random_rows(n, seed)), any_codes, fmt.encode(structured_rows(64, seed))])
    return made[rng.permutation(len(made))[:n]]


# --- what reads blocks -----------------------------------------------------------------------------------------------


@each_format
def test_values_are_the_reference(attention, fmt):
    data = np.concatenate([fmt.encode(edge_rows()), _blocks(fmt, 1500, 71)])
    got = np.full(len(data) * fmt.spec.block, np.nan, np.float32)
    attention.simt_values.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    assert attention.simt_values(fmt.spec.type_id, pointer(data), got.size, pointer(got)) == 1
    assert_same_floats(fmt, data, fmt.decode(data), got, "dequantize_V")


@each_format
@pytest.mark.parametrize("head", HEADS)
def test_products_with_a_query(attention, fmt, head):
    """Against float64, within the rounding of a float32 sum of as many terms as the kernel adds."""
    keys, per_key = 150, head // fmt.spec.block
    data = _blocks(fmt, keys * per_key, head).reshape(keys, -1)
    rows = np.zeros((keys, data.shape[1] + 6), np.uint8)  # keys lie apart, at even addresses
    rows[:, : data.shape[1]] = data
    rng = np.random.default_rng(head)
    q8 = rng.integers(-127, 128, head, dtype=np.int8)
    ds = np.stack([rng.uniform(0.001, 2, head // Q8_GROUP), rng.standard_normal(head // Q8_GROUP)], axis=1).astype(np.float32)
    got = np.full(keys, np.nan, np.float32)
    attention.simt_products.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int] + [ctypes.c_void_p] * 3
    arguments = [pointer(rows), rows.shape[1], keys, pointer(q8), pointer(ds), pointer(got)]
    assert attention.simt_products(fmt.spec.type_id, head, *arguments) == 1
    terms = fmt.decode(data.reshape(-1, fmt.spec.size)).reshape(keys, head).astype(np.float64)
    terms *= q8 * np.repeat(ds[:, 0].astype(np.float64), Q8_GROUP)
    quads = terms.reshape(keys, -1, 4).sum(axis=2)  # four products are added as integers
    additions = head // 4 // 32 + 5 + 3
    assert np.all(np.abs(got - quads.sum(axis=1)) <= additions * EPSILON * np.abs(quads).sum(axis=1))


# --- a whole launch --------------------------------------------------------------------------------------------------


def _stored(name: str, rng: np.random.Generator, shape: tuple[int, ...], size: float) -> tuple[int, np.ndarray, np.ndarray]:
    """Type id, the bytes of a cache of that shape [..., head], and the float64 values that they mean."""
    x = (rng.standard_normal(shape) * size).astype(np.float32)
    if name == "f16":
        half = x.astype(np.float16)
        return GGML_TYPE_F16, half, half.astype(np.float64)
    if name == "q8_0":
        groups = x.reshape(-1, Q8_GROUP)
        scale = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
        codes = np.rint(groups / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
        data = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)
        return GGML_TYPE_Q8_0, data, (codes * scale.astype(np.float64)).reshape(shape)
    fmt = registry.get(name)
    data = fmt.encode(x)
    return fmt.spec.type_id, data, fmt.decode(data).astype(np.float64).reshape(shape)


def _as_q8_1(q: np.ndarray, scale: float) -> np.ndarray:
    """The scaled query as the kernel keeps it beside quantized keys: 8 bits for each of 32."""
    x = (np.float32(scale) * q).reshape(-1, Q8_GROUP)
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    ratio = np.divide(x, d, out=np.zeros_like(x), where=d != 0)
    return (np.copysign(np.floor(np.abs(ratio) + np.float32(0.5)), ratio).astype(np.float64) * d).reshape(q.shape)


def _slopes(heads: int, max_bias: float) -> np.ndarray:
    """ALiBi's slope of each head, as ggml has it."""
    if max_bias <= 0:
        return np.ones(heads)
    power = 1 << int(np.floor(np.log2(heads)))
    base = [2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)]
    return np.array([base[0] ** (h + 1) if h < power else base[1] ** (2 * (h - power) + 1) for h in range(heads)])


class Attention:
    """One FLASH_ATTN_EXT node: random tensors, its result on the device, and float64 attention."""

    def __init__(self, pair, head, *, cells=256, seen=200, batch=1, kv_heads=2, group=2, streams=1, max_bias=0.0, softcap=0.0, sinks=False, seed=5):
        rng = np.random.default_rng([seed, head, batch, cells])
        heads = kv_heads * group
        self.pair, self.head, self.scale, self.max_bias, self.softcap = pair, head, head**-0.5, max_bias, softcap
        self.group, self.heads = group, heads
        self.q = rng.standard_normal((streams, heads, batch, head)).astype(np.float32)
        # a cache has the heads of a token side by side
        self.k_id, self.k_data, self.k = _stored(pair.k, rng, (streams, cells, kv_heads, head), 1.5)
        self.v_id, self.v_data, self.v = _stored(pair.v, rng, (streams, cells, kv_heads, head), 1.0)
        mask = np.zeros((streams, batch, cells), np.float32)
        for s in range(streams):
            for b in range(batch):
                mask[s, b, : seen - 7 * s + b] = rng.uniform(-3, 0, seen - 7 * s + b) if max_bias else 0
                mask[s, b, seen - 7 * s + b :] = -np.inf
                mask[s, b, rng.integers(0, seen // 2, 9)] = -np.inf
        self.mask = mask.astype(np.float16)
        self.sinks = rng.standard_normal(heads).astype(np.float32) if sinks else None

    def on_device(self, ggml, device) -> np.ndarray:
        streams, heads, batch, head = self.q.shape
        cells, kv_heads = self.k.shape[1:3]
        with Graph(ggml) as g:
            q = g.tensor(GGML_TYPE_F32, (head, batch, heads, streams), self.q)
            k = g.swapped(g.tensor(self.k_id, (head, kv_heads, cells, streams), self.k_data))
            v = g.swapped(g.tensor(self.v_id, (head, kv_heads, cells, streams), self.v_data))
            mask = g.tensor(GGML_TYPE_F16, (cells, batch, 1, streams), self.mask)
            node = ggml.base.ggml_flash_attn_ext(g.ctx, q, k, v, mask, self.scale, self.max_bias, self.softcap)
            if self.sinks is not None:
                ggml.base.ggml_flash_attn_ext_add_sinks(node, g.tensor(GGML_TYPE_F32, (heads,), self.sinks))
            device.simt_attend.argtypes = [ctypes.c_void_p]
            assert device.simt_attend(node) == 1, "this case is not compiled"
            return g.bytes_of(node).view(np.float32).reshape(streams, batch, heads, head).swapaxes(1, 2)

    def in_float64(self, exact_query: bool) -> np.ndarray:
        scale = self.scale / self.softcap if self.softcap else self.scale
        q = self.q * scale if exact_query or self.pair.k == "f16" else _as_q8_1(self.q, scale)
        k, v = (np.repeat(x.swapaxes(1, 2), self.group, axis=1) for x in (self.k, self.v))
        scores = q.astype(np.float64) @ k.swapaxes(2, 3)
        if self.softcap:
            scores = self.softcap * np.tanh(scores)
        scores = scores + _slopes(self.heads, self.max_bias)[None, :, None, None] * self.mask.astype(np.float64)[:, None]
        top = scores.max(axis=3, keepdims=True)
        if self.sinks is not None:
            sink = self.sinks.astype(np.float64)[None, :, None, None]
            top = np.maximum(top, sink)
        weights = np.exp(scores - top)
        total = weights.sum(axis=3, keepdims=True) + (np.exp(sink - top) if self.sinks is not None else 0)
        return (weights / total) @ v

    def check(self, ggml, device) -> None:
        got = self.on_device(ggml, device)
        assert np.isfinite(got).all()
        # With the query rounded as the kernel rounds it, what is left is float32 arithmetic.
        want = self.in_float64(exact_query=False)
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max() + 2e-6
        # 8 bits of a query cost less than a percent of the output here.
        exact = self.in_float64(exact_query=True)
        assert np.linalg.norm(got - exact) <= 2e-2 * np.linalg.norm(exact) + 1e-6


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
def test_every_pair(ggml, attention, pair, batch):
    Attention(pair, 64, batch=batch).check(ggml, attention)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("pair", WIDE, ids=lambda p: p.name)
def test_every_head_size_over_more_than_one_block(ggml, attention, pair, head):
    """Blocks share a context of 512 cells, and their results are combined."""
    Attention(pair, head, cells=512, seen=300, group=3, kv_heads=1).check(ggml, attention)


@pytest.mark.parametrize("pair", WIDE, ids=lambda p: p.name)
def test_a_few_cells_streams_and_a_third_query(ggml, attention, pair):
    Attention(pair, 64, seen=24, batch=3, streams=2, kv_heads=1).check(ggml, attention)


@pytest.mark.parametrize("pair", WIDE, ids=lambda p: p.name)
def test_alibi_softcap_and_sinks(ggml, attention, pair):
    Attention(pair, 128, max_bias=8.0, softcap=10.0, sinks=True, group=3, kv_heads=1, batch=2).check(ggml, attention)


def test_threads_in_reverse_order_change_nothing(ggml, attention, monkeypatch):
    """A race would: the shim runs threads in the order of their numbers, or in the reverse."""
    case = Attention(PAIRS[0], 64, batch=2)
    forward = case.on_device(ggml, attention)
    monkeypatch.setenv("SIMT_ORDER", "reverse")
    assert np.array_equal(forward, case.on_device(ggml, attention))


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_short_and_whole():
    """Compile time and library size follow from it: whoever makes it longer says so here."""
    assert len(PAIRS) == len(set(PAIRS)) == 20
    values = {f.spec.name for f in ALL if "V" in f.spec.roles}
    for key in STOCK:
        assert {p.v for p in PAIRS if p.k == key} == values
    assert f"for the {len(PAIRS)} pairs of\n`cpp_patch/fattn_pairs.py`" in (ROOT / "README.md").read_text().replace("\n  ", "\n")
    # every format that is for keys first has a partner
    assert {p.k for p in PAIRS} == {f.spec.name for f in ALL if f.spec.roles[0] == "K"} | set(STOCK)


def test_every_instance_is_built_and_reported(patched):
    cuda = patched / "ggml" / "src" / "ggml-cuda"
    found = {p.stem.removeprefix("kvq-fattn-vec-instance-") for p in (cuda / "template-instances").glob("kvq-fattn-vec-instance-*.cu")}
    assert found == {p.name for p in PAIRS}
    listed = ",".join(p.name for p in PAIRS)
    assert f'"FA_KVQ", "{listed}"' in (cuda / "ggml-cuda.cu").read_text()
    # the same function chooses the instances of CUDA, HIP and MUSA
    assert "kvq-fattn-vec-instance-*.cu" in (patched / "ggml" / "cmake" / "common.cmake").read_text()


# --- which kernel ----------------------------------------------------------------------------------------------------

AMPERE, ADA, VOLTA, PASCAL = 800, 890, 700, 610
TYPE_IDS = STOCK | {f.spec.name: f.spec.type_id for f in ALL}


@pytest.fixture(scope="module")
def choice(ggml, ggml_libdir, patched):
    """tests/simt/choice.cpp: fattn.cu without the kernels' headers."""
    headers = ("fattn-mma-f16.cuh", "fattn-tile.cuh", "fattn-vec.cuh")
    library = device_library(
        patched,
        "choice.cpp",
        ggml_libdir,
        edit=lambda name, text: "" if name.removeprefix("ggml-cuda/") in headers else text,
        defines=tuple(attention_instances(patched)),
    )
    library.simt_choose.argtypes, library.simt_choose.restype = [ctypes.c_void_p], ctypes.c_char_p
    library.simt_result_bytes.argtypes, library.simt_result_bytes.restype = [ctypes.c_void_p], ctypes.c_size_t
    return library


def _node(ggml, g, k: str, v: str, head: int = 128, head_v: int = 0, batch: int = 1, group: int = 4, cells: int = 256) -> int:
    q = g.tensor(GGML_TYPE_F32, (head, batch, 2 * group))
    keys = g.tensor(TYPE_IDS[k], (head, cells, 2))
    values = g.tensor(TYPE_IDS[v], (head_v or head, cells, 2))
    mask = g.tensor(GGML_TYPE_F16, (cells, batch))
    return ggml.base.ggml_flash_attn_ext(g.ctx, q, keys, values, mask, 0.1, 0.0, 0.0)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
def test_single_tokens_take_the_vector_kernel(ggml, choice, pair):
    for arch, batch, kernel in [(AMPERE, 1, b"vec"), (AMPERE, 2, b"mma"), (ADA, 2, b"vec"), (ADA, 3, b"mma"), (PASCAL, 1, b"vec"), (PASCAL, 3, b"tile")]:
        choice.simt_set_architecture(arch)
        for head in HEADS:
            with Graph(ggml) as g:
                assert choice.simt_choose(_node(ggml, g, pair.k, pair.v, head, batch=batch)) == kernel, (arch, batch, head)


def test_prompts_and_other_pairs_are_converted(ggml, choice):
    """By a kernel that reads f16, with room for it in the result; never by the vector kernel, which would convert as well."""
    listed = {(p.k, p.v) for p in PAIRS}
    for fmt in ALL:
        for k, v in [(fmt.spec.name, "f16"), (fmt.spec.name, "q8_0"), ("q8_0", fmt.spec.name), *((fmt.spec.name, other.spec.name) for other in ALL)]:
            for arch, batch in [(AMPERE, 1), (AMPERE, 64), (ADA, 1), (VOLTA, 1), (PASCAL, 1), (PASCAL, 64)]:
                choice.simt_set_architecture(arch)
                with Graph(ggml) as g:
                    node = _node(ggml, g, k, v, batch=batch)
                    got, room = choice.simt_choose(node), choice.simt_result_bytes(node)
                    own = ggml.base.ggml_nbytes(node)
                if (k, v) in listed and batch == 1:
                    assert got == (b"tile" if arch == VOLTA else b"vec"), (k, v, arch)
                else:
                    assert got in (b"mma", b"tile"), (k, v, arch, batch, got)
                converted = 2 * 128 * 256 * 2 * ((k != "f16") + (v != "f16"))
                assert room - own >= converted if got in (b"mma", b"tile") else room == own, (k, v, arch, batch)


def test_stock_pairs_choose_as_they_did(ggml, choice):
    choice.simt_set_architecture(AMPERE)
    with Graph(ggml) as g:
        assert choice.simt_choose(_node(ggml, g, "q8_0", "q8_0")) == b"vec"
        assert choice.simt_choose(_node(ggml, g, "q8_0", "f16")) == b"vec of f16"


# --- what a user is told ---------------------------------------------------------------------------------------------

SUPPORTS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


@pytest.fixture(scope="module")
def kernels(ggml, ggml_libdir, patched, tmp_path_factory):
    """libllama's questions to a device, tests/kv_kernels.cpp."""
    out = tmp_path_factory.mktemp("kernels") / "kernels.so"
    include = [f"-I{patched / folder}" for folder in ("src", "ggml/include", "ggml/src")]
    source = Path(__file__).with_name("kv_kernels.cpp")
    command = [CXX, "-std=c++17", "-Wall", "-Wextra", "-fPIC", "-shared", *include, str(source)]
    done = subprocess.run([*command, "-o", str(out), f"-L{ggml_libdir}", "-lggml-base"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    library = ctypes.CDLL(str(out))
    library.kv_fault.restype = ctypes.c_char_p
    library.kv_fault.argtypes = [SUPPORTS, ctypes.c_char_p, ctypes.c_char_p] + [ctypes.c_int] * 6
    library.kv_can_write.argtypes = [SUPPORTS, ctypes.c_int]
    return library


LISTED = ",".join(p.name for p in PAIRS).encode()
SIZES = ",".join(str(h) for h in HEADS).encode()


@pytest.fixture
def told(kernels, choice):
    """fault(k, v, head_k=128, head_v=head_k, group=8): what the log says of a GPU that answers as fattn.cu does."""
    choice.simt_set_architecture(AMPERE)
    choice.simt_supports.argtypes = [ctypes.c_void_p]
    answer = SUPPORTS(choice.simt_supports)

    def fault(k: str, v: str, head_k: int = 128, head_v: int = 0, group: int = 8) -> str:
        return kernels.kv_fault(answer, LISTED, SIZES, TYPE_IDS[k], TYPE_IDS[v], head_k, head_v or head_k, 2 * group, 2).decode()

    return fault


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
def test_nothing_is_said_of_a_pair_with_a_kernel(told, pair, head):
    assert told(pair.k, pair.v, head) == ""


def test_a_pair_without_one_is_named(told):
    k, v = next((a.spec.name, b.spec.name) for a in ALL for b in ALL if (a.spec.name, b.spec.name) not in {(p.k, p.v) for p in PAIRS})
    said = told(k, v)
    assert f"K {k} and V {v}, heads of 128" in said and "converted to f16 for every token" in said and PAIRS[0].name in said


def test_a_head_size_without_one_is_named(told):
    pair = PAIRS[0]
    said = told(pair.k, pair.v, 192, 128)
    assert f"K {pair.k} and V {pair.v}, heads of 192 and 128" in said and "64,128,256" in said


def test_what_runs_on_the_cpu_instead_is_named(told):
    """Heads of 192 need a group that is a multiple of 8 there."""
    pair = PAIRS[0]
    said = told(pair.k, pair.v, 192, 128, group=3)
    assert f"K {pair.k} and V {pair.v}" in said and "no kernel on GPU0: it runs on the CPU" in said


def test_stock_types_and_backends_without_a_list(kernels):
    yes, no = SUPPORTS(lambda op: 1), SUPPORTS(lambda op: 0)
    q8, f16 = STOCK["q8_0"], STOCK["f16"]
    ours = ALL[0].spec.type_id
    assert kernels.kv_fault(yes, LISTED, SIZES, q8, f16, 128, 128, 8, 2) == b""
    assert kernels.kv_fault(yes, None, None, ours, ours, 128, 128, 8, 2) == b""
    assert b"no kernel on GPU0" in kernels.kv_fault(no, None, None, q8, q8, 128, 128, 8, 2)
    assert kernels.kv_can_write(yes, ours) == 1 and kernels.kv_can_write(no, ours) == 0
