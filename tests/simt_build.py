"""The device code of ggml-cuda, compiled for the host with the headers of tests/simt.

    library = device_library(tree, "device.cpp", libdir)     # a ctypes.CDLL

``tree`` is a patched llama.cpp, ``libdir`` the folder with libggml-base.so. What CUDA has beyond C++ is rewritten in a copy of
the sources. The library is kept under the cache, named by a digest of everything that it is made of.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvfmt.build.paths import cache_dir

SIMT = Path(__file__).resolve().parent / "simt"
CXX = os.environ.get("CXX", "c++")
#: a * b + c may be contracted, as nvcc does; no other freedom of fast math, which would change what is not CUDA's.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-strict-aliasing", "-w"]
FLAGS += ["-mfma", "-mf16c"] if platform.machine() == "x86_64" else []
#: So many libraries stay in the cache.
KEPT = 12

_LAUNCH = re.compile(r"((?:\w+::)*\w+\s*(?:<[^;{}()]*(?:\([^;{}()]*\)[^;{}()]*)*>)?)\s*<<<(.*?)>>>\s*\(", re.S)
_EXTERN = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w:]+)\s+(\w+)\[\];")


def rewritten(text: str) -> str:
    """CUDA source text as C++: launches and dynamic shared memory."""
    text = _LAUNCH.sub(r"simt::launch_config(\2).run([=](auto... simt_arguments) { \1(simt_arguments...); })(", text)
    return _EXTERN.sub(r"\1 * \2 = (\1 *) simt::dynamic_shared();", text)


def _sources(tree: Path) -> dict[str, str]:
    """Relative path -> text: the CUDA sources, rewritten, and what they include by a relative path."""
    src = tree / "ggml" / "src"
    found = {}
    for folder in ("ggml-cuda", "ggml-cuda/template-instances", "ggml-cuda/vendors", "kvq"):
        for path in sorted((src / folder).glob("*")):
            if path.suffix in (".cu", ".cuh"):
                once = "#pragma once\n" if path.suffix == ".cuh" else ""  # not all have it
                found[path.relative_to(src).as_posix()] = once + rewritten(path.read_text())
            elif path.suffix == ".h":
                found[path.relative_to(src).as_posix()] = path.read_text()
    return found


def _included(sources: dict[str, str], name: str, text: str, seen: dict[str, str]) -> None:
    """Adds to ``seen`` the sources that a text includes, directly or not."""
    for target in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M):
        for place in (os.path.normpath(os.path.join(os.path.dirname(name), target)), f"ggml-cuda/{target}"):
            if place in sources and place not in seen:
                seen[place] = sources[place]
                _included(sources, place, sources[place], seen)


def device_library(tree: Path, driver: str, libdir: Path, edit=None, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile tests/simt/``driver`` and what it includes, or take it from the cache.

    ``edit`` (path, text) -> text changes a source before it is compiled. Fails with the compiler's message.
    """
    sources = _sources(tree)
    if edit:
        sources = {name: edit(name, text) for name, text in sources.items()}
    own = {path.name: path.read_text() for path in sorted(SIMT.glob("*.h"))} | {driver: (SIMT / driver).read_text()}
    used: dict[str, str] = {}
    for text in own.values():
        _included(sources, "ggml-cuda/driver.cpp", text, used)
    headers = [tree / "ggml" / "include", tree / "ggml" / "src"]
    outside = {path.name: path.read_text() for folder in headers for path in sorted(folder.glob("*.h"))}
    command = [CXX, *FLAGS, "-include", "cuda_runtime.h", *(f"-D{name}" for name in ("__CUDACC__", "GGML_CUDA_NO_VMM", "GGML_CUDA_USE_GRAPHS=0", *defines))]
    version = subprocess.run([CXX, "--version"], capture_output=True, text=True, check=True).stdout
    made_of = repr((version, command, sorted(own.items()), sorted(used.items()), sorted(outside.items())))
    target = cache_dir() / "simt" / f"{Path(driver).stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:20]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="simt-") as scratch:
            root = Path(scratch)
            for name, text in sources.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            part = target.with_name(f".{target.name}.{os.getpid()}")
            include = [SIMT, root / "ggml-cuda", *headers]
            done = subprocess.run(
                [*command, *(f"-I{folder}" for folder in include), str(SIMT / driver), "-o", str(part), f"-L{libdir}", "-lggml-base"],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{driver} does not compile:\n{done.stderr[:6000]}"
            os.replace(part, target)
        for old in sorted(target.parent.glob("*.so"), key=lambda p: p.stat().st_mtime, reverse=True)[KEPT:]:
            old.unlink(missing_ok=True)
    os.utime(target)
    return ctypes.CDLL(str(target))
