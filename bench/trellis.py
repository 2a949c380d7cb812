"""What a trellis code would give in place of the E8 lattice, and what its encoder costs: ``python -m bench.trellis``.

Two families, both walked by one Viterbi search over a block of 64 values, at R bits a value and one f16 scale:

- ``set``: trellis-coded quantization (Marcellin and Fischer 1990, IEEE Trans. Commun. 38(1)): 2**(R+1) levels in four
  subsets, a rate-1/2 convolutional code (Ungerboeck 1982, IEEE Trans. IT 28(1), table I) says which two of them may follow.
- ``shift``: the state is the last bits of the code, and the next R bits complete an index into one table of levels
  (the bitshift trellis of QTIP, Tseng et al. 2024, arXiv 2406.11235, with a table that is trained instead of computed).

Levels are trained by Lloyd's iteration through the search itself, on blocks that are not scored. A walk starts in
state 0, or bites its tail: it ends where it began, found in two searches as in QTIP. Both take exactly R bits a value.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import typer
from numba import njit
from rich import box
from rich.table import Table

from bench.encode_token import BUDGET_MS, SIDE_VALUES
from kvfmt import registry
from kvfmt.build.console import console, progress
from kvfmt.distortion import gaussian_distortion
from kvfmt.errors import KvfmtError
from kvfmt.scalar import f16_bits_to_f32, f32_to_f16_bits

BLOCK = 64
SCALE_BITS = 16
SEED = 20240817

#: Parity-check polynomials (h0, h1) by memory in bits; the last is the coefficient of D**0.
UNGERBOECK = {2: (0o5, 0o2), 3: (0o13, 0o4), 4: (0o23, 0o4), 5: (0o45, 0o10), 6: (0o103, 0o24), 7: (0o235, 0o126), 8: (0o515, 0o362)}

#: K and V of one token of the 7B-shaped model.
TOKEN_VALUES = 2 * SIDE_VALUES
WORTH_DB = 0.5
#: An optimistic C encoder: 16-bit costs, 16 to a register, two operations a cycle at 3 GHz.
SIMD_OPS_PER_NS = 16 * 2 * 3.0


@dataclass(frozen=True)
class Trellis:
    """``memory``: log2 of the states; ``shift``: bits that enter at each value. A window is the state followed by them,
    the newest lowest; ``labels`` int64 [2**(memory + shift)] names its subset of ``levels`` float32 [subsets, members]."""

    family: str
    bits: int
    memory: int
    shift: int
    labels: np.ndarray
    levels: np.ndarray

    @property
    def states(self) -> int:
        return 1 << self.memory

    @property
    def additions(self) -> float:
        """A value, a scale and a search: the level's error (a subtraction, its square counted as one), and each branch's sum."""
        return 2 * self.levels.size + len(self.labels)

    @property
    def compares(self) -> float:
        """Within each subset, and between the branches that meet in a state."""
        return self.levels.size - len(self.levels) + len(self.labels) - self.states


def set_partitioned(bits: int, memory: int) -> Trellis:
    """Levels as dense as the cube root of a Gaussian's density, ascending; level i is in subset i % 4, whose low bit is z0."""
    h0, h1 = UNGERBOECK[memory]
    windows = np.arange(2 << memory)

    def parity(mask: int) -> np.ndarray:
        # u h0 and u h1 for the input u satisfy the parity check z1 h1 + z0 h0 = 0 whatever u is.
        return np.array([bin(int(w) & mask).count("1") & 1 for w in windows])

    # The cube root of a Gaussian's density is that of one of three times the variance (Panter and Dite 1951).
    levels = np.float32(3**0.5) * _gaussian_levels(2 << bits)
    return Trellis("set", bits, memory, 1, 2 * parity(h0) + parity(h1), np.ascontiguousarray(levels.reshape(-1, 4).T))


def bit_shift(bits: int, memory: int, seed: int = SEED) -> Trellis:
    """2**(memory + bits) levels. The siblings that complete one state are spread evenly, in a random order.
    Raises KvfmtError if ``memory`` is less than ``bits``: the branches that meet in a state would not fill a value."""
    if memory < bits:
        raise KvfmtError(
            f"a bitshift trellis of {bits} bits a value needs at least {1 << bits} states, not {1 << memory}", "Ask for more states."
        )
    rng = np.random.default_rng(seed)
    states, branches = 1 << memory, 1 << bits
    levels = _gaussian_levels(states * branches).reshape(branches, states)
    table = np.stack([rng.permutation(row) for row in levels], axis=1)
    table = rng.permuted(table, axis=1).reshape(-1, 1)
    return Trellis("shift", bits, memory, bits, np.arange(states * branches), np.ascontiguousarray(table))


def _gaussian_levels(n: int) -> np.ndarray:
    """float32 [n]: quantiles of a unit Gaussian, ascending."""
    rank = (np.arange(n) + 0.5) / n
    grid = np.linspace(-6, 6, 24001)
    cumulated = np.cumsum(np.exp(-grid * grid / 2))
    return np.interp(rank, cumulated / cumulated[-1], grid).astype(np.float32)


@njit(cache=True)
def scratch(labels, memory, shift, size):
    """Arrays that :func:`search` works in for rows of ``size``; the first holds ``labels`` in the order in which it goes through them."""
    states, branches = 1 << memory, 1 << shift
    groups = states >> shift
    ordered = np.empty(labels.shape[0], np.int32)
    for p in range(branches):
        for l in range(branches):
            for g in range(groups):
                ordered[(p * branches + l) * groups + g] = labels[(p << memory) | (g << shift) | l]
    return ordered, np.empty(labels.shape[0], np.float32), np.empty(states, np.float32), np.empty(states, np.float32), np.empty((size, states), np.uint8)


@njit(cache=True)
def search(x, labels, levels, memory, shift, start, end, steps, members, room):
    """The best walk for ``x`` float32 [n]: windows into ``steps`` int32 [n], members of their subsets into ``members``
    int32 [n]. ``start`` and ``end`` are states, or -1 for any; ``room`` is :func:`scratch`. Returns the squared error."""
    ordered, weight, cost, merged, branch = room
    n = x.shape[0]
    states, branches = 1 << memory, 1 << shift
    groups = states >> shift
    error = np.empty(levels.shape[0], np.float32)
    for s in range(states):
        cost[s] = 0 if start < 0 or s == start else np.float32(1e30)
    for i in range(n):
        for k in range(levels.shape[0]):
            least = np.float32(1e30)
            for m in range(levels.shape[1]):
                d = x[i] - levels[k, m]
                least = min(least, d * d)
            error[k] = least
        for w in range(labels.shape[0]):
            weight[w] = error[ordered[w]]
        # Windows with the same low bits (g, l) end in the same state; their top bits p say from which they come.
        # Of the three, only g is long: it is the inner loop, so that it becomes SIMD.
        picks = branch[i]
        for l in range(branches):
            into = merged[l * groups : (l + 1) * groups]
            pick = picks[l * groups : (l + 1) * groups]
            first = weight[l * groups : (l + 1) * groups]
            for g in range(groups):
                into[g] = cost[g] + first[g]
                pick[g] = 0
            for p in range(1, branches):
                entering = weight[(p * branches + l) * groups : (p * branches + l + 1) * groups]
                came = cost[p * groups : (p + 1) * groups]
                for g in range(groups):
                    new = came[g] + entering[g]
                    better = new < into[g]
                    pick[g] = np.uint8(p) if better else pick[g]
                    into[g] = new if better else into[g]
        for l in range(branches):
            for g in range(groups):
                cost[(g << shift) | l] = merged[l * groups + g]
    s = end
    if end < 0:
        s = 0
        for t in range(1, states):
            if cost[t] < cost[s]:
                s = t
    total = cost[s]
    for i in range(n - 1, -1, -1):
        w = (np.int64(branch[i, (s & (branches - 1)) * groups + (s >> shift)]) << memory) | s
        steps[i] = w
        k = labels[w]
        members[i] = 0
        for m in range(1, levels.shape[1]):
            if abs(x[i] - levels[k, m]) < abs(x[i] - levels[k, members[i]]):
                members[i] = m
        s = w >> shift
    return total


@njit(cache=True)
def encode(blocks, labels, levels, memory, shift, tail, scales, steps, members, chosen):
    """Codes of each block, ``blocks`` float32 [n, 64]: at every one of ``scales`` (relative to the root mean square) a walk
    is searched, its scale refitted by least squares and rounded to f16, and the least error kept.
    Fills ``steps`` and ``members`` int32 [n, 64] and ``chosen`` float32 [n], the scale."""
    size = blocks.shape[1]
    room = scratch(labels, memory, shift, size)
    walk = np.empty(size, np.int32)
    member = np.empty(size, np.int32)
    y = np.empty(size, np.float32)
    turned = np.empty(size, np.float32)
    half = size // 2
    for b in range(blocks.shape[0]):
        x = blocks[b]
        rms = np.float32(0.0)
        for i in range(size):
            rms += x[i] * x[i]
        rms = np.sqrt(rms / np.float32(size))
        least = np.float32(np.inf)
        for j in range(scales.shape[0]):
            inverse = np.float32(1.0) / max(rms * scales[j], np.float32(1e-20))
            for i in range(size):
                y[i] = x[i] * inverse
            if tail:
                for i in range(size):
                    turned[i] = y[(i + half) % size]
                search(turned, labels, levels, memory, shift, -1, -1, walk, member, room)
                state = walk[half] >> shift
                search(y, labels, levels, memory, shift, state, state, walk, member, room)
            else:
                search(y, labels, levels, memory, shift, 0, -1, walk, member, room)
            xv = np.float32(0.0)
            vv = np.float32(1e-20)
            for i in range(size):
                v = levels[labels[walk[i]], member[i]]
                xv += x[i] * v
                vv += v * v
            scale = f16_bits_to_f32(f32_to_f16_bits(xv / vv))
            total = np.float32(0.0)
            for i in range(size):
                d = x[i] - scale * levels[labels[walk[i]], member[i]]
                total += d * d
            if total < least:
                least = total
                steps[b] = walk
                members[b] = member
                chosen[b] = scale


@dataclass(frozen=True)
class Codes:
    """``steps`` int32 [n, block]: windows; ``members`` int32 [n, block]; ``scales`` float32 [n]."""

    steps: np.ndarray
    members: np.ndarray
    scales: np.ndarray


def encoded(trellis: Trellis, blocks: np.ndarray, tail: bool, scales: np.ndarray) -> Codes:
    """The codes of float32 [n, block]."""
    codes = Codes(np.zeros(blocks.shape, np.int32), np.zeros(blocks.shape, np.int32), np.zeros(len(blocks), np.float32))
    encode(blocks, trellis.labels, trellis.levels, trellis.memory, trellis.shift, tail, scales, codes.steps, codes.members, codes.scales)
    return codes


def symbols(trellis: Trellis, codes: Codes) -> np.ndarray:
    """What would be stored: the entering bits and the member of the subset as one number of R bits, int32 [n, block]."""
    entering = codes.steps & ((1 << trellis.shift) - 1)
    return entering * trellis.levels.shape[1] + codes.members


def decoded(trellis: Trellis, stored: np.ndarray, scales: np.ndarray, tail: bool) -> np.ndarray:
    """float32 [n, block] from the stored symbols and scales alone. With ``tail`` the last symbols give the first state."""
    entering, members = np.divmod(stored, trellis.levels.shape[1])
    state = np.zeros(len(stored), np.int64)
    if tail:
        for i in range(max(0, stored.shape[1] - trellis.memory), stored.shape[1]):
            state = ((state << trellis.shift) | entering[:, i]) & (trellis.states - 1)
    out = np.empty(stored.shape, np.float32)
    for i in range(stored.shape[1]):
        window = (state << trellis.shift) | entering[:, i]
        out[:, i] = scales * trellis.levels[trellis.labels[window], members[:, i]]
        state = window & (trellis.states - 1)
    return out


def distortion(trellis: Trellis, blocks: np.ndarray, tail: bool, scales: np.ndarray) -> float:
    """Mean squared error of encode + decode."""
    codes = encoded(trellis, blocks, tail, scales)
    error = decoded(trellis, symbols(trellis, codes), codes.scales, tail).astype(np.float64) - blocks
    return float(np.mean(error * error))


def trained(trellis: Trellis, blocks: np.ndarray, rounds: int, scales: np.ndarray) -> Trellis:
    """The same trellis, its levels first scaled as a whole, then each moved to the centroid of what falls on it, ``rounds``
    times. The first step matters: a search that refits the scale is content at any of them."""
    some = blocks[: max(1, len(blocks) // 8)]
    factors = [_scaled(trellis, f) for f in np.linspace(0.6, 1.2, 13)]
    trellis = min(factors, key=lambda t: distortion(t, some, False, scales))
    for _ in range(rounds):
        codes = encoded(trellis, blocks, False, scales)
        index = trellis.labels[codes.steps] * trellis.levels.shape[1] + codes.members
        # Weighted with the scale: what counts is the error of the block, not of the normalised one.
        s = codes.scales[:, None].astype(np.float64)
        moments = np.bincount(index.ravel(), (blocks * s).ravel(), trellis.levels.size)
        weights = np.bincount(index.ravel(), np.broadcast_to(s * s, index.shape).ravel(), trellis.levels.size)
        levels = np.where(weights > 0, moments / np.maximum(weights, 1e-12), trellis.levels.ravel())
        trellis = replace(trellis, levels=levels.reshape(trellis.levels.shape).astype(np.float32))
    return trellis


def _scaled(trellis: Trellis, factor: float) -> Trellis:
    return replace(trellis, levels=trellis.levels * np.float32(factor))


@dataclass(frozen=True)
class Row:
    """A measured code: ``searches`` Viterbi passes a block, ``ns`` measured a value, ``gain`` dB better than the lattice."""

    trellis: Trellis
    tail: bool
    searches: int
    mse: float
    gain: float
    ns: float

    @property
    def operations(self) -> tuple[float, float]:
        """Additions and compares a value, all searches together."""
        return self.trellis.additions * self.searches, self.trellis.compares * self.searches

    @property
    def ms(self) -> float:
        """A token of the 7B-shaped model, as measured."""
        return self.ns * TOKEN_VALUES * 1e-6

    @property
    def simd_ms(self) -> float:
        """The same if every operation ran at SIMD_OPS_PER_NS and nothing else cost time."""
        return sum(self.operations) / SIMD_OPS_PER_NS * TOKEN_VALUES * 1e-6


def timed(trellis: Trellis, blocks: np.ndarray, tail: bool, scales: np.ndarray, turns: int) -> float:
    """Nanoseconds a value on one core, the least of ``turns``: whatever else the machine does only adds to it."""
    found = []
    for _ in range(turns):
        began = time.perf_counter()
        encoded(trellis, blocks, tail, scales)
        found.append(time.perf_counter() - began)
    return min(found) * 1e9 / blocks.size


def rivals(bits: int) -> tuple[str, float]:
    """The registered format that is best at the same allocated bits, and its error at the best scale. Raises KvfmtError if there is none."""
    same = [f for f in registry.plain_formats() if f.spec.bits_per_value == bits + SCALE_BITS / BLOCK]
    if not same:
        raise KvfmtError(f"no registered format takes {bits + SCALE_BITS / BLOCK} bits a value", "Ask for a rate at which there is one to compare with.")
    return min(((f.spec.name, gaussian_distortion(f).codes) for f in same), key=lambda found: found[1])


def verdict(bits: int, name: str, rows: list[Row]) -> str:
    """One paragraph: does a trellis beat the format by WORTH_DB within BUDGET_MS?"""
    affordable = [r for r in rows if r.simd_ms < BUDGET_MS]
    measured = [r for r in rows if r.ms < BUDGET_MS]
    enough = [r for r in rows if r.gain > WORTH_DB]

    def best(of: list[Row], what: str) -> str:
        if not of:
            return f"none {what}"
        r = max(of, key=lambda r: r.gain)
        kind = f"{r.trellis.family}, {r.trellis.states} states, {r.searches} search{'es' if r.searches > 1 else ''}"
        return f"the best {what} is {kind}: {r.gain:+.2f} dB at {r.ms:.1f} ms ({r.simd_ms:.2f} ms in ideal SIMD)"

    yes = [r for r in enough if r.simd_ms < BUDGET_MS]
    cheapest = min(enough, key=lambda r: r.simd_ms, default=None)
    reach = (
        f"the cheapest with more than {WORTH_DB} dB would take {cheapest.simd_ms:.1f} ms in ideal SIMD and takes {cheapest.ms:.0f} ms measured"
        if cheapest
        else f"none here gains {WORTH_DB} dB (the most is {max(r.gain for r in rows):+.2f} dB)"
    )
    return (
        f"{bits} bits, against {name}: a trellis is {'WORTH a format' if yes else 'NOT worth a format'} by the rule "
        f"(more than {WORTH_DB} dB, under {BUDGET_MS:g} ms a token). Of all, {best(affordable, 'that ideal SIMD could afford')}; "
        f"{best(measured, 'affordable as measured')}; {reach}."
    )


def numbers(text: str) -> list[int]:
    """"16,64" -> [16, 64]. Raises KvfmtError for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise KvfmtError(f"'{text}' is not a list of numbers", "Write them as 16,64.") from None


def compare(states: list[int], rates: list[int], blocks: int, training: int, rounds: int, turns: int) -> None:
    """Trains, measures and prints. Raises KvfmtError for states or rates that no trellis or no format here has."""
    rng = np.random.default_rng(SEED)
    train = rng.standard_normal((training, BLOCK)).astype(np.float32)
    score = rng.standard_normal((blocks, BLOCK)).astype(np.float32)
    one, three, seven = (np.linspace(1 - w, 1 + w, n).astype(np.float32) for n, w in ((1, 0), (3, 0.15), (7, 0.15)))
    for count in states:
        if count < 4 or count & (count - 1):
            raise KvfmtError(f"{count} states are not a power of two from 4 on", "Ask for 16, 64, 256 or the like.")
    memories = [count.bit_length() - 1 for count in states]
    plan = [(b, f, m) for b in rates for f in ("set", "shift") for m in memories if f == "shift" or m in UNGERBOECK]
    found: dict[int, list[Row]] = {b: [] for b in rates}
    best = {b: rivals(b) for b in rates}
    with progress("trellises", len(plan)) as update:
        for done, (b, family, memory) in enumerate(plan):
            trellis = set_partitioned(b, memory) if family == "set" else bit_shift(b, memory)
            # Large tables are trained for fewer rounds, because a round takes as long as they are large.
            trellis = trained(trellis, train, rounds if memory < 9 else max(1, rounds // 2), one)
            for tail, grid in ((False, one), (True, one), (False, three), (True, seven)):
                mse = distortion(trellis, score[: max(1, (blocks << 8) >> max(8, memory))], tail, grid)
                ns = timed(trellis, score[: max(8, min(len(score), 2**20 // (64 << memory)))], tail, grid, turns)
                gain = 10 * np.log10(best[b][1] / mse)
                found[b].append(Row(trellis, tail, len(grid) * (2 if tail else 1), mse, gain, ns))
            update(done + 1, len(plan))
    for b in rates:
        name, mse = best[b]
        table = Table(
            title=f"{b} bits and an f16 scale per {BLOCK}; {name} has {mse:.4f}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
            padding=0,
        )
        table.add_column("family", no_wrap=True)
        for heading in ("states", "tail", "passes", "MSE", "dB", "adds", "comp.", "ns", "ms/token", "SIMD ms"):
            table.add_column(heading, justify="right", no_wrap=True)
        for r in found[b]:
            adds, compares = r.operations
            table.add_row(
                r.trellis.family, str(r.trellis.states), "yes" if r.tail else "", str(r.searches), f"{r.mse:.4f}", f"{r.gain:+.2f}",
                f"{adds:,.0f}", f"{compares:,.0f}", f"{r.ns:,.0f}", f"{r.ms:,.1f}", f"{r.simd_ms:.2f}",
            )
        console.print(table)
    console.print(
        f"dB: smaller error than the format's. passes: Viterbi searches of a block (two if the walk bites its tail, times the scales "
        f"tried); adds, comparisons and ns are a value's, all passes together. ms/token: {TOKEN_VALUES:,} values on one core, Numba. "
        f"SIMD ms: the least that C could take at {SIMD_OPS_PER_NS:.0f} 16-bit operations a nanosecond, memory and the path's trace left out."
    )
    for b in rates:
        console.print(verdict(b, best[b][0], found[b]))


def main(
    states: str = typer.Option("16,64,256,1024", help="numbers of states, powers of two"),
    bits: str = typer.Option("2,3", help="rates"),
    blocks: int = typer.Option(2000, min=1, help="blocks of 64 that are scored; fewer with more than 256 states, whose search takes long"),
    training: int = typer.Option(4000, min=1, help="blocks of 64 that levels are trained on"),
    rounds: int = typer.Option(12, min=0, help="of Lloyd's iteration"),
    turns: int = typer.Option(5, min=1, help="timings, of which the least counts"),
) -> None:
    """Trellis codes against the lattice, and whether they are worth a format."""
    try:
        compare(numbers(states), numbers(bits), blocks, training, rounds, turns)
    except KvfmtError as error:
        console.print(f"[bold red]error:[/bold red] {error}")
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
