"""How the codes of a format lie in its block, read off its spec, for device code that takes four values at a time.

What is not recognised is read value by value ("levels"): slower, and right. Whatever is chosen, tests hold the result to the
reference on every code.
"""

from __future__ import annotations

from kvfmt.spec import BlockSpec

#: Values at one load: lane l of a quad is value 4 * quad + l of the block.
QUAD = 4


def packing(spec: BlockSpec) -> str:
    """The layout's name in kvq-levels.cuh: "crumbs", "signed_crumbs", "nibbles", "words", "quarters" or "levels"."""
    counts = {field.name: field.count for field in spec.fields[1:]}
    tables = {table.name: len(table.values) for table in spec.tables}
    if spec.block != 64:
        return "levels"
    if counts == {"qs": 16} and tables.get("levels") == 4:
        return "crumbs"
    if counts == {"qs": 16, "qh": 8} and tables.get("levels") == 8:
        return "signed_crumbs"
    if counts == {"qs": 32} and tables.get("levels") == 16:
        return "nibbles"
    if set(counts) == {"rows", "signs"} and {"rows", "shift"} <= set(tables) and _magnitudes(spec, "rows"):
        return "words"
    books = [tables.get(name, 0) for name in ("fine", "middle", "coarse")]
    if set(counts) == {"qs", "qh"} and all(books) and books[0] in (32, 64) and max(books[1:]) <= 16 and _mirrored(spec):
        return "quarters"
    return "levels"


def _magnitudes(spec: BlockSpec, name: str) -> bool:
    """Whether the low 7 bits of each entry are at least 1, so that a sign can be applied to four at once."""
    return all(value & 127 for value in spec.table(name).values)


def _mirrored(spec: BlockSpec) -> bool:
    """Whether each codebook is positive levels, at least 1, and then their negatives."""
    for name in ("fine", "middle", "coarse"):
        values = spec.table(name).values
        half = len(values) // 2
        if any(low < 1 or low != -high for low, high in zip(values[:half], values[half:])):
            return False
    return True


def words(values: tuple[int, ...], at_least: int = 0) -> list[str]:
    """int8 values, four to a little-endian word, as C literals; padded with zero words to ``at_least``."""
    bytes_ = bytes(value & 255 for value in values)
    bytes_ += bytes(-len(bytes_) % QUAD)
    out = [f"0x{int.from_bytes(bytes_[i : i + QUAD], 'little'):08X}u" for i in range(0, len(bytes_), QUAD)]
    return out + ["0u"] * (at_least - len(out))


def quarter_bits(spec: BlockSpec) -> list[int]:
    """Bits of a code in each quarter of a block: the last two are equal."""
    fine, middle, coarse = (len(spec.table(name).values).bit_length() - 1 for name in ("fine", "middle", "coarse"))
    return [fine, middle, coarse, coarse]


def magnitudes(spec: BlockSpec, name: str) -> tuple[int, ...]:
    """The positive half of a mirrored codebook."""
    values = spec.table(name).values
    return values[: len(values) // 2]


def nibble_list(values: list[int]) -> str:
    """Small numbers, the first in the lowest nibble of one C literal."""
    return f"0x{sum(value << 4 * i for i, value in enumerate(values)):X}u"
