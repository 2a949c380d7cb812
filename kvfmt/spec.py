"""What a block format is: one frozen description from which everything else follows.

A :class:`BlockSpec` is the single source of truth for a format. Its size, field
offsets, bits per value and hash are derived, never written down a second time;
the C structs, tables and type ids in ``cpp_patch`` are rendered from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

#: First type id of the private range. Upstream ggml counts up from 0 (its newest
#: id is 42) and known forks stay below 512, so neither ever reads our bytes.
PRIVATE_ID_BASE = 768
PRIVATE_ID_END = 1024

#: Bytes of each field element type that a block may hold.
FIELD_BYTES = {"f16": 2, "u8": 1}

TABLE_RANGES = {"i8": (-128, 127), "u8": (0, 255), "i16": (-32768, 32767), "i32": (-(2**31), 2**31 - 1)}


@dataclass(frozen=True)
class Field:
    """One member of the C struct: ``count`` elements of ``dtype``, stored in order without padding."""

    name: str
    dtype: str
    count: int
    meaning: str

    @property
    def nbytes(self) -> int:
        return FIELD_BYTES[self.dtype] * self.count


@dataclass(frozen=True)
class Table:
    """A constant integer table, flattened row by row. ``shape`` is (n,) or (rows, n)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...]
    meaning: str

    def __post_init__(self) -> None:
        expected = 1
        for extent in self.shape:
            expected *= extent
        if len(self.values) != expected:
            raise ValueError(f"table {self.name}: {len(self.values)} values do not fill shape {self.shape}")
        low, high = TABLE_RANGES[self.dtype]
        for value in self.values:
            if not low <= value <= high:
                raise ValueError(f"table {self.name}: {value} does not fit {self.dtype}")


@dataclass(frozen=True)
class BlockSpec:
    """The exact definition of a block format.

    ``rounding`` names the arithmetic rules in one sentence each; they are part of
    the hash, because two implementations that round differently are two formats.

    ``type_id`` stands for layout and decoder, for ever: another layout takes a new id. ``version`` counts what the
    encoder chooses under that id: blocks of an older version decode as they always did.
    """

    name: str
    type_id: int
    version: int
    block: int
    fields: tuple[Field, ...]
    tables: tuple[Table, ...]
    #: A decoded value is scale * level * 2**-level_shift; the product is exact in float32.
    level_shift: int
    rounding: tuple[str, ...]
    roles: tuple[str, ...]
    summary: str
    #: The block treats its values unequally, so only a profile that orders the channels for it can use it.
    needs_profile: bool = False
    #: The stored scale keeps <x, decoded> = <x, x>, for values that are averaged, instead of minimising the error.
    unbiased: bool = False
    #: Then: sizes of the consecutive groups of values that a head's channels fill, the most important first. The profile brings
    #: each group to about unit variance and mixes the values within it.
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not PRIVATE_ID_BASE <= self.type_id < PRIVATE_ID_END:
            raise ValueError(
                f"{self.name}: type id {self.type_id} is outside the private range "
                f"[{PRIVATE_ID_BASE}, {PRIVATE_ID_END})"
            )
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: a field name occurs twice in {names}")
        if bool(self.groups) != self.needs_profile or self.groups and sum(self.groups) != self.block:
            raise ValueError(f"{self.name}: groups {self.groups} do not fill a block of {self.block} that a profile lays out")
        if self.fields[0].dtype != "f16":
            raise ValueError(f"{self.name}: the f16 scale comes first, so that it stays 2-byte aligned")

    @property
    def size(self) -> int:
        """Bytes of one block."""
        return sum(field.nbytes for field in self.fields)

    @property
    def bits_per_value(self) -> float:
        """Allocated bits per value: scale and padding counted."""
        return self.size * 8 / self.block

    def offset(self, name: str) -> int:
        """Byte offset of a field. Raises KeyError if the block has no such field."""
        position = 0
        for field in self.fields:
            if field.name == name:
                return position
            position += field.nbytes
        raise KeyError(f"{self.name} has no field {name!r}")

    def table(self, name: str) -> Table:
        """Raises KeyError if the format has no such table."""
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(f"{self.name} has no table {name!r}")

    @property
    def hash(self) -> str:
        """sha256 (hex) over everything that decides the bytes. Prose (summary, meanings, roles) is left out,
        and so are ``groups``: a profile's maps follow from them, a block's bytes do not."""
        record = dataclasses.asdict(self)
        for key in ("summary", "roles", "groups"):
            del record[key]
        for flag in ("needs_profile", "unbiased"):
            # Formats that are older than a flag keep their hash.
            if not record[flag]:
                del record[flag]
        for part in (*record["fields"], *record["tables"]):
            del part["meaning"]
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def row_bytes(self, n_values: int) -> int:
        """Bytes of a row of ``n_values``. Raises ValueError if the block does not divide it."""
        if n_values % self.block:
            raise ValueError(
                f"{self.name}: a row of {n_values} values is not a multiple of its block of {self.block}"
            )
        return n_values // self.block * self.size


def flat(rows: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The values of nested rows, row by row."""
    return tuple(int(value) for row in rows for value in row)
