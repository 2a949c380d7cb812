"""What CMake is told of every build. Standard library only: bench/gpu_check.py builds where nothing else may be installed."""

from __future__ import annotations

import sys

_COMMON = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    # One file per library, found beside whatever loads it: the same files then serve the tools and the wheel.
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
FLAGS = (*_COMMON, "-DLLAMA_BUILD_TESTS=ON", "-DGGML_RPC=ON")
#: Beside FLAGS: for the processor at hand, which is CMake's own choice (whatever an earlier run was told), or for any x86-64 since 2013
#: (or, elsewhere, for what the compiler takes by itself). Named one by one: CMake keeps what it chose for the processor at hand.
NATIVE = ("-UGGML_NATIVE",)
PORTABLE = ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")))
#: Only libllama and the CPU backend. The libraries' own checks of indices are on as well; optimized little, to compile fast.
SANITIZED_FLAGS = (
    *_COMMON,
    "-DLLAMA_SANITIZE_ADDRESS=ON",
    "-DCMAKE_C_FLAGS_RELEASE=-O1 -g1 -DNDEBUG",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -g1 -DNDEBUG -D_GLIBCXX_ASSERTIONS",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "SERVER")),
    "-DGGML_RPC=OFF",
)
