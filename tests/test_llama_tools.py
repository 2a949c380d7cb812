"""The programs with our KV cache types: every tool takes them, errors are errors and never signals.

Needs the programs (``kvfmt build``). The models are random, so nothing is downloaded.
"""

from __future__ import annotations

import csv
import io
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import random_gguf
from kvfmt import registry
from random_profile import random_profile
from kvfmt.build.paths import bin_dir
from kvfmt.build.pins import get_pin

BIN = bin_dir(get_pin().name)
NAMES = [fmt.spec.name for fmt in registry.all_formats()]
PLAIN = [fmt.spec.name for fmt in registry.plain_formats()]
TOOLS = ["llama-cli", "llama-completion", "llama-server", "llama-perplexity", "llama-bench", "llama-batched-bench"]
COMMON = [tool for tool in TOOLS if tool != "llama-bench"]
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
QUIET = {"OMP_WAIT_POLICY": "passive", "LLAMA_LOG_COLORS": "off"}


def program(name: str) -> Path:
    path = BIN / name
    if not path.exists():
        pytest.fail(f"{path} is missing: run `kvfmt build` first, or point KVFMT_BIN at another build", pytrace=False)
    return path


def run(name: str, *arguments, timeout: float = 300, environment: dict | None = None) -> subprocess.CompletedProcess:
    command = [str(part) for part in (program(name), *arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        env=os.environ | QUIET | (environment or {}),
    )
    assert done.returncode >= 0, f"signal {-done.returncode}: {' '.join(command)}\n{done.stderr[-2000:]}"
    assert done.returncode < 128, f"exit {done.returncode}: {' '.join(command)}\n{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return random_gguf.llama(tmp_path_factory.mktemp("tools") / "plain.gguf")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "text"
    path.write_text(PROMPT * 12)
    return path


@pytest.fixture(scope="session")
def profile(model):
    return random_profile(model).write(model.with_name("profile.gguf"))


def job(tool: str, model: Path, text: Path) -> list:
    """The shortest run of a tool that makes a context."""
    shared = ["-m", model, "-t", 1, "-c", 256]
    return {
        "llama-cli": [*shared, "-p", "abc", "-n", 4, "--single-turn", "--simple-io"],
        "llama-completion": [*shared, "-p", "abc", "-n", 4, "-no-cnv"],
        "llama-server": [*shared, "--port", free_port()],
        "llama-perplexity": [*shared, "-f", text, "--chunks", 1],
        "llama-bench": ["-m", model, "-t", 1, "-p", 8, "-n", 2, "-r", 1],
        "llama-batched-bench": [*shared, "-npp", 8, "-ntg", 4, "-npl", 1],
    }[tool]


def completion(model: Path, *arguments, **options) -> subprocess.CompletedProcess:
    """Greedy text of the random model; the log goes to stderr."""
    defaults = ["-m", model, "-t", 1, "-no-cnv", "--temp", 0, "--ignore-eos", "--no-warmup", "-v", "-fa", "on"]
    return run("llama-completion", *defaults, *arguments, **options)


@pytest.mark.parametrize("tool", COMMON)
def test_help_names_types_and_protection(tool):
    text = run(tool, "--help").stdout
    for name in NAMES:
        assert name in text
    assert "--kv-protect" in text
    assert "--kv-profile" in text


def test_help_of_bench():
    text = run("llama-bench", "--help").stdout
    assert "-kvp, --kv-protect" in text
    assert "-kvf, --kv-profile" in text


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "llama-server"])
def test_every_tool_takes_every_type(tool, model, text):
    for name in PLAIN:
        done = run(tool, *job(tool, model, text), "-ctk", name, "-ctv", name, "-fa", "on", "-kvp" if tool == "llama-bench" else "--kv-protect", 1)
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("tool", TOOLS)
def test_quantized_v_without_flash_attention_is_an_error(tool, model, text):
    for name in ("q4_0", "kvq2"):
        done = run(tool, *job(tool, model, text), "-ctv", name, "-fa", "off", timeout=120)
        assert done.returncode != 0
        if tool != "llama-bench":  # it shows the library's log only with -v
            assert "quantized V cache requires flash_attn" in done.stdout + done.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_wrong_words_are_errors(tool, model, text):
    protect = "-kvp" if tool == "llama-bench" else "--kv-protect"
    for wrong in (["-ctk", "kvq5"], [protect, "-2"], [protect, "x"]):
        assert run(tool, *job(tool, model, text), *wrong, timeout=120).returncode != 0


def test_protection_from_the_environment(model):
    done = completion(model, "-p", "abc", "-n", 2, "-ctk", "kvq3", "-ctv", "kvq2", environment={"LLAMA_ARG_KV_PROTECT": "1"})
    assert "protected layers: 0 3," in done.stderr + done.stdout


def test_a_wholly_protected_cache_writes_the_text_of_f16(model):
    expected = completion(model, "-p", PROMPT, "-n", 48).stdout
    assert completion(model, "-p", PROMPT, "-n", 48, "-ctk", "kvq3", "-ctv", "kvq2", "--kv-protect", 2).stdout == expected
    assert completion(model, "-p", PROMPT, "-n", 48, "-ctk", "kvq2", "-ctv", "kvq2", "--kv-protect", 0).stdout != expected


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "llama-server"])
def test_every_tool_takes_a_profile(tool, model, text, profile):
    shared = [*job(tool, model, text), "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"]
    assert run(tool, *shared, "--kv-profile", profile).returncode == 0
    assert run(tool, *shared, "--kv-profile", text, timeout=120).returncode != 0


def test_profile_from_the_environment(model, profile):
    done = completion(model, "-p", "abc", "-n", 2, "-ctk", "q8_0", environment={"LLAMA_ARG_KV_PROFILE": str(profile)})
    assert "kv profile: random" in done.stderr + done.stdout


def test_a_bad_profile_is_named(model, text):
    def attempt():
        done = completion(model, "-p", "abc", "-n", 2, "-ctk", "q8_0", "--kv-profile", text)
        assert done.returncode != 0
        return f"KV profile {text}: cannot be read as a GGUF file" in done.stderr + done.stdout

    assert attempt()


def test_memory_of_a_profile_is_counted(tmp_path):
    """In the estimate that --fit makes before anything is allocated, and in what was."""
    big = random_gguf.llama(tmp_path / "big.gguf", head=128, n_head=8, n_head_kv=8)
    maps = random_profile(big, dtype=np.float32)
    mib = sum(data.nbytes for data in maps.tensors.values()) / 2**20
    path = maps.write(tmp_path / "profile.gguf")

    def contexts(*arguments) -> list[int]:
        done = completion(big, "-p", "abc", "-n", 2, "-c", 256, "-ctk", "q8_0", "-ctv", "q8_0", *arguments)
        return [int(line.split("+")[1]) for line in (done.stdout + done.stderr).splitlines() if " - Host " in line]

    without, with_profile = contexts(), contexts("--kv-profile", path)
    assert len(without) == len(with_profile) == 2
    for a, b in zip(without, with_profile):
        assert abs(b - a - mib) <= 1


def test_no_tool_ends_before_it_has_written_all(model):
    """The logger's thread was not waited for: on a busy machine texts lost their end, and refusals their reason."""
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: completion(model, "-p", PROMPT, "-n", 48).stdout, range(32)))
    assert len(set(texts)) == 1


def test_context_shift_goes_on_and_on(model):
    done = completion(model, "-p", PROMPT, "-c", 256, "-n", 1200, "--context-shift", "-ctk", "kvq3", "-ctv", "kvq2")
    assert done.returncode == 0, done.stderr[-2000:]


def refusal_is_named(attempt) -> bool:
    """Every attempt must fail. Upstream's logger thread may drop the last lines of a failing program, so one may be mute."""
    for _ in range(5):
        done = attempt()
        assert done.returncode > 0
        if "saved from another kind of KV cache" in done.stderr + done.stdout:
            return True
    return False


def test_prompt_cache(model, tmp_path):
    saved = tmp_path / "prompt.bin"
    types = ["-ctk", "kvq3", "-ctv", "kvq2", "--kv-protect", 1]
    cached = ["-p", PROMPT, "-n", 16, "--prompt-cache", saved]
    expected = completion(model, *cached, *types).stdout
    assert completion(model, *cached, *types, "--prompt-cache-ro").stdout == expected
    for other in (["-ctk", "kvq4", "-ctv", "kvq2"], ["-ctk", "kvq3", "-ctv", "kvq2", "--kv-protect", 0], []):
        assert refusal_is_named(lambda: completion(model, *cached, *other))
    saved.write_bytes(b"")
    assert completion(model, *cached, *types).returncode == 0


def test_bench_has_a_column_in_every_format(model):
    base = ["-m", model, "-t", 1, "-p", 8, "-n", 0, "-r", 1, "-fa", "on", "-ctk", "kvq3", "-ctv", "kvq2", "-kvp", "0,1"]
    rows = json.loads(run("llama-bench", *base, "-o", "json").stdout)
    assert [row["kv_protect"] for row in rows] == [0, 1]
    assert {row["type_k"] for row in rows} == {"kvq3"}
    rows = list(csv.DictReader(io.StringIO(run("llama-bench", *base, "-o", "csv").stdout)))
    assert [row["kv_protect"] for row in rows] == ["0", "1"]
    assert "kvp |" in run("llama-bench", *base, "-o", "md").stdout
    assert "kv_protect INTEGER" in run("llama-bench", *base, "-o", "sql").stdout
    assert [json.loads(line)["kv_protect"] for line in run("llama-bench", *base, "-o", "jsonl").stdout.splitlines()] == [0, 1]


def test_bench_compares_profiles(model, profile):
    base = ["-m", model, "-t", 1, "-p", 8, "-n", 0, "-r", 1, "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "-kvf", f"none,{profile}"]
    rows = json.loads(run("llama-bench", *base, "-o", "json").stdout)
    assert [row["kv_profile"] for row in rows] == ["none", str(profile)]
    rows = list(csv.DictReader(io.StringIO(run("llama-bench", *base, "-o", "csv").stdout)))
    assert [row["kv_profile"] for row in rows] == ["none", str(profile)]
    assert str(profile) in run("llama-bench", *base, "-o", "md").stdout


# the server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, port: int, process: subprocess.Popen, log: Path):
        self.address, self.process, self.log = f"http://127.0.0.1:{port}", process, log

    def ask(self, path: str, body: dict | None = None, timeout: float = 120):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def said(self, words: str) -> bool:
        """Whether the log has these words, now or soon: a thread of its own writes it, which may be behind the answers."""
        deadline = time.monotonic() + 30
        while words not in self.log.read_text(errors="replace"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    #: The bytes from 0x80 on, as tokens: the server answers with an error where a random model's bytes are no UTF-8.
    NOT_ASCII = [[token, False] for token in range(random_gguf.N_VOCAB - 128, random_gguf.N_VOCAB)]

    def complete(self, prompt: str, n: int = 24, slot: int = -1, cache: bool = False) -> str:
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "id_slot": slot, "cache_prompt": cache}
        body["logit_bias"] = self.NOT_ASCII
        return self.ask("/completion", body)["content"]


@contextmanager
def server(model: Path, folder: Path, *arguments):
    port, log = free_port(), folder / f"server-{time.monotonic_ns()}.log"
    command = [program("llama-server"), "-m", model, "--port", port, "-t", 1, "-c", 1024, "-fa", "on", "-v", "--no-warmup", *arguments]
    with log.open("wb") as sink:
        process = subprocess.Popen([str(part) for part in command], stdout=sink, stderr=sink, env=os.environ | QUIET)
    one = Server(port, process, log)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                one.ask("/health")
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
                time.sleep(0.1)
        yield one
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
    finally:
        process.terminate()
        process.wait(30)


KV = ["-ctk", "kvq3", "-ctv", "kvq2", "--kv-protect", "1"]


def test_server_slots_in_parallel(model, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    prompts = [PROMPT, "Lorem ipsum dolor sit amet. " * 4, "0123456789 " * 8]
    with server(model, tmp_path, *KV, "-np", "3") as one:
        alone = [one.complete(prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(one.complete, prompts))
        assert together == alone
        assert one.said("kv policy: K kvq3 x 2 + f16 x 2 layers"), one.log.read_text(errors="replace")[-3000:]


def test_server_slot_save_and_restore(model, tmp_path):
    slots = tmp_path / "slots"
    slots.mkdir()
    save = ["--slot-save-path", f"{slots}/", "-np", "1"]

    def restore(one: Server, name: str):
        return one.ask("/slots/0?action=restore", {"filename": name})

    with server(model, tmp_path, *KV, *save) as one:
        expected = one.complete(PROMPT, slot=0)
        one.complete(PROMPT, n=1, slot=0)
        one.ask("/slots/0?action=save", {"filename": "a"})
        one.complete("something else entirely", slot=0)
        assert restore(one, "a")["n_restored"] > 0
        assert one.complete(PROMPT, slot=0, cache=True) == expected
        whole = (slots / "a").read_bytes()
        description = whole.index(b"rotated:")
        flipped = whole[:description] + b"R" + whole[description + 1 :]
        for i, damaged in enumerate((b"", whole[:40], whole[: len(whole) // 2], whole[:-1], flipped)):
            (slots / f"bad{i}").write_bytes(damaged)
            with pytest.raises(urllib.error.HTTPError) as error:
                restore(one, f"bad{i}")
            assert error.value.code == 400
            assert one.complete(PROMPT, slot=0, cache=True) == expected
    for other in (["-ctk", "kvq4", "-ctv", "kvq2"], [], ["-ctk", "kvq3", "-ctv", "kvq2", "--kv-protect", "0"]):
        with server(model, tmp_path, *other, *save) as one:
            clean = one.complete(PROMPT, slot=0, cache=True)
            with pytest.raises(urllib.error.HTTPError) as error:
                restore(one, "a")
            assert error.value.code == 400
            assert one.said("saved from another kind of KV cache"), one.log.read_text(errors="replace")[-3000:]
            assert one.complete(PROMPT, slot=0, cache=True) == clean


def test_a_draft_with_types_of_its_own(model, tmp_path):
    with server(model, tmp_path, "-np", "1", *KV) as one:
        expected = one.complete(PROMPT, n=48)
    draft = ["-md", model, "-ctkd", "kvq4", "-ctvd", "kvq4", "--kv-protect-draft", "0", "-np", "1"]
    with server(model, tmp_path, *KV, *draft) as one:
        assert one.complete(PROMPT, n=48) == expected
        log = one.log.read_text(errors="replace")
    assert "K kvq3 x 2 + f16 x 2 layers" in log
    assert "K kvq4 x 4 layers" in log
    with server(model, tmp_path, *KV, "-md", model, "-np", "1") as one:
        assert one.complete(PROMPT, n=48) == expected
        assert one.said("K f16 x 4 layers"), one.log.read_text(errors="replace")[-3000:]


def test_a_draft_does_not_inherit_the_profile(model, tmp_path, profile):
    types = ["-ctk", "q8_0", "-ctv", "q8_0", "--kv-profile", profile, "-np", "1"]
    with server(model, tmp_path, *types) as one:
        expected = one.complete(PROMPT, n=48)
    with server(model, tmp_path, *types, "-md", model, "-ctkd", "q8_0", "-ctvd", "q8_0") as one:
        assert one.complete(PROMPT, n=48) == expected
        log = one.log.read_text(errors="replace")
    assert log.count("kv policy: K q8_0") >= 2
    assert log.count("kv profile: ") == log.count("kv policy: K q8_0") - log.count("kv policy: K q8_0") // 2
