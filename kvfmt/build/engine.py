"""The order of the steps of `kvfmt build`."""

from __future__ import annotations

from pathlib import Path

from kvfmt.build import console
from kvfmt.build.compile import CUDA_LIBRARY, LIBRARIES, LIBRARIES_BESIDE, TESTS, TOOLS, build_tools, check_compilers
from kvfmt.build.cuda import choose
from kvfmt.build.lock import locked
from kvfmt.build.paths import build_dir
from kvfmt.build.pins import get_pin
from kvfmt.build.toolkit import not_found
from kvfmt.build.tree import sync_src
from kvfmt.build.wheel import build_wheel, install_wheel, wheel_version


def run_build(
    pin_name: str | None = None,
    *,
    targets: tuple[str, ...] | None = None,
    tools_only: bool = False,
    jobs: int | None = None,
    discard_edits: bool = False,
    cuda: bool = False,
    cuda_arch: str | None = None,
    portable: bool = False,
) -> None:
    """Fetches, patches, compiles, packs and installs; each step only if what it depends on changed.

    With `targets`, or `tools_only`, no wheel is made. `cuda` adds the backend for NVIDIA GPUs, for the architectures
    `cuda_arch` (see cuda.choose); `portable` makes it for other processors than the one at hand. Raises a KvfmtError that says what
    to do.
    """
    pin = get_pin(pin_name)
    check_compilers()  # before anything is downloaded
    gpu = choose(cuda_arch) if cuda or cuda_arch else None
    libraries = (*LIBRARIES, CUDA_LIBRARY) if gpu else LIBRARIES
    with locked(build_dir(pin.name)):
        series_hash = sync_src(pin, discard_edits=discard_edits)
        wanted = targets or (TOOLS if tools_only else TOOLS + TESTS + libraries)
        binaries = build_tools(pin, wanted, jobs=jobs, cuda=gpu, portable=portable)
        if not targets and not tools_only:
            from cpp_patch.apply import load_all

            version = wheel_version(pin, series_hash, patched=bool(load_all(pin)), cuda=gpu is not None)
            wheel = build_wheel(pin, binaries, version, libraries)
            if gpu and (lacking := not_found(binaries / f"lib{CUDA_LIBRARY}.so")):
                _say_not_installed(wheel, lacking, binaries.parent / LIBRARIES_BESIDE / "stubs")
            else:
                install_wheel(wheel, version)
    console.step(f"tools: {binaries}")


def _say_not_installed(wheel: Path, lacking: list[str], stubs: Path) -> None:
    """A wheel that does not load here would leave this Python without llama_cpp."""
    names = ", ".join(lacking)
    console.step(f"not installed, because nothing here has {names} to load it with: {wheel}")
    if "libcuda.so.1" in lacking and stubs.exists():
        console.step(f"libcuda.so.1 comes with the driver; without one the programs start, on the CPU, with LD_LIBRARY_PATH={stubs}")
