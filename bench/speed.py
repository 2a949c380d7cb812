"""How fast is a cache beside f16? Decode and prefill at depths, all caches by turns: ``kvfmt bench speed``.

Every cache is filled once a depth. Then, round by round, each takes its turn with the same work, and what it took is
divided by what f16 took in that round: a machine that slows down slows all of them.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import ExitStack
from typing import Callable

import numpy as np

from bench.bandwidth import read_bandwidth
from bench.caches import F16, Cache
from bench.divergence import mean
from bench.engine import UBATCH, Engine, Session
from bench.quality import provenance
from bench.records import Metric, Results, Row, Setting, row_key
from kvfmt.errors import KvfmtError
from kvfmt.subjects import ModelFile, Text

#: Upstream rounds the cells of a cache up to a multiple of this.
ROOM = 256


def peak_process_bytes() -> int:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def time_decode(session: Session, token: int, count: int) -> float:
    """Seconds a token, one after the other. The cache is as before afterwards."""
    length = session.length
    one = np.array([token], np.int32)
    began = time.perf_counter()
    for _ in range(count):
        session.decode(one, 0)
    took = time.perf_counter() - began
    session.forget(length)
    return took / count


def time_prefill(session: Session, tokens: np.ndarray) -> float:
    """Seconds a token for all of them together. The cache is as before afterwards."""
    length = session.length
    began = time.perf_counter()
    session.prefill(tokens)
    took = time.perf_counter() - began
    session.forget(length)
    return took / len(tokens)


def rounds_of(sessions: dict[Cache, Session], tokens: np.ndarray, rounds: int, decode: int, prefill: int, step: Callable[[], None]) -> dict[Cache, np.ndarray]:
    """Seconds a token, float64 [rounds, 2]: decode and prefill. The order turns by one every round."""
    taken = {cache: np.zeros((rounds, 2)) for cache in sessions}
    order = list(sessions)
    for session in sessions.values():  # warm: pages, and the threads' own memory
        time_decode(session, int(tokens[0]), 1)
        time_prefill(session, tokens[: min(prefill, 16)])
    for i in range(rounds):
        for cache in order[i % len(order) :] + order[: i % len(order)]:
            taken[cache][i] = time_decode(sessions[cache], int(tokens[i]), decode), time_prefill(sessions[cache], tokens[:prefill])
            step()
    return taken


def summary(mine: np.ndarray, f16: np.ndarray, session: Session, depth: int, bandwidth: float) -> dict[str, Metric]:
    """Metrics of one cache from seconds a token [rounds, 2]. Ratios are speed to f16's in the same round: 2 is twice as
    fast. ``kv_bytes`` are read for each token at this depth, ``kv_floor`` the seconds that takes at the machine's bandwidth."""
    found: dict[str, Metric] = {}
    for i, name in enumerate(("decode", "prefill")):
        ratios = f16[:, i] / mine[:, i]
        found[f"{name}_ratio"] = mean(ratios)
        found[f"{name}_low"], found[f"{name}_high"] = Metric(float(ratios.min())), Metric(float(ratios.max()))
        found[f"{name}_seconds"] = mean(mine[:, i])
        found[f"{name}_rate"] = Metric(float(1 / np.median(mine[:, i])))
    per_cell = session.allocated.n_bytes / -(-session.n_ctx // ROOM) / ROOM
    found["cache_bytes"] = Metric(float(session.allocated.n_bytes))
    found["context_bytes"] = Metric(float(session.allocated.n_bytes + session.allocated.work_bytes))
    found["kv_bytes"] = Metric(per_cell * depth)
    found["kv_floor"] = Metric(per_cell * depth / bandwidth)
    found["bandwidth"] = Metric(bandwidth)
    return found


def measure(
    engine: Engine,
    model: ModelFile,
    caches: tuple[Cache, ...],
    depths: tuple[int, ...],
    rounds: int,
    decode: int,
    prefill: int,
    seed: int,
    results: Results,
    update: Callable[[int, int], None] = lambda done, total: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Rows of all caches at all depths, f16 first. If a row is missing at a depth, all caches are measured there
    again: ratios are of one run. ``update(done, total)`` counts tokens. Raises KvfmtError as ``Engine.open``, and for
    numbers that measure nothing.
    """
    if rounds < 2 or decode < 1 or prefill < 1:
        raise KvfmtError(f"{rounds} rounds of {decode} and {prefill} tokens give no spread", "Take at least 2 rounds and 1 token.")
    if min(depths) < 0:
        raise KvfmtError(f"depth {min(depths)} is negative", "Give the number of tokens in the cache, 0 for none.")
    caches = tuple(dict.fromkeys((F16, *caches)))
    depths = tuple(sorted(set(depths)))
    n_ctx = max(depths) + max(decode, prefill)
    n_ctx += -n_ctx % ROOM
    engine.check_ctx(n_ctx)
    subject = Text("tokens from a seed", str(seed))
    setups: dict[int, dict[str, Setting]] = {
        depth: {"depth": depth, "rounds": rounds, "decode": decode, "prefill": prefill, "threads": engine.threads} for depth in depths
    }
    origins = {cache: provenance(model, subject, n_ctx, cache.kv, seed) for cache in caches}

    def key(cache: Cache, depth: int) -> str:
        return row_key("speed", cache.title, *cache.sides, cache.protect, origins[cache], setups[depth])

    missing = [d for d in depths if any(results.find(key(c, d)) is None for c in caches)]
    total = len(caches) * (max(missing, default=0) + len(missing) * rounds * (decode + prefill))
    done = 0

    def step(n: int) -> None:
        nonlocal done
        done += n
        update(done, total)

    if missing:
        tokens = np.random.default_rng(seed).integers(0, engine.n_vocab, max(n_ctx, rounds), dtype=np.int32)
        bandwidth = read_bandwidth(engine.threads)
        with ExitStack() as stack:
            sessions = {cache: stack.enter_context(engine.open(cache, n_ctx)) for cache in caches}
            for depth in missing:
                for session in sessions.values():
                    while session.length < depth:
                        piece = tokens[session.length : min(session.length + UBATCH, depth)]
                        session.prefill(piece)
                        step(len(piece))
                taken = rounds_of(sessions, tokens, rounds, decode, prefill, lambda: step(decode + prefill))
                rows = []
                for cache, session in sessions.items():
                    found = summary(taken[cache], taken[F16], session, depth, bandwidth)
                    found["process_peak_bytes"] = Metric(float(peak_process_bytes()))
                    detail = {"seconds": taken[cache].tolist(), "beside": [c.title for c in caches], "policy": list(session.allocated.policy)}
                    bits = session.allocated.bits_per_value
                    rows.append(Row("speed", cache.title, *cache.sides, cache.protect, bits, origins[cache], setups[depth], found, detail))
                results.append(rows)
                for row in rows:
                    on_row(row)
    return [row for d in depths for c in caches if (row := results.find(key(c, d)))]
