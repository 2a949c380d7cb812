"""The CUDA sources that the series touches compile with nvcc, and what it makes of our kernels keeps their bytes.

No GPU is needed: nvcc is the installed one, or comes from PyPI (kvfmt/build/nvcc.py). $KVFMT_CUDA_ARCH chooses the architecture.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from build_cache import kept
from conftest import PIN
from cuda_sources import attention_instances, digest, included, sources
from gguf import GGMLQuantizationType

from cpp_patch.apply import load_series
from cpp_patch.fattn_pairs import HEADS, pairs
from kvfmt import registry
from kvfmt.build.nvcc import ensure_nvcc, packaged, release
from kvfmt.build.paths import cache_dir

ARCH = os.environ.get("KVFMT_CUDA_ARCH", "sm_80")
#: Declares what ggml-cuda names of cuBLAS, whose package has half a gigabyte.
STANDIN = Path(__file__).resolve().parent / "cuda"
#: What is kept of an output, and the end of its name.
KEPT_AS = {"object": "symbols", "ptx": "ptx"}
#: So many results stay in the cache.
KEPT = 200
TOUCHED = sorted(f for f in load_series(PIN, "llama.cpp").files if f.endswith(".cu"))
#: All alike but for two names; nvcc takes a quarter of a minute for each. The host compiles and runs every one of them.
INSTANCES = [f for f in TOUCHED if "/kvq-fattn-vec-instance-" in f]
COMPILED = [f for f in TOUCHED if f not in INSTANCES or f.endswith(f"-{pairs()[0].name}.cu")]


@pytest.fixture(scope="module")
def nvcc() -> Path:
    return ensure_nvcc()


@pytest.fixture(scope="module")
def texts(patched):
    return sources(patched)


def _flags(patched: Path) -> list[str]:
    """What upstream's build hands to nvcc."""
    flags = re.search(r"set\(CUDA_FLAGS ([^)]*)\)", (patched / "ggml/src/ggml-cuda/CMakeLists.txt").read_text())[1].split()
    assert "-use_fast_math" in flags
    return ["-std=c++17", f"-arch={ARCH}", *flags, "-DGGML_CUDA_NO_VMM", "-allow-unsupported-compiler", *(f"-D{d}" for d in attention_instances(patched))]


def _compiled(nvcc: Path, patched: Path, texts: dict[str, str], name: str, kind: str, tmp_path: Path, own: str | None = None) -> str:
    """Output of nvcc for ggml/src/``name``, or for a text of the test's ``own`` in that place: the PTX, or an object's symbols as nm has them.

    Kept in the cache under all that it is made of.
    """
    text = own or texts[name]
    command = [*_flags(patched), {"object": "-c", "ptx": "-ptx"}[kind]]
    standin = sorted((p.name, p.read_text()) for p in STANDIN.glob("*.h"))
    made_of = digest(str(nvcc), release(nvcc), command, standin, text, sorted(included(texts, name, text).items()))

    def compile_to(partial: Path) -> None:
        src = patched / "ggml" / "src"
        out = tmp_path / "out"
        source = src / name
        if own:
            source = tmp_path / Path(name).name
            source.write_text(own)
        done = subprocess.run(
            [nvcc, *command, f"-I{src}", f"-I{src}/../include", f"-I{src / 'ggml-cuda'}", f"-I{STANDIN}", source, "-o", out], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{name} does not compile:\n{done.stderr[:4000]}"
        assert not re.search(r"kvq.*warning", done.stderr), done.stderr[:4000]
        symbols = ["nm", "--extern-only", "--demangle", "--format=posix", out]
        partial.write_text(out.read_text() if kind == "ptx" else subprocess.run(symbols, capture_output=True, text=True, check=True).stdout)

    return kept(cache_dir() / "nvcc-tests", f"{Path(name).stem}-{made_of}.{KEPT_AS[kind]}", KEPT, compile_to).read_text()


def test_the_series_touches_these():
    names = {Path(f).name for f in TOUCHED}
    assert names >= {"kvq.cu", "set-rows.cu", "cpy.cu", "getrows.cu", "convert.cu", "ggml-cuda.cu", "fattn.cu"}
    assert len(INSTANCES) == len(pairs())


@pytest.mark.parametrize("path", COMPILED, ids=lambda p: Path(p).name)
def test_compiles(nvcc, patched, texts, tmp_path, path):
    _compiled(nvcc, patched, texts, path.removeprefix("ggml/src/"), "object", tmp_path)


def _symbols(text: str) -> tuple[set[str], set[str]]:
    """Functions that the object has, and those that it asks of others, with their parameters."""
    has, asks = set(), set()
    for line in text.splitlines():
        # name, kind, value, size; a demangled name has spaces
        if defined := re.match(r"(.*?) [A-TV-Za-z] [0-9a-f]+ [0-9a-f]+$", line):
            has.add(defined[1])
        else:
            asks.add(re.match(r"(.*?) [Uvw]\s*$", line)[1])
    return has, asks


def test_what_the_objects_ask_of_ours_is_there(nvcc, patched, texts, tmp_path):
    """Every kvq function that one of them calls is defined in another; the instances beside the first are alike but for the types."""
    has, asks = set(), set()
    for path in COMPILED:
        own, wanted = _symbols(_compiled(nvcc, patched, texts, path.removeprefix("ggml/src/"), "object", tmp_path))
        has |= own
        asks |= wanted
    first = pairs()[0]
    ids = "(ggml_type){}, (ggml_type){}"
    numbers = {kind.name.lower(): kind.value for kind in GGMLQuantizationType} | {fmt.spec.name: fmt.spec.type_id for fmt in registry.all_formats()}
    instance = "void ggml_cuda_flash_attn_ext_vec_case<{}, {}>(ggml_backend_cuda_context&, ggml_tensor*)"
    every = {instance.format(head, ids.format(numbers[p.k], numbers[p.v])) for p in pairs() for head in HEADS}
    of_first = {instance.format(head, ids.format(numbers[first.k], numbers[first.v])) for head in HEADS}
    assert of_first <= has, sorted(n for n in has if "vec_case" in n)[:5]
    assert every <= asks, sorted(every - asks)[:5]
    ours = {name for name in asks - every if "kvq" in name.lower()}
    assert len(ours) > 5 and all(name.startswith("ggml_kvq") or name.startswith("ggml_is_kvq") for name in ours - has), sorted(ours - has)


def _entries(ptx: str) -> dict[str, str]:
    """Mangled name -> body, of each kernel."""
    return {m[1]: m[2] for m in re.finditer(r"\.entry (\w+)\((.*?)^\}", ptx, re.MULTILINE | re.DOTALL)}


def test_fast_math_changes_no_byte(nvcc, patched, texts, tmp_path):
    """Float arithmetic of every kernel of ours rounds each operation to nearest: nothing approximate, nothing contracted."""
    kernels = _entries(_compiled(nvcc, patched, texts, "ggml-cuda/kvq.cu", "ptx", tmp_path))
    seen = set()
    for fmt in registry.all_formats():
        of_type = {name: body for name, body in kernels.items() if f"ggml_type{fmt.spec.type_id}E" in name}
        assert [name for name in of_type if "kvq_encode_blocks" in name] and len(of_type) == 4, fmt.spec.name
        for name, body in of_type.items():
            operations = set(re.findall(r"\b((?:add|sub|mul|div|fma|mad|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh)\.[\w.]*f(?:16|32|64)\w*)", body))
            seen |= operations
            assert operations <= {"add.rn.ftz.f32", "mul.rn.ftz.f32", "div.rn.ftz.f32"}, f"{name}: {sorted(operations)}"
            assert not re.search(r"cvt\.rz\S*\.f32\.[su]\d", body), f"{name}: an integer becomes a float without rounding to nearest"
    assert "div.rn.ftz.f32" in seen and "mul.rn.ftz.f32" in seen, "the patterns of this test no longer see the arithmetic"


READS = """
#include "fattn-vec.cuh"

template <ggml_type type>
static __global__ void reads(const char * blocks, const int * q8, const float2 * ds, float * out) {
    out[threadIdx.x] = kvq_get_vec_dot_KQ<type, 128, 32>()(blocks, nullptr, q8, ds);
    kvq_get_dequantize_V<type, float, 4>()(blocks, out + 4*threadIdx.x, 4*threadIdx.x);
}
"""


def test_attention_reads_every_format_four_values_at_a_time(nvcc, patched, texts, tmp_path):
    """Integer products by dp4a, nothing kept in memory of a thread's own, and no byte of a block loaded twice."""
    arguments = "(const char *, const int *, const float2 *, float *)"
    formats = registry.all_formats()
    own = READS + "".join(f"template __global__ void reads<GGML_TYPE_{f.spec.name.upper()}>{arguments};\n" for f in formats)
    kernels = _entries(_compiled(nvcc, patched, texts, "ggml-cuda/own-reads.cu", "ptx", tmp_path, own))
    for fmt in formats:
        (body,) = [body for name, body in kernels.items() if f"ggml_type{fmt.spec.type_id}E" in name]
        assert body.count("dp4a") == 1 and ".local" not in body, fmt.spec.name
        # the scale, and up to six pieces of codes, once for the product and once for the values; the query and its scale
        assert len(re.findall(r"\bld\.global", body)) <= 2 * 7 + 2, fmt.spec.name


def test_nvcc_from_packages_compiles_and_links(patched, texts, tmp_path):
    """The pinned packages serve a machine that has no CUDA toolkit. CMake's first question to nvcc is a program."""
    nvcc = packaged()
    assert release(nvcc) == (13, 0)
    _compiled(nvcc, patched, texts, "ggml-cuda/set-rows.cu", "object", tmp_path)
    (tmp_path / "program.cu").write_text("__global__ void kernel() {}\nint main() { kernel<<<1, 1>>>(); return cudaDeviceSynchronize() == cudaSuccess; }\n")
    subprocess.run([nvcc, f"-arch={ARCH}", tmp_path / "program.cu", "-o", tmp_path / "program"], check=True)
    assert subprocess.run([tmp_path / "program"], check=False).returncode in (0, 1)
