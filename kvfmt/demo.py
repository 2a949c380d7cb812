"""`kvfmt demo`: text from a small model on a compressed KV cache, then what it costs and what it saves."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from kvfmt import perplexity
from kvfmt.build.console import console, progress, step
from kvfmt.build.corpus import corpus
from kvfmt.build.models import DEFAULT_MODEL, fetch_model, get_model
from kvfmt.build.paths import build_dir
from kvfmt.build.pins import get_pin
from kvfmt.errors import BuildFailed, MissingTool
from kvfmt.policy import parse_kv

PROMPT = "The three most important inventions in the history of computing are"
N_PREDICT = 72
N_CTX = 512
CHUNKS = 2  # of N_CTX tokens; llama-perplexity scores the second half of each
TEXT_CHARS = 16_000


def run_demo(k: str, v: str, protect: int) -> None:
    """Generates text with those cache types, then compares the cache's size and the model's predictions with f16.

    Raises UnknownName for a type that does not exist, MissingTool before `kvfmt build`, BuildFailed if a program
    stops with an error.
    """
    parse_kv(f"{k}/{v}")
    folder = build_dir(get_pin().name) / "cmake-cpu" / "bin"
    for name in ("llama-completion", "llama-perplexity"):
        if not (folder / name).exists():
            raise MissingTool(f"{name} is not built yet", "Run: kvfmt build")
    model = fetch_model(DEFAULT_MODEL)
    title = f"{k}/{v}" + (f", protect {protect}" if protect else "")
    spared = f"; the first and last {protect} layers stay f16" if protect else ""
    console.print(f"\n[bold]{get_model(DEFAULT_MODEL).title}[/bold] on a KV cache of {k} keys and {v} values{spared}\n")

    types = ["-ctk", k, "-ctv", v, "-fa", "on", "--kv-protect", str(protect)]
    _generate(folder / "llama-completion", model, types)
    plain = ["-ctk", "f16", "-ctv", "f16", "-fa", "on", "--kv-protect", "0"]
    with tempfile.TemporaryDirectory() as scratch:
        text, base = Path(scratch, "text"), Path(scratch, "f16.kld")
        text.write_text(corpus("docs")[:TEXT_CHARS], "utf-8")
        run = ["-m", str(model), "-f", str(text), "-c", str(N_CTX), "-b", str(N_CTX), "--chunks", str(CHUNKS)]
        run += ["--kl-divergence-base", str(base)]
        program = folder / "llama-perplexity"
        with progress("compare with the f16 cache", 2 * CHUNKS) as update:
            f16 = perplexity.run(program, [*run, *plain], lambda n: update(n, 2 * CHUNKS))
            ours = perplexity.run(
                program, [*run, "--kl-divergence", *types], lambda n: update(CHUNKS + n, 2 * CHUNKS), compared=True
            )
    console.print(_table(title, f16, ours))


def _generate(program: Path, model: Path, types: list[str]) -> None:
    command = [str(program), "-m", str(model), "-p", PROMPT, "-n", str(N_PREDICT), "-c", str(N_CTX), *types]
    command += ["--temp", "0", "-no-cnv", "--no-display-prompt"]
    console.print("$ " + " ".join([program.name, "-m", model.name, "-p", f"'{PROMPT}'", *types]), style="dim", soft_wrap=True)
    began = time.monotonic()
    done = _run(command)
    written = done.stdout.replace("[end of text]", "").rstrip()
    console.print(Text.assemble((PROMPT, "bold"), written), soft_wrap=True)
    step(f"{time.monotonic() - began:.1f} s, the model's loading included\n")


def _run(command: list[str]) -> subprocess.CompletedProcess:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise BuildFailed(
            f"{Path(command[0]).name} stopped with status {done.returncode}:\n{tail}",
            f"If it does not know a type or an option, run `kvfmt build`. The command was: {' '.join(command)}",
        )
    return done


def _table(title: str, f16: perplexity.Measured, ours: perplexity.Measured) -> Table:
    kld, same, ratio = (ours.statistics[name] for name in ("kld", "same_top", "ppl_ratio"))
    rows = (
        ("allocated", f"{f16.cache_mib:.2f} MiB", f"{ours.cache_mib:.2f} MiB"),
        ("bits per value, all counted", f"{f16.bits_per_value:.2f}", f"{ours.bits_per_value:.2f}"),
        ("smaller by", "", f"[bold]{f16.cache_mib / ours.cache_mib:.2f} times[/bold]"),
        ("same most likely token", "100 %", f"{same[0]:.1f} ± {same[1]:.1f} %"),
        ("mean KLD", "0", f"{kld[0]:.4f} ± {kld[1]:.4f}"),
        ("99.9 % KLD", "0", f"{ours.statistics['kld_999'][0]:.3f}"),
        ("perplexity ratio", "1", f"{ratio[0]:.3f} ± {ratio[1]:.3f}"),
    )
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False, title=f"The cache of {N_CTX} tokens", title_justify="left")
    table.add_column("f16", justify="right")
    table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    table.caption = (
        f"Predictions compared on {CHUNKS * N_CTX // 2} tokens of llama.cpp's documentation.\n"
        "KLD: nats by which the predicted distribution moves from that of the f16 cache."
    )
    table.caption_justify = "left"
    return table
