"""Profiles that `kvfmt bench all` measures with: made from the C++ corpus, since it scores on documentation, and kept in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from bench.caches import Cache
from kvfmt import calibrate
from kvfmt.build.console import progress, step
from kvfmt.errors import KvfmtError
from kvfmt.geometry import layout_for
from kvfmt.profile import Profile
from kvfmt.subjects import ModelFile, find_text

#: A profile's name: the type that its layout is for, and what it does to keys (one of geometry.MAPS).
PROFILES = {"channels": ("flat", "channels"), "kvt3": ("kvt3", "channels"), "kvt4": ("kvt4", "channels"), "kvt4-matrices": ("kvt4", "full")}
#: Caches, and the profile of each.
CACHES = (("kve8_3/kve8_2", "channels"), ("kvq4", "channels"), ("kvt3/kve8_2", "kvt3"), ("kvt4/kvq4", "kvt4"), ("kvt4/kvq4", "kvt4-matrices"))
TEXT = "cpp"


def calibrated_caches(subject: ModelFile, folder: Path, threads: Optional[int] = None) -> tuple[Cache, ...]:
    """The caches of CACHES. The model is run once, and not if the folder has its profiles."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{subject.name}.{name}.kvprofile.gguf" for name in PROFILES}
    kept = {name: _kept(path, subject) for name, path in paths.items()}
    missing = [name for name, profile in kept.items() if profile is None]
    if missing:
        base = next((profile for profile in kept.values() if profile is not None), None) or _measured(subject, threads)
        for name in missing:
            kind, maps = PROFILES[name]
            calibrate.again(subject, base, layout_for(kind), maps).profile.write(paths[name])
            step(f"profile: {paths[name]}")
    return tuple(Cache(kv, 0, paths[name]) for kv, name in CACHES)


def _kept(path: Path, subject: ModelFile) -> Optional[Profile]:
    """The profile at ``path`` if it is this model's, made by this build's formats and from this text."""
    if not path.exists():
        return None
    try:
        profile = Profile.read(path)
        profile.check_model(subject.path)
    except KvfmtError:
        return None
    same = profile.provenance.get("text.sha256") == [find_text(TEXT).sha256] and profile.provenance.get("model.sha256") == subject.sha256
    return profile if same and profile.statistics else None


def _measured(subject: ModelFile, threads: Optional[int]) -> Profile:
    with progress(f"{subject.name}: calibration on {TEXT}", calibrate.TOKENS) as update:
        return calibrate.calibrate(subject, [find_text(TEXT)], None, calibrate.TOKENS, threads=threads, update=update).profile
