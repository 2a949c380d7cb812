"""Freezes what a format encodes today: python -m tests.golden.record FORMAT. Never overwrites.

Once recorded, these bytes must decode for ever. A format whose encoder chooses otherwise under the same layout and decoder
is a new version, with its own record beside the old one; another layout or decoder also takes a new type id.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from kvfmt import registry

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import golden_files as files  # noqa: E402
from edge_inputs import edge_rows, random_rows  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__.split("\n")[0])
    parser.add_argument("format", choices=[f.spec.name for f in registry.all_formats()])
    fmt = registry.get(parser.parse_args(argv).format)
    target = files.folder(fmt)
    if target.exists():
        print(
            f"error: {target} is recorded already. If {fmt.spec.name} changed, raise its version; if old blocks would decode"
            " to other values, take a new type id too.",
            file=sys.stderr,
        )
        return 1
    x = np.ascontiguousarray(np.concatenate([edge_rows(), random_rows(files.N_RANDOM, fmt.spec.type_id)]), "<f4")
    x = x.reshape(-1, fmt.spec.block)
    blocks = fmt.encode(x)
    target.mkdir(parents=True)
    (target / "input.f32").write_bytes(x.tobytes())
    (target / "blocks.bin").write_bytes(blocks.tobytes())
    (target / "facts.json").write_text(json.dumps(files.facts(fmt, x, blocks), indent=1) + "\n")
    print(f"recorded {len(blocks)} blocks in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
