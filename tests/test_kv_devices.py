"""What the log says, before the first token, of a device that knows less than the cache asks for. The device is limited_gpu.cpp."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import random_gguf
from test_llama_tools import completion

K, V = "kvq3", "kvq2"
CXX = os.environ.get("CXX", "c++")


@pytest.fixture(scope="module")
def gpu(ggml_libdir, patched, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("gpu") / "libggml-limited.so"
    include = [f"-I{patched / folder}" for folder in ("ggml/include", "ggml/src")]
    source = Path(__file__).with_name("limited_gpu.cpp")
    command = [CXX, "-std=c++17", "-Wall", "-Wextra", "-fPIC", "-shared", *include, str(source)]
    libraries = [f"-L{ggml_libdir}", "-lggml-base", "-lggml-cpu", "-lggml"]
    done = subprocess.run([*command, "-o", str(out), *libraries], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_gguf.llama(tmp_path_factory.mktemp("devices") / "plain.gguf")


@pytest.fixture
def generate(gpu, model):
    """generate(layers on the device, **limits) -> (exit status, what the log says of devices, the text)."""

    def run(layers: int, k: str = K, v: str = V, **limits: str):
        environment = {"GGML_BACKEND_PATH": str(gpu)} | {f"LIMITED_{name.upper()}": value for name, value in limits.items()}
        device = ["-dev", "Limited0", "-ngl", layers] if layers else ["-dev", "none"]
        done = completion(model, *device, "-fit", "off", "-c", 256, "-p", "abc", "-n", 4, "-ctk", k, "-ctv", v, "--kv-protect", 1, environment=environment)
        said = [line for line in done.stderr.splitlines() if "kv policy: layers" in line or "cannot write" in line]
        return done.returncode, said, done.stdout

    return run


def test_a_device_that_knows_all_is_not_named(generate):
    status, said, text = generate(99, pairs=f"{K}-{V}")
    assert (status, said) == (0, [])
    # The same text as without it: this device computes what the CPU computes.
    assert text == generate(0)[2]


def test_attention_that_goes_to_the_cpu_is_named_with_its_layers(generate):
    status, said, text = generate(99, attention=K)
    assert status == 0 and text == generate(0)[2]
    (line,) = said
    assert re.search(rf"layers [\d, -]+: flash attention on K {K} and V {V}, heads of \d+, has no kernel on Limited0: it runs on the CPU", line)
    assert "layers 0" not in line, "the first layer is f16"


def test_a_pair_that_is_converted_is_named(generate):
    status, said, _ = generate(99, pairs="f16-kvq2")
    assert status == 0 and len(said) == 1
    assert f"K {K} and V {V}" in said[0] and "converted to f16 for every token" in said[0] and "f16-kvq2" in said[0]


def test_layers_that_stay_on_the_cpu_are_not(generate):
    assert generate(0, attention=K, rows=V)[:2] == (0, [])


@pytest.mark.parametrize("side, name", [("K", K), ("V", V)])
def test_a_type_that_the_device_cannot_write_is_refused_by_name(generate, side, name):
    """ggml would abort."""
    status, said, text = generate(99, rows=name)
    assert status == 1 and text.strip() == ""
    assert any(f"{side} cache type {name} (layer 1): Limited0 cannot write it" in line for line in said), said
