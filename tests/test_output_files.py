"""Where a command writes: what cannot be a file is said by name and before the work, and names are printed as they are."""

from __future__ import annotations

import errno
import io
import os

import numpy as np
import pytest
import random_gguf
from kvfmt.build import console as look
from kvfmt.build.files import asked_file, whole_file, write_whole
from kvfmt.cli import app
from kvfmt.errors import KvfmtError
from random_profile import as_kvfmt, random_profile
from rich.console import Console
from test_convert import saved
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its profile, the model that carries it, a state of it, and a dump with its packed cache."""
    home = tmp_path_factory.mktemp("outputs")
    model = random_gguf.llama(home / "model.gguf", n_layer=2)
    as_kvfmt(random_profile(model)).write(home / "profile.gguf")
    (home / "state.bin").write_bytes(saved(model, "f16/f16", 8))
    rng = np.random.default_rng(0)
    np.savez(home / "dump.npz", **{f"0.{side}": rng.standard_normal((1, 2, 3, 64)).astype(np.float32) for side in "kv"})
    for command in ("pack dump.npz --kv kvq4 -o cache.gguf", "profile attach model.gguf profile.gguf -o carrier.gguf"):
        assert call(home, command).startswith("0 "), command
    (home / "taken").mkdir()
    return home


def call(home, command: str, *more: str) -> str:
    before = os.getcwd()
    os.chdir(home)
    try:
        done = CliRunner().invoke(app, [*command.split(), *more])
    finally:
        os.chdir(before)
    assert done.exception is None or isinstance(done.exception, SystemExit), (command, more, done.exception)
    return f"{done.exit_code} {' '.join(done.output.split())}"


WRITERS = [
    "convert state.bin --k q8_0 --model model.gguf -o", "pack dump.npz --kv kvq4 -o", "unpack cache.gguf -o", "profile attach model.gguf profile.gguf -o",
    "profile detach carrier.gguf -o", "profile detach carrier.gguf -o off.gguf --save", "calibrate model.gguf -o", "fold model.gguf -o", "tune model.gguf --bits 4 -o",
]


@pytest.mark.parametrize("command", WRITERS)
def test_where_no_file_can_be(folder, command):
    places = [("taken.npz" if "unpack" in command else "taken", "is a folder"), ("nowhere/x.npz", "no folder nowhere for the")]
    (folder / "taken.npz").mkdir(exist_ok=True)
    if "unpack" not in command:
        places += [(".", "is a folder"), ("/", "is a folder"), ("", "is a folder"), ("..", "is a folder")]
    before = sorted(os.listdir(folder))
    for place, what in places:
        said = call(folder, command, place)
        assert said.startswith("1 ") and what in said and "what to do:" in said, (place, said)
        assert sorted(os.listdir(folder)) == before, place


def test_a_name_that_no_file_can_have(folder):
    """The system's own words, not a traceback."""
    for command in ("inspect", "unpack cache.gguf -o x.npz --profile", "profile show", *WRITERS[:2]):
        assert call(folder, command, "x" * 300).startswith("1 "), command


def test_helpers_say_it_too(tmp_path):
    for write in (lambda path: write_whole(path, "x"), lambda path: whole_file(path).__enter__()):
        with pytest.raises(KvfmtError, match="is a folder"):
            write(tmp_path)
    with pytest.raises(KvfmtError, match="no folder"):
        whole_file(tmp_path / "a" / "b").__enter__()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_printed_as_they_are(monkeypatch, terminal):
    """They are no markup, whatever brackets they have."""
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(look, "console", console)
    name = "a[v2][/b]\\[c].gguf"
    look.step(name)
    with look.progress(name, 3) as update:
        update(3, 3)
    shown = console.file.getvalue()
    assert shown.count(name) >= 2, shown


def test_commands_print_names_as_they_are(folder):
    assert "state[v2].bin" in call(folder, "convert state.bin -o", "state[v2].bin")
    assert "no file [/b].bin" in call(folder, "inspect", "[/b].bin")


def test_what_the_system_does_not_let_be_written_is_said_and_leaves_nothing(tmp_path):
    target = tmp_path / "profile.gguf"
    with pytest.raises(KvfmtError, match="the profile was not written: .*No space left") as error:
        with asked_file(target, "the profile") as partial:
            partial.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "Is there room" in error.value.hint
    assert not list(tmp_path.iterdir())
