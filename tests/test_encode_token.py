"""The bench that times encoders in C calls the encoders that write the cache."""

from __future__ import annotations

import numpy as np
import pytest
from blocks import assert_same_blocks

from bench import encode_token
from kvfmt.ggml_cpu import Encoders
from kvfmt import registry
from kvfmt.errors import MissingTool
from kvfmt.policy import cache_type


@pytest.fixture(scope="module")
def encoders(ggml_libdir):
    return Encoders(ggml_libdir)


@pytest.mark.parametrize("fmt", registry.all_formats(), ids=lambda f: f.spec.name)
def test_it_encodes_what_the_reference_encodes(encoders, fmt):
    x = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    assert_same_blocks(fmt, x, fmt.encode(x), encoders.encode(cache_type(fmt.spec.name), x), "from_float")


def test_every_pair_is_timed_every_turn(encoders):
    pairs = ["q8_0", *(f.spec.name for f in registry.all_formats())]
    found = encode_token.measure(encoders, pairs, 2)
    assert list(found) == pairs and all(len(times) == 2 and min(times) > 0 for times in found.values())
    assert encode_token.report(found).row_count == len(pairs)


def test_a_missing_build_is_named(tmp_path):
    with pytest.raises(MissingTool, match="libggml-base.so"):
        Encoders(tmp_path)
