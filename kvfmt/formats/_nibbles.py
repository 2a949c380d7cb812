"""Packing of 4-bit codes in blocks of 64: byte j holds value j (low nibble) and value j + 32 (high nibble)."""

from __future__ import annotations


from ..jit import jit
from ..spec import Field

FIELD = Field("qs", "u8", 32, "codes: byte j holds value j in its low and value j+32 in its high nibble")


@jit
def pack(codes, out):
    for j in range(32):
        out[2 + j] = codes[j] | (codes[j + 32] << 4)


@jit
def unpack(data, table, levels):
    for j in range(32):
        levels[j] = table[data[2 + j] & 15]
        levels[j + 32] = table[data[2 + j] >> 4]
