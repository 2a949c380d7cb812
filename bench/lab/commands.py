"""``kvfmt bench lab`` and ``kvfmt bench probe``, as functions: what the command line and ``bench all`` run."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from bench.lab import experiment, locus, positions, probe
from bench.lab.calibrated import methods as with_profile
from bench.lab.contexts import SETTINGS, Setting
from bench.lab.methods import find_methods
from bench.records import Results, Row
from kvfmt.build.console import console, progress
from kvfmt.profile import Profile
from kvfmt.subjects import find_model, find_text


def announce(row: Row) -> None:
    """One line a result."""
    m = row.metrics
    more = f"  same top {m['same_top'].value:6.1%}"
    more += f"  agreement {m['agreement'].value:5.1%}  recall {m['recall'].value:5.1%}" if "agreement" in m else ""
    console.print(f"  {row.method:48} {row.bits_per_value:6.2f} bits  KLD {m['kld'].value:9.5f}{more}", soft_wrap=True)


def run_lab(
    model: str, text: str, output: Path, methods: Optional[str] = None, settings: tuple[Setting, ...] = SETTINGS,
    threads: Optional[int] = None, loci: bool = True, profile: Optional[Path] = None,
) -> list[Row]:
    """The methods' table on short and long prompts, and the loci; with a profile, calibrated keys too.

    Raises KvfmtError for what cannot be measured, and for a profile of another model.
    """
    calibrated = None if profile is None else Profile.read(profile)
    chosen = find_methods(methods, () if calibrated is None else with_profile(calibrated))
    if calibrated is not None:
        calibrated.check_model(find_model(model).path)
    subject, source, results = find_model(model), find_text(text), Results(output)
    rows: list[Row] = []
    session, geometry = experiment.open_session(subject, (*settings, locus.LOCUS, probe.PROBE), threads)
    with session:
        sensitive: tuple[int, ...] = ()
        if any("sensitive" in m.kept.name for m in chosen):
            sensitive = probe.ranking(_layers(session, geometry, subject, source, results, "int2 sorted"))
        recalled = experiment.Recall(session, geometry, sensitive)
        for setting in settings:
            with progress(f"{subject.name}: {len(chosen)} methods, {setting.name}", len(chosen)) as update:
                rows += experiment.measure_methods(
                    session, geometry, subject, source, setting, chosen, sensitive, results,
                    lambda n: update(n, len(chosen)), announce, recalled,
                )
        if loci:
            with progress(f"{subject.name}: where keys are quantized", 10) as update:
                rows += locus.measure_loci(session, geometry, subject, source, results, update, announce)
    return rows


def _layers(session, geometry, subject, source, results, codec) -> list[Row]:
    total = 2 * geometry.layers
    with progress(f"{subject.name}: {codec} on one layer at a time", total) as update:
        return probe.measure_layers(session, geometry, subject, source, codec, results, update)


def run_probe(model: str, text: str, output: Path, threads: Optional[int] = None) -> list[Row]:
    """Sensitivity of each layer, and which old tokens matter."""
    subject, source, results = find_model(model), find_text(text), Results(output)
    session, geometry = experiment.open_session(subject, (probe.PROBE, positions.POSITIONS), threads)
    with session:
        rows = []
        for codec in probe.probe_codecs():
            rows += _layers(session, geometry, subject, source, results, codec)
        with progress(f"{subject.name}: which old tokens matter", 17) as update:
            rows += positions.measure_positions(session, geometry, subject, source, results, update, announce)
    return rows
