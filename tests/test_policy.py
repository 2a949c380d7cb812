"""Cache types by name and what they cost, against literal figures."""

from __future__ import annotations

import dataclasses

import pytest

from kvfmt import policy, registry
from kvfmt.bindings import cache_arguments
from kvfmt.errors import KvfmtError, UnknownName


def test_names_and_ids():
    assert policy.cache_type("kvq3").type_id == 771
    assert policy.cache_type("f16").type_id == 1
    assert policy.cache_type("q8_0") == policy.CacheType("q8_0", 8, 32, 34)
    k, v = policy.parse_kv("kvq3/kvq2")
    assert (k.name, v.name) == ("kvq3", "kvq2")
    assert policy.parse_kv("kvq4") == (policy.cache_type("kvq4"),) * 2


@pytest.mark.parametrize("name", ["kvq5", "", "KVQ3", "q3_k", "kvq3/", "kvq3/kvq2/f16"])
def test_unknown_type_is_refused_and_lists_the_known(name):
    with pytest.raises(UnknownName, match="kvq3") as caught:
        policy.parse_kv(name)
    assert "unknown cache type" in caught.value.message


def test_protected_layers_are_the_ends():
    assert policy.protected_layers(6, 2) == (0, 1, 4, 5)
    assert policy.protected_layers(3, 2) == (0, 1, 2)
    assert policy.protected_layers(3, 0) == ()
    with pytest.raises(KvfmtError, match="-1 is negative"):
        policy.protected_layers(3, -1)


def test_cost_counts_scales_and_protected_layers():
    """SmolLM2-135M: 30 layers, 3 KV heads of 64, 512 cells."""
    row = 3 * 64
    k, v = policy.parse_kv("kvq3/kvq2")
    plain = policy.cache_cost(512, row, row, 30, k, v, 0)
    assert plain.k_bytes == 512 * 30 * 3 * 26
    assert plain.v_bytes == 512 * 30 * 3 * 18
    assert plain.bits_per_value == 2.75
    kept = policy.cache_cost(512, row, row, 30, k, v, 2)
    assert kept.total == 512 * 3 * (26 * (26 + 18) + 4 * 2 * 128)
    assert kept.bits_per_value == pytest.approx((26 * 2.75 + 4 * 16) / 30)
    f16 = policy.cache_cost(512, row, row, 30, *policy.parse_kv("f16"), 2)
    assert f16.bits_per_value == 16


def test_a_block_that_does_not_divide_the_row_is_refused_by_name():
    with pytest.raises(KvfmtError, match="kvq3 with block 64 does not divide 80 values"):
        policy.cache_cost(1, 80, 80, 1, *policy.parse_kv("kvq3"), 0)


def test_protection_that_nobody_asked_for():
    ours, stock = policy.parse_kv("kvq3/f16"), policy.parse_kv("q4_0")
    assert [policy.auto_protect(n, *ours) for n in (4, 8, 15, 16, 30)] == [0, 1, 1, 2, 2]
    assert policy.auto_protect(30, *stock) == 0
    assert policy.auto_protect(30, *ours, profile=True) == 0


def test_types_of_layers():
    k, v = policy.parse_kv("kvq3/kvq2")
    f16, q8 = policy.cache_type("f16"), policy.cache_type("q8_0")
    assert policy.layer_types(8, k, v) == [(f16, f16), *[(k, v)] * 6, (f16, f16)]
    assert policy.layer_types(8, k, v, profile=True) == [(k, v)] * 8
    assert policy.layer_types(3, k, f16, protect=1, profile=True) == [(f16, f16), (k, f16), (f16, f16)]
    chosen = [(q8, k), (f16, f16)]
    assert policy.layer_types(2, f16, f16, chosen=chosen) == chosen
    for kv, protect in (("q8_0/f16", 0), ("f16/q8_0", None), ("f16", 1)):
        with pytest.raises(KvfmtError, match="the profile chooses the cache types"):
            policy.layer_types(2, *policy.parse_kv(kv), protect, chosen)
    with pytest.raises(KvfmtError, match="types for 2 layers, the model has 3"):
        policy.layer_types(3, f16, f16, chosen=chosen)


def test_a_layout_is_for_one_type():
    kvq4, q8, f16 = (policy.cache_type(name) for name in ("kvq4", "q8_0", "f16"))
    ordered = dataclasses.replace(kvq4, needs_profile=True)
    for chosen, layout in ((kvq4, None), (kvq4, ""), (kvq4, "flat"), (kvq4, "kvq4"), (q8, "flat"), (f16, "kvq4"), (ordered, "kvq4")):
        assert policy.layout_fault(chosen, layout) is None
    assert "needs a calibration profile" in policy.layout_fault(ordered, None)
    for chosen, layout in ((q8, "kvq4"), (kvq4, "kvq3"), (ordered, "flat"), (ordered, ""), (ordered, "kvq3")):
        assert f"does not suit the profile's layout '{layout}'" in policy.layout_fault(chosen, layout)


def test_cost_of_chosen_types_counts_the_sidecar():
    k, v = policy.parse_kv("kvq3/kvq2")
    q8, f16 = policy.cache_type("q8_0"), policy.cache_type("f16")
    cost = policy.layers_cost(256, [(128, 64), (128, 128)], [(k, q8), (f16, v)], sidecar=1000)
    assert (cost.k_bytes, cost.v_bytes) == (256 * (2 * 26 + 256), 256 * (2 * 34 + 2 * 18))
    assert cost.total == cost.k_bytes + cost.v_bytes + 1000
    assert cost.bits_per_value == 8 * cost.total / (256 * (256 + 192))


def test_the_hash_of_a_format_from_before_the_flag():
    spec = registry.get("kvq3").spec
    assert spec.hash.startswith("ab2c99330c6ccd18")
    assert dataclasses.replace(spec, needs_profile=True, groups=(64,)).hash != spec.hash


def test_arguments_for_the_bindings():
    assert cache_arguments("kvq3/kvq2", 2) == {"type_k": 771, "type_v": 770, "flash_attn": True, "kv_protect": 2}
    assert cache_arguments("f16") == {"type_k": 1, "type_v": 1}
    with pytest.raises(UnknownName):
        cache_arguments("kvq3/q9")
