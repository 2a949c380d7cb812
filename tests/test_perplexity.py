"""Reading llama-perplexity's output."""

from __future__ import annotations

import pytest

from kvfmt import perplexity
from kvfmt.errors import BuildFailed

HEADER = """llama_kv_cache:        CPU KV buffer size =     3.00 MiB
llama_kv_cache: kv policy: K kvq3 x 2 layers = 1.00 MiB (3.250 bits/value), protected layers: none, total 2.00 MiB, 4.000 bits/value, f16
llama_kv_cache:        CPU KV buffer size =     1.00 MiB
llama_kv_cache: kv policy: K f16 x 1 layers, protected layers: none, total 1.00 MiB, 16.000 bits/value, f16
"""


def test_chunks_are_counted_in_both_kinds_of_output():
    assert perplexity.latest_chunk("[1]2.2219,[2]4.3200,") == 2
    assert perplexity.latest_chunk("chunk  PPL\n   1   12.3456 ±    0.9\n   2   11.1 ±    0.8") == 2
    assert perplexity.latest_chunk("0.1234,") == 0


def test_a_tail_that_begins_within_a_number_is_no_chunk():
    """The progress bar of the demo once showed chunk 6701 of 4: the tail began within '0.96701 ±'."""
    assert perplexity.latest_chunk("6701   0.5 ± 0.1   99.1\n   3   12.3 ±  0.9") == 3


def test_bits_of_two_caches_are_weighted_by_their_values():
    found = perplexity.parse(HEADER + "Final estimate: PPL = 4.3200 +/- 0.57060", compared=False)
    assert found.statistics == {"ppl": (4.32, 0.5706)}
    # 2 MiB at 4 bits are eight times the values of 1 MiB at 16 bits.
    assert found.bits_per_value == pytest.approx((8 * 4 + 16) / 9)
    assert found.cache_mib == 4.0


def test_missing_figures_are_an_error():
    with pytest.raises(BuildFailed, match="did not say how large"):
        perplexity.parse("Final estimate: PPL = 4.3200 +/- 0.57060", compared=False)
    with pytest.raises(BuildFailed, match="kld"):
        perplexity.parse(HEADER + "Final estimate: PPL = 4.3200 +/- 0.57060", compared=True)
