"""Folded models: the same to llama.cpp's f16 cache, kinder to quantized ones, the same bytes where nothing is folded."""

from __future__ import annotations

import shutil
import struct
from contextlib import contextmanager

import gguf
import llama_lib as lib
import numpy as np
import pytest
import random_gguf
from converters import fold, row_scale
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from kvfmt.cli import app
from kvfmt.errors import KvfmtError
from kvfmt.geometry import pair_of
from kvfmt.moments import LayerStatistics
from kvfmt.pair_scaling import best_scales
from kvfmt.profile import Profile, fingerprint_of, read_model
from typer.testing import CliRunner

TOKENS = np.random.default_rng(11).integers(3, random_gguf.N_VOCAB, 160).tolist()

# name -> (writer, channels that RoPE turns, whether it pairs neighbours)
MODELS = {
    "plain": (random_gguf.llama, 64, True),
    "varying heads": (lambda path: random_gguf.llama(path, n_head_kv=[1, 2, 4, 2]), 64, True),
    "halves": (random_gguf.biased, 64, False),
    "fused halves": (lambda path: random_gguf.biased(path, fused=True), 64, False),
    "partial halves": (lambda path: random_gguf.llama(path, n_rot=16), 16, False),
    "fused partial neighbours": (lambda path: random_gguf.biased(path, "chatglm", fused=True, n_rot=32), 32, True),
    "one norm for all heads, windows": (random_gguf.iswa, 64, False),
    "one norm for all heads, hybrid": (random_gguf.hybrid, 64, False),
    "a norm for each head": (random_gguf.normed_rows, 64, False),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def get(name):
        path = folder / f"{name.replace(' ', '-')}.gguf"
        if not path.exists():
            MODELS[name][0](path)
        return path

    return get


def statistics(keys, queries, rotated, adjacent):
    """Of a layer whose keys and queries have these mean squares, float [KV heads, head], and no mean."""
    heads, size = keys.shape
    diagonal = [np.eye(size) * m[:, None, :] for m in (keys, queries)]
    rest = np.zeros((heads, size)), np.zeros((heads, size, size)), np.zeros((heads, size)), np.zeros((heads, size))
    return LayerStatistics(1000, 1000, np.zeros((heads, size)), *diagonal, *rest, True, rotated, adjacent)


def uneven(file, rotated, adjacent, seed=3, spread=3.0):
    """Statistics for every layer: energies that differ by a factor of exp(spread)."""
    rng = np.random.default_rng(seed)
    return {
        layer.index: statistics(*np.exp(spread * rng.standard_normal((2, layer.n_head_kv, layer.head))), rotated, adjacent)
        for layer in fold.attention_layers(file)
    }


def folded(path, target, rotated, adjacent, powers_of_two, **options):
    file = read_model(path)
    plan = fold.make_plan(file, uneven(file, rotated, adjacent, **options), powers_of_two)
    with fold.written(file, plan, path, target) as (_, rounding):
        pass
    return plan, rounding


def logits(path, kv="f16/f16", flash="on"):
    with lib.Context(path, kv, protect=0, flash=flash) as context:
        return context.decode(TOKENS)


def exact_logits(path):
    """Without f16 anywhere: there a key near zero may become subnormal and lose a bit."""
    return logits(path, "f32/f32", "off")


# the model


@pytest.mark.parametrize("name", MODELS)
def test_powers_of_two_leave_every_bit_of_the_logits(made, tmp_path, name):
    _, rotated, adjacent = MODELS[name]
    plan, rounding = folded(made(name), tmp_path / "folded.gguf", rotated, adjacent, True)
    assert rounding.touched > 0 and rounding.rounded == 0
    assert any(np.ptp(s.key) > 1 for s in plan.scales.values())
    assert np.array_equal(exact_logits(made(name)), exact_logits(tmp_path / "folded.gguf"))
    assert lib.kld(logits(made(name)), logits(tmp_path / "folded.gguf")) < 1e-8


@pytest.mark.parametrize("name", MODELS)
def test_best_scales_leave_the_model(made, tmp_path, name):
    _, rotated, adjacent = MODELS[name]
    folded(made(name), tmp_path / "folded.gguf", rotated, adjacent, False)
    assert lib.kld(logits(made(name)), logits(tmp_path / "folded.gguf")) < 1e-5


@pytest.mark.parametrize("name", ["plain", "halves", "partial halves", "one norm for all heads, windows"])
def test_the_wrong_pairs_would_be_seen(made, tmp_path, name):
    _, rotated, adjacent = MODELS[name]
    folded(made(name), tmp_path / "folded.gguf", rotated, not adjacent, True)
    assert lib.kld(logits(made(name)), logits(tmp_path / "folded.gguf")) > 0.01


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0, Type.Q5_1, Type.F16, Type.BF16])
def test_quantized_weights_keep_their_codes(made, tmp_path, kind):
    source = with_attention_as(made("plain"), tmp_path / "source.gguf", kind)
    folded(source, tmp_path / "exact.gguf", 64, True, True, spread=1.0)
    folded(source, tmp_path / "best.gguf", 64, True, False, spread=1.0)
    # An f16 weight near zero may become subnormal; a quantized one has a scale that is not.
    if kind != Type.F16:
        assert np.array_equal(exact_logits(source), exact_logits(tmp_path / "exact.gguf"))
    before = logits(source)
    assert lib.kld(before, logits(tmp_path / "exact.gguf")) < 1e-6
    # bf16 has 8 bits: there the rounding of each weight is seen, still far below a quantized cache's error.
    assert lib.kld(before, logits(tmp_path / "best.gguf")) < (1e-3 if kind == Type.BF16 else 1e-4)


def test_a_lopsided_model_is_evened_out(made, tmp_path):
    # Fold random scales in, then measure what is there and fold them out again: what the statistics say is undone.
    path, lopsided, even = made("plain"), tmp_path / "lopsided.gguf", tmp_path / "even.gguf"
    plan, _ = folded(path, lopsided, 64, True, True, spread=4.0)
    drop_fold_mark(lopsided)
    file = read_model(lopsided)
    measured = {i: statistics(s.key**2, s.key**-2, 64, True) for i, s in plan.scales.items()}
    with fold.written(file, fold.make_plan(file, measured, False), lopsided, even):
        pass
    reference = logits(path)
    assert np.array_equal(exact_logits(path), exact_logits(lopsided))
    distance = {p: lib.kld(reference, logits(p, "q4_0/f16")) for p in (path, lopsided, even)}
    assert distance[lopsided] > 4 * distance[path]
    assert distance[even] < 1.5 * distance[path]


def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(map(chr, np.random.default_rng(3).integers(32, 127, 3000))))
    return path


def run(*arguments):
    """`kvfmt ...`: exit status and what it printed, in one line."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("name", ["plain", "fused halves", "partial halves", "one norm for all heads, windows", "one norm for all heads, hybrid"])
@pytest.mark.parametrize("scales", ["--exact", "--fine"])
def test_the_command_measures_and_folds(made, tmp_path, name, scales):
    target = tmp_path / "folded.gguf"
    status, said = run("fold", made(name), "-o", target, "--text", text_file(tmp_path), "--tokens", 1024, "--n-ctx", 512, "--threads", 1, scales)
    assert status == 0, said
    assert f"hash {read_model(target).metadata['kvfmt.fold.hash']}" in said
    assert (" 0 rounded" in said) == (scales == "--exact")
    assert lib.kld(logits(made(name)), logits(target)) < 1e-5
    assert not list(tmp_path.glob(".*"))


def test_the_command_takes_the_statistics_of_a_profile(made, tmp_path):
    model, profile, target, again = made("halves"), tmp_path / "p.gguf", tmp_path / "a.gguf", tmp_path / "b.gguf"
    text = text_file(tmp_path)
    measuring = ("--text", text, "--tokens", 1024, "--n-ctx", 512, "--threads", 1)
    assert run("calibrate", model, *measuring, "-o", profile)[0] == 0
    status, said = run("fold", model, "--profile", profile, "--text", text, "-o", target, "--threads", 1)
    assert status == 0, said
    assert run("fold", model, *measuring, "-o", again)[0] == 0
    assert target.read_bytes() == again.read_bytes()
    # The profile was made for the unfolded model: nobody else's.
    for other in (target, made("plain")):
        status, said = run("fold", other, "--profile", profile, "--text", text, "-o", tmp_path / "c.gguf")
        assert status == 1 and ("folded already" in said or "the profile is not for" in said)
    with pytest.raises(KvfmtError, match="fingerprint"):
        Profile.read(profile).check_model(target)


def test_a_model_that_comes_out_another_is_not_written(made, tmp_path):
    file = read_model(made("halves"))
    with refused(tmp_path, "is not the same model"):
        fold.fold_model(made("halves"), file, uneven(file, 64, True), tmp_path / "out.gguf", True, "some text " * 100, 1)


# the file


def test_everything_else_keeps_its_bytes_and_its_place(made, tmp_path):
    source = with_attention_as(made("halves"), tmp_path / "source.gguf", Type.Q8_0)
    plan, _ = folded(source, tmp_path / "folded.gguf", 64, False, True)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "folded.gguf")
    names = [f for f in before.fields if not f.startswith("GGUF.")]
    added = ["kvfmt.fold.version", "kvfmt.fold.hash", "kvfmt.fold.scales"]
    assert [f for f in after.fields if not f.startswith("GGUF.")] == names + added
    for name in names:
        assert [bytes(p.data) for p in before.fields[name].parts] == [bytes(p.data) for p in after.fields[name].parts]
    assert after.fields["kvfmt.fold.hash"].contents() == plan.hash and len(plan.hash) == 64
    assert after.data_offset % after.alignment == 0
    changed = set()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, old.tensor_type, list(old.shape)) == (new.name, new.tensor_type, list(new.shape))
        assert old.data_offset - before.data_offset == new.data_offset - after.data_offset
        if not np.array_equal(old.data.view(np.uint8), new.data.view(np.uint8)):
            changed.add(old.name)
    assert changed == {f"blk.{i}.attn_{s}.{kind}" for i in range(3) for s in "qk" for kind in ("weight", "bias")}
    assert len(before.data) - before.data_offset == len(after.data) - after.data_offset


def test_a_type_that_nobody_knows_is_copied(made, tmp_path):
    source = shutil.copy(made("plain"), tmp_path / "source.gguf")
    tensor = next(t for t in gguf.GGUFReader(source).tensors if t.name == "blk.1.ffn_up.weight")
    at = tensor.field.offset + sum(p.nbytes for p in tensor.field.parts[:4])
    with open(source, "r+b") as stream:
        stream.seek(at)
        stream.write(struct.pack("<I", 12345))
    folded(source, tmp_path / "folded.gguf", 64, True, True)
    assert read_model(tmp_path / "folded.gguf").tensors["blk.1.ffn_up.weight"].type_id == 12345


def test_layers_without_statistics_stay(made, tmp_path):
    file = read_model(made("plain"))
    some = {i: m for i, m in uneven(file, 64, True).items() if i != 2}
    plan = fold.make_plan(file, some, False)
    assert set(plan.scales) == {0, 1, 3} and not any(name.startswith("blk.2.") for name in plan.factors)


def test_the_hash_is_of_the_scales(made):
    file = read_model(made("plain"))
    hashes = [fold.make_plan(file, uneven(file, 64, True, seed=seed), exact).hash for seed in (1, 2) for exact in (True, False)]
    assert len(set(hashes)) == 4
    assert fold.make_plan(file, uneven(file, 64, True, seed=1), True).hash == hashes[0]


# refusals


@contextmanager
def refused(folder, words):
    before = sorted(folder.iterdir())
    with pytest.raises(KvfmtError, match=words):
        yield
    assert sorted(folder.iterdir()) == before


def test_nothing_is_folded_twice(made, tmp_path):
    folded(made("plain"), tmp_path / "once.gguf", 64, True, True)
    with refused(tmp_path, "folded already"):
        folded(tmp_path / "once.gguf", tmp_path / "twice.gguf", 64, True, True)


def test_the_model_itself_is_never_overwritten(made, tmp_path):
    copy = shutil.copy(made("plain"), tmp_path / "model.gguf")
    (tmp_path / "link.gguf").symlink_to(copy)
    for target in (tmp_path / "model.gguf", tmp_path / "link.gguf"):
        with refused(tmp_path, "is the model itself"):
            folded(copy, target, 64, True, True)


def test_latent_attention_is_refused(tmp_path):
    random_gguf.mla(tmp_path / "mla.gguf")
    with refused(tmp_path, "latent attention"):
        folded(tmp_path / "mla.gguf", tmp_path / "out.gguf", 64, True, True)


@pytest.mark.parametrize(
    "key, words",
    [
        ("attention.clamp_kqv", "clamps"),
        ("attention.shared_kv_layers", "ask the keys of others"),
        ("rope.dimension_count_swa", "another part of the head"),
        ("attention.key_length_swa", "another size"),
    ],
)
def test_what_scales_do_not_pass_through_is_refused(made, tmp_path, key, words):
    source = with_number(made("plain"), tmp_path / "odd.gguf", f"llama.{key}", 8)
    with refused(tmp_path, words):
        folded(source, tmp_path / "out.gguf", 64, True, True)


def test_architectures_and_splits_that_are_refused(made, tmp_path):
    source = with_number(made("plain"), tmp_path / "split.gguf", "split.count", 3)
    with refused(tmp_path, "one of 3 files"):
        folded(source, tmp_path / "out.gguf", 64, True, True)
    renamed = tmp_path / "renamed.gguf"
    # The same length, so that the file stays whole.
    renamed.write_bytes(made("one norm for all heads, windows").read_bytes().replace(b"gemma3", b"gemma4"))
    with refused(tmp_path, "architecture gemma4 lets late layers"):
        folded(renamed, tmp_path / "out.gguf", 64, False, True)


def test_a_layer_that_asks_anothers_keys_is_refused(made, tmp_path):
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(made("plain").read_bytes().replace(b"blk.2.attn_k.weight", b"blk.2.attn_x.weight"))
    with refused(tmp_path, "layer 2 has queries and no keys"):
        folded(odd, tmp_path / "out.gguf", 64, True, True)


def test_a_norm_on_one_side_is_refused(made, tmp_path):
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(made("one norm for all heads, windows").read_bytes().replace(b"blk.1.attn_k_norm", b"blk.1.attn_x_norm"))
    with refused(tmp_path, "layer 1 has a norm weight on queries alone"):
        folded(odd, tmp_path / "out.gguf", 64, False, True)


def test_types_without_a_scale_are_refused_by_name(made, tmp_path):
    source = with_attention_as(made("plain"), tmp_path / "source.gguf", Type.Q8_0)
    data = bytearray(source.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(source).tensors if t.name == "blk.3.attn_q.weight")
    at = tensor.field.offset + sum(p.nbytes for p in tensor.field.parts[:4])
    data[at : at + 4] = struct.pack("<I", Type.IQ1_M)
    source.write_bytes(data)
    with refused(tmp_path, "blk.3.attn_q.weight is stored as iq1_m"):
        folded(source, tmp_path / "out.gguf", 64, True, True)


def test_statistics_of_another_model_are_refused(made, tmp_path):
    file, other = read_model(made("plain")), read_model(made("varying heads"))
    with refused(tmp_path, "made with another model"):
        fold.make_plan(file, uneven(other, 64, True), True)
    with refused(tmp_path, "none of the model's layers"):
        fold.make_plan(file, {}, True)


@pytest.mark.parametrize("end", [0, 3, 20, 5000, -1])
def test_a_cut_file_is_refused(made, tmp_path, end):
    source = tmp_path / "cut.gguf"
    whole = made("plain").read_bytes()
    source.write_bytes(whole[:end] if end >= 0 else whole[: read_model(made("plain")).tensors["blk.2.attn_k.weight"].offset + 5])
    with refused(tmp_path, "cut off|not a GGUF|is empty"):
        folded(source, tmp_path / "out.gguf", 64, True, True)


# bytes of quantized rows


def random_blocks(kind, rows, rng):
    """uint8 [rows, 4 blocks]: any codes, scales of an ordinary size."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, 4, size), np.uint8)
    for at in row_scale.SCALES[kind]:
        scales = (rng.choice([-1, 1], (rows, 4)) * rng.uniform(0.01, 0.1, (rows, 4))).astype("<f2")
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", row_scale.SCALES, ids=lambda kind: Type(kind).name)
def test_powers_of_two_scale_what_is_decoded_exactly(kind):
    rng = np.random.default_rng(kind)
    raw = random_blocks(kind, 9, rng)
    factors = np.exp2(np.arange(9) - 4)
    made, rounding = row_scale.scale_rows(raw, kind, factors)
    before, after = (gguf.quants.dequantize(x, Type(kind)) for x in (raw, made))
    assert rounding.rounded == 0 and rounding.touched == 8 * 4 * len(row_scale.SCALES[kind])
    assert np.abs(before).max() > 0
    assert np.array_equal(after, (before * factors[:, None]).astype(np.float32))
    assert np.array_equal(made[4], raw[4])


@pytest.mark.parametrize("kind", row_scale.SCALES, ids=lambda kind: Type(kind).name)
def test_other_factors_round_the_scales_alone(kind):
    rng = np.random.default_rng(kind)
    raw = random_blocks(kind, 9, rng)
    factors = rng.uniform(0.3, 3, 9)
    made, rounding = row_scale.scale_rows(raw, kind, factors)
    assert 0 < rounding.worst <= 2.0**-11
    size = GGML_QUANT_SIZES[kind][1]
    is_scale = np.zeros(size, bool)
    for at in row_scale.SCALES[kind]:
        is_scale[at : at + 2] = True
    assert np.array_equal(made.reshape(9, 4, size)[..., ~is_scale], raw.reshape(9, 4, size)[..., ~is_scale])


@pytest.mark.parametrize("kind", row_scale.PLAIN, ids=lambda kind: Type(kind).name)
def test_floats(kind):
    values = np.random.default_rng(5).standard_normal((6, 32)).astype(np.float32)
    raw = gguf.quants.quantize(values, Type(kind)).view(np.uint8).reshape(6, -1)
    exact, rounding = row_scale.scale_rows(raw, kind, np.exp2(np.arange(6.0)))
    assert rounding.rounded == 0
    as_floats = [gguf.quants.dequantize(x.view(np.float16 if kind == Type.F16 else np.float32 if kind == Type.F32 else np.uint8), Type(kind)) for x in (raw, exact)]
    assert np.array_equal(as_floats[1], as_floats[0] * np.exp2(np.arange(6.0, dtype=np.float32))[:, None])
    rounded, rounding = row_scale.scale_rows(raw, kind, np.full(6, 1.1))
    assert 0 < rounding.worst <= {Type.F32: 2.0**-24, Type.F16: 2.0**-11, Type.BF16: 2.0**-8}[kind]


def test_scales_that_leave_f16_are_refused_or_counted():
    raw = random_blocks(Type.Q8_0, 2, np.random.default_rng(1))
    with pytest.raises(row_scale.CannotScale, match="blk.0.attn_k.weight: a scale of up to"):
        row_scale.scale_rows(raw, Type.Q8_0, np.array([1.0, 2.0**25]), "blk.0.attn_k.weight")
    _, rounding = row_scale.scale_rows(raw, Type.Q8_0, np.exp2([-16.0, -16.0]))
    assert rounding.rounded > 0  # below f16's normal range


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(row_scale.CannotScale, match="x is stored as type 39"):
        row_scale.scale_rows(np.zeros((1, 17), np.uint8), 39, np.ones(1), "x")


# the scales


def logit_error(keys, queries, s):
    return (keys * s**2).sum(axis=1) @ (queries / s**2).sum(axis=1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_no_scales_nearby_are_better(shared, exact):
    rng = np.random.default_rng(2)
    keys, queries = np.exp(2 * rng.standard_normal((2, 3, 16)))
    pair = pair_of(16, 12, True)
    found = best_scales(keys, queries, pair, shared, exact)
    least = logit_error(keys, queries, found.key)
    assert np.isclose(10 * np.log10(logit_error(keys, queries, np.ones_like(keys)) / least), found.gain)
    assert np.array_equal(found.key[:, pair == 2], found.key[:, pair == 2][:, :1].repeat(2, 1))
    assert not shared or np.array_equal(found.key, found.key[:1].repeat(3, 0))
    assert not exact or np.array_equal(np.log2(found.key), np.round(np.log2(found.key)))
    steps = [2.0, 0.5] if exact else [1.05, 0.95]
    for p in range(pair.max() + 1):
        for step in steps:
            other = found.key.copy()
            other[:, pair == p] *= step
            assert logit_error(keys, queries, other) >= least


def test_energy_stays_what_it_was():
    rng = np.random.default_rng(4)
    keys, queries = np.exp(2 * rng.standard_normal((2, 3, 64)))
    for shared in (False, True):
        found = best_scales(keys, queries, pair_of(64, 64, False), shared).key
        energy = (keys * found**2).sum(axis=1)
        assert np.isclose(energy.sum(), keys.sum()) and (shared or np.allclose(energy, keys.sum(axis=1)))
    exact = best_scales(keys, queries, pair_of(64, 64, False), powers_of_two=True).key
    assert np.all(np.abs(np.log2((keys * exact**2).sum(axis=1) / keys.sum(axis=1))) <= 1)


def test_silent_pairs_and_heads_are_not_blown_up():
    keys, queries = np.ones((2, 8)), np.ones((2, 8))
    keys[0, [1, 5]] = 0
    queries[0, [2, 6]] = 0
    keys[1] = queries[1] = 0
    for exact in (False, True):
        found = best_scales(keys, queries, pair_of(8, 8, False), powers_of_two=exact).key
        assert np.all(np.isfinite(found)) and found.max() < 8 and found.min() > 1 / 8
        assert np.array_equal(found[1], np.ones(8))


def test_a_fold_is_another_model_to_a_profile(made, tmp_path):
    folded(made("plain"), tmp_path / "folded.gguf", 64, True, True)
    assert fingerprint_of(made("plain")) != fingerprint_of(tmp_path / "folded.gguf")


# helpers that rewrite models


def rewrite(source, target, tensor_type=lambda name: None, extra=None):
    """A copy through gguf-py, with tensors of other types and one more number."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or field.name.startswith("kvfmt.fold."):
            continue
        kind = field.types[0]
        value = field.contents() if kind != gguf.GGUFValueType.ARRAY or field.types[1] != gguf.GGUFValueType.STRING else [bytes(field.parts[i]) for i in field.data]
        writer.add_key_value(field.name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    if extra:
        writer.add_uint32(*extra)
    for tensor in reader.tensors:
        kind = tensor_type(tensor.name)
        if kind is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(np.asarray(tensor.data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def with_attention_as(source, target, kind):
    return rewrite(source, target, lambda name: kind if name.endswith(("attn_q.weight", "attn_k.weight")) else None)


def with_number(source, target, key, value):
    return rewrite(source, target, extra=(key, value))


def drop_fold_mark(path):
    kept = path.with_suffix(".kept")
    path.rename(kept)
    rewrite(kept, path)
    kept.unlink()
