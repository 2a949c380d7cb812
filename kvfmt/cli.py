"""The command line: `kvfmt`."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Callable, Optional

import typer
from rich.markup import escape as _plain

from kvfmt.build.console import console
from kvfmt.errors import KvfmtError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="KV-cache quantization formats for llama.cpp.")
models_app = typer.Typer(no_args_is_help=True, help="The models that the demo, the tests and the benchmarks use.")
app.add_typer(models_app, name="models")
profile_app = typer.Typer(no_args_is_help=True, help="Calibration profiles; `kvfmt calibrate` makes them.")
app.add_typer(profile_app, name="profile")


def plain_errors(command: Callable) -> Callable:
    """Turns an expected fault into its message and what to do, and exit status 1."""

    @functools.wraps(command)
    def wrapper(*args, **kwargs):
        # Ended from outside, too, what was started (ninja, pip) is ended first and half a file taken away.
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            return command(*args, **kwargs)
        except KvfmtError as error:
            console.print(f"[bold red]error:[/bold red] {_plain(error.message)}")
            if error.hint:
                console.print(f"[bold]what to do:[/bold] {_plain(error.hint)}")
            raise typer.Exit(1) from None
        except BrokenPipeError:
            raise  # typer ends quietly
        except OSError as error:
            # A name that no file can have, a folder that may not be read: what a command did not foresee itself.
            console.print(f"[bold red]error:[/bold red] {_plain(str(error))}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            console.print("\ninterrupted; run the same command again to go on")
            raise typer.Exit(130) from None

    return wrapper


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@app.command()
@plain_errors
def build(
    pin: Optional[str] = typer.Option(None, help="llama.cpp version, a name in cpp_patch/pins.toml"),
    targets: Optional[str] = typer.Option(None, help="compile only these, separated by commas; no wheel"),
    tools_only: bool = typer.Option(False, help="no upstream tests and no wheel"),
    jobs: Optional[int] = typer.Option(None, "--jobs", "-j", min=1, help="compilers at a time"),
    discard_edits: bool = typer.Option(False, help="overwrite patched files that were edited by hand in build/"),
    cuda: bool = typer.Option(False, "--cuda", help="with the backend for NVIDIA GPUs; nvcc and cuBLAS are fetched where no toolkit has them"),
    cuda_arch: Optional[str] = typer.Option(None, help="GPU architectures such as '80;86;90'; implies --cuda; default: those of the GPUs here"),
    portable: bool = typer.Option(False, help="for other processors than the one here too: slower on the CPU"),
) -> None:
    """Fetch llama.cpp, patch it, compile it, and install llama-cpp-python from the same tree."""
    from kvfmt.build.engine import run_build

    run_build(
        pin,
        targets=tuple(targets.split(",")) if targets else None,
        tools_only=tools_only,
        jobs=jobs,
        discard_edits=discard_edits,
        cuda=cuda,
        cuda_arch=cuda_arch,
        portable=portable,
    )


@models_app.command("fetch")
@plain_errors
def models_fetch(names: Optional[list[str]] = typer.Argument(None, help="default: smollm2; 'all' for all")) -> None:
    """Fetch models into the cache and check them."""
    from kvfmt.build.models import DEFAULT_MODEL, fetch_model, load_models

    chosen = names or [DEFAULT_MODEL]
    for name in load_models() if chosen == ["all"] else chosen:
        console.print(_plain(str(fetch_model(name))), soft_wrap=True)


@models_app.command("list")
@plain_errors
def models_list() -> None:
    """Show the models and whether they are in the cache."""
    from kvfmt.build.models import load_models, model_path

    for model in load_models().values():
        there = "in the cache" if model_path(model.name).exists() else "not fetched"
        console.print(f"{model.name:8} {model.title}, {model.bytes / 1e6:.0f} MB, {model.licence}: {there}")


@app.command()
@plain_errors
def demo(
    k: str = typer.Option("kvq3", "--k", help="type of the K cache"),
    v: str = typer.Option("kvq2", "--v", help="type of the V cache"),
    protect: int = typer.Option(2, help="first and last layers that stay f16"),
) -> None:
    """Generate text on a compressed KV cache, and show what it costs and what it saves."""
    from kvfmt.demo import run_demo

    run_demo(k, v, protect)


@app.command()
@plain_errors
def calibrate(
    model: str = typer.Argument(..., help="a name of `kvfmt models list`, or a GGUF file"),
    text: list[str] = typer.Option(["cpp"], help="'docs', 'cpp' or a text file, best like yours, and not one that you judge by; may be given several times"),
    tokens: Optional[int] = typer.Option(None, min=1, help="default: 16,384; about so many, shared evenly by texts and context lengths"),
    n_ctx: Optional[list[int]] = typer.Option(None, min=2, help="tokens of a context that is run; may be given several times; default: 1024"),
    reach: Optional[int] = typer.Option(None, min=0, help="tokens of the longest context that the profile is for; default: 8,192, or the model's if less"),
    k: str = typer.Option("flat", "--k", help="type of the K cache that the maps are made for; flat: any with the same noise everywhere"),
    v: str = typer.Option("none", "--v", help="none: values have no maps; see --centre-values"),
    kind: str = typer.Option("channels", "--map", help="channels: a factor for each channel, and their order if --k wants one, next to no memory; full: a matrix for each head; pairs: a factor for each RoPE pair; none: only the means"),
    centre: bool = typer.Option(True, help="store keys without their mean, where that changes nothing"),
    centre_values: bool = typer.Option(False, "--centre-values", help="store values without a mean, weighed by attention: helps caches that were computed in f16 and converted, not ones that are written as they go"),
    statistics: Optional[Path] = typer.Option(None, help="take those of this profile of the same model, and run nothing: to make maps for another type"),
    output: Optional[Path] = typer.Option(None, "--output", "-o", help="default: <model>.kvprofile.gguf in this folder"),
    threads: Optional[int] = typer.Option(None, min=1, help="default: all cores"),
) -> None:
    """Measure a model's keys, queries and values, and write the profile that makes its quantized cache more exact."""
    from kvfmt import calibrate as work, geometry, profile_view
    from kvfmt.build.console import progress, step
    from kvfmt.build.files import check_place
    from kvfmt.errors import UnknownName
    from kvfmt.profile import Profile
    from kvfmt.subjects import find_model, find_text

    if v != "none":
        raise UnknownName(f"no layout for values of type '{v}'", "Values have no maps, only their mean: --v none.")
    layout = geometry.layout_for(k)
    geometry.check_kind(kind, layout)
    subject, texts = find_model(model), [find_text(name) for name in text]
    target = output or Path(f"{subject.name}.kvprofile.gguf")
    # Not after minutes of measuring.
    check_place(target, "the profile")
    count = tokens or work.TOKENS
    if statistics is not None:
        made = work.again(subject, Profile.read(statistics), layout, kind, centre, centre_values)
    else:
        with progress(f"{subject.name} on {', '.join(t.name for t in texts)}", count) as update:
            made = work.calibrate(subject, texts, n_ctx or None, count, layout, kind, centre, threads, update, reach, centre_values)
    made.profile.write(target)
    bound = [layer for layer, found in made.profile.statistics.items() if not found.shift_free]
    sides = [name for name, asked in (("keys", centre), ("values", centre_values)) if asked]
    if sides and bound:
        console.print(f"{' and '.join(sides)} are not centred in layers {', '.join(str(layer) for layer in bound)}: a logit soft-cap or attention sinks make it matter")
    console.print(profile_view.summary(made.profile))
    step(f"profile: {target} ({made.profile.sidecar_bytes / 2**20:.2f} MiB of maps)")


@profile_app.command("show")
@plain_errors
def profile_show(file: Path = typer.Argument(..., help="what `kvfmt calibrate` wrote")) -> None:
    """Show where a profile comes from and what it does in each layer."""
    from kvfmt import profile_view
    from kvfmt.profile import Profile

    profile = Profile.read(file)
    for what, value in profile_view.facts(profile):
        console.print(f"{what:8} {_plain(value)}", soft_wrap=True)
    console.print(profile_view.layer_table(profile))
    console.print(profile_view.summary(profile))


@profile_app.command("attach")
@plain_errors
def profile_attach(
    model: str = typer.Argument(..., help="a name of `kvfmt models list`, or a GGUF file"),
    profile: Optional[Path] = typer.Argument(None, help="what `kvfmt calibrate` or `kvfmt tune` wrote; none: only the types that --kv says"),
    output: Path = typer.Option(..., "--output", "-o", help="the model with the profile; may be the model itself"),
    kv: Optional[str] = typer.Option(None, help="types that the profile then chooses, e.g. kvt3/kve8_2; default: what it says, if anything"),
    protect: Optional[int] = typer.Option(None, min=0, help="with --kv: layers at each end that stay f16; default: as llama.cpp chooses"),
    statistics: bool = typer.Option(False, help="keep the statistics that the maps were made from"),
    replace: bool = typer.Option(False, help="take the place of a profile that is there"),
) -> None:
    """Put a profile, or types for each layer, into a model's file: `--kv-profile auto` finds it there."""
    # kvfmt imports nothing of converters, which builds on it; only this command calls it.
    from converters import attach as work
    from kvfmt.build.console import progress, step
    from kvfmt.profile import Profile
    from kvfmt.subjects import find_path

    path = find_path(model)
    if profile is None and kv is None:
        raise KvfmtError("there is nothing to attach", "Name a profile, or types with --kv.")
    if protect is not None and kv is None:
        raise KvfmtError("--protect says which layers do not get the types of --kv, which is missing", "Give both.")
    made = Profile.read(profile) if profile is not None else work.policy_of(path)
    if kv is not None:
        made = work.with_types(made, path, kv, protect)
    with progress(f"copying {path.name}", path.stat().st_size, "bytes") as update:
        work.attach(path, made, output, statistics, replace, update)
    how = "--kv-profile auto" if made.types_k is not None else "-ctk, -ctv and --kv-profile auto"
    step(f"{output}: carries profile {made.hash[:16]}; run it with {how}")


@profile_app.command("detach")
@plain_errors
def profile_detach(
    model: Path = typer.Argument(..., help="a GGUF file that carries a profile"),
    output: Path = typer.Option(..., "--output", "-o", help="the model without it; may be the model itself"),
    save: Optional[Path] = typer.Option(None, help="write the profile to this file"),
) -> None:
    """Take a profile off a model's file, which is then the original again, byte for byte."""
    from converters import attach as work
    from kvfmt.build.console import progress, step
    from kvfmt.gguf_read import GgufError

    if not model.is_file():
        raise GgufError(f"no file {model}", "Check the name.")
    with progress(f"copying {model.name}", model.stat().st_size, "bytes") as update:
        work.detach(model, output, save, update)
    step(f"{output}: without a profile")


@app.command()
@plain_errors
def pack(
    dump: Path = typer.Argument(..., help="keys and values of each layer: an .npz or a .safetensors file"),
    output: Path = typer.Option(..., "--output", "-o", help="the packed cache, a GGUF file"),
    kv: Optional[str] = typer.Option(None, help="types of K and V, e.g. kvq3/kvq2; none: those that the profile chooses"),
    protect: Optional[int] = typer.Option(None, min=0, help="layers at each end that stay f16; default: as llama.cpp chooses"),
    profile: Optional[Path] = typer.Option(None, help="store under the maps of this profile"),
    interleaved: bool = typer.Option(False, help="keys come from transformers and a model of the llama family: store them in llama.cpp's order"),
) -> None:
    """Pack a dump of keys and values into a GGUF file of kvfmt types."""
    from converters import cache_import as work, packed_cache
    from kvfmt.build.console import progress, step
    from kvfmt.profile import Profile

    found = work.open_dump(dump)
    with progress(f"packing {found.name}", found.layers) as update:
        work.pack(found, output, kv, protect, Profile.read(profile) if profile else None, interleaved, update)
    made = packed_cache.read_cache(output)
    step(f"{output}: {made.nbytes} bytes of blocks, {made.bits_per_value:.3f} bits/value")


@app.command()
@plain_errors
def unpack(
    file: Path = typer.Argument(..., help="a packed cache, what `kvfmt pack` wrote"),
    output: Path = typer.Option(..., "--output", "-o", help="an .npz or a .safetensors file"),
    profile: Optional[Path] = typer.Option(None, help="the profile that it was written under, if not the one that it carries"),
) -> None:
    """Decode a packed cache to float32 arrays."""
    from converters import cache_import as work, packed_cache
    from kvfmt.build.console import progress, step
    from kvfmt.profile import Profile

    found = packed_cache.read_cache(file, Profile.read(profile) if profile else None)
    with progress(f"unpacking {file.name}", 1) as update:
        work.unpack(found, output, update)
    step(f"{output}: {sum(layer is not None for layer in found.layers)} layers")


@app.command()
@plain_errors
def fold(
    model: str = typer.Argument(..., help="a name of `kvfmt models list`, or a GGUF file"),
    output: Path = typer.Option(..., "--output", "-o", help="the folded model"),
    profile: Optional[Path] = typer.Option(None, help="take the statistics of this profile of the same model; default: measure them"),
    text: list[str] = typer.Option(["docs", "cpp"], help="'docs', 'cpp' or a text file to measure on; may be given several times"),
    tokens: int = typer.Option(8192, min=1, help="about so many, shared evenly by the texts"),
    n_ctx: int = typer.Option(1024, min=2, help="tokens of a context"),
    exact: bool = typer.Option(True, "--exact/--fine", help="powers of two, which round nothing in the model, or any scales"),
    threads: Optional[int] = typer.Option(None, min=1, help="default: all cores"),
) -> None:
    """Scale a model's key channels in its weights: the same model, with keys that every quantized cache stores better."""
    import os

    # kvfmt imports nothing of converters, which builds on it; only this command calls it.
    from converters import fold as work
    from kvfmt import calibrate
    from kvfmt.build.console import progress, step
    from kvfmt.build.files import check_place
    from kvfmt.profile import Profile, read_model
    from kvfmt.runtime import LoadedModel
    from kvfmt.subjects import find_model, find_text

    subject, texts = find_model(model), [find_text(name) for name in text]
    file = read_model(subject.path)
    # What cannot be folded or written is said before minutes of measuring.
    work.attention_layers(file)
    check_place(output, "the folded model")
    if profile:
        made = Profile.read(profile)
        made.check_model(subject.path)
        statistics = made.statistics
    else:
        with LoadedModel(subject.path, threads) as loaded, progress(f"{subject.name} on {', '.join(t.name for t in texts)}", tokens) as update:
            statistics = calibrate.measure(loaded, texts, [n_ctx], tokens, update)
    with progress(f"folding {file.name}", len(file.data), "bytes") as update:
        found = work.fold_model(subject.path, file, statistics, output, exact, texts[0].content, threads or os.cpu_count() or 1, update)
    for line in work.summary(found):
        console.print(_plain(line))
    step(f"folded model: {output}")


@app.command()
@plain_errors
def convert(
    file: Path = typer.Argument(..., help="a session, --prompt-cache, slot or sequence file, or a state out of memory"),
    output: Path = typer.Option(..., "--output", "-o", help="the converted state"),
    k: str = typer.Option("f16", "--k", help="type of the K cache, as -ctk"),
    v: str = typer.Option("f16", "--v", help="type of the V cache, as -ctv"),
    protect: Optional[int] = typer.Option(None, help="first and last layers that stay f16, as --kv-protect; default: what llama.cpp does by itself"),
    profile: Optional[Path] = typer.Option(None, help="calibration profile of the new cache, as --kv-profile; with one that gives the types leave --k and --v away"),
    source_profile: Optional[Path] = typer.Option(None, help="the profile that FILE was saved under, if it is not --profile"),
    model: Optional[str] = typer.Option(None, help="the model, a GGUF or a name of `kvfmt models list`; only asked for where the state does not say enough"),
    flash_attn: Optional[bool] = typer.Option(None, "--flash-attn/--no-flash-attn", help="of the context that the state is for; default: as FILE, on if V is quantized"),
    threads: Optional[int] = typer.Option(None, min=1, help="default: all cores"),
) -> None:
    """Convert a saved state to other cache types: it restores into a context of those types and goes on from there."""
    from converters import convert_state as work
    from converters.conversion_plan import Request
    from converters.model_layers import read_model_layers
    from kvfmt.build.console import progress, step
    from kvfmt.policy import cache_type
    from kvfmt.profile import Profile, read_model
    from kvfmt.subjects import find_path

    shape = None
    target, source = (None if path is None else Profile.read(path) for path in (profile, source_profile))
    if model is not None:
        path = find_path(model)
        shape = read_model_layers(read_model(path))
        for found in (target, source):
            if found is not None:
                found.check_model(path)
    request = Request(cache_type(k), cache_type(v), protect, flash_attn, target, source, shape)
    with progress(f"converting {file.name}", 0, "bytes") as update:
        done = work.convert_state(file, output, request, threads, update)
    before, after = done.before, done.after
    bits = " -> ".join(f"{8 * found.cache_bytes / found.values:.3f}" for found in (before, after))
    ratio = before.size / after.size
    size = f"{ratio:.2f} times smaller" if ratio >= 1 else f"{1 / ratio:.2f} times larger"
    console.print(f"{before.size:,} -> {after.size:,} bytes, {size}; K and V {bits} bits/value")
    console.print(f"{done.seconds:.2f} s, {before.size / 1e6 / done.seconds:.0f} MB/s of input")
    step(f"converted state: {output}")


@app.command()
@plain_errors
def inspect(file: Path = typer.Argument(..., help="what llama.cpp saved: a session, a slot, a state; or a GGUF file")) -> None:
    """Show what is in a saved state: types, cells, layers, bytes, bits per value, rotation, profile."""
    from converters.state_bytes import FileSource
    from converters.state_layout import GGUF, read_layout
    from converters.state_view import facts, layer_table
    from kvfmt.gguf_read import read_gguf
    from kvfmt.profile import ARCHITECTURE

    with FileSource(file) as source:
        if source.size >= 4 and int.from_bytes(source.read(0, 4, "the magic"), "little") == GGUF:
            from converters import packed_cache

            found = read_gguf(file, lambda key: key == "general.architecture")
            if found.architecture == ARCHITECTURE:
                console.print(f"a calibration profile; kvfmt profile show {_plain(str(file))}", soft_wrap=True)
            elif found.architecture == packed_cache.ARCHITECTURE:
                console.print(f"a packed cache; kvfmt unpack {_plain(str(file))} -o DUMP.npz", soft_wrap=True)
            else:
                console.print(f"a GGUF file of architecture '{_plain(found.architecture)}' with {len(found.tensors)} tensors: not a saved state")
            return
        layout = read_layout(source)
    for what, value in facts(layout):
        console.print(f"{what:9} {_plain(value)}", soft_wrap=True)
    console.print(layer_table(layout))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure KV cache types on models: fidelity, retrieval, speed."""
    # The benchmarks build on kvfmt, not kvfmt on them: they are looked up when asked for.
    import importlib

    importlib.import_module("bench.cli").app(context.args, prog_name="kvfmt bench")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def tune(context: typer.Context) -> None:
    """Choose a cache type for each layer under a budget, and write them into a profile."""
    import importlib

    # It measures with the benchmarks' engine.
    importlib.import_module("bench.tune_cli").app(context.args, prog_name="kvfmt tune")


@app.command()
@plain_errors
def formats() -> None:
    """Show the formats: sizes, bits per value, and their error on a unit Gaussian."""
    from kvfmt.listing import format_table

    console.print(format_table())


@app.command()
@plain_errors
def distortion(
    models: str = typer.Option("none", help="real rotated K and V of: none, all, or names separated by commas (see `kvfmt models list`)"),
    tokens: int = typer.Option(256, min=1, help="tokens of C++ source whose K and V are stored"),
    values: int = typer.Option(1_280_000, min=64, help="values drawn from the Gaussian and the Laplacian"),
    plot: Optional[Path] = typer.Option(None, help="write the plot to this PNG"),
) -> None:
    """Show how far every format is from the rate-distortion bound, and how fast the Python reference is."""
    from kvfmt import ladder
    from kvfmt.build.console import progress
    from kvfmt.build.models import chosen_models

    names = [] if models == "none" else chosen_models(models)
    sources = ladder.known_sources(values)
    if names:
        # kvfmt imports nothing of converters, which builds on it; only this command, which reads a saved cache, calls it.
        from converters.cache_rows import cache_rows
        from kvfmt.build.corpus import corpus
        from kvfmt.build.models import fetch_model

        with progress("K and V of a real run", len(names)) as update:
            for done, name in enumerate(names):
                for side, rows in zip("KV", cache_rows(fetch_model(name), corpus("cpp"), tokens)):
                    sources.append(ladder.rows_source(f"{name} {side}", rows))
                update(done + 1, len(names))
    with progress("formats and sources", 1) as update:
        rungs = ladder.climb(sources, update)
    console.print(ladder.ladder_table(rungs))
    console.print(ladder.LEGEND)
    if plot:
        ladder.plot_ladder(rungs, plot)
        console.print(f"plot: {_plain(str(plot))}", soft_wrap=True)


if __name__ == "__main__":
    app()
