"""The device code of ggml-cuda, compiled for the host with the headers of tests/simt.

    library = device_library(tree, "device.cpp", libdir)     # a ctypes.CDLL

``tree`` is a patched llama.cpp, ``libdir`` the folder with libggml-base.so. What CUDA has beyond C++ is rewritten in a copy of
the sources. The library is kept under the cache, named by a digest of everything that it is made of.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path

from build_cache import kept
from cuda_sources import digest, included, sources

from kvfmt.build.paths import cache_dir

SIMT = Path(__file__).resolve().parent / "simt"
CXX = os.environ.get("CXX", "c++")
#: a * b + c may be contracted, as nvcc does; no other freedom of fast math, which would change what is not CUDA's.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=fast", "-fexpensive-optimizations", "-fno-strict-aliasing", "-w"]
FLAGS += ["-mfma", "-mf16c"] if platform.machine() == "x86_64" else []
#: So many libraries stay in the cache.
KEPT = 40

_LAUNCH = re.compile(r"((?:\w+::)*\w+\s*(?:<[^;{}()]*(?:\([^;{}()]*\)[^;{}()]*)*>)?)\s*<<<(.*?)>>>\s*\(", re.S)
_EXTERN = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w:]+)\s+(\w+)\[\];")


def rewritten(text: str) -> str:
    """CUDA source text as C++: launches and dynamic shared memory."""
    text = _LAUNCH.sub(r"simt::launch_config(\2).run([=](auto... simt_arguments) { \1(simt_arguments...); })(", text)
    return _EXTERN.sub(r"\1 * \2 = (\1 *) simt::dynamic_shared();", text)


def device_library(tree: Path, driver: str, libdir: Path, edit=None, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile tests/simt/``driver`` and what it includes, or take it from the cache.

    ``edit`` (path, text) -> text changes a source before it is compiled. Fails with the compiler's message.
    """
    texts = sources(tree)
    if edit:
        texts = {name: edit(name, text) for name, text in texts.items()}
    own = {path.name: path.read_text() for path in sorted(SIMT.glob("*.h"))} | {driver: (SIMT / driver).read_text()}
    used: dict[str, str] = {}
    for text in own.values():
        used |= included(texts, "ggml-cuda/driver.cpp", text)
    definitions = [f"-D{name}" for name in ("__CUDACC__", "GGML_CUDA_NO_VMM", *defines)]
    command = [CXX, *FLAGS, "-include", "cuda_runtime.h", *definitions]
    version = subprocess.run([CXX, "--version"], capture_output=True, text=True, check=True).stdout
    name = f"{Path(driver).stem}-{digest(version, command, _LAUNCH.pattern, rewritten.__code__.co_consts, sorted(own.items()), sorted(used.items()))}"

    def compile_to(partial: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="simt-") as scratch:
            root = Path(scratch) / "src"
            for place, text in texts.items():
                path = root / place
                path.parent.mkdir(parents=True, exist_ok=True)
                once = "#pragma once\n" if path.suffix == ".cuh" else ""  # not all have it
                path.write_text(once + rewritten(text) if path.suffix in (".cu", ".cuh") else text)
            include = [f"-I{folder}" for folder in (SIMT, root / "ggml-cuda", root, root / ".." / "include")]
            done = subprocess.run(
                [*command, *include, str(SIMT / driver), "-o", str(partial), f"-L{libdir}", "-lggml-base"], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{driver} does not compile:\n{done.stderr[:6000]}"

    return ctypes.CDLL(str(kept(cache_dir() / "simt", f"{name}.so", KEPT, compile_to)))
