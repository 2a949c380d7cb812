"""What bench/gpu_check.sh runs. Standard library only: the machine with the GPU may have nothing else.

Every step says what came out in the JSON, which is written anew, whole, after each result: a machine that is taken away in the
middle leaves what was measured, and so does a step that fails, crashes or takes too long. What calls kernels runs in processes of its
own, because an error of CUDA ends the process. Nothing is estimated, except the GPU's peak bandwidth, which is its clock times its bus.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

from cpp_patch.apply import hash_all, load_all
from kvfmt.build import cublas, toolkit
from kvfmt.build.files import write_whole
from kvfmt.build.flags import FLAGS
from kvfmt.build.pins import get_pin
from kvfmt.errors import BuildFailed, KvfmtError, MissingTool

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
#: In this order, the most seconds of each (0: all that is left): bandwidth is last because its inputs are encoded on the CPU, and
#: because it loses least where it is cut off.
STEPS = {"parity": 60, "operations": 150, "fidelity": 90, "speed": 150, "sanitizer": 60, "bandwidth": 0}
TARGETS = ("test-backend-ops", "llama-bench", "llama-perplexity")
STOCK = ("f16/f16", "q8_0/q8_0", "q4_0/q4_0")
#: Caches that are scored and timed; those that need a profile are only timed by attention alone.
OURS = ("kvq3/kvq2", "kvq4/kvq4", "kve8_3/kve8_2", "kvnf4/kvnf4")


@dataclass(frozen=True)
class Scale:
    """How much is measured: caches, depths in tokens, rounds of turns, chunks of 1,024 tokens, caches
    that are scored by single tokens too, and whether every pair is timed."""

    caches: tuple[str, ...] = (*STOCK, *OURS)
    depths: tuple[int, ...] = (0, 4096, 16384)
    rounds: int = 3
    chunks: int = 8
    singly: tuple[str, ...] = OURS[:1]
    all_pairs: bool = True


REHEARSAL = Scale(caches=(STOCK[0], OURS[0]), depths=(0, 64), rounds=1, chunks=1, singly=(), all_pairs=False)
#: Attention whose bandwidth is measured, as in 0005-upstream-tests: heads, size of one, cells.
PERF_HEADS, PERF_HEAD, PERF_CELLS = 8, 128, 131072
#: What NVIDIA's compute-sanitizer looks for in the kernels that write and read blocks, and the status that says it found something.
SANITIZERS, FOUND = ("memcheck", "racecheck", "synccheck"), 99
GPU = 1  # enum ggml_backend_dev_type
F32, I64 = 0, 27


@dataclass(frozen=True)
class Golden:
    """A format as it was recorded: facts, input floats and the blocks that they encode to, as bytes."""

    facts: dict
    x: bytes
    blocks: bytes

    @property
    def name(self) -> str:
        return self.facts["name"]


def recorded() -> list[Golden]:
    """The newest version of every format."""
    found = []
    for folder in sorted(GOLDEN.iterdir()):
        versions = sorted(folder.glob("v*"), key=lambda p: int(p.name[1:])) if folder.is_dir() else []
        if versions:
            where = versions[-1]
            facts = json.loads((where / "facts.json").read_text())
            found.append(Golden(facts, (where / "input.f32").read_bytes(), (where / "blocks.bin").read_bytes()))
    return found


class Backend:
    """One device of a build, through ggml's C interface. ``kind`` 1: the first GPU, 0: the CPU."""

    def __init__(self, folder: Path, kind: int):
        try:
            self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
            self.ggml = ctypes.CDLL(str(folder / "libggml.so"), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            hint = "A library of CUDA's that is not found: add its folder (such as /usr/local/cuda/lib64) to LD_LIBRARY_PATH."
            raise MissingTool(f"the libraries in {folder} do not load: {error}", hint) from None
        p, i64, n, c_int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
        for library, name, result, arguments in [
            (self.ggml, "ggml_backend_load_all", None, []),
            (self.ggml, "ggml_backend_dev_by_type", p, [c_int]),
            (self.base, "ggml_backend_dev_init", p, [p, ctypes.c_char_p]),
            (self.base, "ggml_backend_dev_name", ctypes.c_char_p, [p]),
            (self.base, "ggml_backend_dev_description", ctypes.c_char_p, [p]),
            (self.base, "ggml_backend_dev_supports_op", ctypes.c_bool, [p, p]),
            (self.base, "ggml_backend_alloc_ctx_tensors", p, [p, p]),
            (self.base, "ggml_backend_buffer_free", None, [p]),
            (self.base, "ggml_backend_tensor_set", None, [p, p, n, n]),
            (self.base, "ggml_backend_tensor_get", None, [p, p, n, n]),
            (self.base, "ggml_backend_graph_compute", c_int, [p, p]),
            (self.base, "ggml_init", p, [_InitParams]),
            (self.base, "ggml_free", None, [p]),
            (self.base, "ggml_new_tensor_2d", p, [p, c_int, i64, i64]),
            (self.base, "ggml_set_rows", p, [p, p, p, p]),
            (self.base, "ggml_cpy", p, [p, p, p]),
            (self.base, "ggml_new_graph", p, [p]),
            (self.base, "ggml_build_forward_expand", None, [p, p]),
            (self.base, "ggml_nbytes", n, [p]),
            (self.base, "ggml_kvq_spec_hash", ctypes.c_char_p, [c_int]),
        ]:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.ggml.ggml_backend_load_all()
        self.device = self.ggml.ggml_backend_dev_by_type(kind)
        if not self.device:
            raise MissingTool("ggml finds no GPU", "Is the driver loaded (nvidia-smi), and was the build made with --cuda for this GPU?")
        self.name = self.base.ggml_backend_dev_name(self.device).decode()
        self.description = self.base.ggml_backend_dev_description(self.device).decode()
        self.backend = self.base.ggml_backend_dev_init(self.device, None)

    def spec_hash(self, type_id: int) -> str:
        found = self.base.ggml_kvq_spec_hash(type_id)
        return found.decode() if found else ""

    def run(self, build, inputs: list[tuple[int, tuple[int, int], bytes]]) -> bytes:
        """Bytes of the tensor that ``build(context, tensors)`` makes of input tensors (type, extents, bytes)."""
        context = self.base.ggml_init(_InitParams(1 << 20, None, True))
        tensors = [self.base.ggml_new_tensor_2d(context, kind, *extents) for kind, extents, _ in inputs]
        node = build(context, tensors)
        if not self.base.ggml_backend_dev_supports_op(self.device, node):
            self.base.ggml_free(context)
            raise KvfmtError(f"{self.name} does not support this operation")
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, node)
        buffer = self.base.ggml_backend_alloc_ctx_tensors(context, self.backend)
        for tensor, (_, _, data) in zip(tensors, inputs):
            assert self.base.ggml_nbytes(tensor) == len(data), (self.base.ggml_nbytes(tensor), len(data))
            self.base.ggml_backend_tensor_set(tensor, data, 0, len(data))
        status = self.base.ggml_backend_graph_compute(self.backend, graph)
        out = ctypes.create_string_buffer(self.base.ggml_nbytes(node))
        self.base.ggml_backend_tensor_get(node, out, 0, len(out))
        self.base.ggml_backend_buffer_free(buffer)
        self.base.ggml_free(context)
        if status:
            raise KvfmtError(f"{self.name}: the graph failed with status {status}")
        return out.raw


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def parity(backend: Backend, golden: list[Golden]) -> Iterator[tuple[str, dict]]:
    """By format: whether SET_ROWS writes the recorded bytes, and CPY to f32 reads the recorded floats, and the spec is the same."""
    for fmt in golden:
        facts, n = fmt.facts, fmt.facts["n_blocks"]
        index = b"".join(i.to_bytes(8, "little") for i in range(n))
        kind, block = facts["type_id"], facts["block"]
        written = backend.run(
            lambda c, t: backend.base.ggml_set_rows(c, t[0], t[1], t[2]),
            [(kind, (block, n), bytes(len(fmt.blocks))), (F32, (block, n), fmt.x), (I64, (n, 1), index)],
        )
        floats = backend.run(
            lambda c, t: backend.base.ggml_cpy(c, t[0], t[1]),
            [(kind, (block, n), fmt.blocks), (F32, (block, n), bytes(4 * block * n))],
        )
        size = facts["size"]
        wrong = sum(written[i : i + size] != fmt.blocks[i : i + size] for i in range(0, len(written), size))
        yield fmt.name, {
            "spec_hash": backend.spec_hash(kind),
            "same_spec": backend.spec_hash(kind) == facts["spec_hash"],
            "blocks": n,
            "blocks_that_differ": wrong,
            "same_floats": hashlib.sha256(floats).hexdigest() == facts["sha256_decoded"],
        }


def probe(folder: Path, kind: int) -> int:
    """What a process of its own does for the step "parity": the device in a line of JSON, then a line for every format."""
    try:
        backend = Backend(folder, kind)
        print(json.dumps({"device": backend.name, "description": backend.description}), flush=True)
        for name, found in parity(backend, recorded()):
            print(json.dumps({name: found}), flush=True)
    except KvfmtError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


@dataclass
class Check:
    """One run: where things are, what came out so far, and until when there is time."""

    folder: Path
    out: Path
    until: float
    device: str
    names: list[str]
    layers: list[str]
    report: dict = field(default_factory=dict)
    step_until: float = float("inf")

    def left(self) -> float:
        """Seconds that the run, and the step in it, still has."""
        return min(self.until, self.step_until) - time.monotonic()

    def step(self, name: str, needs: float, work) -> None:
        """Runs ``work(found)``, which fills a dict, unless fewer than ``needs`` seconds are left. A fault is kept beside what was found."""
        found = self.report[name] = {}
        if self.left() < needs:
            found["left_out"] = f"{self.left():.0f} s were left of the {needs:.0f} s that it takes"
        else:
            began = time.monotonic()
            self.step_until = began + (STEPS.get(name) or float("inf"))
            try:
                work(found)
            except (KvfmtError, OSError, subprocess.SubprocessError) as error:
                found["fault"] = str(error)[-2000:]
            self.step_until = float("inf")
            found["seconds"] = round(time.monotonic() - began, 1)
        self.save()
        print(f"{name}: {json.dumps(found)[:300]}", flush=True)

    def save(self) -> None:
        write_whole(self.out, json.dumps(self.report, indent=1, sort_keys=True) + "\n")

    def run(self, command: list[str]) -> tuple[str, str]:
        """What a process printed, and what is wrong with how it ended: empty if nothing is. Raises OSError if it does not start."""
        seconds = max(self.left(), 1)
        name = Path(command[0]).name
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=seconds, cwd=ROOT)
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode(errors="replace")  # bytes, whatever was asked for
            fault = f"{name} took longer than the {seconds:.0f} s that it had"
        else:
            said, fault = done.stdout, ""
            if done.returncode:
                how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
                fault = f"{name} ended with {how}:\n{(done.stdout + done.stderr)[-1500:]}"
        return re.sub(r"\x1b\[[0-9;]*m", "", said), fault

    def program(self, name: str, *arguments: str) -> str:
        """What a program of the build prints. Raises KvfmtError if it fails or takes longer than is left."""
        said, fault = self.run([str(self.folder / name), *arguments])
        if fault:
            raise KvfmtError(fault)
        return said

    def asking(self, kind: int) -> list[str]:
        """The command of :func:`probe`."""
        return [sys.executable, "-m", "bench.gpu_check", "--probe", str(self.folder), "--kind", str(kind)]

    def parity(self, found: dict, kind: int) -> None:
        """See :func:`parity`; also learns the device's name."""
        said, fault = self.run(self.asking(kind))
        for line in said.splitlines():
            if line.startswith("{"):
                found.update(json.loads(line))
        self.device, self.report["device"] = found.pop("device", ""), found.pop("description", "")
        if fault:
            raise KvfmtError(fault)

    def sanitizer(self, found: dict) -> None:
        """The step "parity" again, under compute-sanitizer: addresses, races in shared memory, and barriers that not all lanes reach."""
        nvcc = toolkit.installed()
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(nvcc.parent) if nvcc else "")
        if not program:
            found["left_out"] = "compute-sanitizer is not installed"
            return
        for tool in SANITIZERS:
            said, fault = self.run([program, "--tool", tool, "--error-exitcode", str(FOUND), *self.asking(GPU)])
            if f"status {FOUND}" in fault:
                found["fault"] = f"{tool}: {fault}"
            elif fault:  # it does not run everywhere
                found["left_out"] = f"{tool}: {fault}"
            found[tool] = [line for line in said.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
            self.save()

    def operations(self, op: str, cases: str) -> dict:
        """test-backend-ops: how many cases of an operation passed, and which did not. Raises KvfmtError if it does not say."""
        # a failed case is a status other than 0, too
        text, fault = self.run([str(self.folder / "test-backend-ops"), "test", "-b", self.device, "-o", op, "-p", cases])
        passed = re.search(r"(\d+)/(\d+) tests passed", text)
        if not passed:
            raise KvfmtError(fault or f"test-backend-ops said nothing of tests:\n{text[-1500:]}")
        return {
            "passed": int(passed[1]),
            "of": int(passed[2]),
            "not_supported": len(re.findall(r"not supported", text)),
            "failed": re.findall(r"^\s+(\w+\(.*\)): .*FAIL", text, re.MULTILINE)[:50],
        }

    def all_operations(self, found: dict, pairs: list[str]) -> None:
        ours = "|".join(self.names)
        listed = "|".join("type_K={},type_V={}".format(*pair.split("-")) for pair in pairs)
        for op, cases in (
            ("SET_ROWS", f"type_dst=({ours})(,|$)"),
            ("GET_ROWS", f"type=({ours})(,|$)"),
            ("CPY", f"type_(src|dst)=({ours})(,|$)"),
            ("MUL_MAT", f"type_a=({ours})(,|$)"),
            ("FLASH_ATTN_EXT", f"({listed}),"),
        ):
            try:
                found[op] = self.operations(op, cases)
            except KvfmtError as error:
                found[op] = {"fault": str(error)[-2000:]}
            self.save()

    def bandwidth(self, found: dict, sizes: dict[str, float], pairs: list[str], peak: float | None) -> None:
        """By pair: microseconds of one token's attention, and what it reads of K and V in a second, as a share of the peak."""
        listed = "|".join("type_K={},type_V={}".format(*pair.split("-")) for pair in pairs)
        shape = f"hsk={PERF_HEAD},.*kv={PERF_CELLS},nb=1,.*({listed}),"
        text, fault = self.run([str(self.folder / "test-backend-ops"), "perf", "-b", self.device, "-o", "FLASH_ATTN_EXT", "-p", shape])
        result: dict[str, dict] = {}
        for k, v, took in re.findall(r"type_K=(\w+),type_V=(\w+),.*?([\d.]+) us/run", text):
            read = PERF_HEADS * PERF_HEAD * PERF_CELLS * (sizes[k] + sizes[v]) / 8
            rate = read / (float(took) * 1e-6)
            result[f"{k}/{v}"] = {"us": float(took), "bytes": int(read), "GB_per_s": round(rate / 1e9, 1)}
            if peak:
                result[f"{k}/{v}"]["share_of_peak"] = round(rate / peak, 4)
        found.update({"peak_GB_per_s": peak and round(peak / 1e9, 1), "pairs": result})
        if fault:
            raise KvfmtError(f"{len(result)} of {len(pairs)} pairs were timed: {fault}")
        if not result:
            raise KvfmtError(f"test-backend-ops timed no attention of {PERF_CELLS} cells:\n{text[-1000:]}")

    def fidelity(self, found: dict, model: str, text: str, caches: list[str], chunks: int, singly: tuple[str, ...] = ()) -> None:
        """By cache: divergence from f16. A cache that fails leaves the others.

        Batches go through kernels that convert K and V first; the caches of ``singly`` are scored a token at a time as well, as they are
        read when text is generated.
        """
        base = str(self.out.resolve().with_suffix(".base"))
        common = ["-m", model, *self.layers, "-c", "1024", "-fa", "on", "--chunks", str(chunks)]
        runs = [(cache, cache, []) for cache in caches] + [(f"{cache}, single tokens", cache, ["-ub", "1"]) for cache in singly]
        try:
            self.program("llama-perplexity", *common, "-f", text, "--kl-divergence-base", base)
            for name, cache, more in runs:
                if self.left() < 5:
                    found["left_out"] = f"the time was over before {name}"
                    return
                k, v = cache.split("/")
                arguments = [*common, *more, "--kl-divergence-base", base, "--kl-divergence", "-ctk", k, "-ctv", v, "--kv-protect", "0"]
                try:
                    said = self.program("llama-perplexity", *arguments)
                except KvfmtError as error:
                    found["fault"] = f"{name}: {error}"
                    continue
                kld = re.search(r"Mean\s+KLD:\s+(\S+) ±\s+(\S+)", said)
                same = re.search(r"Same top p:\s+(\S+) ±", said)
                if kld and same:
                    found[name] = {"mean_kld": float(kld[1]), "error": float(kld[2]), "same_top_percent": float(same[1])}
                else:
                    found["fault"] = f"llama-perplexity printed no divergence for {name}"
                self.save()
        finally:
            Path(base).unlink(missing_ok=True)

    def speed(self, found: dict, model: str, caches: list[str], depths: tuple[int, ...], rounds: int) -> None:
        """Tokens a second of every turn; caches take turns, so that a clock that changes meets all of them. One that fails is left out."""
        result: dict[str, dict[str, list[float]]] = {cache: {} for cache in caches}
        found.update({"model": Path(model).name, "turns": 0, "caches": result})
        well = list(caches)
        for turn in range(rounds):
            for cache in list(well):
                if self.left() < 15:
                    found["left_out"] = "the time was over in the middle of a round"
                    return
                k, v = cache.split("/")
                arguments = ["-m", model, *self.layers, "-fa", "1", "-ctk", k, "-ctv", v, "-kvp", "0", "-p", "512", "-n", "32", "-r", "1"]
                try:
                    said = self.program("llama-bench", *arguments, "-d", ",".join(map(str, depths)), "-o", "json")
                except KvfmtError as error:
                    found["fault"] = f"{cache}: {error}"
                    well.remove(cache)
                    continue
                for row in json.loads(said):
                    what = "decode" if row["n_gen"] else "prefill"
                    result[cache].setdefault(f"{what}@{row['n_depth']}", []).append(round(row["avg_ts"], 2))
                self.save()
            found["turns"] = turn + 1


def peak_bandwidth() -> float | None:
    """Bytes a second of the first GPU's memory: twice its clock times its bus. None if the driver does not say."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, clock, bus = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory_clock_rate, memory_bus_width = 36, 37  # CUdevice_attribute; kHz, bits
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(clock), memory_clock_rate, device):
        return None
    if cuda.cuDeviceGetAttribute(ctypes.byref(bus), memory_bus_width, device):
        return None
    return 2.0 * clock.value * 1000 * bus.value / 8 or None


def gpu_facts() -> dict:
    """Name, driver and compute capability as nvidia-smi says them. Raises MissingTool."""
    fields = ("name", "driver_version", "compute_cap", "memory.total", "clocks.max.memory")
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    except OSError:
        raise MissingTool("nvidia-smi is missing, so there is no NVIDIA driver", "Run this on a machine with an NVIDIA GPU.") from None
    if done.returncode or not done.stdout.strip():
        raise MissingTool(f"nvidia-smi sees no GPU: {(done.stdout + done.stderr).strip()}", "Run this on a machine with an NVIDIA GPU.")
    return dict(zip(fields, (part.strip() for part in done.stdout.splitlines()[0].split(","))))


def build(tree: Path, folder: Path, arch: str, seconds: float) -> None:
    """Configures and compiles what the checks need. Raises MissingTool, BuildFailed."""
    for tool, why in (("cmake", "configure"), ("c++", "compile")):
        if not shutil.which(tool):
            raise MissingTool(f"{tool} is missing, and without --bin there is nothing to {why} with", "Install it, or give --bin.")
    nvcc = toolkit.installed()
    if not nvcc:
        hint = "Install it, name it in CUDACXX, or give --bin."
        raise MissingTool(f"nvcc of CUDA {toolkit.OLDEST} or later is missing, and without --bin there is nothing to compile with", hint)
    packaged = None
    if "cublas" in cublas.lacking(nvcc):
        major = toolkit.release(nvcc)[0]
        packaged = cublas.of_packages(major, sys.path)
        if not packaged:
            hint = f"Install the whole toolkit, run this with a Python that has the package nvidia-cublas of CUDA {major}, or give --bin."
            raise MissingTool(f"the toolkit of {nvcc} has no cuBLAS, and without --bin it is needed to link with", hint)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    more = (packaged / "lib",) if packaged else ()
    flags = [*FLAGS, *toolkit.flags(nvcc, arch, more), *cublas.flags(nvcc, packaged, folder / "libraries")]
    until = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    jobs = str(os.cpu_count() or 1)
    print(f"compiling for architecture {arch} with {jobs} jobs; see {log}", flush=True)
    with log.open("w") as said:
        for command in (
            ["cmake", "-S", str(tree), "-B", str(folder), *generator, *flags],
            ["cmake", "--build", str(folder), "-j", jobs, "--target", *TARGETS],
        ):
            running = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = running.wait(max(until - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGTERM)  # with the compilers that it started
                hint = "Run the same command again: it goes on; or give --bin or --minutes."
                raise BuildFailed("the build is not done, and the time is over", hint) from None
            if status:
                raise BuildFailed(f"{' '.join(command[:2])} failed:\n{log.read_text(errors='replace')[-3000:]}")


def find_libraries(folder: Path) -> None:
    """Adds to LD_LIBRARY_PATH the folders of the toolkit and of Python's packages that hold what libggml-cuda does not find by itself.

    A build that was brought along knows the folders of the machine that it was made on. Raises MissingTool if something is in none.
    """
    library = folder / "libggml-cuda.so"
    lacking = toolkit.not_found(library) if library.exists() else []
    if not lacking:
        return
    nvcc = toolkit.installed()
    places = toolkit.folders(nvcc) if nvcc else []
    places += [found for place in sys.path for found in sorted(Path(place).glob("nvidia/*/lib"))]
    added = list(dict.fromkeys(str(next(p for p in places if (p / name).exists())) for name in lacking if any((p / name).exists() for p in places)))
    os.environ["LD_LIBRARY_PATH"] = ":".join([*filter(None, [os.environ.get("LD_LIBRARY_PATH")]), *added])
    if lacking := toolkit.not_found(library):
        hint = "libcuda.so.1 comes with the driver, the others with CUDA's toolkit: add their folder to LD_LIBRARY_PATH."
        raise MissingTool(f"{library} needs {', '.join(lacking)}, which the loader does not find", hint)


def missing(options: argparse.Namespace) -> list[str]:
    """What was not given or is not there, a line each."""
    wanted = []
    if options.model or options.text:
        wanted += [("--model", options.model, "a GGUF file such as SmolLM2 (`kvfmt models fetch`)"), ("--text", options.text, "a text to score")]
    if options.bin:
        wanted += [("--bin", options.bin / name, "a program of the build") for name in TARGETS]
        wanted += [("--bin", options.bin / "libggml-base.so", "a library of the build")]
    else:
        wanted += [("--tree", options.tree / "ggml" / "src" / "ggml-cuda" / "kvq.cuh" if options.tree else None, "the patched llama.cpp")]
    return [f"{flag}: {what}" + (f", {path} is not there" if path else "") for flag, path, what in wanted if not path or not path.exists()]


def type_bits(golden: list[Golden]) -> dict[str, float]:
    """Allocated bits per value of every type that is timed."""
    return {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5} | {g.name: 8 * g.facts["size"] / g.facts["block"] for g in golden}


def compiled_pairs() -> list[str]:
    """The pairs whose template instances the patches of this repository add."""
    names = {Path(file).name for _, series in load_all(get_pin()) for file in series.files}
    found = [match[1] for name in names if (match := re.fullmatch(r"kvq-fattn-vec-instance-(.+)\.cu", name))]
    return sorted(found)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu_check.sh", description="The checks that need a GPU.")
    parser.add_argument("--tree", type=Path, help="the patched llama.cpp, build/<pin>/src/vendor/llama.cpp of a `kvfmt build`; not needed with --bin")
    parser.add_argument("--bin", type=Path, help="programs and libraries of a finished CUDA build; without it one is made")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu-check", help="where the build goes")
    parser.add_argument("--model", type=Path, help="scored and timed; without it both are left out")
    parser.add_argument("--speed-model", type=Path, help="timed instead, where that should be a larger one")
    parser.add_argument("--text", type=Path, help="scored")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--arch", help="CUDA architecture (default: the GPU's)")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rehearse-on-cpu", action="store_true", help="the same steps on the CPU device of --bin: no GPU result")
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", type=int, default=GPU, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("tree", "bin", "work", "model", "speed_model", "text", "out"):  # programs run in another folder
        if path := getattr(options, name):
            setattr(options, name, path.resolve())
    return options


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 if every step that ran passed, 2 if some were left out, 1 if one failed."""
    options = options_of(arguments)
    if options.probe:
        return probe(options.probe, options.kind)
    until = time.monotonic() + 60 * options.minutes
    try:
        if lacking := missing(options):
            raise MissingTool("not everything that the check needs is here:\n  " + "\n  ".join(lacking), "Nothing is downloaded; see --help.")
        rehearsal = options.rehearse_on_cpu
        facts = {"name": f"none: a rehearsal on {platform.machine()}"} if rehearsal else gpu_facts()
        folder = (options.bin or options.work / "bin").resolve()
        took = time.monotonic()
        if not options.bin:
            build(options.tree, options.work, options.arch or facts["compute_cap"].replace(".", ""), until - time.monotonic())
        took = time.monotonic() - took
        if not rehearsal:
            find_libraries(folder)
    except KvfmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    golden = recorded()
    check = Check(folder, options.out, until, "", [g.name for g in golden], [] if rehearsal else ["-ngl", "99"])
    check.report = {
        "gpu": facts,
        "rehearsal": rehearsal,
        "build": {"pin": get_pin().name, "series": hash_all(load_all(get_pin())), "compiled_here_s": None if options.bin else round(took, 1)},
    }
    if options.model:
        check.report["model"] = {"file": options.model.name, "sha256": hashlib.sha256(options.model.read_bytes()).hexdigest()}
        check.report["text_sha256"] = hashlib.sha256(options.text.read_bytes()).hexdigest()
    check.save()
    pairs = compiled_pairs()
    scale = REHEARSAL if rehearsal else Scale()
    caches = list(scale.caches)
    stock = [cache.replace("/", "-") for cache in STOCK]
    timed = options.speed_model or options.model
    check.step("parity", 5, lambda found: check.parity(found, 0 if rehearsal else GPU))
    if not check.device:  # nothing else can run
        return verdict(check.report)
    chosen = [*stock, *pairs] if scale.all_pairs else pairs[-1:]
    check.step("operations", 30, lambda found: check.all_operations(found, pairs))
    if options.model:
        check.step("fidelity", 30, lambda found: check.fidelity(found, str(options.model), str(options.text), caches[1:], scale.chunks, scale.singly))
    else:
        check.report["fidelity"] = {"left_out": "no --model"}
    if timed:
        check.step("speed", 30, lambda found: check.speed(found, str(timed), caches, scale.depths, scale.rounds))
    else:
        check.report["speed"] = {"left_out": "no --model"}
    if not rehearsal:
        check.step("sanitizer", 20, check.sanitizer)
    check.step("bandwidth", 20, lambda found: check.bandwidth(found, type_bits(golden), chosen, None if rehearsal else peak_bandwidth()))
    return verdict(check.report)


def verdict(report: dict) -> int:
    """Prints what is wrong or was left out; the exit status."""
    steps = {name: report[name] for name in STEPS if name in report}
    faults = [f"{name}: {step['fault']}" for name, step in steps.items() if "fault" in step]
    left_out = [name for name, step in steps.items() if "left_out" in step]
    for name, found in steps.get("parity", {}).items():
        if isinstance(found, dict) and not (found["same_spec"] and found["same_floats"] and found["blocks_that_differ"] == 0):
            faults.append(f"parity of {name}: {found}")
    for op, found in steps.get("operations", {}).items():
        if isinstance(found, dict) and "fault" in found:
            faults.append(f"test-backend-ops {op}: {found['fault']}")
        elif isinstance(found, dict) and (found["passed"] != found["of"] or found["of"] == 0):
            faults.append(f"test-backend-ops {op}: {found['passed']} of {found['of']}")
    for fault in faults:
        print(f"FAILED {fault}", file=sys.stderr)
    if left_out:
        print(f"left out: {', '.join(left_out)}", file=sys.stderr)
    return 1 if faults else 2 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
