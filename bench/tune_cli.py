"""``kvfmt tune``: what is asked for, and what is shown. The work is in bench/tune.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

import typer
from rich import box
from rich.table import Table

from kvfmt.cli import plain_errors
from kvfmt.errors import KvfmtError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_WHAT = {"gradients": "gradients of the predictions", "alone": "each layer alone"}
_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def size_of(text: str, what: str) -> int:
    """"2GiB", "900M", "32k" -> a whole number, in powers of 1,024. Raises KvfmtError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None or not float(match[1]) > 0:
        raise KvfmtError(f"{what} '{text}' is no size", "Write e.g. 2GiB, 900M or 32k.")
    return int(float(match[1]) * _SIZES[match[2]])


@app.command()
@plain_errors
def tune(
    model: str = typer.Argument(..., help="a name of `kvfmt models list`, or a GGUF file"),
    bits: Optional[float] = typer.Option(None, min=0.1, max=16, help="budget in allocated bits per value, maps counted"),
    memory: Optional[str] = typer.Option(None, help="budget for the whole cache instead, e.g. 2GiB; needs --context"),
    context: Optional[str] = typer.Option(None, help="tokens that the budget is for, e.g. 32k; default: the model's, at most 32k"),
    profile: Optional[Path] = typer.Option(None, help="what `kvfmt calibrate` wrote; default: calibrated now"),
    text: str = typer.Option("cpp", help="'docs', 'cpp' or a text file to measure on; not the one that you judge by"),
    n_ctx: int = typer.Option(512, min=64, help="tokens of a chunk"),
    chunks: Optional[int] = typer.Option(None, min=1, help="chunks of the text; default: 8 for gradients, 1 for one layer at a time"),
    costs: Optional[str] = typer.Option(None, help="'gradients': of the model's predictions, by transformers (the extra 'torch'); 'alone': one layer at a time is quantized; default: gradients where they can be had"),
    k: Optional[str] = typer.Option(None, "--k", help="candidates for K, separated by commas; TYPE:scaled has a mean and a scale for each channel (and an order of them where the type wants one) in place of maps, TYPE:plain nothing"),
    v: Optional[str] = typer.Option(None, "--v", help="candidates for V, centred if --profile centres them; TYPE:plain is not"),
    output: Optional[Path] = typer.Option(None, "--output", "-o", help="default: <model>.tuned.kvprofile.gguf in this folder"),
    threads: Optional[int] = typer.Option(None, min=1, help="default: all cores"),
) -> None:
    """Choose a cache type for each layer under a budget, by what each costs, and write it into a profile."""
    from bench import quality
    from bench import tune as work
    from bench.engine import Engine
    from bench.tune_gradients import Unsuitable
    from kvfmt import calibrate
    from kvfmt.build.console import console, progress, step
    from kvfmt.build.files import check_place
    from kvfmt.profile import Profile
    from kvfmt.subjects import find_model, find_text

    candidates = {side: tuple(given.split(",")) if given else work.CANDIDATES[side] for side, given in (("k", k), ("v", v))}
    work.check_candidates(candidates)
    if costs is not None and costs not in work.COSTS:
        raise KvfmtError(f"no costs '{costs}'", "Known: " + ", ".join(work.COSTS))
    budget = work.Budget(bits, size_of(memory, "memory") if memory is not None else None)
    if memory is not None and context is None:
        raise KvfmtError("--memory says nothing without --context", "Give the tokens that have to fit, e.g. --context 32k.")
    subject, measured_on = find_model(model), find_text(text)
    target = output or Path(f"{subject.name}.tuned.kvprofile.gguf")
    check_place(target, "the profile")
    if profile is not None:
        base = Profile.read(profile)
        base.check_model(subject.path)
    else:
        with progress(f"{subject.name}: calibration on {measured_on.name}", 1) as update:
            base = calibrate.calibrate(subject, [measured_on], None, calibrate.TOKENS, threads=threads, update=update).profile
    with Engine(subject.path, threads) as engine:
        tokens = size_of(context, "context") if context else min(engine.n_ctx_train, 32768)
        engine.check_ctx(tokens)

        def tuned(by: str) -> work.Outcome:
            with progress(f"{subject.name}: {_WHAT[by]} on {measured_on.name}", 1) as update:
                plan = quality.make_plan(n_ctx, chunks or work.COSTS[by], None)
                return work.tune(engine, subject, base, measured_on, plan, tokens, budget, candidates, update, by)

        try:
            made = tuned(costs or "gradients")
        except Unsuitable as reason:
            if costs:
                raise
            console.print(f"{reason.message}: each layer is quantized alone instead.", soft_wrap=True)
            made = tuned("alone")
    made.profile.write(target)
    for side in work.SIDES:
        console.print(table(made, side))
    console.print(f"{made.tuned.bits_per_value:.3f} bits/value at {tokens} tokens, {made.profile.sidecar_bytes / 2**20:.2f} MiB of maps counted; "
                  f"KLD on {measured_on.name} {made.together:.4f} (sum of what the layers cost {made.tuned.predicted:.4f})")
    if made.best_uniform:
        name, best, together = made.best_uniform
        console.print(f"best of one pair for all layers within the budget: {name}, {best.bits_per_value:.3f} bits/value, KLD {together:.4f} (sum {best.predicted:.4f})")
        if together < made.by_layer:
            console.print(f"That is closer than the choice by layers (KLD {made.by_layer:.4f}), so that it is what the profile has.")
    step(f"profile: {target}; measure it: kvfmt bench quality --model {model} --caches @{target}")


def _thousandths(cost: float) -> str:
    return f"{1000 * cost:.2f}" if cost < 0.1 else f"{1000 * cost:.0f}"


def table(made, side: str) -> Table:
    """Types and costs by layer of one side, short enough for a terminal."""
    from bench.tune_costs import SCALED

    def short(kind: str) -> str:
        return kind.replace(SCALED, "*")

    chosen = {o.layer: o for o in made.tuned.options if o.side == side}
    options = [o for o in made.options if o.side == side]
    kinds = sorted({o.type for o in options if o.type != "f16"}, key=lambda t: min(o.n_bytes for o in options if o.type == t))
    found = {(o.layer, o.type): o.kld for o in options}
    stars = " (*: scaled)" if any(kind.endswith(SCALED) for kind in kinds) else ""
    title = f"{side.upper()}: thousandths of a nat by layer and type{stars}"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
    for name in ("layer", side.upper(), *(short(kind).replace(":", "\n") for kind in kinds)):
        shown.add_column(name, justify="left" if name == side.upper() else "right", no_wrap=True)
    for layer in sorted(chosen):
        shown.add_row(str(layer), f"[bold]{short(chosen[layer].type)}[/bold]", *(_thousandths(found[layer, kind]) for kind in kinds))
    return shown
