#!/usr/bin/env bash
# The checks that need a GPU, in at most 8 minutes on one data-centre GPU with 16 cores; writes one JSON.
#
#   bench/gpu_check.sh --tree LLAMA --model GGUF --text TEXT [--out JSON] [--bin DIR] [--arch 90] [--minutes 8]
#
# Nothing is downloaded. On a machine with a network, `kvfmt build` makes the tree (build/<pin>/src/vendor/llama.cpp) and
# `kvfmt models fetch` the model; take this repository, the tree and both files along. The machine needs a driver and Python 3.11.
# --bin names the programs of a build (`kvfmt build --cuda-arch 90` needs no GPU: build/<pin>/cmake-cuda/bin), which needs cuBLAS
# there and a processor like the one that it was made on. Without it nvcc, cuBLAS, cmake and a C++ compiler make one first: that counts
# in --minutes, can take all of 8, and goes on where it was when the same command is run again.
#
# The JSON is written after every result. A step that fails, crashes or runs out of time keeps what it found, and the next one runs.
set -euo pipefail

if [ $# -eq 0 ] || [ "$1" = "-h" ] || [ "$1" = "--help" ]; then
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 0
fi
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: python3 is missing or older than 3.11" >&2
    exit 1
fi
# not cd: paths on the command line are the caller's
PYTHONPATH="$(cd "$(dirname "$0")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}" exec python3 -m bench.gpu_check "$@"
