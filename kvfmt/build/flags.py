"""What CMake is told of every build. Standard library only: bench/gpu_check.py builds where nothing else may be installed."""

from __future__ import annotations

import sys

FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    # One file per library, found beside whatever loads it: the same files then serve the tools and the wheel.
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    "-DLLAMA_BUILD_TESTS=ON",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DGGML_RPC=ON",
)
