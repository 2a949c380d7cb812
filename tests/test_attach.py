"""A profile in a model's own file: found by the patched llama.cpp, and taken off again byte for byte."""

from __future__ import annotations

import dataclasses
import json
import struct

import gguf
import llama_lib as lib
import numpy as np
import pytest
import random_gguf
from converters import attach as work
from converters.gguf_copy import copy_tensors, write_header
from kvfmt.bindings import cache_arguments, open_model
from kvfmt.cli import app
from kvfmt.errors import KvfmtError
from kvfmt.gguf_read import read_gguf
from kvfmt.profile import ATTACHED, ATTACHED_BYTES, AUTO, Profile, attached
from random_profile import as_kvfmt, random_profile
from test_llama_tools import job, run, text  # noqa: F401
from typer.testing import CliRunner

TOKENS = np.random.default_rng(11).integers(3, random_gguf.N_VOCAB, 96).tolist()
MIXED = (["kvq4", "q8_0", "f16", "kvq3"], ["kvq4", "kvq2", "f16", "q4_0"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_gguf.llama(tmp_path_factory.mktemp("attach") / "model.gguf")


@pytest.fixture(scope="module")
def profile(model):
    return as_kvfmt(random_profile(model))


@pytest.fixture(scope="module")
def carrier(model, profile):
    """The model with the profile, which does not choose types."""
    path = model.with_name("carrier.gguf")
    work.attach(model, profile, path)
    return path


def logits(model, kv, profile):
    with lib.Context(model, kv, protect=0, profile=profile) as context:
        return context.decode(TOKENS)


@pytest.mark.parametrize(
    "options", [{}, {"mean": False, "v": False}, {"types": MIXED}, {"layers": [1]}, {"layout": "kvt4", "ordered": True, "v": False}, {"layout": "scaled"}], ids=str
)
def test_off_again_the_file_is_the_original(model, tmp_path, options):
    made = as_kvfmt(random_profile(model, **options))
    before, on, off, saved = model.read_bytes(), tmp_path / "on.gguf", tmp_path / "off.gguf", tmp_path / "saved.gguf"
    work.attach(model, made, on)
    assert Profile.read(on).hash == made.hash and on.read_bytes() != before
    work.detach(on, off, saved)
    assert off.read_bytes() == before == model.read_bytes()
    assert Profile.read(saved).hash == made.hash
    # in place
    work.attach(off, made, off)
    assert off.read_bytes() == on.read_bytes()
    work.detach(off, off)
    assert off.read_bytes() == before


def test_a_model_with_an_old_profile_says_so_and_can_be_rid_of_it(model, carrier, profile, tmp_path):
    old, key = bytearray(carrier.read_bytes()), b"kvfmt.profile.version"
    old[old.index(key) + len(key) + 4] = 1
    (tmp_path / "old.gguf").write_bytes(old)
    with pytest.raises(KvfmtError, match="old.gguf: the profile is of version 1, which an older kvfmt wrote"):
        Profile.read(tmp_path / "old.gguf")
    work.detach(tmp_path / "old.gguf", tmp_path / "off.gguf")
    assert (tmp_path / "off.gguf").read_bytes() == model.read_bytes()
    work.attach(tmp_path / "old.gguf", profile, tmp_path / "new.gguf", replace=True)
    assert (tmp_path / "new.gguf").read_bytes() == carrier.read_bytes()


def test_everything_else_is_unchanged(model, carrier):
    one, two = gguf.GGUFReader(model), gguf.GGUFReader(carrier)
    assert [(t.name, t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in one.tensors] == [
        (t.name, t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in two.tensors
    ]
    added = set(two.fields) - set(one.fields)
    assert added == set(work.KEYS)
    for key in set(one.fields) - {"GGUF.kv_count"}:
        assert one.fields[key].contents() == two.fields[key].contents(), key


def test_auto_is_the_same_as_the_file(model, carrier, profile, tmp_path):
    profile.write(tmp_path / "profile.gguf")
    by_file = logits(model, "q8_0/q4_0", tmp_path / "profile.gguf")
    assert np.array_equal(logits(carrier, "q8_0/q4_0", AUTO), by_file)
    assert not np.array_equal(logits(carrier, "q8_0/q4_0", None), by_file)
    # it only acts when asked for
    assert np.array_equal(logits(carrier, "q8_0/q4_0", None), logits(model, "q8_0/q4_0", None))


def test_statistics_stay_out_unless_asked_for(model, profile, tmp_path):
    from test_profile import statistics

    rich = dataclasses.replace(profile, statistics={0: statistics(np.random.default_rng(1))})
    work.attach(model, rich, tmp_path / "lean.gguf")
    work.attach(model, rich, tmp_path / "rich.gguf", statistics=True)
    assert not Profile.read(tmp_path / "lean.gguf").statistics and Profile.read(tmp_path / "rich.gguf").statistics
    assert Profile.read(tmp_path / "lean.gguf").hash == rich.hash == Profile.read(tmp_path / "rich.gguf").hash


def test_a_policy_chooses_types_without_maps(model, tmp_path):
    made = work.with_types(work.policy_of(model), model, "kvq3/kvq2", 1)
    assert made.types_k == ("f16", "kvq3", "kvq3", "f16") and made.types_v == ("f16", "kvq2", "kvq2", "f16")
    path = tmp_path / "policy.gguf"
    work.attach(model, made, path)
    with lib.Context(path, profile=AUTO) as context:
        assert "K f16 x 2 + kvq3 x 2 layers" in context.log and "V f16 x 2 + kvq2 x 2 layers" in context.log
        found = context.decode(TOKENS)
    with lib.Context(model, "kvq3/kvq2", protect=1) as context:
        assert np.array_equal(context.decode(TOKENS), found)
    with pytest.raises(lib.Refused, match="chooses the cache type"):
        lib.Context(path, "q8_0/q8_0", profile=AUTO)
    assert cache_arguments(profile=AUTO, model=path) == {"kv_profile": AUTO, "flash_attn": True}


@pytest.mark.parametrize("kv, what", [("kvt3/kvq2", "kvt3"), ("nonsense", "nonsense")])
def test_types_that_do_not_suit(model, profile, kv, what):
    with pytest.raises(KvfmtError, match=what):
        work.with_types(profile, model, kv)


def test_a_model_without_one(model, carrier):
    with pytest.raises(lib.Refused, match="the model's file carries no profile"):
        lib.Context(model, "q8_0/q8_0", profile=AUTO)
    with pytest.raises(KvfmtError, match="carries no profile"):
        cache_arguments(profile=AUTO, model=model)
    with pytest.raises(KvfmtError, match="no model was named"):
        cache_arguments(profile=AUTO)
    with pytest.raises(KvfmtError, match="carries no profile"):
        work.detach(model, model.with_name("x.gguf"))
    assert not model.with_name("x.gguf").exists()


def test_another_models(model, profile, carrier, tmp_path):
    other = random_gguf.llama(tmp_path / "other.gguf", seed=2)
    with pytest.raises(KvfmtError, match="fingerprint"):
        work.attach(other, profile, tmp_path / "x.gguf")
    # metadata that some tool copied from one model to another
    file, source = read_gguf(other), read_gguf(carrier)
    entries = [bytes(source.data[slice(*source.spans[key])]) for key in work.KEYS]
    with open(tmp_path / "mixed.gguf", "wb") as out:
        write_header(file, out, entries)
        copy_tensors(file, out)
    with pytest.raises(lib.Refused, match="made for another model: its fingerprint"):
        lib.Context(tmp_path / "mixed.gguf", "q8_0/q8_0", profile=AUTO)


def test_damaged(carrier, tmp_path):
    raw = bytearray(carrier.read_bytes())
    file = read_gguf(carrier)
    start, stop = file.spans[ATTACHED_BYTES]
    broken = tmp_path / "broken.gguf"
    # how many bytes of the words it is
    for size in (0, 2**63, file.metadata[ATTACHED_BYTES] - 8):
        raw[stop - 8 : stop] = int(size).to_bytes(8, "little")
        broken.write_bytes(raw)
        with pytest.raises(lib.Refused, match="carries no profile"):
            lib.Context(broken, "q8_0/q8_0", profile=AUTO)
        with pytest.raises(KvfmtError, match="damaged"):
            Profile.read(broken)
        lib.Context(broken, "q8_0/q8_0").close()
    # the profile itself
    start, stop = file.spans[ATTACHED]
    raw = bytearray(carrier.read_bytes())
    raw[start + 8 + len(ATTACHED) + 16 : start + 8 + len(ATTACHED) + 20] = b"FUGG"
    broken.write_bytes(raw)
    with pytest.raises(lib.Refused, match="cannot be read as a GGUF file"):
        lib.Context(broken, "q8_0/q8_0", profile=AUTO)
    # it comes off all the same
    work.detach(broken, tmp_path / "off.gguf")
    assert attached(read_gguf(tmp_path / "off.gguf")) is None


@pytest.mark.parametrize("make, n_layer, owners", [(random_gguf.hybrid, 12, (2, 5, 8, 10)), (random_gguf.shared_kv, 6, (0, 1, 2, 3))])
def test_layers_without_kv_get_no_types(tmp_path, make, n_layer, owners):
    """Those that are no attention, and those that read an earlier layer's: llama.cpp refuses a profile that has types for them."""
    model, on = make(tmp_path / "model.gguf"), tmp_path / "on.gguf"
    work.attach(model, work.with_types(work.policy_of(model), model, "q8_0/q4_0", 1), on)
    found = Profile.read(on)
    assert [layer for layer in range(n_layer) if found.types_k[layer]] == list(owners)
    assert [layer for layer in range(n_layer) if found.types_v[layer] == "q4_0"] == list(owners[1:-1])
    with lib.Context(on, "f16/f16", profile=AUTO) as chosen, lib.Context(model, "q8_0/q4_0", protect=1) as asked:
        np.testing.assert_array_equal(chosen.decode(TOKENS), asked.decode(TOKENS))


def test_models_that_take_no_profile(tmp_path):
    model = random_gguf.mla(tmp_path / "model.gguf")
    with pytest.raises(KvfmtError, match="model.gguf takes no profile"):
        work.with_types(work.policy_of(model), model, "kvq4/kvq4")


def test_a_model_that_was_cut_off(model, profile, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-1000])
    with pytest.raises(KvfmtError, match="cut.gguf: tensor .* ends at byte .* the file at"):
        work.attach(cut, profile, tmp_path / "on.gguf")
    assert not (tmp_path / "on.gguf").exists()


def test_a_part_of_a_model(model, profile, tmp_path):
    """It has not all the norms that a model is recognized by, and its name must stay."""
    part, file = tmp_path / "model-00001-of-00002.gguf", read_gguf(model)
    with open(part, "wb") as out:
        key = b"split.count"
        write_header(file, out, [struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 2)])
        copy_tensors(file, out)
    with pytest.raises(KvfmtError, match="one of 2 parts"):
        work.attach(part, profile, tmp_path / "on.gguf")


def test_the_saved_profile_takes_no_models_place(carrier, tmp_path):
    raw, off = carrier.read_bytes(), tmp_path / "off.gguf"
    (tmp_path / "other").symlink_to(carrier)
    for target, saved in ((off, carrier), (off, tmp_path / "other"), (off, off), (off, tmp_path / "." / "off.gguf")):
        with pytest.raises(KvfmtError, match="the profile and a model"):
            work.detach(carrier, target, saved)
    # Nor is it there where the model could not be written.
    with pytest.raises(KvfmtError, match="no folder"):
        work.detach(carrier, tmp_path / "no" / "off.gguf", tmp_path / "saved.gguf")
    assert carrier.read_bytes() == raw and {path.name for path in tmp_path.iterdir()} == {"other"}


def test_what_could_not_be_restored_is_refused(model, profile, tmp_path):
    raw = bytearray(model.read_bytes())
    file = read_gguf(model)
    if file.infos_end == file.data_start:
        pytest.fail("the model has no padding to test with")
    raw[file.infos_end] = 7
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(raw)
    with pytest.raises(KvfmtError, match="between its header and its tensors"):
        work.attach(odd, profile, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_the_bindings(carrier, model):
    options = {"n_ctx": 256, "n_threads": 1, "verbose": False}
    one = open_model(carrier, "q8_0/q8_0", profile=AUTO, **options)
    one.eval(TOKENS[:32])
    last = np.ctypeslib.as_array(one._ctx.get_logits_ith(-1), shape=(random_gguf.N_VOCAB,))
    with lib.Context(carrier, "q8_0/q8_0", protect=0, profile=AUTO) as context:
        np.testing.assert_allclose(last, context.decode(TOKENS[:32])[-1], atol=1e-3)
    one.close()
    with pytest.raises(ValueError):
        open_model(model, "q8_0/q8_0", profile=AUTO, **options)


@pytest.mark.parametrize("tool", ["llama-completion", "llama-perplexity"])
def test_the_tools(carrier, text, tool):  # noqa: F811
    done = run(tool, *job(tool, carrier, text), "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "--kv-profile", "auto", "-lv", "4")
    assert done.returncode == 0
    assert "kv profile: random ('auto', attached to the model)" in done.stderr + done.stdout


def test_the_bench_tool(carrier):
    done = run("llama-bench", "-m", carrier, "-t", 1, "-p", 8, "-n", 0, "-r", 1, "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "-kvf", "none,auto", "-o", "json")
    assert [row["kv_profile"] for row in json.loads(done.stdout)] == ["none", "auto"]


def test_the_commands(model, profile, tmp_path):
    runner, file, on, off = CliRunner(), tmp_path / "p.gguf", tmp_path / "on.gguf", tmp_path / "off.gguf"
    profile.write(file)

    def call(*arguments) -> str:
        done = runner.invoke(app, [str(a) for a in arguments])
        return f"{done.exit_code} {' '.join(done.output.split())}"

    assert call("profile", "attach", model, file, "--kv", "q8_0/kvq2", "-o", on).startswith("0 ")
    assert "--kv-profile auto" in call("profile", "attach", model, "--kv", "kvq4", "--protect", 1, "-o", off)
    assert Profile.read(off).types_k == ("f16", "kvq4", "kvq4", "f16")
    assert call("profile", "show", on).startswith("0 ")
    assert "carries a profile already" in call("profile", "attach", on, file, "-o", off)
    assert call("profile", "attach", on, file, "--replace", "-o", off).startswith("0 ")
    assert Profile.read(off).types_k is None
    assert call("profile", "detach", on, "-o", off).startswith("0 ")
    assert off.read_bytes() == model.read_bytes()
    for wrong in (["attach", model, "-o", on], ["attach", model, file, "--protect", 1, "-o", on], ["detach", tmp_path / "no", "-o", on]):
        assert call("profile", *wrong).startswith("1 error:"), wrong
