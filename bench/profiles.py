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

#: K type that needs a profile, and the values beside it.
PAIRS = (("kvt3", "kve8_2"), ("kvt4", "kvq4"))
TEXT = "cpp"


def calibrated_caches(subject: ModelFile, folder: Path, threads: Optional[int] = None) -> tuple[Cache, ...]:
    """One cache for each of PAIRS. The model is run once, and not if the folder has its profiles."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {k: folder / f"{subject.name}.{k}.kvprofile.gguf" for k, _ in PAIRS}
    kept = {k: _kept(path, subject) for k, path in paths.items()}
    missing = [k for k, profile in kept.items() if profile is None]
    if missing:
        base = next((profile for profile in kept.values() if profile is not None), None) or _measured(subject, threads)
        for k in missing:
            calibrate.again(subject, base, layout_for(k)).profile.write(paths[k])
            step(f"profile: {paths[k]}")
    return tuple(Cache(f"{k}/{v}", 0, paths[k]) for k, v in PAIRS)


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
