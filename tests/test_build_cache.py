"""What tests compile is made once by whichever asks first, and again after a failure; what was used last stays."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from build_cache import kept


def test_those_who_ask_at_once_get_one_file_that_one_of_them_made(tmp_path):
    made = []

    def make(partial):
        partial.write_text("half")
        time.sleep(0.05)
        partial.write_text("whole")
        made.append(partial)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kept(tmp_path / "new", "thing-1.so", 5, make).read_text(), range(4)))
    assert found == ["whole"] * 4 and len(made) == 1


def test_what_failed_leaves_nothing_and_is_made_again(tmp_path):
    def fail(partial):
        partial.write_text("half")
        raise AssertionError("does not compile")

    with pytest.raises(AssertionError, match="does not compile"):
        kept(tmp_path, "thing-1.so", 5, fail)
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    assert kept(tmp_path, "thing-1.so", 5, lambda partial: partial.write_text("whole")).read_text() == "whole"


def test_the_files_used_last_stay(tmp_path):
    for age in range(4):
        (tmp_path / f"old-{age}.so").touch()
        os.utime(tmp_path / f"old-{age}.so", (10**9 - age, 10**9 - age))
    kept(tmp_path, "old-3.so", 3, lambda partial: pytest.fail("it is there"))
    kept(tmp_path, "new-1.so", 3, lambda partial: partial.touch())
    assert {path.name for path in tmp_path.glob("*.so")} == {"new-1.so", "old-3.so", "old-0.so"}
