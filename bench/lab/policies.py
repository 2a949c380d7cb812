"""Which (layer, token) cells a codec gets, and which are kept in a better one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Protocol

import numpy as np


@dataclass(frozen=True)
class Layout:
    """The cells of a cache: ``positions[i]``, int [cells], are the tokens that layer i holds.

    The first ``prompt`` of ``tokens`` tokens are the prompt, the rest were decoded after it. A sliding-window layer
    holds only the last of them. ``sensitive`` ranks the layers, the most sensitive first; None if no probe did.
    """

    positions: tuple[np.ndarray, ...]
    tokens: int
    prompt: int
    sensitive: Optional[tuple[int, ...]] = None

    @property
    def layers(self) -> int:
        return len(self.positions)

    def at(self, tokens: int, prompt: int, window: tuple[Optional[int], ...]) -> "Layout":
        """The same model's cache at another length; ``window[i]`` is how many tokens layer i holds at most."""
        positions = tuple(np.arange(max(0, tokens - (w or tokens)), tokens) for w in window)
        return Layout(positions, tokens, prompt, self.sensitive)


class Region(Protocol):
    """A set of cells."""

    name: str

    def mask(self, layout: Layout, layer: int) -> np.ndarray:
        """bool [cells of that layer]."""


class _Region:
    def __or__(self, other: Region) -> "Either":
        return Either(self, other)

    def __and__(self, other: Region) -> "Both":
        return Both(self, other)

    def __invert__(self) -> "Not":
        return Not(self)


@dataclass(frozen=True)
class Nowhere(_Region):
    name: str = "nothing"

    def mask(self, layout, layer):
        return np.zeros(len(layout.positions[layer]), bool)


@dataclass(frozen=True)
class Anchors(_Region):
    """The prompt and the first ``decoded`` tokens after it."""

    decoded: int = 32

    @property
    def name(self) -> str:
        return f"the prompt and the first {self.decoded} decoded tokens"

    def mask(self, layout, layer):
        return layout.positions[layer] < layout.prompt + self.decoded


@dataclass(frozen=True)
class FirstTokens(_Region):
    """The first ``count`` tokens of the context: attention sinks."""

    count: int

    @property
    def name(self) -> str:
        return f"the first {self.count} tokens"

    def mask(self, layout, layer):
        return layout.positions[layer] < self.count


@dataclass(frozen=True)
class Recent(_Region):
    """The last ``count`` tokens."""

    count: int

    @property
    def name(self) -> str:
        return f"the last {self.count} tokens"

    def mask(self, layout, layer):
        return layout.positions[layer] >= layout.tokens - self.count


@dataclass(frozen=True)
class Span(_Region):
    """Tokens from ``start`` to ``end``, not included."""

    start: int
    end: int

    @property
    def name(self) -> str:
        return f"tokens {self.start} to {self.end}"

    def mask(self, layout, layer):
        return (layout.positions[layer] >= self.start) & (layout.positions[layer] < self.end)


@dataclass(frozen=True)
class Layers(_Region):
    """Whole layers, counted from 0 among those that own KV."""

    numbers: frozenset[int]

    @property
    def name(self) -> str:
        return "layers " + " ".join(map(str, sorted(self.numbers)))

    def mask(self, layout, layer):
        return np.full(len(layout.positions[layer]), layer in self.numbers)


@dataclass(frozen=True)
class Ends(_Region):
    """The first and last ``count`` layers."""

    count: int

    @property
    def name(self) -> str:
        return f"the first and last {self.count} layers"

    def mask(self, layout, layer):
        return np.full(len(layout.positions[layer]), layer < self.count or layer >= layout.layers - self.count)


@dataclass(frozen=True)
class Sensitive(_Region):
    """The ``count`` layers that the probe found most sensitive."""

    count: int

    @property
    def name(self) -> str:
        return f"the {self.count} most sensitive layers"

    def mask(self, layout, layer):
        if layout.sensitive is None:
            raise ValueError(f"{self.name}: no probe has ranked the layers of this layout")
        return np.full(len(layout.positions[layer]), layer in layout.sensitive[: self.count])


@dataclass(frozen=True)
class Either(_Region):
    a: Region
    b: Region

    @property
    def name(self) -> str:
        return f"{self.a.name} and {self.b.name}"

    def mask(self, layout, layer):
        return self.a.mask(layout, layer) | self.b.mask(layout, layer)


@dataclass(frozen=True)
class Both(_Region):
    a: Region
    b: Region

    @property
    def name(self) -> str:
        return f"{self.a.name} on {self.b.name}"

    def mask(self, layout, layer):
        return self.a.mask(layout, layer) & self.b.mask(layout, layer)


@dataclass(frozen=True)
class Not(_Region):
    a: Region

    @property
    def name(self) -> str:
        return f"all but {self.a.name}"

    def mask(self, layout, layer):
        return ~self.a.mask(layout, layer)
