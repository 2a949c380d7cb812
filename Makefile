# One way in: `make demo` on a fresh clone. Everything is made once and reused; `make clean` undoes it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST_ARGS ?=
# One process for each core: most tests are single-threaded. Empty: one after the other.
TEST_PROCESSES ?= -n auto --dist worksteal
FUZZ_ARGS ?= --files 10000

# Named after what was installed, so that a change of the pins installs again and nothing else does.
PINS   := $(shell cat requirements.txt pyproject.toml | cksum | tr ' ' -)
READY  := $(VENV)/.ready-$(PINS)
# torch has builds for the CPU and for GPUs under one version: what is there, or what pip finds, is taken, after all else.
TORCH  := torch==2.13.0
TORCH_READY := $(VENV)/.torch-$(shell cat requirements.txt requirements-torch.txt pyproject.toml | cksum | tr ' ' -)

.DEFAULT_GOAL := help
.PHONY: help setup torch build demo test test-arm fuzz check clean

help:
	@echo "make demo    build llama.cpp with the kvfmt types and show them on a small model"
	@echo "make test    the tests"
	@echo "make torch   torch and transformers, for kvfmt.torch and its tests"
	@echo "make test-arm the kvq code on 64-bit ARM under qemu (Debian: g++-aarch64-linux-gnu qemu-user)"
	@echo "make fuzz    10,000 mutated saved states into llama.cpp under AddressSanitizer (builds it once, some ten minutes)"
	@echo "make build   only the build"
	@echo "make check   what is generated equals what is committed"
	@echo "make clean   remove .venv and build/ (downloads stay in the cache)"

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: $(PYTHON) is not Python 3.10 to 3.13. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: no virtual environment. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.ready-*
	@touch $@

setup: $(READY)

$(TORCH_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-torch.txt
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || echo "transformers needs Python 3.11: kvfmt.torch is left out"
	$(BIN)/python -c 'import sys, importlib.util as u; sys.exit(not (sys.version_info < (3, 11) or u.find_spec("torch")))' || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@rm -f $(VENV)/.torch-*
	@touch $@

torch: $(TORCH_READY)

build: $(READY)
	$(BIN)/kvfmt build

demo: build
	$(BIN)/kvfmt demo

test: build torch
	$(BIN)/kvfmt models fetch
	$(BIN)/python -m pytest -q $(TEST_PROCESSES) $(PYTEST_ARGS)

test-arm: build
	$(BIN)/python -m pytest -q tests/arm/arm_parity.py $(PYTEST_ARGS)

fuzz: $(READY)
	$(BIN)/python tests/fuzz/fuzz_run.py $(FUZZ_ARGS)

check: $(READY)
	$(BIN)/python -m cpp_patch.generate --check

clean:
	rm -rf $(VENV) build .pytest_cache .hypothesis
