"""Comparison of encoded blocks that shows the worst one: its values, both byte strings and the bits that differ."""

from __future__ import annotations

import numpy as np

from kvfmt.codec import Format


def _hex(data: np.ndarray) -> str:
    return bytes(data).hex(" ")


def _field_at(fmt: Format, byte: int) -> str:
    name = [f.name for f in fmt.spec.fields if fmt.spec.offset(f.name) <= byte][-1]
    return f"{name}[{byte - fmt.spec.offset(name)}]"


def _as_blocks(array: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1, size)


def describe(fmt: Format, x: np.ndarray | None, want: np.ndarray, got: np.ndarray, label: str) -> str:
    """What differs between two arrays of packed blocks; the block with most differing bits in full."""
    want, got = _as_blocks(want, fmt.spec.size), _as_blocks(got, fmt.spec.size)
    differ = np.unpackbits(want ^ got, axis=1, bitorder="little")
    per_block = differ.sum(axis=1)
    worst = int(per_block.argmax())
    bits = np.flatnonzero(differ[worst])
    fields = ", ".join(f"{_field_at(fmt, bit // 8)} bit {bit % 8}" for bit in bits[:12])
    lines = [
        f"{fmt.spec.name}, {label}: {np.count_nonzero(per_block)} of {len(want)} blocks differ",
        f"worst: block {worst}, {len(bits)} bits: {fields}{', ...' if len(bits) > 12 else ''}",
        f"  want {_hex(want[worst])}",
        f"  got  {_hex(got[worst])}",
    ]
    if x is not None:
        values = np.ascontiguousarray(x, np.float32).reshape(-1, fmt.spec.block)[worst]
        lines.append("  of   " + " ".join(f"{v:.9g}" for v in values))
        lines.append("  bits " + " ".join(f"{v:08x}" for v in values.view(np.uint32)))
    return "\n".join(lines)


def assert_same_blocks(fmt: Format, x: np.ndarray | None, want: np.ndarray, got: np.ndarray, label: str) -> None:
    """Packed blocks are equal in every byte. ``x`` holds the values they encode, if there are any."""
    want, got = np.asarray(want), np.asarray(got)
    assert want.size == got.size, f"{fmt.spec.name}, {label}: {want.size} bytes against {got.size}"
    if not np.array_equal(want.ravel(), got.ravel()):
        raise AssertionError(describe(fmt, x, want, got, label))


def assert_same_floats(fmt: Format, data: np.ndarray, want: np.ndarray, got: np.ndarray, label: str) -> None:
    """Decoded values are equal in every bit, the sign of zero included."""
    want = np.ascontiguousarray(want, np.float32).reshape(-1, fmt.spec.block)
    got = np.ascontiguousarray(got, np.float32).reshape(-1, fmt.spec.block)
    assert want.shape == got.shape, f"{fmt.spec.name}, {label}: {want.shape} against {got.shape}"
    bad = want.view(np.uint32) != got.view(np.uint32)
    if not bad.any():
        return
    worst = int(bad.sum(axis=1).argmax())
    where = np.flatnonzero(bad[worst])
    raise AssertionError(
        f"{fmt.spec.name}, {label}: {np.count_nonzero(bad.any(axis=1))} of {len(want)} blocks decode differently\n"
        f"worst: block {worst}, bytes {_hex(_as_blocks(data, fmt.spec.size)[worst])}\n"
        + "\n".join(f"  value {i}: want {want[worst, i]!r}, got {got[worst, i]!r}" for i in where[:16])
    )
