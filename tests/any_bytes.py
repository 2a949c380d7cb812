"""A C program that unpacks blocks of any bytes, and what it must give: the levels and their products with a query are integers."""

from __future__ import annotations

import numpy as np

from kvfmt import registry

ALL = registry.all_formats()
N_BLOCKS = 500
#: Codes of a q8_0 query: every residue modulo 255, the extremes included.
QUERY = (np.arange(64) * 37 % 255 - 127).astype(np.int8)


def program() -> str:
    """Reads N_BLOCKS blocks of every format; writes for each its 64 levels and the two sums of kvq_dot32."""
    parts = ["#include <stdio.h>", *(f'#include "{fmt.spec.name}.h"' for fmt in ALL), "int main(void) {", "    int8_t levels[64], q[64];"]
    parts.append("    for (int i = 0; i < 64; ++i) { q[i] = (int8_t) (i * 37 % 255 - 127); }")
    for fmt in ALL:
        name = fmt.spec.name
        parts.append(f"""
    for (int n = 0; n < {N_BLOCKS}; ++n) {{
        block_{name} b;
        if (fread(&b, sizeof(b), 1, stdin) != 1) {{ return 1; }}
        {name}_unpack(&b, levels);
        fwrite(levels, sizeof(levels), 1, stdout);
        for (int h = 0; h < 64; h += 32) {{
            const int32_t sum = kvq_dot32(levels + h, q + h);
            fwrite(&sum, sizeof(sum), 1, stdout);
        }}
    }}""")
    return "\n".join([*parts, "    return 0;", "}", ""])


def blocks(seed: int = 71) -> dict[str, np.ndarray]:
    """uint8 [N_BLOCKS, size] by format, the scale 1 and all else of any value."""
    rng = np.random.default_rng(seed)
    found = {fmt.spec.name: rng.integers(0, 256, (N_BLOCKS, fmt.spec.size), dtype=np.uint8) for fmt in ALL}
    for data in found.values():
        data[:, :2] = (0, 0x3C)
    return found


def check(data: dict[str, np.ndarray], output: bytes, label: str) -> None:
    """The program's output for these blocks against the Python reference."""
    at = 0
    for fmt in ALL:
        want = np.rint(fmt.decode(data[fmt.spec.name]).astype(np.float64) * 2**fmt.spec.level_shift).astype(np.int64)
        raw = np.frombuffer(output, np.uint8, N_BLOCKS * 72, at).reshape(N_BLOCKS, 72)
        at += raw.size
        levels, sums = raw[:, :64].copy().view(np.int8), raw[:, 64:].copy().view(np.int32)
        wrong = np.flatnonzero((levels != want).any(axis=1))
        assert not len(wrong), (
            f"{fmt.spec.name}, {label}: {len(wrong)} of {N_BLOCKS} blocks unpack wrong, the first {data[fmt.spec.name][wrong[0]].tobytes().hex(' ')}\n"
            f"want {want[wrong[0]]}\ngot  {levels[wrong[0]]}"
        )
        assert np.array_equal((want * QUERY).reshape(N_BLOCKS, 2, 32).sum(axis=2), sums), f"{fmt.spec.name}, {label}: kvq_dot32"
    assert at == len(output)
