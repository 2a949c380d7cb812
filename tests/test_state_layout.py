"""Saved states of every kind, whole, damaged and foreign: read as they are or refused with where and why."""

from __future__ import annotations

import re
import struct
import tracemalloc
from dataclasses import replace

import pytest
import random_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_lib import Context
from saved_states import TOKENS, layers, profile_of, save_as
from typer.testing import CliRunner

from converters import state_layout
from converters.conversion_plan import Request
from converters.convert_state import convert_state
from converters.kv_description import describe, parse
from converters.model_layers import WINDOWS, read_model_layers
from converters.state_bytes import BytesSource, FileSource, StateError
from converters.state_layout import KINDS, OTHER_MEMORY, read_layout
from converters.state_view import rows, stored
from kvfmt.cli import app
from kvfmt.errors import KvfmtError
from kvfmt.policy import cache_type
from kvfmt.profile import Profile, read_model

N = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {"plain": random_gguf.llama(folder / "plain.gguf", n_layer=3, n_head=3, n_head_kv=3, n_embd=96), "windows": random_gguf.iswa(folder / "windows.gguf", window=16)}
    return made


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """(model, types) and kind -> file."""
    folder = tmp_path_factory.mktemp("saved")
    files = {}
    for name, kv, more in (("plain", "f16/f16", {}), ("plain", "kvq3/kvq2", {"protect": 1}), ("plain", "bf16/f16", {"flash": "off"}), ("windows", "kvq4/q8_0", {"protect": 1})):
        with Context(models[name], kv, n_seq=2 if name == "windows" else 1, **more) as context:
            context.decode(TOKENS[:N])
            if name == "windows":
                context.decode(TOKENS[: N // 2], 1, 0)
            for kind in KINDS:
                files[name, kv, kind] = save_as(context, kind, folder / f"{name}-{kv.replace('/', '-')}-{kind}", TOKENS[:N])
    return files


def test_each_kind_is_told_and_counted(saved):
    for (name, kv, kind), path in saved.items():
        with FileSource(path) as source:
            layout = read_layout(source)
        assert layout.kind == kind and layout.size == path.stat().st_size
        assert layout.architecture == ({"plain": "llama", "windows": "gemma3"}[name] if kind in ("session", "context") else None)
        assert layout.tokens == (N if kind in ("session", "sequence") else None)
        assert (layout.version is None) == (kind in ("memory", "context"))
        assert len(layout.caches) == 1 + (name == "windows")
        streams = layout.caches[0].streams
        assert [s and s.cells for s in streams] == ([N] if name == "plain" else [N, N // 2 if kind in ("session", "context") else None])
        first = layout.caches[0].filled[0]
        assert (first.first_position, first.last_position) == (0, N - 1)
        assert first.transposed == (kv == "bf16/f16")
        # The data fills what the headers leave, to the byte.
        assert layout.cache_bytes + layout.caches_at < layout.size


def test_a_cell_of_several_sequences(models):
    import llama_cpp

    with Context(models["plain"], "f16/f16", n_seq=4) as context:
        context.decode(TOKENS[:N])
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = 256, 4, True
        unified = llama_cpp.llama_init_from_model(context.model, params)
        context.ctx, old = unified, context.ctx
        context.memory = llama_cpp.llama_get_memory(unified)
        context.decode(TOKENS[:N], 0, 0)
        llama_cpp.llama_memory_seq_cp(context.memory, 0, 2, 4, -1)
        llama_cpp.llama_memory_seq_cp(context.memory, 0, 3, 20, -1)
        data = context.save(None)
        llama_cpp.llama_free(old)
    layout = read_layout(BytesSource(data))
    (stream,) = layout.caches[0].streams
    assert stream.cells == N and stream.cells_end - stream.cells_at == 12 * N + 4 * (N - 4) + 4 * (N - 20)
    with pytest.raises(StateError, match="sequence"):
        read_layout(BytesSource(data[: stream.cells_at + 8] + struct.pack("<i", 300) + data[stream.cells_at + 12 :]))


def test_every_truncation_says_where(saved):
    for kind in KINDS:
        data = saved["windows", "kvq4/q8_0", kind].read_bytes()
        layout = read_layout(BytesSource(data))
        ends = {cache.filled[-1].k[-1].at + cache.filled[-1].k[-1].nbytes for cache in layout.caches} | {cache.filled[-1].sides[-1].at + cache.filled[-1].sides[-1].nbytes for cache in layout.caches}
        # Where latent attention or a model with one cache would end, a state is whole; streams of no cells may follow.
        ends |= {end + 4 for end in ends}
        for n in [*range(0, 600), *range(600, len(data), 97)]:
            if n in ends:
                continue
            with pytest.raises(StateError) as error:
                read_layout(BytesSource(data[:n], "cut"))
            assert re.search("byte|empty|before its first cache", str(error.value)) and error.value.hint


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "empty"),
        (b"ab", "within the magic"),
        (b"GGUF" + bytes(50), "It is a GGUF file"),
        (b"PK\x03\x04" + bytes(50), "not as a saved state does"),
        (struct.pack("<III", state_layout.SESSION, 11, 0), "of version 11; version 10 is known.*newer"),
        (struct.pack("<III", state_layout.SESSION, 9, 0), "of version 9.*older"),
        (struct.pack("<III", state_layout.SEQUENCE, 3, 2**31), "8589934592 bytes were to follow"),
        (struct.pack("<IIII", state_layout.SESSION, 10, 0, 2**32 - 1), "name of 4294967295 bytes"),
        (struct.pack("<I5s", 5, b"mamba") + bytes(40), "architecture mamba has recurrent layers"),
        (struct.pack("<I5s", 5, b"a\0b\nc") + bytes(40), "not the name of an architecture"),
        (struct.pack("<II", state_layout.IO_MAGIC, 0), "before its first cache"),
        (struct.pack("<IIII", state_layout.IO_MAGIC, 0, 1, 2**32 - 1), "51539607540 bytes were to follow"),
        (struct.pack("<IIII", state_layout.IO_MAGIC, 0, state_layout.MAGIC, 70_000), "a description of 70000 bytes"),
        (struct.pack("<III", state_layout.IO_MAGIC, 0, 300), "300 streams"),
    ],
)
def test_what_is_not_whole_says_what_it_is(data, words):
    with pytest.raises(StateError) as error:
        read_layout(BytesSource(data, "file"))
    assert re.search(words, str(error.value), re.DOTALL)


@given(data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_are_read_or_refused(data, saved, models, tmp_path):
    """Read, shown and converted or refused in words; nothing is left behind, and no damaged number is believed."""
    name, kv, kind = data.draw(st.sampled_from(sorted(saved)))
    raw = bytearray(saved[name, kv, kind].read_bytes())
    layout = read_layout(BytesSource(bytes(raw)))
    marks = [*range(0, layout.caches_at + 100, 4), *(at for side in layout.sides for at in (side.at - 12, side.at - 8, side.at - 4))]
    marks += [at for cache in layout.caches for stream in cache.filled for at in (stream.cells_at - 4, stream.cells_at, stream.cells_at + 4, stream.cells_end, stream.cells_end + 4)]
    for _ in range(data.draw(st.integers(1, 3))):
        if not raw:
            break
        at = min(data.draw(st.sampled_from(marks) | st.integers(0, len(raw) - 1)), len(raw) - 1)
        change = data.draw(st.sampled_from(("number", "bit", "cut", "remove", "insert")))
        if change == "number":
            value = data.draw(st.sampled_from((0, 1, 2, 255, 256, 257, 65536, 2**31 - 1, 2**31, 2**32 - 1)) | st.integers(0, 2**32 - 1))
            raw[at : at + 4] = struct.pack("<I", value)[: len(raw) - at]
        elif change == "bit":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del raw[at:]
        elif change == "remove":
            del raw[at : at + data.draw(st.integers(1, 40))]
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=40))
    path, target = tmp_path / "mutated", tmp_path / "converted"
    path.write_bytes(raw)
    target.unlink(missing_ok=True)
    model = layers(models[name]) if data.draw(st.booleans()) else None
    k, v = (cache_type(data.draw(st.sampled_from(("f16", "f32", "q8_0", "kvq3", "kvq2")))) for _ in range(2))
    tracemalloc.start()
    try:
        with FileSource(path) as source:
            found = read_layout(source)
        assert rows(found) and all(stored(cache) for cache in found.caches)
        done = convert_state(path, target, Request(k, v, data.draw(st.sampled_from((None, 0, 1, 7))), model=model), 1)
        assert target.stat().st_size == done.after.size
    except KvfmtError as error:
        assert error.message and not target.exists()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 6_000_000
    assert {entry.name for entry in tmp_path.iterdir()} <= {"mutated", "converted"}


def test_descriptions_are_read_and_written(saved):
    for kv in ("kvq3/kvq2", "kvq4/q8_0"):
        name = "plain" if kv == "kvq3/kvq2" else "windows"
        with FileSource(saved[name, kv, "memory"]) as source:
            layout = read_layout(source)
        for cache in layout.caches:
            said, stream = parse(cache.description), cache.filled[0]
            types = [(k.type, v.type) for k, v in zip(stream.k, stream.v)]
            said.check_types(types)
            with pytest.raises(StateError):
                said.check_types([*types, types[-1], (cache_type("f32"), cache_type("f32"))])
            with pytest.raises(StateError):
                replace(said, runs=said.runs[:-1]).check_types(types)
    for text in ("", "rotated:", "rotated: K", "rotated: K none; layers 0-1: f16/f16", "rotated: K; layers 1-0: f16/f16", "rotated: K; layers 0-1: f16/f16; layers 1-2: f16/f16"):
        with pytest.raises(StateError):
            parse(text)
    assert describe([(0, cache_type("q8_0"), cache_type("f16"))] * 3, True, False, "") is None


def test_layers_of_each_cache_are_those_of_llama(tmp_path):
    """A profile that gives every layer types of its own makes llama.cpp say which layers each cache has."""
    for make in (random_gguf.iswa, random_gguf.soft_cap, random_gguf.sinks, random_gguf.shared_kv, random_gguf.llama):
        model = make(tmp_path / f"{make.__name__}.gguf")
        found = layers(model)
        names, number = ("f16", "bf16", "f32"), read_model(model).setting("block_count")
        types = [[""] * number, [""] * number]
        for i, layer in enumerate(found.layers):
            types[0][layer.number], types[1][layer.number] = names[i % 3], names[i // 3 % 3]
        profile = profile_of(model, layers=[], types=types)
        profile.write(tmp_path / "p.gguf")
        with Context(model, "f16/f16", profile=tmp_path / "p.gguf") as context:
            context.decode(TOKENS[:4])
            layout = read_layout(BytesSource(context.save()))
        sizes = [len(cache.filled[0].k) for cache in layout.caches]
        for cache, owned in zip(layout.caches, found.caches(sizes), strict=True):
            stream = cache.filled[0]
            assert [(k.type.name, v.type.name) for k, v in zip(stream.k, stream.v)] == [(types[0][layer.number], types[1][layer.number]) for layer in owned]
            assert [(k.values, v.values) for k, v in zip(stream.k, stream.v)] == [(x.heads * x.head_k, x.heads * x.head_v) for x in owned]
            if cache.description is not None:
                runs = parse(cache.description).runs
                assert (runs[0].first, runs[-1].last) == (owned[0].number, owned[-1].number)


def test_tables_are_those_of_the_source(pristine):
    """What the file of a model does not say, llama.cpp says in its source."""
    source = pristine / "vendor" / "llama.cpp" / "src"
    arch = (source / "llama-arch.cpp").read_text()
    names = dict(re.findall(r'\{ (LLM_ARCH_\w+), +"([^"]+)"', arch))
    periods = {}
    for file in (source / "models").glob("*.cpp"):
        if found := re.search(r"load_swa_pattern\(ml, (\d+)(, (?:/\*.*?\*/)?true)?\)", file.read_text()):
            periods[file.stem] = (int(found[1]), bool(found[2]))
    periods["gpt-oss"] = periods.pop("openai-moe")
    # Encoders have no cache.
    assert WINDOWS == {name: period for name, period in periods.items() if name not in ("gemma-embedding", "modern-bert")}
    assert set(WINDOWS) <= set(names.values())
    for function, what in (("llm_arch_is_recurrent", "recurrent layers"), ("llm_arch_is_hybrid", "attention and recurrent layers")):
        body = arch[arch.index(f"bool {function}") :]
        cases = re.findall(r"case (LLM_ARCH_\w+):", body[: body.index("default")])
        assert set(OTHER_MEMORY[what]) == {names[case] for case in cases}
    model = (source / "llama-model.cpp").read_text()
    memory = model[model.index("llama_memory_i * llama_model::create_memory") :]
    special, cases = set(), []
    for line in memory[: memory.index("default:")].splitlines():
        cases = cases + re.findall(r"case (LLM_ARCH_\w+):", line)
        special |= {names[case] for case in cases} if re.search(r"new llama_kv_cache_(dsa|msa|dsv4)|new llama_memory_hybrid", line) else set()
        cases = [] if "break" in line else cases
    assert special <= {name for names_of in OTHER_MEMORY.values() for name in names_of}


def test_inspect_and_convert_from_the_shell(saved, models, tmp_path):
    def run(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
        return done.exit_code, done.output

    code, said = run("inspect", saved["plain", "kvq3/kvq2", "session"])
    assert code == 0
    for words in ("session file, version 10", "architecture llama", "24 cells, positions 0 to 23, 3 layers", "K and V rotated", "kvq3", "kvq2", "2.750", "16.000"):
        assert words in said, said
    target = tmp_path / "small.bin"
    code, said = run("convert", saved["plain", "f16/f16", "session"], "--k", "kvq3", "--v", "kvq2", "--protect", "1", "-o", target)
    assert code == 0 and "16.000 -> 11.583 bits/value" in said, said
    with FileSource(target) as a, FileSource(saved["plain", "kvq3/kvq2", "session"]) as b:
        assert read_layout(a) == read_layout(b)
    code, said = run("convert", target, "-o", tmp_path / "back", "--model", models["windows"])
    assert code == 1 and "of architecture llama, the model of gemma3" in said and not (tmp_path / "back").exists()
    code, said = run("convert", target, "--k", "kvq9", "-o", tmp_path / "back")
    assert code == 1 and "kvq9" in said
    profile = tmp_path / "p.gguf"
    profile_of(models["plain"]).write(profile)
    code, said = run("inspect", profile)
    assert code == 0 and "kvfmt profile show" in said
    code, said = run("convert", saved["plain", "f16/f16", "memory"], "--k", "kvq4", "--v", "kvq4", "--profile", profile, "-o", target)
    assert code == 0, said
    code, said = run("inspect", target)
    assert code == 0 and f"under profile {Profile.read(profile).hash[:16]}" in said, said
    code, said = run("inspect", models["plain"])
    assert code == 0 and "not a saved state" in said
    code, said = run("inspect", tmp_path / "none")
    assert code == 1 and "no file" in said


def test_models_that_are_not_converted_are_named(tmp_path):
    for make, words in ((random_gguf.hybrid, "lfm2 has attention and recurrent layers"), (random_gguf.mla, "latent attention")):
        with pytest.raises(StateError, match=words):
            read_model_layers(read_model(make(tmp_path / "m.gguf")))
    with Context(random_gguf.mla(tmp_path / "m.gguf"), "f16/f16") as context:
        context.decode(TOKENS[:4])
        (tmp_path / "s").write_bytes(context.save())
    with pytest.raises(StateError, match="no V"):
        convert_state(tmp_path / "s", tmp_path / "t", Request(cache_type("q8_0"), cache_type("q8_0")))

