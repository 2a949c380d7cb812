"""Maps from statistics: exact inverses, never worse than a plain Hadamard, right at the edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from kvfmt import geometry as g
from kvfmt import registry
from kvfmt.calibrate import stored_maps
from kvfmt.distortion import equal_noise, slot_noise
from kvfmt.errors import KvfmtError, UnknownName
from kvfmt.moments import LayerStatistics, Moments
from kvfmt.side_maps import SideMaps
from kvfmt.transform import hadamard, rotation_size

SIZES = (1, 4, 24, 64, 96)
#: Enough vectors that nothing is shrunk: what is tested is the mathematics.
MANY = 10**12


def moment(rng: np.random.Generator, size: int, decades: float) -> np.ndarray:
    """A random second moment whose eigenvalues span that many powers of ten."""
    q = np.linalg.qr(rng.standard_normal((size, size)))[0]
    m = (q * 10 ** rng.uniform(-decades / 2, decades / 2, size)) @ q.T
    return (m + m.T) / 2


def layer(k_cov: np.ndarray, q_moment: np.ndarray, mean: np.ndarray | None = None, count: int = MANY, **more) -> LayerStatistics:
    size = len(k_cov)
    mean = np.zeros(size) if mean is None else mean
    fields = dict(shift_free=True, rotated=size - size % 2, adjacent=False, k_first=3 * np.ones((1, size)), v_centre=np.linspace(1, 2, size)[None]) | more
    return LayerStatistics(
        tokens=count, queries=count, k_mean=mean[None], k_cov=k_cov[None], q_moment=q_moment[None],
        v_mean=np.zeros((1, size)), v_moment=np.eye(size)[None], **fields,
    )


cases = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.floats(0, 5), st.sampled_from(g.MAPS), st.booleans(), st.booleans())


@settings(max_examples=120, deadline=None)
@given(cases)
def test_maps_undo_each_other_and_beat_a_plain_hadamard(case):
    seed, size, decades, kind, centre, adjacent = case
    rng = np.random.default_rng(seed)
    keys, queries = moment(rng, size, decades), moment(rng, size, decades)
    found = layer(keys, queries, 5 * rng.standard_normal(size), adjacent=adjacent)
    maps = g.key_maps(found, g.FLAT, kind, centre)
    a, inverse = maps.key[0], maps.query[0]
    np.testing.assert_allclose(inverse.T @ a, np.eye(size), atol=1e-6)
    assert np.linalg.slogdet(a)[1] + np.linalg.slogdet(inverse)[1] == pytest.approx(0, abs=1e-6)
    # Logits are the same in exact arithmetic.
    k, q = rng.standard_normal(size), rng.standard_normal(size)
    assert (inverse @ q) @ (a @ k) == pytest.approx(q @ k, rel=1e-6, abs=1e-6 * np.linalg.norm(q) * np.linalg.norm(k))
    seen = keys if centre else found.k_moment()[0]
    assert g.logit_error(a, inverse, seen, queries) == pytest.approx(maps.error[0], rel=1e-6)
    assert maps.error[0] <= maps.plain[0] * (1 + 1e-6)
    # Stored keys have mean power 1: f16 scales of blocks hold them.
    assert np.trace(a @ seen @ a.T) / size == pytest.approx(1, rel=1e-6)
    # After the Hadamard of a power of two, noise and keys are the same in every slot where the map made channels independent.
    if kind == "full" and size & (size - 1) == 0:
        np.testing.assert_allclose(np.diag(a @ seen @ a.T), 1, rtol=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.floats(0, 4))
def test_each_step_is_at_least_as_good_as_the_one_before(seed, size, decades):
    rng = np.random.default_rng(seed)
    found = layer(moment(rng, size, decades), moment(rng, size, decades), 5 * rng.standard_normal(size))
    errors = [g.key_maps(found, g.FLAT, kind, centre).error[0] for kind, centre in (("none", False), ("none", True), ("pairs", True), ("channels", True), ("full", True))]
    assert all(after <= before * (1 + 1e-6) for before, after in zip(errors, errors[1:]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from((4, 24, 64)), st.floats(0, 4))
def test_the_full_map_is_the_geometric_mean_and_the_least(seed, size, decades):
    rng = np.random.default_rng(seed)
    keys, queries = moment(rng, size, decades), moment(rng, size, decades)
    a, inverse, spectrum = g.full_map(keys, queries)
    mean = a.T @ a
    # The geometric mean M of keys^-1 and queries is the solution of M keys M = queries.
    np.testing.assert_allclose(mean @ keys @ mean, queries, rtol=1e-6, atol=1e-6 * np.abs(queries).max())
    np.testing.assert_allclose(a @ keys @ a.T, np.diag(spectrum), atol=1e-6 * spectrum[0])
    np.testing.assert_allclose(inverse @ queries @ inverse.T, np.diag(spectrum), atol=1e-6 * spectrum[0])
    assert (np.diff(spectrum) <= 0).all()
    best = g.logit_error(a, inverse, keys, queries)
    assert best == pytest.approx(np.trace(sqrtm(keys @ queries)).real ** 2 / size, rel=1e-4)
    other = np.eye(size) + 0.3 * rng.standard_normal((size, size)) / np.sqrt(size)
    assert g.logit_error(other @ a, np.linalg.inv(other @ a).T, keys, queries) >= best * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from((4, 64)), st.floats(-3, 3), st.floats(-3, 3), st.sampled_from(g.MAPS))
def test_units_of_keys_and_queries_do_not_matter(seed, size, k_unit, q_unit, kind):
    rng = np.random.default_rng(seed)
    keys, queries = moment(rng, size, 3), moment(rng, size, 3)
    one = g.key_maps(layer(keys, queries), g.FLAT, kind)
    other = g.key_maps(layer(keys * 10 ** (2 * k_unit), queries * 10 ** (2 * q_unit)), g.FLAT, kind)
    np.testing.assert_allclose(other.key * 10**k_unit, one.key, rtol=1e-5, atol=1e-6 * np.abs(one.key).max())
    assert other.plain[0] / other.error[0] == pytest.approx(one.plain[0] / one.error[0], rel=1e-6)


def test_pairs_commute_with_rope():
    rng = np.random.default_rng(0)
    size, rotated = 16, 8
    angle = rng.uniform(0, 6, rotated // 2)
    for adjacent in (False, True):
        turn = np.eye(size)
        for i, x in enumerate(angle):
            at = [2 * i, 2 * i + 1] if adjacent else [i, i + rotated // 2]
            turn[np.ix_(at, at)] = [[np.cos(x), -np.sin(x)], [np.sin(x), np.cos(x)]]
        a, inverse = g.pair_map(moment(rng, size, 3), moment(rng, size, 3), rotated, adjacent)
        np.testing.assert_allclose(a @ turn, turn @ a, atol=1e-12)
        assert np.ptp(np.diag(a)) > 0.1 and (a == np.diag(np.diag(a))).all()
        np.testing.assert_allclose(a @ inverse, np.eye(size), atol=1e-12)


@pytest.mark.parametrize("kind", g.MAPS)
@pytest.mark.parametrize(
    "what", ["no key varies", "no query", "one channel is dead", "keys in a plane", "fewer tokens than values", "huge", "tiny"]
)
def test_degenerate_heads_have_finite_maps(kind, what):
    rng = np.random.default_rng(5)
    size, count = 64, 4000
    x, y = rng.standard_normal((1, count, size)), rng.standard_normal((1, count, size))
    if what == "no key varies":
        x[:] = x[:, :1]
    elif what == "no query":
        y[:] = 0
    elif what == "one channel is dead":
        x[:, :, 7] = 0
        y[:, :, 9] = 0
    elif what == "keys in a plane":
        x = x[:, :, :2] @ rng.standard_normal((2, size))
    elif what == "fewer tokens than values":
        x, y = x[:, :20], y[:, :20]
    elif what == "huge":
        x *= 3e4
    elif what == "tiny":
        x *= 1e-4
    k, q = Moments(1, size), Moments(1, size)
    k.add(x)
    q.add(y)
    found = LayerStatistics(x.shape[1], y.shape[1], k.mean, k.covariance(), q.second(), k.mean, k.second(), k.mean, k.mean + 1, True, size, False)
    maps = g.key_maps(found, g.FLAT, kind, True)
    assert np.isfinite(maps.key).all() and np.isfinite(maps.query).all()
    np.testing.assert_allclose(maps.query[0].T @ maps.key[0], np.eye(size), atol=1e-5)
    assert maps.error[0] <= maps.plain[0] * (1 + 1e-9) + 1e-300
    # New vectors of the same kind are not blown up.
    fresh = (x[0] - k.mean[0]) @ maps.key[0].T
    assert np.mean(fresh**2) < 1.5


def test_shrinking_follows_its_rule():
    m = np.array([[4.0, 1.0], [1.0, 0.0]])
    safe = g.shrunk(m, 6)
    assert safe[0, 1] == safe[1, 0] == pytest.approx(1 - 8 / 14)
    assert safe[0, 0] == pytest.approx(4 + 2 * g.FLOOR) and safe[1, 1] == pytest.approx(2 * g.FLOOR)
    np.testing.assert_array_equal(g.shrunk(np.zeros((3, 3)), 5), np.eye(3))


def test_centring_is_left_out_where_softmax_is_not_shift_invariant():
    rng = np.random.default_rng(1)
    found = layer(moment(rng, 64, 2), moment(rng, 64, 2), rng.standard_normal(64), shift_free=False)
    maps = g.key_maps(found, centre=True)
    assert maps.mean is None and g.value_mean(found) is None
    stored = replace(stored_maps(maps, found), v_mean=g.value_mean(found))
    assert stored.k_mean is None and stored.v_mean is None and stored.layout_v("") == ""
    np.testing.assert_array_equal(maps.key, g.key_maps(found, centre=False).key)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kind", ["none", "pairs", "channels"])
def test_a_diagonal_is_stored_as_such_where_llama_cpp_rotates(kind, size):
    """Under its rotation it is the matrix: what is stored has mean power 1, except where only the mean remains."""
    rng = np.random.default_rng(9)
    found = layer(moment(rng, size, 2), moment(rng, size, 2), rng.standard_normal(size), rotated=size)
    maps = g.key_maps(found, kind=kind)
    stored = stored_maps(maps, found)
    assert stored.k_map is None and stored.layout_k("flat") == "scaled" and (stored.k_scale is None) == (kind == "none")
    assert stored.k_order is None and stored.k_mix is None
    scale = np.ones((1, size)) if stored.k_scale is None else stored.k_scale.astype(np.float64)
    mixed = hadamard(np.eye(size), rotation_size(size, True))
    keys, queries = mixed * scale, mixed / scale
    whole = np.linalg.norm(keys) / np.linalg.norm(maps.key[0])
    np.testing.assert_allclose(keys, maps.key[0] * whole, rtol=1e-5)
    np.testing.assert_allclose(queries, maps.query[0] / whole, rtol=1e-5)
    if kind == "pairs":
        np.testing.assert_array_equal(scale[:, : size // 2], scale[:, size // 2 :])
    if kind == "channels":
        assert len(np.unique(scale)) == size
    if kind != "none":
        assert np.trace(keys @ found.k_cov[0] @ keys.T) / size == pytest.approx(1, rel=1e-4)
    assert not stored_maps(g.key_maps(found, kind="none", centre=False), found).arrays()


def test_elsewhere_a_diagonal_is_a_matrix_with_its_own_rotation():
    found = layer(np.eye(80), np.eye(80))
    assert stored_maps(g.key_maps(found, kind="pairs"), found).layout_k("flat") == "flat"


def test_the_first_key_is_reported():
    found = layer(np.eye(4), np.eye(4), np.ones(4), k_first=np.array([[9.0, 1, 1, 1]]))
    maps = g.key_maps(found, kind="none")
    assert maps.first_error[0] == pytest.approx(64) and maps.first_plain[0] == pytest.approx(84)


def test_a_layout_orders_scales_and_mixes():
    lay = g.Layout("x", lambda s: np.argsort(s), lambda s: 1 / s, lambda d: (d // 4, d - d // 4))
    forward, inverse = lay.matrices(np.array([4.0, 3.0, 2.0, 1.0]))
    np.testing.assert_allclose(inverse.T @ forward, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(forward[0], [0, 0, 0, 1])
    np.testing.assert_allclose(np.abs(forward[1:, :3]) @ [1, 0, 0], g.mixing(3)[:, 2].__abs__() / 4)
    with pytest.raises(ValueError, match="does not lay out"):
        g.Layout("y", lambda s: [0, 0], lambda s: s, lambda d: (d,)).matrices(np.ones(2))


@pytest.mark.parametrize("size", [1, 2, 3, 64, 80, 96, 192, 576])
def test_mixing_is_orthogonal_and_flat(size):
    m = g.mixing(size)
    np.testing.assert_allclose(m @ m.T, np.eye(size), atol=1e-12)
    assert np.abs(m).max() <= np.sqrt(2 / size) + 1e-12
    if size & (size - 1) == 0:
        np.testing.assert_allclose(np.abs(m), size**-0.5)


each_unequal = pytest.mark.parametrize("fmt", [f for f in registry.all_formats() if f.spec.needs_profile], ids=lambda f: f.spec.name)


@each_unequal
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_a_format_s_layout_orders_by_importance_and_brings_groups_to_unit_variance(fmt, size):
    layout = g.layout_for(fmt.spec.name)
    assert layout.name == fmt.spec.name and g.layout_for(fmt.spec.name) is layout
    rng = np.random.default_rng(7)
    spectrum = rng.permutation(np.geomspace(1e-4, 10, size))
    order, count = layout.order(spectrum), size // 64
    rank = np.argsort(np.argsort(-spectrum))
    for slot in range(size):
        assert rank[order[slot]] == slot % 64 * count + slot // 64
    assert layout.groups(size) == (16,) * (size // 16)
    forward, inverse = layout.matrices(spectrum)
    np.testing.assert_allclose(inverse.T @ forward, np.eye(size), atol=1e-12)
    stored = forward @ np.diag(spectrum) @ forward.T
    # A Hadamard spreads the variance of a group evenly.
    np.testing.assert_allclose(np.diag(stored), 1, rtol=1e-9)
    # Nothing leaks from one group into another.
    groups = np.arange(size) // 16
    assert not stored[groups[:, None] != groups].any()


@each_unequal
def test_an_unequal_layout_beats_equal_bits(fmt):
    """Keys and queries whose spectrum falls as real ones' does: what the block's errors do to a logit, against kvq of the same size."""
    rng = np.random.default_rng(8)
    size, count = 128, 1500
    spectrum = np.geomspace(1, 1e-3, size)
    keys, queries = (rng.standard_normal((count, size)) * np.sqrt(spectrum) for _ in range(2))
    errors = []
    for name in (fmt.spec.name, fmt.spec.name.replace("kvt", "kvq")):
        forward, inverse = g.layout_for(name).matrices(spectrum)
        coder = registry.get(name)
        stored = (keys @ forward.T).astype(np.float32)
        error = coder.decode(coder.encode(stored)).astype(np.float64) - stored
        errors.append(np.mean((queries @ inverse.T @ error.T) ** 2))
    assert errors[0] < 0.6 * errors[1]


@each_unequal
def test_what_a_layout_cannot_lay_out_is_refused(fmt):
    layout = g.layout_for(fmt.spec.name)
    with pytest.raises(KvfmtError, match=f"heads of 80 values are not whole blocks of {fmt.spec.name}, 64 each"):
        g.key_maps(layer(np.eye(80), np.eye(80)), layout)
    for kind in g.MAPS:
        if kind in g.ORDERED:
            g.key_maps(layer(np.eye(64), np.eye(64)), layout, kind=kind)
            continue
        with pytest.raises(KvfmtError, match=f"the channels of map '{kind}' are not of the size that layout {fmt.spec.name} counts on") as refused:
            g.key_maps(layer(np.eye(64), np.eye(64)), layout, kind=kind)
        assert refused.value.hint == "Use one of: channels, full"


def falling(rng: np.random.Generator, size: int, mean: bool = True) -> LayerStatistics:
    """A head whose channels fall in size by themselves, in no order, and are correlated with some others."""
    channels = rng.permutation(np.geomspace(1, 1e-3, size)) ** 0.5
    near = np.eye(size) + 0.15 * rng.standard_normal((size, size)) / np.sqrt(size)
    other = np.eye(size) + 0.15 * rng.standard_normal((size, size)) / np.sqrt(size)
    keys, queries = (channels[:, None] * (m @ m.T) * channels for m in (near, other))
    unit = np.exp(rng.standard_normal(size))
    return layer(
        unit[:, None] * keys * unit, queries / unit / unit[:, None], 5 * rng.standard_normal(size) if mean else None, count=4000,
        v_centre=rng.standard_normal((1, size)),
    )


@each_unequal
@pytest.mark.parametrize("size", [64, 128, 192])
@pytest.mark.parametrize("centre", [True, False])
def test_ordered_channels_are_stored_as_vectors_and_are_the_matrix(fmt, size, centre):
    rng = np.random.default_rng(size)
    found, layout = falling(rng, size), g.layout_for(fmt.spec.name)
    maps = g.key_maps(found, layout, "channels", centre)
    stored = stored_maps(maps, found)
    assert set(stored.arrays()) == {"k_order", "k_mix", "k_scale"} | ({"k_mean"} if centre else set())
    assert stored.layout_k(layout.name) == fmt.spec.name and stored.k_order.dtype == np.int32 and stored.k_mix.shape == (16, 16)
    side = SideMaps.of(stored, True)
    assert side.mixes and side.shape == (1, size)
    k, q = rng.standard_normal((2, 1, 7, size)).astype(np.float32)
    kept = side.store(k)
    mean = found.k_mean[0] if centre else 0
    np.testing.assert_allclose(kept[0], (k[0] - mean) @ maps.key[0].T, rtol=1e-4, atol=1e-4 * np.abs(maps.key[0]).max())
    # Channels of very different sizes are mixed in float32: each comes back as well as its size allows.
    assert (np.abs(side.restore(kept) - k) <= 1e-6 * np.abs(k) + 4e-7 * (np.abs(kept).max() / stored.k_scale + np.abs(mean))).all()
    # What a query does to a key is the same, up to what all keys have in common.
    turned = q[0] @ maps.query[0].T
    np.testing.assert_allclose(turned @ kept[0].T, (q[0] @ (k[0] - mean).T), rtol=1e-4, atol=1e-3)
    # llama.cpp's way to the turned query: by the vectors alone.
    by_vectors = (q / stored.k_scale[:, None])[0][:, stored.k_order[0]].reshape(7, -1, 16) @ stored.k_mix.T
    np.testing.assert_allclose(by_vectors.reshape(7, size), turned, rtol=1e-3, atol=1e-4 * np.abs(turned).max())
    # A token's floats depend on it alone.
    np.testing.assert_array_equal(np.concatenate([side.store(k[:, i : i + 1]) for i in range(7)], axis=1), kept)
    np.testing.assert_array_equal(side.store(np.stack([k, k]), np.float64, as_ggml=True)[1], kept)
    # The matrix says what the least scales and the largest ones do: each group of slots has mean power 1.
    power = np.diag(maps.key[0] @ (found.k_cov if centre else found.k_moment())[0] @ maps.key[0].T).reshape(-1, 16).mean(axis=1)
    assert power.mean() == pytest.approx(1, rel=1e-3) and (np.abs(power - 1) < 0.3).all()


@each_unequal
def test_ordered_channels_lie_between_flat_ones_and_the_full_map(fmt):
    """In the squared error of a logit that a block's noise makes, each group's as measured on Gaussians."""
    rng = np.random.default_rng(12)
    size = 128
    noise = slot_noise(fmt, size)
    for _ in range(5):
        found = falling(rng, size)
        errors = []
        for layout, kind, slots in ((g.FLAT, "channels", np.full(size, equal_noise(fmt))), (g.layout_for(fmt.spec.name), "channels", noise), (g.layout_for(fmt.spec.name), "full", noise)):
            maps = g.key_maps(found, layout, kind)
            errors.append(g.logit_error(maps.key[0], maps.query[0], found.k_cov[0], found.q_moment[0], slots))
        assert errors[2] < errors[1] < 0.6 * errors[0]
        # Of FLAT it is what key_maps says.
        assert errors[0] == pytest.approx(equal_noise(fmt) * g.key_maps(found, g.FLAT, "channels").error[0], rel=1e-6)


def test_values_are_centred_with_every_kind_of_map():
    found = falling(np.random.default_rng(4), 64)
    for kind in g.MAPS:
        stored = replace(stored_maps(g.key_maps(found, kind=kind), found), v_mean=g.value_mean(found))
        np.testing.assert_array_equal(stored.v_mean, found.v_centre.astype(np.float32))
        side = SideMaps.of(stored, False)
        assert not side.mixes and side.shape == (1, 64) and stored.layout_v("") == "scaled"
        v = np.random.default_rng(5).standard_normal((1, 9, 64)).astype(np.float32)
        np.testing.assert_array_equal(side.store(v), v - stored.v_mean[:, None])
        # Attention's weights sum to 1: the mean may be added to its output as well.
        p = np.random.default_rng(6).dirichlet(np.ones(9), 3).astype(np.float32)
        np.testing.assert_allclose(p @ side.restore(side.store(v))[0], p @ side.store(v)[0] + stored.v_mean, atol=1e-5)
        assert stored_maps(g.key_maps(found, kind=kind, centre=False), found).v_mean is None


def test_a_layout_with_groups_of_several_sizes_is_a_matrix():
    lay = g.Layout("x", lambda s: np.argsort(-s), lambda s: np.ones(len(s)), lambda d: (d // 4, d - d // 4))
    maps = g.key_maps(falling(np.random.default_rng(3), 64), lay, "channels")
    assert maps.order is None and maps.mix is None and maps.scale is None
    assert lay.parts(np.arange(64.0))[2] is None and g.FLAT.parts(np.arange(64.0))[2].shape == (64, 64)


def test_names():
    assert g.layout_for("kvq3") is g.layout_for("q4_0") is g.layout_for("flat") is g.FLAT
    with pytest.raises(UnknownName):
        g.layout_for("q9")
    with pytest.raises(UnknownName, match="unknown map"):
        g.key_maps(layer(np.eye(4), np.eye(4)), kind="odd")
    with pytest.raises(KvfmtError, match="damaged"):
        g.full_map(-np.eye(4), np.eye(4))
