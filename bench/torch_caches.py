"""Caches in transformers beside llama.cpp's: fidelity on the same tokens, memory and speed of generate().

    python -m bench.torch_caches fidelity --tokens 1024 --profile smollm2.kvt3.gguf
    python -m bench.torch_caches memory
    python -m bench.torch_caches speed --tokens 256
    python -m bench.torch_caches table

The model is one file, opened by both. Each side's caches are held against its own f16 cache; how far the two forward passes are
from each other with f16 caches is a row of its own. Quanto and HQQ are transformers' own quantized caches, as they come: they
need their packages (the extra "baselines"), and keep the newest tokens unquantized. All rows go to bench/results/torch.json; one of
the fidelity that is there is not measured again.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from bench.caches import Cache
from bench.divergence import Scores, compare, metrics
from kvfmt.build.console import console, progress
from kvfmt.build.files import write_whole
from kvfmt.errors import KvfmtError
from kvfmt.subjects import find_model, find_text

RESULTS = Path(__file__).parent / "results" / "torch.json"
CACHES = ("f16", "q8_0", "q4_0", "kvq4", "kve8_3/kve8_2", "kvq3/kvq2", "kvq3/kvq2:2")
#: transformers' own: title, backend, bits.
BASELINES = (("quanto, 4 bits", "quanto", 4), ("hqq, 4 bits", "hqq", 4), ("quanto, 2 bits", "quanto", 2), ("hqq, 2 bits", "hqq", 2))
#: The row that says how far the two forward passes are from each other.
BETWEEN = "transformers against llama.cpp"
#: Tokens that both engines run at a time.
STEP = 64


def baseline(config: Any, backend: str, bits: int) -> Any:
    """transformers' quantized cache with its own defaults, but for HQQ's axes, which its documentation wants to be 1."""
    from transformers.cache_utils import QuantizedCache

    return QuantizedCache(backend, config, nbits=bits, **({"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}))


def storage(found: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors that an object holds, each storage once, however they are wrapped."""
    import torch

    seen = set() if seen is None else seen
    if id(found) in seen:
        return 0
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        if type(found) not in (torch.Tensor, torch.nn.Parameter):
            if hasattr(found, "__tensor_flatten__"):
                return sum(storage(getattr(found, name), seen) for name in found.__tensor_flatten__()[0])
            return sum(storage(value, seen) for value in vars(found).values())
        place = found.untyped_storage()
        key = place.data_ptr()
        if not key or key in seen:
            return 0
        seen.add(key)
        return place.nbytes()
    if isinstance(found, dict):
        return sum(storage(value, seen) for value in found.values())
    if isinstance(found, (list, tuple)):
        return sum(storage(value, seen) for value in found)
    module = type(found).__module__
    if module.startswith(("transformers.cache_utils", "kvfmt.torch")):
        return sum(storage(value, seen) for value in vars(found).values())
    return 0


def _held() -> dict[str, list[dict]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _save(kind: str, rows: list[dict]) -> None:
    write_whole(RESULTS, json.dumps({**_held(), kind: rows}, indent=1) + "\n")


def _score(base: np.ndarray, other: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    out = Scores.empty(len(targets))
    with ThreadPoolExecutor(1) as pool:
        compare(base, other, targets, out, pool, 1)
    found = metrics(out)
    return {name: [found[name].value, found[name].error] for name in ("kld", "kld_999", "same_top", "ppl_ratio", "ppl")}


def fidelity(model_name: str, text: str, count: int, caches: list[Cache]) -> None:
    """KLD of every cache from its own engine's f16, over the second half of ``count`` tokens."""
    from bench.engine import Engine

    subject = find_model(model_name)
    first, identity = count // 2, {"model": model_name, "text": text, "tokens": count, "step": STEP}
    before = [run for run in _held().get("fidelity", ()) if {key: run[key] for key in identity} == identity]
    rows = before[0]["rows"] if before else []
    there = {(row["engine"], row["cache"]) for row in rows}
    with Engine(subject.path) as engine:
        tokens = engine.tokenize(find_text(text).content[: 16 * count])[:count]
        targets = tokens[first + 1 :]

        def native(cache: Cache) -> tuple[np.ndarray, float]:
            with engine.open(cache, count, STEP) as session:
                parts = [session.decode(tokens[at : at + STEP], 0).copy() for at in range(0, count, STEP)]
                return np.concatenate(parts)[first:-1], session.allocated.bits_without_maps

        def keep(row: dict) -> None:
            # Each takes a while: an interrupted run goes on where it was.
            rows.append(row)
            _save("fidelity", [{**identity, "scored": len(targets), "rows": rows}])

        base, _ = native(Cache("f16"))
        wanted = [cache for cache in caches if cache.kv != "f16" and ("llama.cpp", cache.title) not in there]
        with progress("llama.cpp", len(wanted)) as update:
            for done, cache in enumerate(wanted):
                made, bits = native(cache)
                keep({"engine": "llama.cpp", "cache": cache.title, "bits": bits, **_score(base, made, targets)})
                update(done + 1, len(wanted))
    for row in transformers_rows(subject.path, tokens, first, caches, base, there):
        keep(row)


def transformers_rows(path: Path, tokens: np.ndarray, first: int, caches: list[Cache], native: np.ndarray, there: set) -> Iterator[dict]:
    """A row for each cache in transformers that is not ``there``, the first f16 against ``native``, llama.cpp's logits with f16."""
    import torch

    from kvfmt.torch import PackedCache, logits, open_gguf

    torch.set_num_threads(2)
    model, _ = open_gguf(path)
    targets = tokens[first + 1 :]
    values = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim * len(tokens)

    def run(cache: Any) -> np.ndarray:
        return np.concatenate([part.numpy() for part in logits(model, tokens, cache, STEP)])[first:-1]

    def packed(cache: Cache) -> Any:
        return PackedCache(model.config, cache.kv or None, cache.protect, cache.profile)

    base = run(packed(Cache("f16")))
    if (BETWEEN, "f16") not in there:
        yield {"engine": BETWEEN, "cache": "f16", "bits": 16.0, **_score(native, base, targets)}
    jobs: list[tuple[str, Callable[[], Any]]] = [(cache.title, lambda cache=cache: packed(cache)) for cache in caches if cache.kv != "f16"]
    jobs += [(title, lambda b=backend, n=bits: baseline(model.config, b, n)) for title, backend, bits in BASELINES]
    jobs = [job for job in jobs if ("transformers", job[0]) not in there]
    with progress("transformers", len(jobs)) as update:
        for done, (title, make) in enumerate(jobs):
            try:
                cache = make()
            except ImportError as error:
                console.print(f"{title}: left out, {error}")
                continue
            made = run(cache)
            bits = cache.memory().bits_per_value if isinstance(cache, PackedCache) else 8 * storage(cache) / values
            yield {"engine": "transformers", "cache": title, "bits": bits, **_score(base, made, targets)}
            update(done + 1, len(jobs))


def _resident() -> tuple[int, int]:
    """Bytes of memory that this process has now, and has had at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


#: The cache that is filled to weigh it: SmolLM2's shape, four sequences of 4,096 tokens.
SHAPE = {"layers": 30, "batch": 4, "heads": 3, "tokens": 4096, "size": 64}


def weigh(title: str) -> None:
    """Fills one cache in this process and prints what it takes. Keys and values are Gaussian: memory does not depend on them."""
    import torch
    from transformers import DynamicCache, LlamaConfig

    from kvfmt.torch import PackedCache

    torch.set_num_threads(1)
    config = LlamaConfig(
        num_hidden_layers=SHAPE["layers"], num_key_value_heads=SHAPE["heads"], num_attention_heads=9, head_dim=SHAPE["size"], hidden_size=576
    )

    def make() -> Any:
        if title.startswith("DynamicCache"):
            return DynamicCache(config=config)
        for name, backend, bits in BASELINES:
            if title == name:
                return baseline(config, backend, bits)
        cache = Cache.parse(title)
        return PackedCache(config, cache.kv, cache.protect)

    dtype = torch.float16 if title.endswith("f16") and title.startswith("Dynamic") else torch.float32
    torch.manual_seed(0)

    def fill(cache: Any, tokens: int) -> Any:
        x = torch.randn(SHAPE["batch"], SHAPE["heads"], 512, SHAPE["size"], dtype=torch.float32).to(dtype)
        for _ in range(0, tokens, 512):
            for layer in range(SHAPE["layers"]):
                cache.update(x, x, layer)
        return cache

    fill(make(), 512)  # what is loaded and compiled once is not the cache's
    before, _ = _resident()
    # From here on the highest mark counts.
    Path("/proc/self/clear_refs").write_text("5")
    cache = fill(make(), SHAPE["tokens"])
    after, peak = _resident()
    values = 2 * SHAPE["layers"] * SHAPE["batch"] * SHAPE["heads"] * SHAPE["tokens"] * SHAPE["size"]
    print(json.dumps({"cache": title, "tensors": storage(cache), "resident": after - before, "peak": peak - before, "bits": 8 * storage(cache) / values}))


def memory(titles: list[str]) -> None:
    """Each cache in a process of its own."""
    rows = []
    with progress("memory", len(titles)) as update:
        for done, title in enumerate(titles):
            made = subprocess.run([sys.executable, "-m", "bench.torch_caches", "weigh", title], capture_output=True, text=True)
            if made.returncode:
                raise KvfmtError(f"{title} could not be weighed:\n{made.stderr[-2000:]}", "Is its package installed?")
            rows.append(json.loads(made.stdout.splitlines()[-1]))
            update(done + 1, len(titles))
    _save("memory", [{**SHAPE, "rows": rows}])


def speed(model_name: str, prompt: int, new: int, titles: list[str]) -> None:
    """What greedy generate() takes after a prompt, in seconds of one core: other work on the machine does not count."""
    import numba
    import torch
    from transformers import DynamicCache

    from kvfmt.torch import PackedCache, open_gguf

    torch.set_num_threads(1)
    numba.set_num_threads(1)
    model, tokenizer = open_gguf(find_model(model_name).path)
    ids = tokenizer(find_text("docs").content[: 16 * prompt], return_tensors="pt").input_ids[:, :prompt]

    def make(title: str) -> Any:
        if title == "DynamicCache":
            return DynamicCache(config=model.config)
        for name, backend, bits in BASELINES:
            if title == name:
                return baseline(model.config, backend, bits)
        cache = Cache.parse(title)
        return PackedCache(model.config, cache.kv, cache.protect)

    rows = []
    for title in titles:
        times = []
        for length in (2, 1, 1 + new):  # the first warms up
            cache = make(title)
            start = time.process_time()
            model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, min_new_tokens=length, max_new_tokens=length, do_sample=False)
            times.append(time.process_time() - start)
        rows.append({"cache": title, "prompt_seconds": times[1], "seconds_per_token": (times[2] - times[1]) / new})
        console.print(f"{title}: prompt {times[1]:.1f} s, {1000 * rows[-1]['seconds_per_token']:.0f} ms a token")
        _save("speed", [{"model": model_name, "prompt": prompt, "new": new, "rows": rows}])


def table() -> str:
    """The results as Markdown."""
    held = _held()
    lines = []
    for run in held.get("fidelity", ()):
        own = {(row["engine"], row["cache"]): row for row in run["rows"]}
        lines += ["| cache (K/V) | bits/value | KLD, transformers | KLD, llama.cpp | same top token | PPL ratio |", "|---|---:|---:|---:|---:|---:|"]
        for (engine, cache), row in own.items():
            if engine == "llama.cpp":
                continue
            other = own.get(("llama.cpp", cache)) if engine == "transformers" else None
            name = f"f16, {engine}" if engine == BETWEEN else cache
            lines.append(
                f"| {name} | {row['bits']:.2f} | {_pm(row['kld'], 4)} | {_pm(other['kld'], 4) if other else ''} |"
                f" {100 * row['same_top'][0]:.1f} % | {_pm(row['ppl_ratio'], 3)} |"
            )
    for run in held.get("memory", ()):
        lines += ["", "| cache | MB of tensors | MB resident | MB at most while it was filled | bits/value |", "|---|---:|---:|---:|---:|"]
        lines += [f"| {row['cache']} | {row['tensors'] / 1e6:.0f} | {row['resident'] / 1e6:.0f} | {row['peak'] / 1e6:.0f} | {row['bits']:.2f} |" for row in run["rows"]]
    for run in held.get("speed", ()):
        lines += ["", f"| cache | prompt of {run['prompt']}, s of one core | a token, ms of one core |", "|---|---:|---:|"]
        lines += [f"| {row['cache']} | {row['prompt_seconds']:.1f} | {1000 * row['seconds_per_token']:.0f} |" for row in run["rows"]]
    return "\n".join(lines)


def _pm(pair: list[float], digits: int) -> str:
    return f"{pair[0]:.{digits}f}" + (f" ± {pair[1]:.{digits}f}" if pair[1] is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fidelity", "memory", "speed", "weigh", "table"))
    parser.add_argument("cache", nargs="*", help="caches instead of the usual ones")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="docs")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--profile", type=Path, help="adds kvt3/kve8_2 under this profile")
    parser.add_argument("--new", type=int, default=32, help="tokens that speed generates")
    chosen = parser.parse_args()
    if chosen.what == "fidelity":
        caches = [Cache.parse(text) for text in (*(chosen.cache or CACHES), *([f"kvt3/kve8_2@{chosen.profile}"] if chosen.profile else ()))]
        fidelity(chosen.model, chosen.text, chosen.tokens, caches)
    elif chosen.what == "memory":
        memory(chosen.cache or ["DynamicCache, f32", "DynamicCache, f16", *CACHES, *(title for title, _, _ in BASELINES)])
    elif chosen.what == "speed":
        speed(chosen.model, chosen.tokens, chosen.new, chosen.cache or ["DynamicCache", "f16", "kvq4", "kvq3/kvq2", BASELINES[0][0], BASELINES[1][0]])
    elif chosen.what == "weigh":
        weigh(chosen.cache[0])
    else:
        console.print(table(), soft_wrap=True)


if __name__ == "__main__":
    main()
