"""How fast the Python reference is: ``python -m bench.encode_speed``.

Against the same code without Numba (a second Python with NUMBA_DISABLE_JIT=1), and against the numpy quantizers
of gguf-py on the same values. Candidates take turns; a ratio is made within a turn, and the table gives its median
and range over the turns. Exits 1 if a target of ``--targets`` is missed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import gguf
import numba
import numpy as np
import typer
from gguf import GGMLQuantizationType as Gguf
from rich.table import Table

from kvfmt import registry
from kvfmt.build.console import console, progress

#: At least this many times the same loop in plain Python, on one core; and at least as fast as gguf-py's numpy.
TARGET_PLAIN = 50.0
TARGET_GGUF = 1.0

RIVALS = (Gguf.Q8_0, Gguf.Q4_0, Gguf.Q4_1, Gguf.Q5_0, Gguf.Q5_1)
OPS = ("encode", "decode")
SEED = 20240817

Seconds = dict[tuple[str, str], float]


def values(n: int) -> np.ndarray:
    return np.random.default_rng(SEED).standard_normal(n).astype(np.float32)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def time_formats(x: np.ndarray) -> Seconds:
    """Seconds for each of our formats and both directions, in the current mode of Numba."""
    found = {}
    for fmt in registry.all_formats():
        data = fmt.encode(x[:64])  # compiles or loads; not timed
        fmt.decode(data)
        found[fmt.spec.name, "encode"] = timed(lambda: fmt.encode(x))
        data = fmt.encode(x) if x.size <= 4096 else _encoded(fmt.spec.name, x)
        found[fmt.spec.name, "decode"] = timed(lambda: fmt.decode(data))
    return found


_kept: dict[tuple[str, int], np.ndarray] = {}


def _encoded(name: str, x: np.ndarray) -> np.ndarray:
    if (name, x.size) not in _kept:
        _kept[name, x.size] = registry.get(name).encode(x)
    return _kept[name, x.size]


def time_rivals(x: np.ndarray) -> Seconds:
    found = {}
    for kind in RIVALS:
        data = gguf.quants.quantize(x, kind)
        found[kind.name, "encode"] = timed(lambda: gguf.quants.quantize(x, kind))
        found[kind.name, "decode"] = timed(lambda: gguf.quants.dequantize(data, kind))
    return found


WORKER = """
import json, sys
from bench import encode_speed as speed
print(json.dumps([[*key, t] for key, t in speed.time_formats(speed.values(int(sys.argv[1]))).items()]))
"""


def time_plain(n: int) -> Seconds:
    """The same in a Python that does not compile."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(n)], env=environment, capture_output=True, text=True, check=True
    )
    return {(name, op): seconds for name, op, seconds in json.loads(done.stdout)}


def ratio(slow: list[float], fast: list[float]) -> tuple[float, float, float]:
    """Median, least and greatest of slow / fast, turn by turn."""
    found = [a / b for a, b in zip(slow, fast)]
    return statistics.median(found), min(found), max(found)


def shown(r: tuple[float, float, float]) -> str:
    digits = 0 if r[0] >= 100 else 1
    return f"{r[0]:,.{digits}f} ({r[1]:,.{digits}f}–{r[2]:,.{digits}f})"


def main(
    n: int = typer.Option(1 << 20, help="values per call; a multiple of 64"),
    n_plain: int = typer.Option(2048, help="values per call without Numba; the ratio is per value"),
    turns: int = typer.Option(7, min=1),
    threads: int = typer.Option(1, min=1, max=numba.config.NUMBA_NUM_THREADS, help="of Numba; gguf-py has one"),
    targets: bool = typer.Option(False, "--targets", help="exit 1 if a target is missed"),
) -> None:
    """Speed of the Python reference."""
    numba.set_num_threads(threads)
    x = values(n)
    times: dict[tuple[str, str], list[float]] = {}
    plain: dict[tuple[str, str], list[float]] = {}
    time_formats(x), time_rivals(x)  # caches and frequency settle
    with progress("turns", turns) as update:
        for turn in range(turns):
            for found in (time_formats(x), time_rivals(x)):
                for key, seconds in found.items():
                    times.setdefault(key, []).append(seconds / n)
            for key, seconds in time_plain(n_plain).items():
                plain.setdefault(key, []).append(seconds / n_plain)
            update(turn + 1, turns)

    console.print(f"{n:,} values of a unit Gaussian, {turns} turns, Numba on {threads} thread(s); times: median (range)")
    missed = []
    for op in OPS:
        table = Table(title=f"{op}: times as fast as ...")
        for heading in ("format", "Mvalues/s", "without Numba", *(f"gguf {kind.name}" for kind in RIVALS)):
            table.add_column(heading, justify="left" if heading == "format" else "right")
        for fmt in registry.all_formats():
            key = fmt.spec.name, op
            against_plain = ratio(plain[key], times[key])
            against = [ratio(times[kind.name, op], times[key]) for kind in RIVALS]
            speed = f"{1e-6 / statistics.median(times[key]):,.0f}"
            table.add_row(fmt.spec.name, speed, shown(against_plain), *map(shown, against))
            if against_plain[0] < TARGET_PLAIN:
                missed.append(f"{fmt.spec.name} {op}: {against_plain[0]:.1f} times plain Python, not {TARGET_PLAIN:.0f}")
            missed += [
                f"{fmt.spec.name} {op}: {r[0]:.2f} times gguf {kind.name}" for kind, r in zip(RIVALS, against) if r[0] < TARGET_GGUF
            ]
        console.print(table)
    for line in missed:
        console.print(f"[red]below target:[/red] {line}")
    if targets and missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
