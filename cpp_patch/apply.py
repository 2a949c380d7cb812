"""Applies the patch series to a llama.cpp tree: all of it or nothing.

    python -m cpp_patch.apply TREE [--pin NAME] [--check] [--reverse]

TREE is a llama.cpp checkout, or an unpacked source distribution of llama-cpp-python (then its bindings are
patched too). Nothing is written unless every hunk of every patch fits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvfmt.build.paths import series_dir
from kvfmt.build.pins import Pin, get_pin
from kvfmt.errors import KvfmtError, MissingTool, PatchRefused

STAMP = ".kvfmt-patch.json"
LLAMA_IN_SDIST = Path("vendor/llama.cpp")

_NEW_FILE = re.compile(rb"^\+\+\+ b/(.*?)(?:\t.*)?$", re.M)
_OLD_FILE = re.compile(rb"^--- a/(.*?)(?:\t.*)?$", re.M)
_FAILED_HUNK = re.compile(r"^error: patch failed: (.+):(\d+)$", re.M)


@dataclass(frozen=True)
class Series:
    """The patches for one root folder, in order."""

    patches: tuple[Path, ...]

    @property
    def text(self) -> bytes:
        """All patches as one. git checks later hunks against earlier ones only within one input."""
        return b"".join(p.read_bytes().rstrip(b"\n") + b"\n" for p in self.patches)

    @property
    def files(self) -> set[str]:
        """The paths that the series changes, adds or removes, relative to its root."""
        text = self.text
        return {m.decode() for m in _OLD_FILE.findall(text) + _NEW_FILE.findall(text)}

    @property
    def sha256(self) -> str:
        """Changes with any byte of any patch and with their order."""
        return hashlib.sha256(self.text).hexdigest()

    def __bool__(self) -> bool:
        return bool(self.patches)


def load_series(pin: Pin, part: str) -> Series:
    """The committed patches of a pin; `part` is "llama.cpp" or "llama-cpp-python". May be empty."""
    return Series(tuple(sorted((series_dir(pin.name) / part).glob("*.patch"))))


def load_all(pin: Pin, sdist: bool = True) -> list[tuple[Path, Series]]:
    """(root relative to the tree, series) for a source distribution, or for a llama.cpp checkout. Empty ones are left out."""
    roots = [(LLAMA_IN_SDIST if sdist else Path("."), "llama.cpp")]
    if sdist:
        roots.append((Path("."), "llama-cpp-python"))
    return [(root, series) for root, part in roots if (series := load_series(pin, part))]


def hash_all(parts: list[tuple[Path, Series]]) -> str:
    """One hash over the series of all roots; of the empty list too."""
    return hashlib.sha256("".join(f"{root} {series.sha256}\n" for root, series in parts).encode()).hexdigest()


def apply_all(tree: Path, parts: list[tuple[Path, Series]], *, check_only: bool = False, reverse: bool = False) -> None:
    """Applies every series below `tree`, or takes them back, or only checks that it could.

    Raises PatchRefused, with the tree untouched, if the series is there already (or, in reverse, is not), or if a
    hunk does not fit; MissingTool without git.
    """
    stamp = tree / STAMP
    wanted = hash_all(parts)
    stamped = json.loads(stamp.read_text())["sha256"] if stamp.exists() else None
    if not reverse and stamped:
        if stamped == wanted:
            raise PatchRefused(f"this patch series is already applied to {tree}", "Nothing to do. To take it out: --reverse.")
        raise PatchRefused(
            f"another version of the patch series is already applied to {tree}",
            "Start from a clean tree, or take the other version out with the kvfmt that applied it (--reverse).",
        )
    if reverse and stamped and stamped != wanted:
        raise PatchRefused(f"{tree} carries another version of the patch series", "Use the kvfmt that applied it.")
    # Asked first: hunks that only add lines would fit a second time.
    if not reverse and parts and all(not _failures(tree / root, series, True) for root, series in parts):
        raise PatchRefused(f"this patch series is already applied to {tree}", "Nothing to do. To take it out: --reverse.")
    failures = [text for root, series in parts if (text := _failures(tree / root, series, reverse))]
    if failures:
        verb = "be taken out of" if reverse else "be applied to"
        raise PatchRefused(
            f"the patch series cannot {verb} {tree}; nothing was changed:\n" + "\n".join(failures),
            "The tree is not the llama.cpp version that the series is made for, or it was edited.",
        )
    if check_only:
        return
    before = _contents(tree, parts)
    for root, series in parts:
        done = _git_apply(tree / root, series, ["--reverse"] if reverse else [])
        if done.returncode:
            raise PatchRefused(f"git stopped while it wrote to {tree / root}:\n{done.stderr}", "Start again from a clean tree.")
    after = _contents(tree, parts)
    if skipped := sorted(file for file in before if before[file] == after[file]):
        raise PatchRefused(f"git reported success but left these as they were: {', '.join(skipped)}", "Start again from a clean tree.")
    if reverse:
        stamp.unlink(missing_ok=True)
    else:
        stamp.write_text(json.dumps({"sha256": wanted, "patches": [p.name for _, s in parts for p in s.patches]}) + "\n")


def _contents(tree: Path, parts: list[tuple[Path, Series]]) -> dict[str, bytes | None]:
    paths = [tree / root / file for root, series in parts for file in series.files]
    return {str(p.relative_to(tree)): p.read_bytes() if p.exists() else None for p in paths}


def _git_apply(root: Path, series: Series, options: list[str]) -> subprocess.CompletedProcess:
    root = root.resolve()
    # Inside another repository git takes the paths to be relative to that one, finds none of them below the
    # current folder, and skips every patch with success. It must not look above the tree.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(root.parent), "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn", "apply", *options, "-"]
    try:
        done = subprocess.run(command, cwd=root, env=environment, input=series.text, capture_output=True)
    except FileNotFoundError:
        raise MissingTool("git is not installed", "Install it (Debian: apt-get install git) and run the same command again.") from None
    done.stderr = done.stderr.decode("utf-8", "replace")
    return done


def _failures(root: Path, series: Series, reverse: bool) -> str:
    """Empty if the series fits; else a line per hunk or file that does not."""
    done = _git_apply(root, series, ["--check"] + (["--reverse"] if reverse else []))
    if done.returncode == 0:
        return ""
    lines = []
    explained = set()
    for file, line in _FAILED_HUNK.findall(done.stderr):
        explained.add(file)
        lines.append(f"  {_patch_with(series, file, int(line))}: {file}: hunk at line {line} does not fit")
    for text in done.stderr.splitlines():
        if text.startswith("error: ") and "patch failed" not in text:
            file = text[len("error: ") :].split(":")[0]
            if file not in explained:
                lines.append(f"  {text[len('error: '):]}")
    return "\n".join(lines) or "  " + done.stderr.strip()


def _patch_with(series: Series, file: str, line: int) -> str:
    """The name of the patch whose hunk for `file` starts at old line `line`."""
    for patch in series.patches:
        current = None
        for text in patch.read_text("utf-8", "replace").splitlines():
            if text.startswith("--- a/") or text.startswith("+++ b/"):
                current = text[6:].split("\t")[0]
            elif current == file and re.match(rf"@@ -{line}(,\d+)? ", text):
                return patch.name
    return "?"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cpp_patch.apply", description=__doc__.split("\n\n")[0])
    parser.add_argument("tree", type=Path, help="llama.cpp checkout or unpacked llama-cpp-python source distribution")
    parser.add_argument("--pin", help="which llama.cpp version the tree is (default: the newest supported)")
    parser.add_argument("--check", action="store_true", help="only say whether it would apply")
    parser.add_argument("--reverse", action="store_true", help="take the series out again")
    options = parser.parse_args(arguments)
    try:
        pin = get_pin(options.pin)
        tree = options.tree.resolve()
        sdist = (tree / LLAMA_IN_SDIST / "ggml").is_dir()
        if not sdist and not (tree / "ggml").is_dir():
            raise PatchRefused(f"{tree} is no llama.cpp tree", "Name the folder that contains ggml/, or one with vendor/llama.cpp.")
        parts = load_all(pin, sdist)
        if not parts:
            raise PatchRefused(f"there is no patch series for {pin.name}", "Generate it: python -m cpp_patch.generate")
        apply_all(tree, parts, check_only=options.check, reverse=options.reverse)
    except KvfmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    count = sum(len(series.patches) for _, series in parts)
    verb = "would apply to" if options.check else "taken out of" if options.reverse else "applied to"
    print(f"{count} patches {verb} {tree}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
