"""Result rows: written whole, found again by their key, refused when damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.caches import Cache
from bench.records import Metric, Provenance, Results, Row, machine
from kvfmt import registry
from kvfmt.errors import KvfmtError

ORIGIN = Provenance("0.3.36+kvfmt.1.h0", {"kvq3": "aa"}, "smollm2", "bb", "docs", "cc", 512, 1, "x86_64, 2 cores")
ROW = Row("quality", "kvq3/kvq2", "kvq3", "kvq2", 0, 2.75, ORIGIN, {"chunks": 2}, {"kld": Metric(0.1, 0.01), "kld_max": Metric(3.0)}, {"ages": [1, 2.5]})


def test_a_row_comes_back_as_it_was(tmp_path):
    Results(tmp_path / "r.jsonl").append(ROW)
    (back,) = Results(tmp_path / "r.jsonl")
    assert back == ROW and back.key == ROW.key
    assert back.metrics["kld_max"].error is None


def test_the_key_is_everything_but_what_came_out(tmp_path):
    results = Results(tmp_path / "r.jsonl")
    results.append(ROW)
    again = replace(ROW, metrics={"kld": Metric(0.2, 0.02)}, detail={}, bits_per_value=3.0)
    assert results.find(again.key) == ROW
    others = [
        replace(ROW, kind="lab"), replace(ROW, method="x"), replace(ROW, k="q8_0"), replace(ROW, v="q8_0"),
        replace(ROW, protect=1), replace(ROW, setup={"chunks": 3}), replace(ROW, provenance=replace(ORIGIN, seed=2)),
        replace(ROW, provenance=replace(ORIGIN, build="other")), replace(ROW, provenance=replace(ORIGIN, formats={"kvq3": "ab"})),
    ]
    assert all(results.find(other.key) is None for other in others)
    results.append(again)
    assert list(Results(results.path)) == [again]


def test_two_writers_lose_nothing(tmp_path):
    one, two = Results(tmp_path / "r.jsonl"), Results(tmp_path / "r.jsonl")
    one.append(ROW)
    two.append(replace(ROW, method="second"))
    assert [row.method for row in Results(tmp_path / "r.jsonl")] == ["kvq3/kvq2", "second"]
    assert [row.method for row in two] == ["kvq3/kvq2", "second"]


@pytest.mark.parametrize("damage", ["{", "[]", '{"kind": "quality"}', ROW.to_json()[:-3], ROW.to_json().replace("quality", "speeed")])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "r.jsonl"
    path.write_text(ROW.to_json() + "\n" + damage + "\n")
    with pytest.raises(KvfmtError, match="line 2 of .*r.jsonl is not a result"):
        Results(path)


def test_a_metric_that_is_no_number_is_refused():
    with pytest.raises(KvfmtError, match="metric 'kld' of kvq3/kvq2"):
        replace(ROW, metrics={"kld": Metric(float("nan"))})


def test_only_our_formats_have_a_spec_hash():
    assert Cache("kvq3/f16").identity == {"kvq3": registry.get("kvq3").spec.hash}
    assert "cores" in machine()
