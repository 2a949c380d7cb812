"""gguf-py learns the kvfmt types: their ids, names and block sizes, and how to encode and decode them.

gguf-py has an enumeration of ggml's types and raises for any other id. ``register`` adds ours to it, so that its reader, its
writer and ``gguf.quants`` treat them as they treat upstream's.
"""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from kvfmt import registry
from kvfmt.codec import Format
from kvfmt.errors import KvfmtError


class _Codec:
    """What ``gguf.quants.quantize`` and ``dequantize`` call for one format."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt

    def quantize(self, values: np.ndarray) -> np.ndarray:
        return self.fmt.encode(values)

    def dequantize(self, data: np.ndarray) -> np.ndarray:
        return self.fmt.decode(data)


def register() -> None:
    """Makes every registered format known to gguf-py in this process. Again does nothing.

    Raises KvfmtError if this gguf-py has another type of one of the ids or names: then its files would be misread.
    """
    for fmt in registry.all_formats():
        spec = fmt.spec
        name = spec.name.upper()
        by_id, by_name = GGMLQuantizationType._value2member_map_.get(spec.type_id), GGMLQuantizationType._member_map_.get(name)
        if by_id is None and by_name is None:
            # An enumeration cannot be derived from or added to once it has members; this is how it makes one itself.
            member = int.__new__(GGMLQuantizationType, spec.type_id)
            member._name_, member._value_ = name, spec.type_id
            GGMLQuantizationType._value2member_map_[spec.type_id] = member
            GGMLQuantizationType._member_map_[name] = member
            GGMLQuantizationType._member_names_.append(name)
            type.__setattr__(GGMLQuantizationType, name, member)
        elif by_id is not by_name:
            there = by_id.name if by_id is not None else f"{name} = {int(by_name)}"
            raise KvfmtError(f"this gguf-py has {there} where {name} = {spec.type_id} belongs", "Install the pinned gguf: make setup")
        member = GGMLQuantizationType(spec.type_id)
        GGML_QUANT_SIZES[member] = (spec.block, spec.size)
        quants._type_traits[member] = _Codec(fmt)
