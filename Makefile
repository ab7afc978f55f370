# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
STORES := $(VENV)/.stores
SGLANG := .venv-sglang

.PHONY: help demo test lint bench test-slow test-stores test-sglang crash-matrix clean

help:            ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "needs Python 3.11 or newer with venv (Debian: python3-venv); another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check 'torch==2.13.0' numpy
	$(PY) -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

$(STORES): $(READY)
	$(PY) -m pip install -q --disable-pip-version-check -e '.[dev,stores]'
	@touch $@

$(SGLANG)/.rig-ready: tests/rigs/sglang/setup.sh
	tests/rigs/sglang/setup.sh $(SGLANG)

demo: $(READY)   ## the main job, end to end, on the embedded engine
	$(VENV)/bin/hicachectl demo

test: $(READY)   ## fast and end-to-end tests (under 10 minutes)
	$(PY) -m pytest -m "not slow and not stores and not sglang"

test-slow: $(READY)  ## the slower suites of .ci/run
	$(PY) -m pytest -m "slow and not stores and not sglang" --timeout 900

test-stores: $(STORES)  ## every storage backend against its real server
	$(PY) -m pytest -m stores --timeout 600

test-sglang: $(READY) $(SGLANG)/.rig-ready  ## the hooks inside the real SGLang, on the CPU
	SGLANG_VENV=$(abspath $(SGLANG)) $(PY) -m pytest -m sglang --timeout 900

lint: $(READY)   ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)  ## medians, each with its comparison in the same run
	$(PY) -m tests.bench

crash-matrix: $(READY)  ## every fault point x fault x operation on real processes (under 40 minutes)
	$(PY) -m tests.crash

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) $(SGLANG) .mypy_cache .ruff_cache .pytest_cache
