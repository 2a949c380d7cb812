"""Cache types by name and what they cost, against literal figures."""

from __future__ import annotations

import pytest

from kvfmt import policy
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


def test_arguments_for_the_bindings():
    assert cache_arguments("kvq3/kvq2", 2) == {"type_k": 771, "type_v": 770, "flash_attn": True, "kv_protect": 2}
    assert cache_arguments("f16") == {"type_k": 1, "type_v": 1}
    with pytest.raises(UnknownName):
        cache_arguments("kvq3/q9")
