"""The sources of ggml-cuda in a patched llama.cpp: what each includes, and a digest of all of it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def sources(tree: Path) -> dict[str, str]:
    """Path below ggml/src -> text: ggml-cuda, the kvq bodies, and ggml's own headers."""
    src = tree / "ggml" / "src"
    found = {}
    for folder in ("ggml-cuda", "ggml-cuda/template-instances", "ggml-cuda/vendors", "kvq", ".", "../include"):
        for path in sorted((src / folder).glob("*")):
            if path.suffix in (".cu", ".cuh", ".h"):
                found[os.path.normpath(os.path.join(folder, path.name))] = path.read_text()
    return found


def included(texts: dict[str, str], name: str, text: str) -> dict[str, str]:
    """Those of ``texts`` that the file ``name`` with this text includes, directly or not."""
    seen: dict[str, str] = {}
    waiting = [(name, text)]
    while waiting:
        name, text = waiting.pop()
        for target in _INCLUDE.findall(text):
            beside = os.path.normpath(os.path.join(os.path.dirname(name), target))
            for place in (beside, f"ggml-cuda/{target}", target, f"../include/{target}"):
                if place in texts:
                    if place not in seen:
                        seen[place] = texts[place]
                        waiting.append((place, texts[place]))
                    break
    return seen


def digest(*parts) -> str:
    """20 hex digits that change with any part."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def attention_instances(tree: Path) -> list[str]:
    """What upstream's CMake defines for fattn.cu: GGML_CUDA_FA_<K>_<V>=1 for the pairs of a default build, =0 for the others."""
    types = re.search(r"set\(FA_TYPES ([^)]*)\)", (tree / "ggml" / "cmake" / "common.cmake").read_text())[1].split()
    chosen = re.search(r'GGML_CUDA_FA_QUANTS "([^"]*)"', (tree / "ggml" / "CMakeLists.txt").read_text())[1].split(";")
    assert "f16-f16" in chosen and len(types) > 5, (chosen, types)
    return [f"GGML_CUDA_FA_{k.upper()}_{v.upper()}={int(f'{k}-{v}' in chosen)}" for k in types for v in types]
