"""The patch series: it is what the generator makes, it fits the pinned tree, and its C is the Python reference."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from blocks import assert_same_blocks
from conftest import PIN
from edge_inputs import edge_rows, random_rows, rounding_rows, structured_rows, tie_rows
from kvfmt import registry
from kvfmt.errors import PatchRefused

from cpp_patch import edits, generate
from cpp_patch.apply import LLAMA_IN_SDIST, apply_all, load_all
from cpp_patch.edits import Edit, EditError, Span

ALL = registry.all_formats()
NAMES = [f.spec.name for f in ALL]


# --- the committed series is what the specs make ---------------------------------------------------------------------


def test_the_committed_series_is_what_the_generator_makes(pristine, capsys):
    assert generate.differences(PIN.name, pristine) == []
    assert generate.main(["--check", "--tree", str(pristine)]) == 0
    assert "clean" in capsys.readouterr().out


def _with_spec(monkeypatch, name: str, **changed) -> None:
    specs = [dataclasses.replace(f.spec, **changed) if f.spec.name == name else f.spec for f in ALL]
    monkeypatch.setattr(registry, "all_formats", lambda: tuple(dataclasses.replace(f, spec=s) for f, s in zip(ALL, specs)))


@pytest.mark.parametrize("changed", [{"version": 2}, {"rounding": ("another",)}, {"type_id": 1000}], ids=lambda c: next(iter(c)))
def test_a_changed_spec_is_noticed(pristine, monkeypatch, capsys, changed):
    _with_spec(monkeypatch, "kvq3", **changed)
    found = generate.differences(PIN.name, pristine)
    assert any(line.startswith("differs: llama.cpp/0001-") for line in found), found
    assert generate.main(["--check", "--tree", str(pristine)]) == 1
    assert "differs: llama.cpp/0001-" in capsys.readouterr().err


def test_a_changed_table_value_is_noticed(pristine, monkeypatch):
    levels, grid = registry.get("kvq3").spec.tables
    changed = dataclasses.replace(levels, values=(15, *levels.values[1:]))
    _with_spec(monkeypatch, "kvq3", tables=(changed, grid))
    assert any("0001-" in line for line in generate.differences(PIN.name, pristine))


def test_missing_edited_and_foreign_patches_are_named(pristine, monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "OUT", tmp_path)
    names = generate.write(PIN.name, pristine)
    assert generate.differences(PIN.name, pristine) == []
    base = tmp_path / PIN.name
    (base / names[0]).unlink()
    (base / names[1]).write_text((base / names[1]).read_text() + "x")
    (base / "llama.cpp" / "9999-foreign.patch").write_text("")
    assert [line.split(" at ")[0] for line in generate.differences(PIN.name, pristine)] == [
        f"missing: {names[0]}",
        "not generated: llama.cpp/9999-foreign.patch",
        f"differs: {names[1]}",
    ]


def test_an_edit_that_does_not_fit_leaves_the_old_series(pristine, monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "OUT", tmp_path)
    names = generate.write(PIN.name, pristine)
    before = {n: (tmp_path / PIN.name / n).read_bytes() for n in names}
    templates = tmp_path / "templates"
    shutil.copytree(generate.TEMPLATES, templates)
    monkeypatch.setattr(generate, "TEMPLATES", templates)
    broken = sorted((templates / "llama.cpp").glob("*.toml"))[-1]
    broken.write_text(
        broken.read_text() + '\n[[edit]]\npath = "ggml/src/ggml.c"\nanchor = "no such line"\nwhere = "after"\ntext = "x"\n'
    )
    with pytest.raises(EditError, match=rf"{broken.stem}: ggml/src/ggml.c: anchor not found:\nno such line"):
        generate.write(PIN.name, pristine)
    assert generate.main(["--check", "--tree", str(pristine)]) == 2
    assert {n: (tmp_path / PIN.name / n).read_bytes() for n in names} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [PIN.name, "templates"]


def test_a_missing_tree_says_what_to_do(tmp_path, capsys):
    assert generate.main(["--check", "--tree", str(tmp_path)]) == 2
    assert "run `kvfmt build` once" in capsys.readouterr().err


def test_a_new_format_needs_no_other_file_than_its_two(pristine, monkeypatch, tmp_path):
    """A spec and a body are enough: types, traits, switches, readers and upstream tests follow."""
    new = dataclasses.replace(registry.get("kvq2").spec, name="kvx", type_id=900)
    bodies = tmp_path / "bodies"
    shutil.copytree(generate.BODIES, bodies)
    (bodies / "kvx.h").write_text((bodies / "kvq2.h").read_text().replace("kvq2", "kvx").replace("KVQ2", "KVX"))
    monkeypatch.setattr(generate, "BODIES", bodies)
    monkeypatch.setattr(registry, "all_formats", lambda: (*ALL, dataclasses.replace(registry.get("kvq2"), spec=new)))
    series = generate.render(pristine)
    added = "\n".join(line for text in series.values() for line in text.split("\n") if line.startswith("+"))
    for expected in [
        "+++ b/ggml/src/kvq/kvx.h",
        "GGML_TYPE_KVX",
        "= 900,",
        "GGML_TYPE_COUNT   = 901,",
        '.type_name      = "kvx"',
        "block_kvx",
        "ggml_vec_dot_kvx_q8_0",
        "GGMLQuantizationType.KVX:",
        new.hash,
    ]:
        assert expected in added, expected
    # Wherever a template goes through the formats, the new one stands with the others.
    for name, text in series.items():
        assert ("kvx" in text.lower()) == ("kvq2" in text.lower()), name


# --- edits -----------------------------------------------------------------------------------------------------------

LINES = ["a", "b", "c", "b", "d", "e"]


def _edit(anchor: str, where: str = "after", text: str = "new") -> Edit:
    return Edit("some/file.c", anchor, where, text)


def test_a_missing_anchor_names_patch_file_and_anchor():
    with pytest.raises(EditError, match="0001-x: some/file.c: anchor not found:\nzz"):
        edits.locate(LINES, _edit("zz"), "0001-x")


def test_a_part_of_a_line_is_no_anchor():
    with pytest.raises(EditError, match="anchor not found"):
        edits.locate(["int x = 1;"], _edit("x = 1"), "p")


def test_a_double_anchor_names_patch_file_and_anchor():
    with pytest.raises(EditError, match="0001-x: some/file.c: anchor found 2 times:\nb"):
        edits.locate(LINES, _edit("b"), "0001-x")
    assert edits.locate(LINES, _edit("b\nd"), "p") == [Span(5, 5, ("new",))]


@pytest.mark.parametrize(
    "where, text, expected",
    [
        ("before", "x", ["a", "b", "x", "c", "b", "d", "e"]),
        ("after", "x\ny", ["a", "b", "c", "x", "y", "b", "d", "e"]),
        ("replace", "x", ["a", "b", "x", "b", "d", "e"]),
        ("replace", "", ["a", "b", "b", "d", "e"]),
    ],
)
def test_where_text_goes(where, text, expected):
    assert edits.apply_spans(LINES, edits.locate(LINES, _edit("c", where, text), "p")) == expected


def test_overlapping_edits_name_the_file():
    spans = edits.locate(LINES, _edit("a\nb\nc", "replace", "x"), "p") + edits.locate(LINES, _edit("c", "replace", "y"), "p")
    with pytest.raises(EditError, match="some/file.c: edits of lines 1 and 3 overlap"):
        edits.ordered(spans, "some/file.c")


def test_a_replacement_changes_only_the_lines_that_differ():
    spans = edits.locate(LINES, _edit("a\nb\nc", "replace", "a\nx\nc\ny"), "p")
    assert spans == [Span(1, 2, ("x",)), Span(3, 3, ("y",))]


def test_insertions_at_one_place_keep_their_order():
    spans = [span for t in ("first", "second") for span in edits.locate(LINES, _edit("c", "after", t), "p")]
    assert edits.apply_spans(LINES, edits.ordered(spans, "f"))[3:5] == ["first", "second"]


@pytest.mark.parametrize(
    "text, message",
    [
        ('subject = "s"\n', "p.toml: 'why'"),
        ('subject = "s"\nwhy = "w"\nextra = 1\n', r"p.toml: unknown keys \['extra'\]"),
        ('subject = "s"\nwhy = "w"\n[[edit]]\npath = "f"\nanchor = "a"\nwhere = "around"\ntext = ""\n', "where = 'around', not one of"),
        ('subject = "s"\nwhy = "w"\n[[edit]]\npath = "f"\nanchor = "a"\n', "missing 2 required"),
        ('subject = "s"\nwhy = "w"\n[[file]]\npath = "f"\ntemplate = "t"\nmode = "x"\n', "unexpected keyword"),
    ],
)
def test_a_wrong_template_is_refused(tmp_path, text, message):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(EditError, match=message):
        edits.load(tmp_path / "p.toml")


def _toy_tree(monkeypatch, tmp_path, *templates: str) -> Path:
    folder = tmp_path / "templates" / "toy"
    (tmp_path / "templates" / "files").mkdir(parents=True)
    folder.mkdir()
    for i, text in enumerate(templates, 1):
        (folder / f"{i:04}-p.toml").write_text('subject = "s"\nwhy = "w"\n' + text)
    (tmp_path / "templates" / "files" / "body.j2").write_text("// {{ fmt.name }}\n")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file.c").write_text("one\ntwo\nthree\n")
    monkeypatch.setattr(generate, "TEMPLATES", tmp_path / "templates")
    return tmp_path / "tree"


def test_each_format_makes_one_file_a_format(monkeypatch, tmp_path):
    tree = _toy_tree(
        monkeypatch, tmp_path, '[[file]]\npath = "new/{{ fmt.name }}.h"\ntemplate = "body.j2"\neach_format = true\n'
    )
    (text,) = generate.render_tree("toy", tree).values()
    assert re.findall(r"^\+\+\+ b/(.*)\n.*\n\+// (.*)$", text, re.M) == [(f"new/{n}.h", n) for n in NAMES]


def test_a_new_file_must_not_exist(monkeypatch, tmp_path):
    tree = _toy_tree(monkeypatch, tmp_path, '[[file]]\npath = "file.c"\ntemplate = "body.j2"\neach_format = true\n')
    with pytest.raises(EditError, match="0001-p: new file file.c exists already"):
        generate.render_tree("toy", tree)


def test_a_file_to_edit_must_exist(monkeypatch, tmp_path):
    tree = _toy_tree(monkeypatch, tmp_path, '[[edit]]\npath = "gone.c"\nanchor = "one"\nwhere = "after"\ntext = "x"\n')
    with pytest.raises(EditError, match="0001-p: gone.c does not exist"):
        generate.render_tree("toy", tree)


def test_a_later_patch_sees_what_an_earlier_one_wrote(monkeypatch, tmp_path):
    edit = '[[edit]]\npath = "file.c"\nanchor = "{}"\nwhere = "after"\ntext = "{}"\n'
    tree = _toy_tree(monkeypatch, tmp_path, edit.format("one", "added"), edit.format("added", "more"))
    series = generate.render_tree("toy", tree)
    for text in series.values():
        done = subprocess.run(["git", "apply", "-"], cwd=tree, input=text, text=True, env=_no_git_above(tree))
        assert done.returncode == 0
    assert (tree / "file.c").read_text() == "one\nadded\nmore\ntwo\nthree\n"


# --- names -----------------------------------------------------------------------------------------------------------

_WORD = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(NAMES)})(?![A-Za-z0-9])", re.I)


def _code(text: str) -> str:
    return re.sub(r"//.*|\{#.*?#\}", "", text)


def test_templates_name_no_format():
    """Each format comes from the registry; a name in a template would be a second list."""
    for path in sorted((generate.TEMPLATES / "files").iterdir()):
        assert not _WORD.search(_code(path.read_text())), path.name
    for path in sorted(generate.TEMPLATES.glob("*/*.toml")):
        patch = edits.load(path)
        for text in [e.anchor + "\n" + e.text for e in patch.edits] + [f.path + f.template for f in patch.files]:
            assert not _WORD.search(_code(text)), path.name


def test_a_body_names_only_its_own_format():
    for path in sorted(generate.BODIES.glob("*.h")):
        own = {path.stem} if path.stem in NAMES else set()
        assert {m.lower() for m in _WORD.findall(_code(path.read_text()).replace("_", " "))} <= own, path.name


def test_every_format_has_a_body_and_every_body_a_format():
    bodies = {p.stem for p in generate.BODIES.glob("*.h")}
    assert set(NAMES) <= bodies
    assert all(b.startswith("kvq_") for b in bodies - set(NAMES))


# --- the series on the pinned tree -----------------------------------------------------------------------------------


def _no_git_above(folder: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return clean | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}


def _copy_of_touched(pristine: Path, target: Path) -> Path:
    for root, series in load_all(PIN):
        (target / root).mkdir(parents=True, exist_ok=True)
        for file in series.files:
            if (pristine / root / file).exists():
                (target / root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(pristine / root / file, target / root / file)
    return target


@pytest.fixture
def tree(pristine, tmp_path) -> Path:
    """The files that the series touches, unpatched."""
    return _copy_of_touched(pristine, tmp_path / "tree")


@pytest.fixture(scope="module")
def patched(pristine, tmp_path_factory) -> Path:
    """llama.cpp's files that the series touches, patched."""
    target = _copy_of_touched(pristine, tmp_path_factory.mktemp("patched") / "tree")
    apply_all(target, load_all(PIN))
    return target / LLAMA_IN_SDIST


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_git_applies_the_series_patch_by_patch(tree):
    count = 0
    for root, series in load_all(PIN):
        for patch in series.patches:
            for check in (["--check"], []):
                command = ["git", "apply", "--whitespace=error-all", *check, str(patch)]
                done = subprocess.run(command, cwd=tree / root, capture_output=True, text=True, env=_no_git_above(tree / root))
                assert done.returncode == 0, f"{patch.name}: {done.stderr}"
            count += 1
    assert count >= 3


def test_git_checks_the_series_as_a_whole(tree):
    before = _content(tree)
    for root, series in load_all(PIN):
        command = ["git", "apply", "--check", "-"]
        done = subprocess.run(command, cwd=tree / root, input=series.text, capture_output=True, env=_no_git_above(tree / root))
        assert done.returncode == 0, done.stderr.decode()
    assert _content(tree) == before


def test_a_second_application_is_refused(tree):
    parts = load_all(PIN)
    apply_all(tree, parts)
    once = _content(tree)
    with pytest.raises(PatchRefused, match="already applied"):
        apply_all(tree, parts)
    (tree / ".kvfmt-patch.json").unlink()  # as if patched by hand
    with pytest.raises(PatchRefused, match="already applied"):
        apply_all(tree, parts)
    once.pop(".kvfmt-patch.json")
    assert _content(tree) == once


def test_taking_it_out_restores_every_byte(tree):
    before = _content(tree)
    apply_all(tree, load_all(PIN))
    assert _content(tree) != before
    apply_all(tree, load_all(PIN), reverse=True)
    assert _content(tree) == before


def test_a_hunk_that_does_not_fit_is_named_and_nothing_is_written(tree):
    target = tree / LLAMA_IN_SDIST / "ggml" / "src" / "ggml.c"
    text = target.read_text()
    line = '#include "ggml-quants.h"'
    assert text.count(line) == 1
    target.write_text(text.replace(line, '#include "ggml-quants-renamed.h"'))
    before = _content(tree)
    with pytest.raises(PatchRefused) as error:
        apply_all(tree, load_all(PIN))
    assert re.search(r"0001-\S+\.patch: ggml/src/ggml\.c: hunk at line \d+ does not fit", error.value.message)
    assert "nothing was changed" in error.value.message
    assert _content(tree) == before


def test_a_new_file_in_the_way_is_named(tree):
    (tree / LLAMA_IN_SDIST / "ggml" / "src" / "ggml-kvq.c").write_text("mine\n")
    before = _content(tree)
    with pytest.raises(PatchRefused, match="ggml/src/ggml-kvq.c"):
        apply_all(tree, load_all(PIN))
    assert _content(tree) == before


# --- the C ------------------------------------------------------------------------------------------------------------


def test_every_number_of_the_header_is_the_spec_s(patched):
    """Block sizes, offsets and tables as C literals. The compiler asserts them; this asserts that they are the right ones."""
    text = (patched / "ggml/src/kvq/kvq_blocks.h").read_text()
    sizes = dict(re.findall(r"sizeof\(block_(\w+)\) == (\d+)", text))
    assert {n: int(s) for n, s in sizes.items()} == {f.spec.name: f.spec.size for f in ALL}
    assert sizes.items() >= {"kvq2": "18", "kvq3": "26", "kvq4": "34", "kvnf4": "34", "kve8_2": "18", "kve8_3": "26"}.items()
    offsets = re.findall(r"offsetof\(block_(\w+), (\w+)\) == (\d+)", text)
    assert offsets == [(f.spec.name, x.name, str(f.spec.offset(x.name))) for f in ALL for x in f.spec.fields]
    assert re.findall(r"#define (\w+)_BLOCK (\d+)", text) == [(f.spec.name.upper(), str(f.spec.block)) for f in ALL]
    units = re.findall(r"#define (\w+)_LEVEL_UNIT (\S+)f ", text)
    assert [(n, float(u)) for n, u in units] == [(f.spec.name.upper(), 2.0**-f.spec.level_shift) for f in ALL]
    for fmt in ALL:
        for table in fmt.spec.tables:
            body = re.search(rf"{fmt.spec.name}_{table.name}(?:\[\d+\])+ = \{{(.*?)\}};", text, re.S)[1]
            assert tuple(int(v) for v in re.findall(r"-?\d+", body)) == table.values, (fmt.spec.name, table.name)


def test_ids_in_the_patched_headers(patched):
    text = (patched / "ggml/include/ggml.h").read_text()
    enum = {n: int(v) for n, v in re.findall(r"GGML_TYPE_(\w+)\s*= (\d+),", text)}
    assert {f.spec.name: enum[f.spec.name.upper()] for f in ALL} == {f.spec.name: f.spec.type_id for f in ALL}
    assert enum["COUNT"] == max(f.spec.type_id for f in ALL) + 1
    assert max(v for n, v in enum.items() if n.lower() not in NAMES and n != "COUNT") < 768


def _compiler(language: str) -> list[str]:
    variable, default = {"c": ("CC", "cc"), "c++": ("CXX", "c++")}[language]
    return shlex.split(os.environ.get(variable) or default)


STRICT = ["-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]


def _compile(language: str, source: Path, include: Path, *options: str) -> None:
    standard = {"c": "-std=c11", "c++": "-std=c++17"}[language]
    command = [*_compiler(language), "-x", language, standard, *STRICT, *options, f"-I{include}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("march", [[], ["-march=native"]], ids=["baseline", "native"])
@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_headers_compile_alone_without_a_warning(patched, tmp_path, language, name, march):
    source = tmp_path / "only.c"
    source.write_text("".join(f'#include "{n}.h"\n' for n in (NAMES if name == "all" else [name])) + "int unused;\n")
    _compile(language, source, patched / "ggml/src/kvq", "-c", *march, "-o", str(tmp_path / "only.o"))


def test_fast_math_is_refused(patched, tmp_path):
    source = tmp_path / "only.c"
    source.write_text('#include "kvq_prim.h"\n')
    with pytest.raises(AssertionError, match="build without fast math"):
        _compile("c", source, patched / "ggml/src/kvq", "-c", "-ffast-math", "-o", str(tmp_path / "only.o"))


def _program(formats=ALL) -> str:
    """Reads blocks of 64 floats; writes for each format the encoded blocks, then what they decode to."""
    parts = ["#include <stdio.h>", "#include <stdlib.h>"]
    parts += [f'#include "{fmt.spec.name}.h"' for fmt in formats]
    parts.append("int main(void) {\n    static float x[64];\n    static float y[64];\n    int8_t levels[64];")
    for fmt in formats:
        n, upper = fmt.spec.name, fmt.spec.name.upper()
        parts.append(f"""
    rewind(stdin);
    while (fread(x, sizeof(x), 1, stdin) == 1) {{
        block_{n} b;
        memset(&b, 0xA5, sizeof(b));
        {n}_encode(x, &b);
        fwrite(&b, sizeof(b), 1, stdout);
        {n}_unpack(&b, levels);
        for (int i = 0; i < 64; ++i) {{
            if (levels[i] != {n}_level(&b, i)) {{
                fprintf(stderr, "{n}: level %d of the unpacked block differs\\n", i);
                return 1;
            }}
            y[i] = kvq_f16_to_f32(b.d) * ((float) levels[i] * {upper}_LEVEL_UNIT);
        }}
        fwrite(y, sizeof(y), 1, stdout);
    }}""")
    parts.append("    return 0;\n}\n")
    return "\n".join(parts)


@lru_cache
def _inputs() -> np.ndarray:
    decisive = [*(tie_rows(f.spec) for f in ALL), *(rounding_rows(f) for f in ALL if f.spec.unbiased)]
    return np.concatenate([edge_rows(), *decisive, structured_rows(300, 61), random_rows(1000, 62)])


@lru_cache
def _wanted(name: str) -> np.ndarray:
    """What the Python reference makes of the inputs."""
    return registry.get(name).encode(_inputs())


def _run(program: Path, x: np.ndarray, tmp_path: Path, formats=ALL) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    (tmp_path / "input.f32").write_bytes(x.tobytes())
    with (tmp_path / "input.f32").open("rb") as handle:
        done = subprocess.run([str(program)], stdin=handle, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return _split(done.stdout, len(x), formats)


def _split(output: bytes, n: int, formats=ALL) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What the program wrote for n blocks: format -> (uint8 [n, size], float32 [n, 64])."""
    raw, at, found = np.frombuffer(output, np.uint8), 0, {}
    for fmt in formats:
        row = fmt.spec.size + 256
        rows = raw[at : at + n * row].reshape(n, row)
        found[fmt.spec.name] = rows[:, : fmt.spec.size], rows[:, fmt.spec.size :].copy().view(np.float32)
        at += n * row
    assert at == len(raw)
    return found


@pytest.mark.parametrize(
    "language, options",
    [
        ("c", "-O0"),
        ("c", "-O2"),
        ("c", "-O3 -march=native"),
        ("c", "-O2 -march=native -mno-avx512f"),
        ("c", "-O2 -march=native -mno-avx2"),
        ("c", "-O1 -march=native -fsanitize=undefined -fno-sanitize-recover=all"),
        ("c++", "-O2 -march=native"),
    ],
)
def test_bytes_do_not_depend_on_the_compiler_s_options(patched, tmp_path, language, options):
    source, program = tmp_path / "all.c", tmp_path / "all"
    source.write_text(_program())
    _compile(language, source, patched / "ggml/src/kvq", *options.split(), "-o", str(program))
    x = _inputs()
    found = _run(program, x, tmp_path)
    for fmt in ALL:
        want = _wanted(fmt.spec.name)
        assert_same_blocks(fmt, x, want, found[fmt.spec.name][0], f"{language} {options}")
        assert np.array_equal(fmt.decode(want).view(np.uint32), found[fmt.spec.name][1].view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_number_in_the_header_would_be_noticed(patched, tmp_path, name):
    """The comparison above is no empty one: each threshold or candidate scale off by one changes some byte."""
    include = tmp_path / "kvq"
    shutil.copytree(patched / "ggml/src/kvq", include)
    header = include / "kvq_blocks.h"
    table = next(t for t in registry.get(name).spec.tables if t.dtype == "i16" or t.name == "step")
    text = header.read_text()
    head, body = re.search(rf"({name}_{table.name}(?:\[\d+\])+ = \{{)(.*?)\}};", text, re.S).groups()
    raised = re.sub(r"-?\d+", lambda m: str(int(m[0]) + (int(m[0]) != 32767)), body)
    header.write_text(text.replace(head + body, head + raised))
    source, program = tmp_path / "all.c", tmp_path / "all"
    fmt = registry.get(name)
    source.write_text(_program([fmt]))
    _compile("c", source, include, "-O1", "-o", str(program))
    x = _inputs()
    found = _run(program, x, tmp_path, [fmt])
    with pytest.raises(AssertionError, match=f"{name}, .*: [1-9]\\d* of {len(x)} blocks differ\nworst: block \\d+"):
        assert_same_blocks(fmt, x, _wanted(name), found[name][0], "raised thresholds")


@pytest.mark.parametrize("wrong", ["down", "up"])
def test_a_wrong_rounding_of_the_sum_of_squares_would_be_noticed(patched, tmp_path, wrong):
    include = tmp_path / "kvq"
    shutil.copytree(patched / "ggml/src/kvq", include)
    header, right = include / "kvq_prim.h", "KVQ_FROM_I64(v) ((float) (v))"
    text = header.read_text()
    assert text.count(right) == 1
    # What does not fit 24 bits is cut off, or rounded up, before the conversion.
    shift = "(36 - 24 - ((v) < (1ll << 35)) - ((v) < (1ll << 34)) - ((v) < (1ll << 33)) - ((v) < (1ll << 32)))"
    low = f"((1ll << {shift}) - 1)"
    cut = "(v)" if wrong == "down" else f"((v) + {low})"
    header.write_text(text.replace(right, f"KVQ_FROM_I64(v) ((float) ({cut} & ~{low}))"))
    source, program = tmp_path / "all.c", tmp_path / "all"
    source.write_text(_program())
    _compile("c", source, include, "-O1", "-o", str(program))
    x = _inputs()
    found = _run(program, x, tmp_path)
    for fmt in ALL:
        differ = (_wanted(fmt.spec.name) != found[fmt.spec.name][0]).any(axis=1)
        assert differ.any() == fmt.spec.unbiased, fmt.spec.name


# --- halves in C -----------------------------------------------------------------------------------------------------

HALVES = r"""
#include <stdio.h>
#include "kvq_prim.h"
int main(void) {
    for (unsigned h = 0; h < 0x10000u; ++h) {
        const uint32_t bits = kvq_bits(kvq_f16_to_f32((uint16_t) h));
        fwrite(&bits, sizeof(bits), 1, stdout);
    }
    for (uint32_t bits = 0; bits <= 0x7F7FFFFFu - 0x3FFu; bits += 0x3FFu) {
        const uint16_t half = kvq_scale_to_f16(kvq_float(bits));
        fwrite(&half, sizeof(half), 1, stdout);
    }
    for (uint32_t h = 0; h < 0x7BFFu; ++h) {
        const float middle = (kvq_f16_to_f32((uint16_t) h) + kvq_f16_to_f32((uint16_t) (h + 1))) * 0.5f;
        for (int step = -1; step <= 1; ++step) {
            const uint16_t half = kvq_scale_to_f16(kvq_float(kvq_bits(middle) + (uint32_t) step));
            fwrite(&half, sizeof(half), 1, stdout);
        }
    }
    return 0;
}
"""


def test_halves_in_c_are_numpy_s(patched, tmp_path):
    source, program = tmp_path / "halves.c", tmp_path / "halves"
    source.write_text(HALVES)
    _compile("c", source, patched / "ggml/src/kvq", "-O2", "-o", str(program))
    raw = subprocess.run([str(program)], capture_output=True, check=True).stdout
    widened = np.frombuffer(raw, np.uint32, 0x10000)
    want = np.arange(0x10000, dtype=np.uint16).view(np.float16).astype(np.float32)
    number = ~np.isnan(want)
    assert np.array_equal(widened[number], want[number].view(np.uint32))
    assert np.isnan(widened.view(np.float32)[~number]).all()
    narrowed = np.frombuffer(raw, np.uint16, -1, 0x40000)
    dense = np.arange(0, 0x7F7FFFFF - 0x3FF + 1, 0x3FF, dtype=np.uint32).view(np.float32)
    steps = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (steps[1:] + steps[:-1]) * np.float32(0.5)
    near = (middle.view(np.uint32)[:, None] + np.array([-1, 0, 1])).astype(np.uint32).view(np.float32).ravel()
    x = np.minimum(np.concatenate([dense, near]), np.float32(65504))
    assert np.array_equal(narrowed, x.astype(np.float16).view(np.uint16))
