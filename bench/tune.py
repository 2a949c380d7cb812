"""A cache type for every layer and side under a budget: ``kvfmt tune``.

What each candidate type costs in each layer and side, in KLD on a text, comes from gradients (bench/tune_gradients.py) or from
quantizing one layer and side at a time (bench/tune_costs.py). Costs nearly add up, so the best types under a budget are an integer
programme: one type for each layer and side, least sum of KLD, allocated bytes within the budget, a profile's maps counted. The result is
a profile that gives every layer its types.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterable, Mapping, Optional, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from bench.caches import Cache
from bench.engine import Engine
from bench.quality import F16, TOGETHER, Plan, chunks_of, score_chunk
from bench.tune_costs import PLAIN, SCALED, Place, costs, floor_of, treatment, type_of
from bench.tune_gradients import gradient_costs
from kvfmt.calibrate import stored_maps
from kvfmt.errors import KvfmtError
from kvfmt.geometry import key_maps, layout_for, value_mean
from kvfmt.policy import cache_type
from kvfmt.profile import LayerMaps, Profile, formats_of
from kvfmt.subjects import ModelFile, Text
from kvfmt.transform import rotation_size

SIDES = ("k", "v")
#: Where costs come from, and the chunks of text that make them steady enough.
COSTS = {"gradients": 8, "alone": 1}
#: Pairs for all layers that the choice by layers is held against, all layers together.
RIVALS = 3
#: How many layers and sides show the noise floor, at least.
FLOOR_PLACES = 8
#: What a side may get, f16 besides; types that no format of ours beats at their size are left out. Mean and scale take next to
#: nothing, so that no keys are without both.
CANDIDATES = {
    "k": ("kve8_2" + SCALED, "kvt3" + SCALED, "kvt3", "kve8_3" + SCALED, "kvt4" + SCALED, "kvt4", "q5_0" + SCALED, "q8_0" + SCALED),
    "v": ("kve8_2", "kve8_3", "kvq4", "q5_0", "q8_0"),
}


def check_candidates(candidates: Mapping[str, Sequence[str]]) -> None:
    """Raises KvfmtError for what is no cache type, or has no meaning without maps or with them."""
    for side in SIDES:
        for kind in candidates[side]:
            chosen = cache_type(type_of(kind))
            how = treatment(kind)
            if not how:
                continue
            reason = "values are centred, not scaled" if side == "v" and how == SCALED else ""
            if not reason and how == PLAIN and chosen.needs_profile:
                reason = f"{chosen.name} needs its channels in order"
            if not reason and not chosen.is_quantized:
                reason = f"{chosen.name} {'keys' if side == 'k' else 'values'} are stored as they are"
            if reason:
                raise KvfmtError(f"candidate '{kind}' for {side.upper()}: {reason}", f"Write '{chosen.name}'.")


@dataclass(frozen=True)
class Option:
    """One candidate for one side of one layer: what it allocates, maps counted, and what it costs in nats."""

    layer: int
    side: str
    type: str
    n_bytes: int
    kld: float


@dataclass(frozen=True)
class Tuned:
    """The chosen options, the sum of their distances, and the allocated bits per value with the maps counted."""

    options: tuple[Option, ...]
    predicted: float
    bits_per_value: float

    def types(self, side: str, layers: int) -> tuple[str, ...]:
        """Candidates by layer of the model; "" where a layer owns no KV."""
        chosen = {o.layer: o.type for o in self.options if o.side == side}
        return tuple(chosen.get(layer, "") for layer in range(layers))


@dataclass(frozen=True)
class Budget:
    """Bits per value, or bytes of the whole cache: one of the two. Raises KvfmtError otherwise."""

    bits: Optional[float] = None
    memory: Optional[int] = None

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.memory is None):
            raise KvfmtError("a budget is needed, and only one", "Give --bits, or --memory and --context.")

    def n_bytes(self, values: int) -> int:
        """For a cache of so many values."""
        return int(self.bits * values / 8) if self.bits is not None else self.memory


class Profiles:
    """Profiles of one model that differ in types: the maps of each layer and kind are made once, from the statistics of ``base``."""

    def __init__(self, base: Profile) -> None:
        """Raises KvfmtError if ``base`` has no statistics."""
        if not base.statistics:
            raise KvfmtError(f"profile '{base.name}' has no statistics", "Tuning needs them: kvfmt calibrate makes a profile that has.")
        self.base = base
        self._centres_values = any(maps.v_mean is not None for maps in base.maps.values())
        self._maps: dict[tuple[int, str], LayerMaps] = {}

    @property
    def owners(self) -> tuple[int, ...]:
        """Layers that own KV."""
        return tuple(sorted(self.base.statistics))

    def maps(self, layer: int, side: str, kind: str) -> LayerMaps:
        """What that side has in that layer as that candidate; nothing for a type that is not quantized. Values have a mean at most, if
        the base profile centres them and the layer's attention allows it."""
        name, how = type_of(kind), treatment(kind)
        if how == PLAIN or not cache_type(name).is_quantized or side == "v" and not self._centres_values:
            return LayerMaps()
        statistics = self.base.statistics[layer]
        if side == "v":
            return LayerMaps(v_mean=value_mean(statistics))
        layout = layout_for(name)
        if (layer, layout.name + how) not in self._maps:
            self._maps[layer, layout.name + how] = stored_maps(key_maps(statistics, layout, "channels" if how == SCALED else "full"), statistics)
        return self._maps[layer, layout.name + how]

    def check_rotated(self, candidates: Sequence[str]) -> None:
        """Raises KvfmtError if keys of a layer are to be scaled and llama.cpp does not rotate heads of their size; channels in order are
        mixed by the profile."""
        for kind in candidates:
            for layer in self.owners if treatment(kind) == SCALED and not cache_type(type_of(kind)).needs_profile else ():
                size = self.base.statistics[layer].k_size
                if rotation_size(size, keys=True) == 1:
                    raise KvfmtError(
                        f"candidate '{kind}' for K: layer {layer} has heads of {size}, which llama.cpp does not rotate",
                        f"Scaled keys need the rotation: write '{type_of(kind)}', whose maps have one of their own, or '{type_of(kind)}{PLAIN}'.",
                    )

    def probe(self, k: Sequence[str], v: Sequence[str], path: Path) -> Cache:
        """A cache of these types through a profile that is written to ``path``, without statistics: nobody makes maps from it."""
        replace(self.make(k, v, "probe"), statistics={}).write(path)
        return Cache("", 0, path)

    def alone(self, layer: int, side: str, kind: str, folder: Path) -> Cache:
        """An f16 cache but for this candidate in one place, through a profile in ``folder``."""
        types = {other: ["f16" if i in self.base.statistics else "" for i in range(self.base.layers)] for other in SIDES}
        types[side][layer] = kind
        return self.probe(types["k"], types["v"], folder / f"{layer}.{side}.{kind.replace(':', '.')}.gguf")

    def make(self, k: Sequence[str], v: Sequence[str], name: str, provenance: Mapping[str, object] = {}) -> Profile:
        """The profile that gives each layer these candidates, "" where a layer owns no KV."""
        maps = {}
        for layer in self.owners:
            keys, values = self.maps(layer, "k", k[layer]), self.maps(layer, "v", v[layer])
            if keys.arrays() or values.arrays():
                maps[layer] = replace(keys, v_mean=values.v_mean)
        types_k, types_v = (tuple(map(type_of, kinds)) for kinds in (k, v))
        layout_k = tuple(maps[layer].layout_k(layout_for(types_k[layer]).name) if layer in maps else "" for layer in range(self.base.layers))
        layout_v = tuple(maps[layer].layout_v("") if layer in maps else "" for layer in range(self.base.layers))
        return replace(
            self.base, name=name, layout_k=layout_k, layout_v=layout_v, maps=maps, types_k=types_k, types_v=types_v,
            formats=formats_of((*layout_k, *types_k, *types_v)), provenance={**self.base.provenance, **provenance},
        )


def cells_of(engine: Engine, profiles: Profiles, n_ctx: int, scratch: Path) -> dict[int, int]:
    """Tokens that each layer's cache has room for at a context: fewer in layers with a sliding window.

    Found by allocating: a layer at q8_0 among f16 ones shrinks the cache by what its cells save.
    """
    row_of = {layer: found.heads * found.k_size for layer, found in profiles.base.statistics.items()}
    if not engine.lib.llama_model_n_swa(engine.model):
        return {layer: n_ctx for layer in profiles.owners}
    found = {}
    with engine.open(F16, n_ctx) as session:
        full = session.allocated.n_bytes
    saved = cache_type("f16").row_bytes(64) - cache_type("q8_0").row_bytes(64)
    for layer in profiles.owners:
        with engine.open(profiles.alone(layer, "k", "q8_0", scratch), n_ctx) as session:
            cells = (full - session.allocated.n_bytes) / (saved * row_of[layer] / 64)
        # The library says sizes to 0.01 MiB, and cells come in multiples of 256.
        found[layer] = max(256, round(cells / 256) * 256)
    return found


def alone_costs(
    engine: Engine,
    profiles: Profiles,
    text: Text,
    plan: Plan,
    candidates: Mapping[str, Sequence[str]],
    scratch: Path,
    update: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Place, float]:
    """Cost of every candidate but f16 in nats, from one layer and side at a time.

    ``update(done, total)`` counts tokens over all caches. Raises KvfmtError for a text that is too short or a type that the library refuses.
    """
    places = [(layer, side) for layer in profiles.owners for side in SIDES]
    asked = [(layer, side, kind) for layer, side in places for kind in candidates[side] if kind != "f16"]
    # An odd step, so that K and V take turns.
    still = places[:: max(1, len(places) // FLOOR_PLACES) | 1]
    caches = [profiles.alone(*place, scratch) for place in (*asked, *((layer, side, "f32") for layer, side in still))]
    found = distances(engine, text, plan, caches, update)
    floor = floor_of([(layer, kld) for (layer, _), kld in zip(still, found[len(asked) :])])
    return costs(dict(zip(asked, found)), floor)


def options_of(profiles: Profiles, cells: Mapping[int, int], found: Mapping[Place, float]) -> list[Option]:
    """Every option, f16 included, which costs nothing in fidelity."""
    f16 = {(layer, side, "f16"): 0.0 for layer in profiles.owners for side in SIDES}
    return [
        Option(layer, side, kind, allocated(profiles, layer, side, kind, cells[layer]), cost) for (layer, side, kind), cost in {**found, **f16}.items()
    ]


def distances(
    engine: Engine, text: Text, plan: Plan, caches: Sequence[Cache], update: Callable[[int, int], None] = lambda done, total: None
) -> list[float]:
    """Mean KLD of each cache from f16 in nats. ``update(done, total)`` counts tokens over all caches."""
    pieces = chunks_of(engine, text, plan)
    total, done = len(caches) * len(pieces) * plan.n_ctx, 0
    found: list[float] = []
    for start in range(0, len(caches), TOGETHER):
        group = caches[start : start + TOGETHER]
        with ExitStack() as stack:
            others = [stack.enter_context(engine.open(cache, plan.n_ctx, engine.logit_rows())) for cache in group]
            base = stack.enter_context(engine.open(F16, plan.n_ctx, engine.logit_rows()))

            def on_tokens(count: int) -> None:
                nonlocal done
                done += count * len(group)
                update(done, total)

            scores = [score_chunk(base, others, piece, plan.first, on_tokens) for piece in pieces]
        found += [float(np.mean([chunk[i].kld.mean() for chunk in scores])) for i in range(len(group))]
    return found


def allocated(profiles: Profiles, layer: int, side: str, kind: str, cells: int) -> int:
    """Bytes of one side of one layer, which brings its maps."""
    found = profiles.base.statistics[layer]
    size = found.k_size if side == "k" else found.v_size
    return cells * cache_type(type_of(kind)).row_bytes(found.heads * size) + profiles.maps(layer, side, kind).nbytes


def values_of(profiles: Profiles, cells: Mapping[int, int]) -> int:
    """Values that the cache holds, K and V."""
    return sum(cells[layer] * found.heads * (found.k_size + found.v_size) for layer, found in profiles.base.statistics.items())


def choose(options: Iterable[Option], budget: int, values: int) -> Tuned:
    """The options with the least sum of distances within ``budget`` bytes, one for each layer and side.

    Raises KvfmtError, with the least that is possible, if nothing fits.
    """
    options = tuple(options)
    places = sorted({(o.layer, o.side) for o in options})
    least = sum(min(o.n_bytes for o in options if (o.layer, o.side) == place) for place in places)
    check_budget(least, budget, values)
    one_each = np.array([[float((o.layer, o.side) == place) for o in options] for place in places])
    n_bytes = np.array([o.n_bytes for o in options], np.float64)
    # In units of the budget, so that the solver's tolerance means something. It lets a sum pass that is a millionth too large:
    # then it is asked again for a little less.
    for limit in (1.0, 1 - 4e-6):
        found = milp(
            np.array([o.kld for o in options]),
            integrality=np.ones(len(options)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint((n_bytes / budget)[None, :], 0, limit)],
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            raise KvfmtError(f"no choice was found: {found.message}", "Report it.")
        chosen = tuple(o for o, x in zip(options, found.x) if x > 0.5)
        if sum(o.n_bytes for o in chosen) <= budget:
            break
    return Tuned(chosen, sum(o.kld for o in chosen), 8 * sum(o.n_bytes for o in chosen) / values)


def check_budget(least: int, budget: int, values: int) -> None:
    """Raises KvfmtError, with the least that is possible, if it is more than the budget."""
    if least > budget:
        raise KvfmtError(
            f"{budget / 2**20:.2f} MiB are less than the smallest cache of these types, {least / 2**20:.2f} MiB ({8 * least / values:.3f} bits/value)",
            "Give more bits, or a longer context, over which the maps spread.",
        )


def uniform(options: Iterable[Option], k: str, v: str, values: int) -> Tuned:
    """The same types in every layer."""
    chosen = tuple(o for o in options if o.type == (k if o.side == "k" else v))
    return Tuned(chosen, sum(o.kld for o in chosen), 8 * sum(o.n_bytes for o in chosen) / values)


@dataclass(frozen=True)
class Outcome:
    """What ``tune`` made: the profile, the choice that it holds, all options, and what the choice costs with all layers together, in nats.

    ``best_uniform``: name, choice and cost of the best pair for all layers of the same size or less, None if no pair fits. Where it is
    closer than the choice by layers, whose cost is ``by_layer``, it is the choice.
    """

    profile: Profile
    tuned: Tuned
    options: tuple[Option, ...]
    together: float
    best_uniform: Optional[tuple[str, Tuned, float]]
    by_layer: float


def tune(
    engine: Engine,
    subject: ModelFile,
    base: Profile,
    text: Text,
    plan: Plan,
    n_ctx: int,
    budget: Budget,
    candidates: Mapping[str, Sequence[str]] = CANDIDATES,
    update: Callable[[int, int], None] = lambda done, total: None,
    by: str = "alone",
) -> Outcome:
    """Chooses types for a context of ``n_ctx`` tokens within the budget; ``by`` is one of COSTS. ``update(done, total)`` counts chunks or
    tokens.

    Raises KvfmtError for a profile of another model, a type that does not fit, a budget that nothing fits, and with gradients
    what ``gradient_costs`` raises.
    """
    check_candidates(candidates)
    base.check_model(subject.path)
    profiles = Profiles(base)
    profiles.check_rotated(candidates["k"])
    layers = base.layers
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        cells = cells_of(engine, profiles, n_ctx, scratch)
        values = values_of(profiles, cells)
        room = budget.n_bytes(values)
        # What cannot fit is said before minutes of measuring.
        least = sum(
            min(allocated(profiles, layer, side, kind, cells[layer]) for kind in (*candidates[side], "f16"))
            for layer in profiles.owners for side in SIDES
        )
        check_budget(least, room, values)
        if by == "gradients":
            found = gradient_costs(engine, subject.path, profiles, chunks_of(engine, text, plan), plan.first, candidates, update)
        else:
            found = alone_costs(engine, profiles, text, plan, candidates, scratch, update)
        options = options_of(profiles, cells, found)
        tuned = choose(options, room, values)
        pairs = [(f"{k}/{v}", uniform(options, k, v, values)) for k in (*candidates["k"], "f16") for v in (*candidates["v"], "f16")]
        fitting = [pair for pair in pairs if pair[1].bits_per_value * values / 8 <= room * (1 + 1e-9)]
        rivals = sorted(fitting, key=lambda pair: pair[1].predicted)[:RIVALS]
        # The sum says what is good, not what it costs: errors of early layers reach later ones. So what is written is what was closest.
        compared = [tuned, *(choice for _, choice in rivals)]
        caches = [profiles.probe(of.types("k", layers), of.types("v", layers), scratch / f"together{i}.gguf") for i, of in enumerate(compared)]
        by_layer, *others = distances(engine, text, plan, caches)
    best = min(((*rival, kld) for rival, kld in zip(rivals, others)), key=lambda found: found[2], default=None)
    together = by_layer
    if best and best[2] < by_layer:
        tuned, together = best[1:]
    profile = profiles.make(
        tuned.types("k", layers), tuned.types("v", layers), f"{subject.name}, tuned to {tuned.bits_per_value:.2f} bits at {n_ctx} tokens",
        {"tuned.bits": tuned.bits_per_value, "tuned.context": n_ctx, "tuned.text.name": text.name, "tuned.text.sha256": text.sha256,
         "tuned.costs": by, "tuned.predicted": tuned.predicted, "tuned.kld": together},
    )
    return Outcome(profile, tuned, tuple(options), together, best, by_layer)
