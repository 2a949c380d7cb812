"""What is fuzzed: small random models with quantized and other caches, and where the numbers of their saved states are."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import random_gguf  # noqa: E402
from random_profile import random_profile  # noqa: E402

from converters.state_bytes import FileSource  # noqa: E402
from converters.state_layout import read_layout  # noqa: E402

KINDS = ("memory", "context", "session", "sequence")


@dataclass(frozen=True)
class Subject:
    """A model and its cache. ``sequences`` more than 1: one stream each."""

    name: str
    model: Callable[[Path], Path]
    kv: str
    protect: int = 0
    flash: bool = True
    sequences: int = 1
    profile: bool = False

    def arguments(self, folder: Path) -> list[str]:
        """What the fuzzer takes after its first word; makes the model and the profile in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        model = self.model(folder / "model.gguf")
        profile = str(random_profile(model).write(folder / "profile.gguf")) if self.profile else ""
        return [str(model), self.kv, str(self.protect), str(int(self.flash)), str(self.sequences), profile, str(folder)]


SUBJECTS = (
    Subject("kvq3/kvq2, protected", random_gguf.llama, "kvq3/kvq2", protect=1),
    Subject("kve8_3/kve8_2, two streams", random_gguf.llama, "kve8_3/kve8_2", sequences=2),
    Subject("kvq4/kvq4 under a profile", random_gguf.llama, "kvq4/kvq4", profile=True),
    Subject("kvq3/kvq2, sliding windows", random_gguf.iswa, "kvq3/kvq2", protect=1),
    Subject("q8_0/q4_0", random_gguf.llama, "q8_0/q4_0"),
    Subject("kvnf4/f16, transposed V", random_gguf.llama, "kvnf4/f16", flash=False),
)


def mark(folder: Path) -> None:
    """Writes where the numbers of each saved state are: u32 [n] offsets of its head, counts, cells and the heads of every layer."""
    for kind in KINDS:
        with FileSource(folder / kind) as source:
            layout = read_layout(source)
        found = set(range(0, min(layout.caches_at + 128, layout.size), 4))
        for cache in layout.caches:
            for stream in cache.filled:
                found |= set(range(stream.cells_at - 8, stream.cells_end + 8, 4))
                found |= {at for side in stream.sides for at in range(side.at - 12, side.at, 4)}
        np.array(sorted(at for at in found if at >= 0), "<u4").tofile(folder / f"{kind}.marks")
