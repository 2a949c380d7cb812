"""Generation, retrieval and speed: their rules on made-up figures, their work on a random model."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import random_gguf
from rich.console import Console
from typer.testing import CliRunner

from bench import generate, prompts, retrieval, speed, tables
from bench.bandwidth import read_bandwidth
from bench.caches import F16, Cache
from bench.cli import app
from bench.engine import Engine
from bench.records import Provenance, Results, Row
from bench.retrieval import Answer
from kvfmt.errors import KvfmtError, UnknownName
from kvfmt.subjects import find_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return find_model(str(random_gguf.llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")))


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine(tiny.path, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("kind", prompts.SETS)
def test_prompts_follow_from_the_seed(kind):
    made = prompts.prompts(kind, 12, 1)
    assert made == prompts.prompts(kind, 12, 1) and made[:5] == prompts.prompts(kind, 5, 1)
    assert len(set(made)) == 12 and made != prompts.prompts(kind, 12, 2)
    with pytest.raises(UnknownName, match="'easy'"):
        prompts.prompts("easy", 1, 1)


def test_arithmetic_is_right():
    lines = [line for text in prompts.prompts("hard", 40, 3)[1::2] for line in text.splitlines()[1:-1]]
    assert len(lines) == 160 and all(eval(line.replace("=", "==")) for line in lines)


def test_hidden_values_stand_at_their_depths():
    made = prompts.document(200, 5, "x")
    assert [h.depth for h in made.hidden] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    for hidden in made.hidden:
        assert made.text.count(hidden.value) == 1
        assert made.text.index(hidden.value) / len(made.text) == pytest.approx(hidden.depth, abs=0.05)
        name = hidden.question.removeprefix("\n\nAs the text says, the secret code of the ").removesuffix(" is")
        assert f"The secret code of the {name} is {hidden.value}." in made.text


@pytest.mark.parametrize("tokens, looping", [
    ([7] * 24, True), ([7] * 23, False), (list(range(100)) + [1, 2, 3] * 8, True), (list(range(100)) + [1, 2, 3] * 7, False),
    (list(range(100)), False), (list(range(32)) * 3, True), (list(range(33)) * 3, False), ([1, 2, 3] * 8 + [9], False), ([], False),
])
def test_loops(tokens, looping):
    assert generate.loops(tokens) is looping


def test_agreement_of_texts():
    reference = [list(range(10)), list(range(10)), [1, 2]]
    found = generate.compare([list(range(10)), [0, 1, 2, 9], [1, 2]], reference, (3, 5))
    assert found["match_3"].value == 1 and found["match_5"].value == pytest.approx(2 / 3)
    assert found["prefix"].value == pytest.approx((10 + 3 + 2) / 3)
    # Three of three is no certainty: (3 + 1) / (3 + 2) with the error of five trials.
    assert found["match_3"].error == pytest.approx((0.8 * 0.2 / 5) ** 0.5)
    # One that goes on where f16 ended is another text.
    assert generate.compare([[1, 2, 3]], [[1, 2]], (3,))["match_3"].value == 0


def test_greedy_text_is_that_of_the_most_likely_tokens(engine):
    prompt = engine.tokenize("12 + 3")
    with engine.open(F16, 256) as session:
        made = session.greedy(session.prefill(prompt, last=True), 20)
    tokens = list(prompt)
    for token in made:
        with engine.open(F16, 256) as fresh:
            assert int(np.argmax(fresh.prefill(np.array(tokens, np.int32), last=True))) == token
        tokens.append(token)


def test_generation_resumes_and_f16_is_itself(engine, tiny, tmp_path):
    results = Results(tmp_path / "r.jsonl")
    rows = generate.measure(engine, tiny, (Cache("q4_0"), F16), "hard", 4, 1, results, horizons=(5, 10))
    assert [r.method for r in rows] == ["q4_0", "f16"]
    assert rows[1].metrics["match_10"].value == 1 and rows[1].metrics["prefix"].value == np.mean([len(t) for t in rows[1].detail["tokens"]])
    assert rows[0].metrics["match_10"].value < 1 and all(len(t) <= 10 for t in rows[0].detail["tokens"])
    rest = generate.measure(engine, tiny, (Cache("q4_0"), Cache("q8_0")), "hard", 4, 1, results, lambda done, total: results.rows or pytest.fail(), horizons=(5, 10))
    assert rest[0] == rows[0] and len(results.rows) == 3
    with pytest.raises(KvfmtError, match="a prompt of set 'long' with 5000 more tokens takes"):
        generate.measure(engine, tiny, (F16,), "long", 1, 1, results, horizons=(5000,))


def test_a_snapshot_goes_back_exactly(engine):
    tokens = engine.tokenize("one two three four five six")
    for cache in (F16, Cache("kvq3/kvq2", 1)):
        with engine.open(cache, 256) as session:
            session.prefill(tokens)
            state = session.snapshot()
            first = session.decode(tokens[:3], 2).copy()
            session.decode(tokens, None)
            session.restore(state)
            np.testing.assert_array_equal(session.decode(tokens[:3], 2), first)
            session.forget(len(tokens))
            np.testing.assert_array_equal(session.decode(tokens[:3], 2), first)
            with engine.open(Cache("q8_0"), 256) as other, pytest.raises(KvfmtError, match="does not fit the cache q8_0"):
                other.restore(state)


def test_retrieval_pairs_with_f16(engine, tiny, tmp_path):
    results = Results(tmp_path / "r.jsonl")
    rows = retrieval.measure(engine, tiny, (F16, Cache("q4_0")), 1024, 2, 3, 1, results)
    f16, q4 = rows
    assert len(f16.detail["answers"]) == 6 and [d["n"] for d in f16.detail["by_depth"]] == [2, 2, 2]
    assert f16.metrics["nll_rise"] == (0, 0) and f16.metrics["recall_drop"] == (0, 0)
    mine, theirs = ([a["nll"] for a in r.detail["answers"]] for r in rows)
    assert q4.metrics["nll_rise"].value == pytest.approx(np.mean(theirs) - np.mean(mine)) and q4.metrics["nll_rise"].value != 0
    again = retrieval.measure(engine, tiny, (F16, Cache("q4_0")), 1024, 2, 3, 1, results, lambda *_: pytest.fail("measured again"))
    assert again == rows
    with pytest.raises(KvfmtError, match="8192 tokens is more than the model's 4096"):
        retrieval.measure(engine, tiny, (F16,), 8192, 1, 3, 1, results)
    with pytest.raises(KvfmtError, match="40 values do not fit 256 tokens"):
        retrieval.measure(engine, tiny, (F16,), 256, 1, 40, 1, results)


def test_an_answer_is_scored_as_the_definition(engine):
    """The value's likelihood from one pass over everything, and recall from greedy text."""
    made, tokens = retrieval.fit(engine, 512, 1, "y")
    question, value = retrieval.question_of(engine, made.hidden[0])
    assert engine.detokenize(value).strip("▁ ") == made.hidden[0].value
    with engine.open(F16, 512) as session:
        (answer,) = retrieval.answers(engine, session, made, tokens)
    with engine.open(F16, 512, 64) as session:
        session.prefill(np.concatenate([tokens, question[:-1]]))
        logits = session.decode(np.concatenate([question[-1:], value[:-1]]), 0).astype(np.float64)
        likely = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        assert answer.nll == pytest.approx(-likely[np.arange(len(value)), value].mean(), rel=0.02)
        # A value that the model writes itself is recalled.
        session.clear()
        written = np.array(session.greedy(session.prefill(np.concatenate([tokens, question]), last=True), 4), np.int32)
        session.clear()
        session.prefill(tokens)
        assert retrieval.ask(session, question, written)[0]
        session.clear()
        session.prefill(tokens)
        assert not retrieval.ask(session, question, np.append(written[:-1], (written[-1] + 1) % engine.n_vocab))[0]


def test_retrieval_figures():
    f16 = [Answer(0.5, True, 1.0), Answer(0.5, True, 1.0), Answer(0.5, False, 2.0), Answer(0.5, False, 2.0)]
    ours = [replace(f16[0], right=False, nll=3.0), f16[1], replace(f16[2], right=True), f16[3]]
    found = retrieval.summary(ours, f16)
    assert [found[n].value for n in ("recall", "recall_f16", "recall_drop", "lost", "nll_rise")] == [0.5, 0.5, 0, 0.25, 0.5]


def test_speed_measures_all_caches_in_one_run(engine, tiny, tmp_path):
    results = Results(tmp_path / "r.jsonl")
    arguments = dict(depths=(0, 300), rounds=2, decode=2, prefill=8, seed=1)
    counts = []
    rows = speed.measure(engine, tiny, (Cache("q8_0"), Cache("kvq3/kvq2", 1)), results=results, update=lambda done, total: counts.append((done, total)), **arguments)
    assert [(r.method, r.setup["depth"]) for r in rows] == [(m, d) for d in (0, 300) for m in ("f16", "q8_0", "kvq3/kvq2, protect 1")]
    assert counts[-1][0] == counts[-1][1], "the count of tokens is wrong"
    f16, q8 = rows[3:5]
    assert f16.metrics["decode_ratio"] == (1, 0) and f16.metrics["prefill_low"].value == 1
    # 4 layers, 2 KV heads of 64 on each side, 512 cells, of which 300 are read for a token.
    assert f16.metrics["cache_bytes"].value == 512 * 4 * 2 * 128 * 2
    assert f16.metrics["kv_bytes"].value == 300 * 4 * 2 * 128 * 2
    assert q8.metrics["cache_bytes"].value == pytest.approx(f16.metrics["cache_bytes"].value * 8.5 / 16, abs=0.01 * 2**20)
    assert f16.metrics["context_bytes"].value > f16.metrics["cache_bytes"].value
    assert q8.metrics["kv_floor"].value == pytest.approx(q8.metrics["kv_bytes"].value / q8.metrics["bandwidth"].value)
    assert speed.measure(engine, tiny, (Cache("q8_0"),), results=results, update=lambda *_: pytest.fail("measured again"), **arguments)[0] == rows[0]
    for bad in ({"rounds": 1}, {"depths": (-1,)}, {"depths": (5000,)}):
        with pytest.raises(KvfmtError):
            speed.measure(engine, tiny, (F16,), results=results, **{**arguments, **bad})


def test_speed_figures(engine):
    mine, f16 = np.array([[2.0, 1.0], [1.0, 1.0]]), np.array([[1.0, 1.0], [1.0, 2.0]])
    with engine.open(F16, 256) as session:
        found = speed.summary(mine, f16, session, 100, 1e9)
    assert found["decode_ratio"].value == 0.75 and found["prefill_ratio"].value == 1.5
    assert (found["decode_low"].value, found["decode_high"].value) == (0.5, 1)


def test_rows_of_an_earlier_version_still_make_a_table():
    origin = Provenance("b", {}, "m", "h", "t", "h", 256, 1, "x")
    setups = {"generate": {"set": "hard"}, "retrieval": {"length": 512}, "speed": {"depth": 0}}
    for kind, setup in setups.items():
        rows = [Row(kind, "q8_0, old", "q8_0", "q8_0", 0, 8.5, origin, setup)]
        out = io.StringIO()
        Console(file=out, width=120).print(tables.table(rows, getattr(tables, kind)(rows)))
        assert "q8_0, old" in out.getvalue()
    rows = [Row("speed", "q8_0", "q8_0", "q8_0", 0, 8.5, origin, setups["speed"])]
    assert tables.table(rows, tables.roofline(rows), tables.bandwidth(rows)).row_count == 1


def test_bandwidth_reads_every_word():
    assert read_bandwidth(2, 1 << 20) > 0


def test_the_commands(tiny, tmp_path):
    common = ["--model", str(tiny.path), "--caches", "q8_0", "--output", str(tmp_path / "r.jsonl"), "--threads", "1"]
    for command in (["generate", "--sets", "hard", "--prompts", "2"], ["retrieval", "--length", "1024", "--documents", "1"], ["speed", "--depth", "64", "--rounds", "2"]):
        done = CliRunner().invoke(app, [*command, *common])
        assert done.exit_code == 0, done.output
    assert {row.kind for row in Results(tmp_path / "r.jsonl")} == {"generate", "retrieval", "speed"}
    for command in (["generate", "--sets", "easy"], ["retrieval", "--length", "100000"], ["speed", "--depth", "100000"]):
        assert CliRunner().invoke(app, [*command, *common]).exit_code == 1


def test_profiles_of_the_benchmark_are_made_once_and_again_for_another_model(tmp_path, monkeypatch):
    from bench import profiles
    from kvfmt import calibrate

    monkeypatch.setattr(calibrate, "TOKENS", 256)
    monkeypatch.setattr(calibrate, "LENGTHS", (128,))
    runs = []
    measured = profiles._measured
    monkeypatch.setattr(profiles, "_measured", lambda *given: runs.append(1) or measured(*given))
    one, other = (find_model(str(random_gguf.llama(tmp_path / f"m{seed}.gguf", seed=seed))) for seed in (1, 2))
    other = replace(other, name=one.name)
    first = profiles.calibrated_caches(one, tmp_path / "p", 1)
    assert [cache.kv for cache in first] == ["kve8_3/kve8_2", "kvq4", "kvt3/kve8_2", "kvt4/kvq4", "kvt4/kvq4"] and len(runs) == 1
    assert [cache.calibrated.layout_k[0] for cache in first] == ["scaled", "scaled", "kvt3", "kvt4", "kvt4"]
    assert [cache.calibrated.maps[0].k_map is not None for cache in first] == [False] * 4 + [True]
    again = profiles.calibrated_caches(one, tmp_path / "p", 1)
    assert [c.calibrated.hash for c in again] == [c.calibrated.hash for c in first] and len(runs) == 1
    # The same name, another model: what lies there is not its profile.
    profiles.calibrated_caches(other, tmp_path / "p", 1)
    assert len(runs) == 2
    first[2].profile.write_bytes(b"nonsense")
    profiles.calibrated_caches(other, tmp_path / "p", 1)
    assert len(runs) == 2, "statistics come from the other profile where one is left"
