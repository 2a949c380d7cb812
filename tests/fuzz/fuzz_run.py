"""Mutated saved states into the patched llama.cpp under AddressSanitizer: ``make fuzz``, or

    python tests/fuzz/fuzz_run.py --files 10000

Builds libllama with the sanitizer in a folder of its own (some ten minutes once), and the fuzzer against it. Each crash is
counted once per place in the code, and the run goes on after it; the exit status is 1 if there was any.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from fuzz_subjects import SUBJECTS, Subject, mark  # noqa: E402

from kvfmt.build.compile import build_sanitized  # noqa: E402
from kvfmt.build.console import console, step  # noqa: E402
from kvfmt.build.lock import locked  # noqa: E402
from kvfmt.build.paths import build_dir  # noqa: E402
from kvfmt.build.pins import get_pin  # noqa: E402
from kvfmt.build.tree import sync_src  # noqa: E402

#: No state of these contexts is larger than a few hundred kB: what allocates more believed a damaged number.
LIMIT_MB = 64
MOST_CRASHES = 200


def compile_fuzzer(libraries: Path, source: Path, target: Path, sanitize: bool) -> Path:
    """The fuzzer, linked to the libraries in that folder; ``source`` is llama.cpp's."""
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-g", *(["-fsanitize=address"] if sanitize else [])]
    command += [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}", str(HERE / "state_fuzz.cpp"), "-o", str(target)]
    command += [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, check=True)
    return target


def _environment() -> dict[str, str]:
    options = f"detect_leaks=0:max_allocation_size_mb={LIMIT_MB}:allocator_may_return_null=0:handle_abort=1"
    return {**os.environ, "ASAN_OPTIONS": options, "GGML_NO_BACKTRACE": "1"}


def _place(said: str) -> str:
    """Where it crashed: what was found, and the first functions of llama.cpp on the stack."""
    what = re.search(r"(?:ERROR: AddressSanitizer: ([^\n]{1,60})|state_fuzz: (.*)|GGML_ASSERT\((.*)\) failed|what\(\): *(.*)|Assertion '(.*)' failed)", said)
    frames = re.findall(r"#\d+ 0x[0-9a-f]+ in (\w[\w:~]*)[^\n]*?/(?:src|ggml/src|ggml)/([\w./-]+:\d+)", said)
    named = next((group for group in what.groups() if group), "") if what else said.strip()[-300:]
    named = re.sub(r" on (unknown )?address.*|-?\d+\.\d+|0x[0-9a-f]+", "", named)
    return named + "".join(f"\n    {function} {place}" for function, place in frames[:4])


def fuzz(fuzzer: Path, subject: Subject, folder: Path, first: int, last: int, seed: int) -> tuple[int, Counter[str]]:
    """Tries mutations [first, last). Returns how many were accepted as states, and crashes by place.

    Raises RuntimeError if the unchanged states cannot be made or loaded.
    """
    arguments = subject.arguments(folder)
    subprocess.run([fuzzer, "make", *arguments], check=True, env=_environment())
    mark(folder)
    crashes: Counter[str] = Counter()
    accepted = 0
    while first < last:
        (folder / "at").unlink(missing_ok=True)
        done = subprocess.run([fuzzer, "run", *arguments, str(first), str(last), str(seed)], capture_output=True, text=True, errors="replace", env=_environment())
        if done.returncode == 0:
            return accepted + int(done.stdout), crashes
        if not (folder / "at").exists():
            raise RuntimeError(f"{subject.name}: the fuzzer does not start\n{done.stderr[-3000:]}")
        at = int.from_bytes((folder / "at").read_bytes(), "little")
        place = _place(done.stderr)
        known = next((crash for crash in crashes if crash.startswith(place)), None)
        crashes[known or f"{place}\n    first with --only {SUBJECTS.index(subject)} --from {at} --seed {seed}"] += 1
        if crashes.total() >= MOST_CRASHES:
            break
        first = at + 1
    return accepted, crashes


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000, help="mutated states in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first")
    parser.add_argument("--only", type=int, choices=range(len(SUBJECTS)), help="one of: " + "; ".join(f"{i} {s.name}" for i, s in enumerate(SUBJECTS)))
    parser.add_argument("--jobs", "-j", type=int, help="compilers at a time")
    options = parser.parse_args()
    pin = get_pin(None)
    home = build_dir(pin.name)
    with locked(home):
        sync_src(pin)
        libraries = build_sanitized(pin, jobs=options.jobs)
    chosen = SUBJECTS if options.only is None else (SUBJECTS[options.only],)
    each = -(-options.files // len(chosen))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kvfmt-fuzz-") as scratch:
        fuzzer = compile_fuzzer(libraries, home / "src" / "vendor" / "llama.cpp", Path(scratch) / "state_fuzz", sanitize=True)
        for subject in chosen:
            began = time.monotonic()
            accepted, crashes = fuzz(fuzzer, subject, Path(scratch) / f"{SUBJECTS.index(subject)}", options.first, options.first + each, options.seed)
            step(f"{subject.name}: {each} mutated states, {accepted} accepted, {crashes.total()} crashes, {time.monotonic() - began:.0f} s")
            for place, n in crashes.most_common():
                console.print(f"{n} x {place}", markup=False, soft_wrap=True)
            failed += crashes.total()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
