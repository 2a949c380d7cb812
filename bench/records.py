"""The one schema of a result: what was measured, how, on what, and what came out. One JSON line a row.

A row's key is everything but what came out. A row whose key is in the file is not measured again, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Union

from kvfmt import registry
from kvfmt.build.files import write_whole
from kvfmt.errors import KvfmtError, MissingTool
from kvfmt.policy import parse_kv
from kvfmt.subjects import ModelFile, Text

KINDS = ("quality", "generate", "retrieval", "speed", "lab", "probe")

#: Settings: what a key may hold. Whole numbers, words and switches come back from JSON as they went in; so do floats.
Setting = Union[str, int, float, bool, None]


class Metric(NamedTuple):
    """A figure and its standard error, None where it has none (a maximum, a quantile)."""

    value: float
    error: Optional[float] = None


@dataclass(frozen=True)
class Provenance:
    """Where a row comes from. All of it is part of the row's key.

    ``build`` is the version of the llama-cpp-python that ran: pin, series and hash of the patches. ``formats`` maps
    each of our formats in the row to its spec hash. ``text`` names the text or the prompt set, ``text_sha256`` is of
    its bytes in UTF-8. ``n_ctx`` is in tokens.
    """

    build: str
    formats: dict[str, str]
    model: str
    model_sha256: str
    text: str
    text_sha256: str
    n_ctx: int
    seed: int
    machine: str

    @classmethod
    def here(cls, formats: dict[str, str], model: ModelFile, text: Text, n_ctx: int, seed: int) -> Provenance:
        """Of what the installed build measures on this machine."""
        return cls(build_id(), formats, model.name, model.sha256, text.name, text.sha256, n_ctx, seed, machine())


@dataclass(frozen=True)
class Row:
    """One result.

    ``method`` is what a table calls it ("kvq3/kvq2, protect 2", "int8 per token"); ``k`` and ``v`` are the names of
    types or codecs; ``protect`` counts the layers at each end that stay f16. ``bits_per_value`` is what was
    allocated, with scales, padding and protected layers counted: 8 x bytes / values. ``setup`` holds the settings of
    its kind (chunks, horizon, depth, locus, layer). ``metrics`` maps a name to figure and standard error; shares are
    0 to 1, KLD in nats, sizes in bytes, times in seconds. ``detail`` holds what tables and plots need besides:
    curves by position, per layer, per prompt; JSON as it is.
    """

    kind: str
    method: str
    k: str
    v: str
    protect: int
    bits_per_value: float
    provenance: Provenance
    setup: dict[str, Setting] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise KvfmtError(f"unknown kind of result '{self.kind}'", "Known: " + ", ".join(KINDS))
        for name, metric in self.metrics.items():
            if not isinstance(metric, Metric) or any(x is not None and not math.isfinite(x) for x in metric):
                raise KvfmtError(f"metric '{name}' of {self.method} is {metric!r}", "Every metric is a finite Metric.")

    @property
    def key(self) -> str:
        """Identifies what was measured. ``bits_per_value`` follows from the rest, and is known only afterwards."""
        return row_key(self.kind, self.method, self.k, self.v, self.protect, self.provenance, self.setup)

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        """Raises KeyError, TypeError, ValueError or KvfmtError if the line is not a row."""
        data = json.loads(line)
        data["provenance"] = Provenance(**data["provenance"])
        data["metrics"] = {name: Metric(*pair) for name, pair in data["metrics"].items()}
        missing = {f.name for f in fields(cls)} - set(data)
        if missing:
            raise ValueError(f"{sorted(missing)} missing")
        return cls(**data)


def row_key(
    kind: str, method: str, k: str, v: str, protect: int, provenance: Provenance, setup: dict[str, Setting]
) -> str:
    """The key of a row that may not be measured yet."""
    return json.dumps([kind, method, k, v, protect, asdict(provenance), setup], sort_keys=True, allow_nan=False)


#: What a measurement finds: bits per value, metrics, detail.
Outcome = tuple[float, dict[str, Metric], dict[str, Any]]


class Results:
    """A file of rows. Every append replaces the whole file in one step: a reader never sees half a row."""

    def __init__(self, path: Path) -> None:
        """Reads what is there. Raises KvfmtError, with the line's number, if it is not ours."""
        self.path = Path(path)
        self.rows: list[Row] = []
        self._load()

    def _load(self) -> None:
        self.rows = []
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_text("utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                self.rows.append(Row.from_json(line))
            except (KeyError, TypeError, ValueError, KvfmtError) as error:
                raise KvfmtError(
                    f"line {number} of {self.path} is not a result: {error}",
                    "Delete that line, or give another file: --output.",
                ) from None

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def find(self, key: str) -> Optional[Row]:
        """The row of that key, the latest if there are several, or None: not measured yet."""
        return next((row for row in reversed(self.rows) if row.key == key), None)

    def of(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row.kind in kinds]

    def once(
        self,
        kind: str,
        method: str,
        k: str,
        v: str,
        provenance: Provenance,
        setup: dict[str, Setting],
        measure: Callable[[], Outcome],
        announce: Callable[[Row], None] = lambda row: None,
    ) -> Row:
        """The row that is there, or a new one from ``measure()``, appended and announced. Nothing is protected in it."""
        row = self.find(row_key(kind, method, k, v, 0, provenance, setup))
        if row is None:
            bits, metrics, detail = measure()
            row = Row(kind, method, k, v, 0, bits, provenance, setup, metrics, detail)
            self.append(row)
            announce(row)
        return row

    def append(self, rows: Row | Iterable[Row]) -> None:
        """Adds rows; one of the same key takes the place of the old. Several processes may write to one file."""
        added = [rows] if isinstance(rows, Row) else list(rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)  # for the lock
        with open(self.path.with_name(f".{self.path.name}.lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._load()
            keys = {row.key for row in added}
            self.rows = [row for row in self.rows if row.key not in keys] + added
            write_whole(self.path, "".join(row.to_json() + "\n" for row in self.rows))


def build_id() -> str:
    """Version of the installed llama-cpp-python, whose local part names the patches. Raises MissingTool."""
    from importlib import metadata

    try:
        return metadata.version("llama_cpp_python")
    except metadata.PackageNotFoundError:
        raise MissingTool("llama-cpp-python is not installed", "Run: kvfmt build") from None


def spec_hashes(*kv: str) -> dict[str, str]:
    """Spec hash of each of our formats among K/V pairs such as "kvq3/kvq2"; upstream's types have none."""
    names = {side.name for pair in kv for side in parse_kv(pair)}
    return {fmt.spec.name: fmt.spec.hash for fmt in registry.all_formats() if fmt.spec.name in names}


def machine() -> str:
    """Architecture, processor and cores: what speed depends on. No host name."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    parts = (platform.machine(), model if model != platform.machine() else "", f"{os.cpu_count()} cores")
    return ", ".join(part for part in parts if part)
