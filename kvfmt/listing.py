"""The table of formats that `kvfmt formats` prints."""

from __future__ import annotations

from rich import box
from rich.table import Table

from . import registry
from .distortion import decibel_above_bound, gaussian_distortion, group_distortion


def format_table() -> Table:
    """One row a format: what it stores, what it costs, and its error on a unit Gaussian."""
    table = Table(title="kvfmt block formats: one f16 scale per block", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("for", no_wrap=True)
    table.add_column("codes", min_width=8)
    for title in ("bytes", "bits", "MSE", "stored", "dB", "id"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("spec hash", no_wrap=True)
    for fmt in registry.all_formats():
        spec = fmt.spec
        if spec.groups:
            shown = "\n".join(f"{mse:.4f}" for mse in group_distortion(fmt)), "-", "-"
        else:
            error = gaussian_distortion(fmt)
            shown = f"{error.codes:.4f}", f"{error.stored:.4f}", f"{decibel_above_bound(error.codes, spec.bits_per_value):.2f}"
        table.add_row(
            spec.name,
            ",".join(spec.roles),
            spec.summary,
            f"{spec.size}/{spec.block}",
            f"{spec.bits_per_value:g}",
            *shown,
            str(spec.type_id),
            spec.hash[:8],
        )
    table.caption = (
        "bytes: of a block, and its values. bits: allocated per value, the scale counted.\n"
        "MSE: mean squared error on a unit Gaussian, each block at its best scale (codes\n"
        "only). stored: at the scale that is stored, which for kvq2 and kve8_2 is made\n"
        "unbiased, since attention averages values. dB: MSE above the rate-distortion\n"
        "bound at those bits; 6 dB is one bit. Where there is an MSE for each quarter, a\n"
        "calibration profile must order the channels by importance."
    )
    table.caption_justify = "left"
    return table
