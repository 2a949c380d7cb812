"""Saved sequences: byte for byte both ways, damaged ones refused with where and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from llama_lib import Context

from converters import state as states
from converters.state import Cache, Side, State, StateError, Stream
from kvfmt.build.models import fetch_model

F16 = 1


def made(layers: int, cells: int, *, transposed: bool = False, first: int = 0, width: int = 6) -> Cache:
    rng = np.random.default_rng(layers * 100 + cells)

    def side(flip: bool) -> Side:
        values = rng.standard_normal((cells, width)).astype(np.float16)
        data = np.ascontiguousarray(values.T)[..., None] if flip else values
        return Side(F16, data.view(np.uint8), flip)

    positions = np.arange(first, first + cells, dtype=np.int32)
    sides = [(side(False), side(transposed)) for _ in range(layers)]
    stream = Stream(positions, np.zeros(cells, np.int32), tuple(k for k, _ in sides), tuple(v for _, v in sides), transposed)
    return Cache((stream,))


SYNTHETIC = {
    "plain": State(0, (made(3, 5),)),
    "transposed V": State(2, (made(2, 4, transposed=True),)),
    "two caches": State(0, (made(1, 7), made(3, 4, first=3))),
    "described": State(0, (replace(made(2, 3), description="rotated: K V; layers 0-1: f16/f16"),)),
    "empty second stream": State(0, (Cache((*made(1, 2).streams, None)),)),
}


@pytest.mark.parametrize("state", SYNTHETIC.values(), ids=SYNTHETIC)
def test_written_and_read_back(state):
    data = states.write(state)
    again = states.read(data)
    assert states.write(again) == data
    assert again.sequence == state.sequence
    for a, b in zip(again.caches, state.caches, strict=True):
        assert a.description == b.description
        np.testing.assert_array_equal(a.only.positions, b.only.positions)
        for x, y in zip((*a.only.k, *a.only.v), (*b.only.k, *b.only.v), strict=True):
            np.testing.assert_array_equal(x.f16(), y.f16())


def test_f16_of_a_transposed_side_is_by_cell():
    values = np.arange(12, dtype=np.float16).reshape(3, 4)
    plain = Side(F16, values.view(np.uint8))
    flipped = Side(F16, np.ascontiguousarray(values.T)[..., None].view(np.uint8), True)
    np.testing.assert_array_equal(plain.f16(), flipped.f16())
    assert plain.row_bytes == flipped.row_bytes == 8
    np.testing.assert_array_equal(flipped.with_f16(values + 1).f16(), values + 1)


@pytest.mark.parametrize("state", SYNTHETIC.values(), ids=SYNTHETIC)
def test_every_truncation_is_refused(state):
    data = states.write(state)
    whole = []
    for n in range(len(data)):
        try:
            whole.append(states.read(data[:n]))
        except StateError as error:
            assert error.hint and ("byte" in str(error) or "empty" in str(error) or "before its first cache" in str(error))
    # A cache without V, as latent attention has, and a model with one cache end at places where these are cut.
    for cut in whole:
        assert not cut.caches[-1].only.v or len(cut.caches) < len(state.caches)


@pytest.mark.parametrize("state", SYNTHETIC.values(), ids=SYNTHETIC)
def test_flipped_bits_are_refused_or_read_as_they_are(state):
    data = bytearray(states.write(state))
    refused = 0
    for byte in range(min(len(data), 120)):
        data[byte] ^= 0x40
        try:
            assert states.write(states.read(bytes(data))) == bytes(data)
        except StateError:
            refused += 1
        data[byte] ^= 0x40
    assert refused > 8


def test_what_is_no_state_says_so():
    with pytest.raises(StateError, match="0x46554747"):
        states.read(b"GGUF" + bytes(100))
    with pytest.raises(StateError, match="empty"):
        states.read(b"")


def test_another_shape_is_refused():
    side = made(1, 4).only.k[0]
    with pytest.raises(StateError, match=r"float16 \(4, 6\)"):
        side.with_f16(np.zeros((4, 5), np.float16))


@pytest.mark.parametrize("kv, flash", [("f16/f16", "on"), ("f16/f16", "off"), ("kvq3/kvq2", "on"), ("q8_0/q4_0", "on")])
def test_what_llama_saves(kv, flash):
    with Context(fetch_model(), kv, flash=flash) as ctx:
        tokens = ctx.tokenize("A state is read as it was saved, and written as it was read.")
        ctx.decode(tokens)
        data = ctx.save()
        state = states.read(data)
        stream = state.caches[0].only
        assert states.write(state) == data
        assert stream.positions.tolist() == list(range(len(tokens)))
        assert len(stream.k) == len(stream.v) == 30
        assert stream.transposed == (flash == "off")
        assert (state.caches[0].description is not None) == (kv == "kvq3/kvq2")
        if kv == "f16/f16":
            # The first token's key is a key: values are values. Both are there, neither is the other.
            assert stream.k[0].f16().shape == stream.v[0].f16().shape == (len(tokens), 192)
            assert np.abs(stream.k[0].f16()).max() > 4 * np.abs(stream.v[0].f16()).max()
        else:
            with pytest.raises(StateError, match="not as f16"):
                stream.k[10].f16()
        ctx.clear()
        assert ctx.load(states.write(state))
