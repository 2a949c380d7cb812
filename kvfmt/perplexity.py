"""Runs llama-perplexity and reads what it says: the cache as allocated, and the distance from the f16 cache."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import BuildFailed

_NUMBER = r"(-?\d[\d.]*(?:e[+-]?\d+)?|nan|-nan|inf)"
_STATISTICS = {
    "ppl": rf"Mean PPL\(Q\)\s*:\s*{_NUMBER}\s*±\s*{_NUMBER}",
    "ppl_base": rf"Mean PPL\(base\)\s*:\s*{_NUMBER}\s*±\s*{_NUMBER}",
    "ppl_ratio": rf"Mean PPL\(Q\)/PPL\(base\)\s*:\s*{_NUMBER}\s*±\s*{_NUMBER}",
    "kld": rf"Mean\s+KLD:\s*{_NUMBER}\s*±\s*{_NUMBER}",
    "kld_median": rf"Median\s+KLD:\s*{_NUMBER}",
    "kld_999": rf"99\.9%\s+KLD:\s*{_NUMBER}",
    "kld_max": rf"Maximum KLD:\s*{_NUMBER}",
    "same_top": rf"Same top p:\s*{_NUMBER}\s*±\s*{_NUMBER}",
}
_PPL = re.compile(rf"Final estimate: PPL = {_NUMBER} \+/- {_NUMBER}")
_BUFFER = re.compile(r"KV buffer size =\s*([\d.]+) MiB")
_POLICY = re.compile(r"kv policy: (.*)")
_SIDECAR = re.compile(r"kv profile: .*sidecar (\d+) bytes")
_POLICY_BITS = re.compile(r"total ([\d.]+) MiB, ([\d.]+) bits/value")
#: "[3]12.3," while it computes perplexity, "   3   12.3 ±" on a line of its own while it compares
_CHUNK = re.compile(r"(?:\n\s*|\[)(\d+)(?:\]\d|\s+[\d.]+ ±)")


@dataclass(frozen=True)
class Measured:
    """One run. ``statistics`` maps a name to (value,) or (value, standard error); same_top is in percent."""

    cache_mib: float
    #: Bytes of a profile's maps; they count in ``bits_per_value``, and not in ``bits_without_maps``.
    maps: int
    bits_per_value: float
    bits_without_maps: float
    statistics: dict[str, tuple[float, ...]]
    policy: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Allocated:
    """A cache as llama.cpp allocated it: its size in MiB, the bytes of a profile's maps, bits per value with the maps counted,
    and the policy's own words."""

    mib: float
    sidecar: int
    bits_per_value: float
    bits_without_maps: float
    policy: tuple[str, ...]


def allocation(log: str) -> Allocated:
    """What the log says of the cache. Raises BuildFailed if it does not say it."""
    buffers = [float(size) for size in _BUFFER.findall(log)]
    policy = tuple(line.strip() for line in _POLICY.findall(log))
    sizes = [tuple(map(float, pair)) for line in policy for pair in _POLICY_BITS.findall(line)]
    if not buffers or not sizes:
        raise BuildFailed("llama.cpp did not say how large the cache is", "Run `kvfmt build`, then try again.")
    sidecar = sum(int(size) for size in _SIDECAR.findall(log))
    # A cache of m MiB at b bits holds m / b units of values.
    values = sum(mib / b for mib, b in sizes if b)
    mib = sum(mib for mib, _ in sizes)
    bits, alone = ((size / values if values else 0.0) for size in (mib + sidecar / (1 << 20), mib))
    return Allocated(sum(buffers), sidecar, bits, alone, policy)


def parse(output: str, compared: bool) -> Measured:
    """Reads the output of a run with ``-lv 4``. Raises BuildFailed if what it should say is not there."""
    allocated = allocation(output)
    found: dict[str, tuple[float, ...]] = {}
    for name, pattern in _STATISTICS.items():
        if match := re.search(pattern, output):
            found[name] = tuple(float(x) for x in match.groups())
    if match := _PPL.search(output):
        found["ppl"] = tuple(float(x) for x in match.groups())
    missing = (set(_STATISTICS) if compared else {"ppl"}) - set(found)
    if missing:
        raise BuildFailed(f"llama-perplexity did not print {sorted(missing)}", "Its output may have changed with the pin.")
    return Measured(allocated.mib, allocated.sidecar, allocated.bits_per_value, allocated.bits_without_maps, found, allocated.policy)


def latest_chunk(tail: str) -> int:
    """Number of the last finished chunk in the end of the output, 0 if there is none. ``tail`` may begin within a line."""
    return max(map(int, _CHUNK.findall(tail)), default=0)


def run(
    program: Path, arguments: list[str], on_chunk: Callable[[int], None] | None = None, compared: bool = False
) -> Measured:
    """Runs llama-perplexity with ``arguments``; ``on_chunk(n)`` is called as chunks finish.

    Raises BuildFailed with the end of its output if it stops with an error.
    """
    command = [str(program), *arguments, "-lv", "4"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen = bytearray()
    chunks = 0
    assert process.stdout is not None
    # Chunk results come without line ends, so bytes are read as they arrive.
    while piece := process.stdout.read1(4096):
        seen += piece
        if on_chunk:
            latest = max(chunks, latest_chunk(seen[-400:].decode("utf-8", "replace")))
            if latest > chunks:
                chunks = latest
                on_chunk(chunks)
    output = seen.decode("utf-8", "replace")
    if process.wait():
        tail = "\n".join(output.splitlines()[-12:])
        raise BuildFailed(
            f"{program.name} stopped with status {process.returncode}:\n{tail}",
            f"If it does not know a type or an option, run `kvfmt build`. The command was: {' '.join(command)}",
        )
    return parse(output, compared)
