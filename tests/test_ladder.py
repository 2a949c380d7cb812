"""The ladder of distortions, and the rows of real caches that it stands on."""

from __future__ import annotations

import io

import gguf
import numpy as np
import pytest
import random_gguf
from rich.console import Console
from scipy.linalg import hadamard as scipy_hadamard
from typer.testing import CliRunner

from converters import cache_rows, state
from kvfmt import ladder, registry
from kvfmt.bindings import open_model
from kvfmt.build.corpus import corpus
from kvfmt.build.models import fetch_model
from kvfmt.cli import app
from kvfmt.distortion import block_errors
from kvfmt.errors import KvfmtError
from kvfmt.listing import format_table
from kvfmt.transform import hadamard, rotation_size

TOKENS = 24


@pytest.mark.parametrize("size", [1, 2, 64, 256])
def test_the_fast_transform_is_the_matrix_and_its_own_inverse(size):
    x = np.random.default_rng(1).standard_normal((5, 2 * size))
    matrix = scipy_hadamard(size) / np.sqrt(size)
    assert np.allclose(hadamard(x, size), (x.reshape(-1, size) @ matrix).reshape(x.shape))
    assert np.allclose(hadamard(hadamard(x, size), size), x)


@pytest.mark.parametrize("size", [0, 3, 128])
def test_a_size_that_does_not_fit_is_refused(size):
    with pytest.raises(ValueError, match=f"size {size} "):
        hadamard(np.zeros((2, 64)), size)


def test_keys_are_mixed_over_the_largest_power_of_two_and_values_over_64():
    assert [rotation_size(head, True) for head in (64, 128, 192, 256, 576, 80)] == [64, 128, 64, 256, 64, 1]
    assert [rotation_size(head, False) for head in (64, 128, 256, 80)] == [64, 64, 64, 1]


def _first_layer(path, kv: str, tokens: list[int]) -> tuple[state.Side, state.Side]:
    model = open_model(str(path), kv=kv, n_ctx=256, n_threads=2, flash_attn=True, verbose=False)
    try:
        stream = state.read(cache_rows.sequence_state(model, tokens)).caches[0].only
    finally:
        model.close()
    return stream.k[0], stream.v[0]


@pytest.mark.parametrize("head", [64, 192, 256])
def test_the_rotation_is_the_one_that_llama_cpp_stores_quantized_rows_in(tmp_path, head):
    """The first layer's rows do not depend on the cache's type: q8_0's rows are ours to within its rounding."""
    path = random_gguf.llama(tmp_path / "model.gguf", head=head, n_layer=1)
    tokens = list(range(3, 3 + TOKENS))
    plain, stored = _first_layer(path, "f16", tokens), _first_layer(path, "q8_0", tokens)
    for keys, f16, q8 in zip((True, False), plain, stored):
        ours = cache_rows.rotated_heads([f16.f16()], head, keys)
        theirs = gguf.quants.dequantize(q8.data, gguf.GGMLQuantizationType.Q8_0).reshape(-1, head)
        assert np.abs(ours - theirs).max() < 0.012 * np.abs(ours).max()
        unrotated = f16.f16().reshape(-1, head).astype(np.float32)
        assert np.abs(unrotated - theirs).max() > 0.1 * np.abs(ours).max()


@pytest.fixture(scope="module")
def smollm2_rows():
    return cache_rows.cache_rows(fetch_model("smollm2"), corpus("cpp"), TOKENS)


def test_rows_of_a_real_model(smollm2_rows):
    for rows in smollm2_rows:
        assert rows.shape == (30 * TOKENS * 3, 64) and rows.dtype == np.float32
        assert np.isfinite(rows).all() and (rows != 0).mean() > 0.99
    k, v = (np.mean(rows**2) for rows in smollm2_rows)
    # SmolLM2's keys are several times as large as its values: the sides are not exchanged.
    assert k > 2 * v


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(KvfmtError, match="the text has 3 tokens, not 8"):
        cache_rows.cache_rows(fetch_model("smollm2"), "one two three", 8)
    with pytest.raises(KvfmtError, match="0 tokens"):
        cache_rows.cache_rows(fetch_model("smollm2"), "one", 0)


def test_head_sizes_come_from_the_lengths_or_from_the_head_count():
    base = {"general.architecture": "x", "x.embedding_length": "512", "x.attention.head_count": "8"}
    assert cache_rows.head_sizes(base) == (64, 64)
    assert cache_rows.head_sizes({**base, "x.attention.key_length": "128"}) == (128, 64)
    with pytest.raises(KvfmtError, match="architecture 'x'"):
        cache_rows.head_sizes({"general.architecture": "x"})
    with pytest.raises(KvfmtError, match="100 values a token, not whole heads of 64"):
        cache_rows.rotated_heads([np.zeros((2, 100), np.float16)], 64, True)


def test_the_laplacian_bound_is_shannons():
    """exp(2 h) / (2 pi e), with the differential entropy integrated numerically."""
    x = np.linspace(0, 40, 2_000_001)
    density = np.exp(-np.sqrt(2) * x) / np.sqrt(2)
    h = 2 * np.trapezoid(-density * np.log(density), x)
    assert ladder.LAPLACE == pytest.approx(np.exp(2 * h) / (2 * np.pi * np.e), rel=1e-5)
    laplace = ladder.known_sources(64_000)[1].rows
    assert np.mean(laplace**2) == pytest.approx(1, abs=0.03)
    assert np.mean(np.abs(laplace)) == pytest.approx(2**-0.5, abs=0.01)


def test_errors_count_against_each_rows_own_power():
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((400, 128)).astype(np.float32)
    mixed = rows * np.exp2(rng.integers(-4, 5, (400, 1))).astype(np.float32)
    for fmt in registry.all_formats():
        plain = ladder.relative_mse(fmt, ladder.rows_source("rows", rows))
        found = ladder.relative_mse(fmt, ladder.rows_source("mixed", mixed))
        assert (found.codes, found.stored) == pytest.approx((plain.codes, plain.stored), rel=1e-6)


@pytest.mark.parametrize("fmt", registry.all_formats(), ids=lambda f: f.spec.name)
def test_the_error_at_the_best_scale_is_the_least_over_scales(fmt):
    """Against a plain search over scales, and what is stored against decoding; zero blocks count in full."""
    x = np.random.default_rng(3).standard_t(4, (50, 128)).astype(np.float32)
    x[0, :64] = 1e-12
    x[1] = 0
    codes, stored = block_errors(fmt, x)
    assert codes.shape == stored.shape == (50, 2)
    blocks, decoded = (v.astype(np.float64).reshape(50, 2, 64) for v in (x, fmt.decode(fmt.encode(x))))
    assert stored == pytest.approx(np.square(decoded - blocks).sum(axis=2), rel=1e-12)
    tried = [np.square(factor * decoded - blocks).sum(axis=2) for factor in np.linspace(0, 2, 8001)]
    assert codes == pytest.approx(np.min(tried, axis=0), rel=2e-5) and (codes <= stored * (1 + 1e-12)).all()
    assert codes[0, 0] == pytest.approx(64e-24, rel=1e-5) and codes[1, 0] == 0


def test_the_ladder_prints_the_error_as_stored_where_it_differs():
    table = ladder.ladder_table(ladder.climb(ladder.known_sources(64 * 500)))
    names = {cell.split("\n")[0]: cell for cell in table.columns[0].cells}
    assert {name for name, cell in names.items() if cell.endswith("\nstored")} == {"kvq2", "kve8_2", "kvnf4"}
    assert all(cell.count("\n") == head.count("\n") for head, cell in zip(names.values(), table.columns[1].cells))


def test_rows_of_zeros_are_left_out():
    rows = np.zeros((3, 64), np.float32)
    rows[1] = 1
    assert len(ladder.rows_source("rows", rows).rows) == 1
    with pytest.raises(KvfmtError, match="all 2 rows are zero"):
        ladder.rows_source("rows", rows[::2])
    with pytest.raises(KvfmtError, match="rows of 80 values are not whole blocks"):
        ladder.relative_mse(registry.all_formats()[0], ladder.Source("odd", np.ones((2, 80), np.float32)))


def test_no_format_is_below_a_bound_and_real_rows_are_near_the_gaussian(smollm2_rows):
    sources = ladder.known_sources(64_000) + [ladder.rows_source(f"smollm2 {s}", r) for s, r in zip("KV", smollm2_rows)]
    calls = []
    rungs = ladder.climb(sources, lambda done, of: calls.append((done, of)))
    assert [r.name for r in rungs] == [f.spec.name for f in registry.plain_formats()]
    assert calls[-1] == (len(rungs) * 4, len(rungs) * 4)
    for rung in rungs:
        assert rung.db["Gauss"] > 0 and rung.db["Laplace"] > 0
        assert rung.mse["Gauss"] < rung.mse["Laplace"]
        # That is what the rotation is for.
        assert rung.db["smollm2 V"] == pytest.approx(rung.db["Gauss"], abs=0.4)


def test_the_command_prints_every_format_and_writes_the_plot(tmp_path):
    plot = tmp_path / "ladder.png"
    done = CliRunner().invoke(app, ["distortion", "--values", "6400", "--models", "smollm2", "--tokens", "8", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    for fmt in registry.plain_formats():
        assert fmt.spec.name in done.output
    assert plot.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [plot]
    refused = CliRunner().invoke(app, ["distortion", "--values", "640", "--models", "gpt9"])
    assert refused.exit_code == 1 and "unknown model 'gpt9'" in refused.output


def test_the_list_of_formats_fits_a_terminal():
    """A longer name cut the hashes and "Lloyd-Max" off at 80 columns."""
    console = Console(width=80, file=io.StringIO())
    console.print(format_table())
    shown = console.file.getvalue()
    assert "…" not in shown and "Lloyd-Max" in shown
    assert all(fmt.spec.hash[:8] in shown for fmt in registry.all_formats())
