"""A build for NVIDIA GPUs: which nvcc, which architectures, and what our kernels cost in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvfmt.build import console, cublas, nvcc, toolkit
from kvfmt.build.toolkit import installed, release
from kvfmt.errors import KvfmtError, MissingTool

#: Object files of the backend, and ours among them.
_CUDA_OBJECT = re.compile(r"ggml-cuda\.dir/.*\.cu\.o$")
_OUR_OBJECT = re.compile(r"/kvq[^/]*\.cu\.o$")

_ARCHITECTURE = re.compile(r"(\d{2,3})([af]?)(-real|-virtual)?")
_EXAMPLES = "80 (A100), 86 (RTX 30), 89 (RTX 40, L40S), 90 (H100, H200), 100 (B200), 120 (RTX 50)"


@dataclass(frozen=True)
class CudaBuild:
    """The compiler, its list of architectures, separated by semicolons, and the folder of cuBLAS where the toolkit has none."""

    nvcc: str
    architectures: str
    cublas: Path | None = None

    def flags(self, folder: Path) -> tuple[str, ...]:
        """What CMake is told. Below the folder it finds the libraries that the toolkit lacks. Raises what cublas.flags raises."""
        compiler = Path(self.nvcc)
        more = (self.cublas / "lib",) if self.cublas else ()
        return (*toolkit.flags(compiler, self.architectures, more), *cublas.flags(compiler, self.cublas, folder))


def find_nvcc() -> Path:
    """nvcc of an installed toolkit that has cuBLAS or that the packaged cuBLAS fits, else the packaged nvcc; what $CUDACXX names in any case.

    Raises MissingTool, and what nvcc.packaged raises.
    """
    own = os.environ.get("CUDACXX")
    if own and not (shutil.which(own) and release(Path(own))):
        raise MissingTool(f"CUDACXX={own} does not run", "Set it to the nvcc of a CUDA toolkit, or unset it.")
    found = installed()
    if found and (own or "cublas" not in cublas.lacking(found) or _fits(found)):
        return found
    if found:
        console.step(f"{found} has no cuBLAS, and the packaged one is of another release: nvcc is taken from packages too")
    return nvcc.packaged()


def find_cublas(compiler: Path) -> Path | None:
    """The folder of the packaged cuBLAS if this toolkit has none and it fits; None if not. Raises what nvcc.packaged_cublas raises."""
    return nvcc.packaged_cublas() if "cublas" in cublas.lacking(compiler) and _fits(compiler) else None


def _fits(compiler: Path) -> bool:
    return release(compiler)[0] == nvcc.cublas_major()


def gpu_architectures() -> list[str]:
    """Compute capabilities of the GPUs that the driver sees, such as "90"; empty without one."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    except OSError:
        return []
    found = re.findall(r"^(\d+)\.(\d+)\s*$", done.stdout, re.MULTILINE) if done.returncode == 0 else []
    return sorted({major + minor for major, minor in found}, key=int)


def known_architectures(compiler: Path) -> list[str]:
    """What this nvcc compiles for; empty if it does not say."""
    done = subprocess.run([compiler, "--list-gpu-arch"], capture_output=True, text=True, check=False)
    return sorted(set(re.findall(r"compute_(\d+)\b", done.stdout)), key=int)


def architectures(asked: str | None) -> list[str]:
    """What ``asked`` names ("80;86;90", also with commas; "native"), or without it the architectures of the GPUs of this machine.

    Raises KvfmtError if there is no GPU to go by, or if an entry is no architecture.
    """
    wanted = [part.strip() for part in re.split(r"[;,]", asked or "native") if part.strip()]
    if wanted == ["native"]:
        wanted = gpu_architectures()
        if not wanted:
            raise KvfmtError(
                "no NVIDIA GPU is seen here, so there is nothing that \"native\" could mean",
                f"Name what the build is for: --cuda-arch {_EXAMPLES}; several: --cuda-arch '80;90'.",
            )
    if not wanted:
        raise KvfmtError(f"--cuda-arch: {asked!r} names no CUDA architecture", f"Numbers, separated by semicolons: {_EXAMPLES}.")
    for entry in wanted:
        if not _ARCHITECTURE.fullmatch(entry):
            raise KvfmtError(f"--cuda-arch: {entry!r} is no CUDA architecture", f"Numbers, separated by semicolons: {_EXAMPLES}.")
    return wanted


def check_known(wanted: list[str], compiler: Path) -> None:
    """Raises KvfmtError if this nvcc does not compile for one of the architectures."""
    known = known_architectures(compiler)
    for entry in wanted:
        if known and _ARCHITECTURE.fullmatch(entry)[1] not in known:
            raise KvfmtError(f"--cuda-arch: {compiler} does not compile for {entry}", f"It knows {', '.join(known)}.")


def choose(asked: str | None) -> CudaBuild:
    """The build for what is asked for, which is checked before anything is downloaded.

    Raises what :func:`architectures`, :func:`check_known`, :func:`find_nvcc` and :func:`find_cublas` raise.
    """
    wanted = architectures(asked)
    compiler = find_nvcc()
    check_known(wanted, compiler)
    return CudaBuild(str(compiler), ";".join(wanted), find_cublas(compiler))


@dataclass(frozen=True)
class Share:
    """Files, seconds of compiler time and bytes of some object files."""

    files: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class CudaCost:
    """What the CUDA backend cost to compile, and our files' part of it; the library's size in bytes, 0 if there is none."""

    all: Share
    ours: Share
    library: int

    def lines(self) -> list[str]:
        """What `kvfmt build --cuda` prints: with our kernels, without them, and the difference."""
        rest = Share(self.all.files - self.ours.files, self.all.seconds - self.ours.seconds, self.all.bytes - self.ours.bytes)
        rows = [("CUDA objects", self.all), ("  without the kvq files", rest), ("  the kvq files", self.ours)]
        lines = [f"{name:24} {s.files:4} files, {s.seconds:7.0f} s of one compiler, {s.bytes / 1e6:7.1f} MB" for name, s in rows]
        return [*lines, f"{'libggml-cuda':24} {self.library / 1e6:.1f} MB"] if self.library else lines


def measured(folder: Path) -> CudaCost:
    """What ninja's log and the objects of a build folder say. An object that was compiled twice counts once, the last time."""
    times: dict[str, float] = {}
    for line in (folder / ".ninja_log").read_text().splitlines():
        columns = line.split("\t")
        if len(columns) >= 4 and _CUDA_OBJECT.search(columns[3]) and (folder / columns[3]).exists():
            times[columns[3]] = (int(columns[1]) - int(columns[0])) / 1000

    def share(names: list[str]) -> Share:
        return Share(len(names), sum(times[n] for n in names), sum((folder / n).stat().st_size for n in names))

    library = folder / "bin" / "libggml-cuda.so"
    return CudaCost(
        share(list(times)),
        share([name for name in times if _OUR_OBJECT.search(name)]),
        library.stat().st_size if library.exists() else 0,
    )
