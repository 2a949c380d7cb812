#!/usr/bin/env bash
# The checks that need a GPU, in at most 8 minutes on one data-centre GPU with 16 cores; writes one JSON.
#
#   bench/gpu_check.sh (--bin DIR | --tree LLAMA) [--model GGUF --text TEXT] [--out JSON] [--arch 90] [--minutes 8]
#
# Nothing is downloaded. The machine needs a driver and Python 3.11; take this repository along, and either
#
#   --bin DIR      the programs of a build that was made elsewhere, where no GPU is needed:
#                  kvfmt build --cuda-arch 90 --portable --targets test-backend-ops,llama-bench,llama-perplexity
#                  (build/<pin>/cmake-cuda/bin). cuBLAS and CUDA's runtime are found in the toolkit or the Python packages that are there.
#   --tree LLAMA   the patched llama.cpp (build/<pin>/src/vendor/llama.cpp), to compile there with nvcc, cuBLAS (of the toolkit, or Python's
#                  package of it), cmake and a C++ compiler. That counts in --minutes, and goes on where it was when run again.
#
# `kvfmt models fetch` brings a model. Without --model what needs one is left out, and so named.
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
