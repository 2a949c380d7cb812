"""spec -> patch series: ``python -m cpp_patch.generate [--check]``.

Renders the templates with the registered formats and writes ``out/<pin>/<tree>/NNNN-*.patch``.
With ``--check`` nothing is written; any difference from the committed series is an error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jinja2

from kvfmt import profile, registry
from kvfmt.spec import BlockSpec

from . import edits, fattn_pairs
from . import packing as packed

HERE = Path(__file__).resolve().parent
TEMPLATES = HERE / "templates"
BODIES = HERE / "bodies"
OUT = HERE / "out"
DEFAULT_PIN = "llama-cpp-python-0.3.36"

#: Which trees the series patches, and where each lies in the source distribution.
TREES = {"llama.cpp": "vendor/llama.cpp", "llama-cpp-python": "."}


@dataclass(frozen=True)
class FormatView:
    """What a template may say about a format."""

    spec: BlockSpec

    def __getattr__(self, name: str):
        return getattr(self.spec, name)

    @property
    def upper(self) -> str:
        return self.spec.name.upper()

    @property
    def enum(self) -> str:
        return f"GGML_TYPE_{self.upper}"

    @property
    def coarsest_bits(self) -> float:
        """What upstream's tests, which know of no profile, hold a format to: with unequal bits, a bit less than the mean."""
        return self.spec.bits_per_value - self.spec.needs_profile

    @property
    def bits_text(self) -> str:
        return f"{self.spec.bits_per_value:g}"

    # How CUDA's attention reads a block, see packing.py

    @property
    def packing(self) -> str:
        return packed.packing(self.spec)

    def words(self, table: str) -> list[str]:
        return packed.words(self.spec.table(table).values)

    def magnitude_words(self, table: str, at_least: int) -> list[str]:
        return packed.words(packed.magnitudes(self.spec, table), at_least)

    def moved(self, sign: int) -> str:
        """Four times the shift of an E8 word."""
        (shift,) = self.spec.table("shift").values
        return packed.words((sign * shift,) * packed.QUAD)[0]

    @property
    def quarter_bits(self) -> list[int]:
        return packed.quarter_bits(self.spec)

    @property
    def high_shifts(self) -> list[int]:
        """Where the bits beyond the second of each quarter's code begin in the field of a column."""
        above = [bits - 2 for bits in self.quarter_bits]
        return [sum(above[:quarter]) for quarter in range(len(above))]

    def nibbles(self, values: list[int]) -> str:
        return packed.nibble_list(values)


def environment() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader([TEMPLATES / "files", BODIES]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    env.globals["formats"] = [FormatView(fmt.spec) for fmt in registry.all_formats()]
    env.globals["profile_version"], env.globals["profile_mixing"] = profile.VERSION, profile.MIXING
    env.globals["pairs"] = fattn_pairs.pairs()
    env.globals["heads"] = fattn_pairs.HEADS
    return env


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


def _each(env: jinja2.Environment, new: edits.NewFile) -> list[dict]:
    """What path and template of a new file may name, once for each file that it makes."""
    if new.each_format:
        return [{"fmt": view} for view in env.globals["formats"]]
    if new.each_pair:
        return [{"pair": pair} for pair in env.globals["pairs"]]
    return [{}]


def _new_files(env: jinja2.Environment, patch: edits.Patch) -> list[tuple[str, str]]:
    made = []
    for new in patch.files:
        for given in _each(env, new):
            path = env.from_string(new.path).render(given)
            template = env.from_string(new.template).render(given)
            made.append((path, env.get_template(template).render(given)))
    return made


def render_tree(tree: str, pristine: Path) -> dict[str, str]:
    """Patch file name -> text, for one tree. Raises EditError when an edit does not fit."""
    env = environment()
    current: dict[str, list[str]] = {}
    result: dict[str, str] = {}
    for source in sorted((TEMPLATES / tree).glob("*.toml")):
        patch = edits.load(source)
        spans: dict[str, list[edits.Span]] = {}
        diffs: list[str] = []
        for path, text in _new_files(env, patch):
            if path in current or (pristine / path).exists():
                raise edits.EditError(f"{patch.name}: new file {path} exists already")
            current[path] = _lines(text)
            diffs.append(edits.unified(path, None, [edits.Span(0, 0, tuple(current[path]))]))
        for edit in patch.edits:
            if edit.path not in current:
                target = pristine / edit.path
                if not target.is_file():
                    raise edits.EditError(f"{patch.name}: {edit.path} does not exist in {pristine}")
                current[edit.path] = _lines(target.read_text())
            rendered = edits.Edit(edit.path, edit.anchor, edit.where, env.from_string(edit.text).render())
            spans.setdefault(edit.path, []).extend(edits.locate(current[edit.path], rendered, patch.name))
        for path in sorted(spans):
            in_order = edits.ordered(spans[path], path)
            diffs.append(edits.unified(path, current[path], in_order))
            current[path] = edits.apply_spans(current[path], in_order)
        result[f"{patch.name}.patch"] = f"Subject: {patch.subject}\n\n{patch.why.strip()}\n\n---\n" + "".join(diffs)
    return result


def render(pristine: Path) -> dict[str, str]:
    """Path below ``out/<pin>`` -> text, for every tree of the source distribution at ``pristine``."""
    return {
        f"{tree}/{name}": text
        for tree, below in TREES.items()
        for name, text in render_tree(tree, pristine / below).items()
    }


def committed(pin: str) -> dict[str, str]:
    base = OUT / pin
    return {str(p.relative_to(base)): p.read_text() for p in sorted(base.rglob("*.patch"))}


def differences(pin: str, pristine: Path) -> list[str]:
    """One line for each patch that differs from what the generator makes."""
    want, have = render(pristine), committed(pin)
    lines = [f"missing: {name}" for name in sorted(want.keys() - have.keys())]
    lines += [f"not generated: {name}" for name in sorted(have.keys() - want.keys())]
    for name in sorted(want.keys() & have.keys()):
        if want[name] != have[name]:
            pairs = enumerate(zip(want[name].split("\n"), have[name].split("\n")), 1)
            where = next((n for n, (a, b) in pairs if a != b), "end")
            lines.append(f"differs: {name} at line {where}")
    return lines


def write(pin: str, pristine: Path) -> list[str]:
    """Write the series, all of it or nothing. Returns the file names."""
    series = render(pristine)
    base = OUT / pin
    OUT.mkdir(exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{pin}-", dir=OUT))
    try:
        for name, text in series.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).write_text(text)
        fresh.chmod(0o755)
        if base.exists():
            shutil.rmtree(base)
        fresh.rename(base)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return sorted(series)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpp_patch.generate", description=__doc__.split("\n")[0])
    parser.add_argument("--pin", default=DEFAULT_PIN, help="supported version, see pins.toml (default %(default)s)")
    parser.add_argument("--tree", type=Path, help="unpatched source distribution (default build/<pin>/pristine)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the committed series differs")
    args = parser.parse_args(argv)
    pristine = args.tree or HERE.parent / "build" / args.pin / "pristine"
    if not (pristine / TREES["llama.cpp"]).is_dir():
        print(f"error: no unpatched tree at {pristine}; run `kvfmt build` once, or pass --tree", file=sys.stderr)
        return 2
    try:
        if args.check:
            found = differences(args.pin, pristine)
            for line in found:
                print(line, file=sys.stderr)
            print(f"out/{args.pin}: " + (f"{len(found)} differences" if found else "clean"))
            return 1 if found else 0
        for name in write(args.pin, pristine):
            print(f"wrote out/{args.pin}/{name}")
    except (edits.EditError, jinja2.TemplateError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
