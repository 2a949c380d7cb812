"""`kvfmt demo`: text from a small model on a compressed KV cache, then what it costs and what it saves."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvfmt.build.console import console, progress, step
from kvfmt.build.corpus import corpus
from kvfmt.build.models import DEFAULT_MODEL, fetch_model, get_model
from kvfmt.build.paths import build_dir
from kvfmt.build.pins import get_pin
from kvfmt.errors import BuildFailed, MissingTool

PROMPT = "The three most important inventions in the history of computing are"
N_PREDICT = 72
N_CTX = 512
CHUNKS = 2  # of N_CTX tokens; llama-perplexity scores the second half of each
TEXT_CHARS = 16_000

_BUFFER = re.compile(r"KV buffer size =\s*([\d.]+) MiB")
_CACHE_LINE = re.compile(r"llama_kv_cache\w*: (size = .*)")
_STATISTICS = {
    "mean KLD": re.compile(r"Mean\s+KLD:\s*(\S+)\s*±\s*(\S+)"),
    "99.9 % KLD": re.compile(r"99\.9%\s+KLD:\s*(\S+)"),
    "same top token": re.compile(r"Same top p:\s*(\S+)\s*±\s*(\S+)"),
}


@dataclass(frozen=True)
class Measured:
    """What one run of llama-perplexity says: the cache as allocated, and its distance from f16 (none for f16 itself)."""

    cache_mib: float
    statistics: dict[str, tuple[str, ...]]
    cache_line: str


def run_demo(k: str, v: str, protect: int) -> None:
    """Generates text with those cache types, then compares the cache's size and the model's predictions with f16.

    Raises MissingTool before `kvfmt build`, BuildFailed if a program stops with an error.
    """
    folder = build_dir(get_pin().name) / "cmake-cpu" / "bin"
    for name in ("llama-completion", "llama-perplexity"):
        if not (folder / name).exists():
            raise MissingTool(f"{name} is not built yet", "Run: kvfmt build")
    model = fetch_model(DEFAULT_MODEL)
    title = f"K {k}, V {v}" + (f", first and last {protect} layers f16" if protect else "")
    console.print(f"\n[bold]{get_model(DEFAULT_MODEL).title}[/bold] on a compressed KV cache: {title}\n")

    types = ["-ctk", k, "-ctv", v, "-fa", "on"] + (["--kv-protect", str(protect)] if protect else [])
    _generate(folder / "llama-completion", model, types)
    with tempfile.TemporaryDirectory() as scratch:
        text, base = Path(scratch, "text"), Path(scratch, "f16.kld")
        text.write_text(corpus("docs")[:TEXT_CHARS], "utf-8")
        run = [str(folder / "llama-perplexity"), "-m", str(model), "-f", str(text), "-fa", "on", "-lv", "4"]
        run += ["-c", str(N_CTX), "-b", str(N_CTX), "--chunks", str(CHUNKS), "--kl-divergence-base", str(base)]
        with progress("compare with the f16 cache", 2) as update:
            f16 = _measure(run)
            update(1, 2)
            ours = _measure([*run, "--kl-divergence", *types])
            update(2, 2)
    console.print(_table(title, f16, ours))
    console.print(
        f"KLD is how far the predicted distribution moves from that of the f16 cache, in nats per token, over "
        f"{CHUNKS * N_CTX // 2} tokens of llama.cpp's documentation; 0 is no change.\n"
        f"llama.cpp allocated: {ours.cache_line}"
    )


def _generate(program: Path, model: Path, types: list[str]) -> None:
    command = [str(program), "-m", str(model), "-p", PROMPT, "-n", str(N_PREDICT), "-c", str(N_CTX), *types]
    command += ["--temp", "0", "-no-cnv", "--no-display-prompt"]
    console.print("$ " + " ".join([program.name, "-m", model.name, "-p", f"'{PROMPT}'", *types]), style="dim", soft_wrap=True)
    began = time.monotonic()
    done = _run(command)
    written = done.stdout.replace("[end of text]", "").rstrip()
    console.print(Text.assemble((PROMPT, "bold"), written), soft_wrap=True)
    step(f"{time.monotonic() - began:.1f} s, the model's loading included\n")


def _measure(command: list[str]) -> Measured:
    done = _run(command)
    output = done.stdout + done.stderr
    buffers = [float(size) for size in _BUFFER.findall(output)]
    if not buffers:
        raise BuildFailed("llama-perplexity did not say how large the cache is", f"The command was: {' '.join(command)}")
    statistics = {name: m.groups() for name, pattern in _STATISTICS.items() if (m := pattern.search(output))}
    if "--kl-divergence" in command and len(statistics) != len(_STATISTICS):
        raise BuildFailed("llama-perplexity printed no KL divergence", f"The command was: {' '.join(command)}")
    line = _CACHE_LINE.search(output)
    return Measured(sum(buffers), statistics, " ".join(line[1].split()) if line else "?")


def _run(command: list[str]) -> subprocess.CompletedProcess:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise BuildFailed(
            f"{Path(command[0]).name} stopped with status {done.returncode}:\n{tail}",
            f"If it does not know a type or an option, run `kvfmt build`. The command was: {' '.join(command)}",
        )
    return done


def _table(title: str, f16: Measured, ours: Measured) -> Table:
    table = Table(title=f"KV cache for {N_CTX} tokens", title_justify="left")
    table.add_column("")
    table.add_column("f16", justify="right")
    table.add_column(title, justify="right")
    # f16 is 16 bits for each value, so the ratio of what was allocated gives the bits, everything counted.
    table.add_row("allocated", f"{f16.cache_mib:.2f} MiB", f"{ours.cache_mib:.2f} MiB")
    table.add_row("bits per value", "16.00", f"{16 * ours.cache_mib / f16.cache_mib:.2f}")
    table.add_row("smaller by", "", f"{f16.cache_mib / ours.cache_mib:.2f} x")
    mean, error = ours.statistics["mean KLD"]
    same, same_error = ours.statistics["same top token"]
    table.add_row("mean KLD", "0", f"{mean} ± {error}")
    table.add_row("99.9 % KLD", "0", ours.statistics["99.9 % KLD"][0])
    table.add_row("same top token", "100 %", f"{same} ± {same_error} %")
    return table
