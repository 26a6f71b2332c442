# make prints what there is. PYTHON=python3 uses that interpreter and makes no environment; without it .venv is made.

ifdef PYTHON
    PY := $(PYTHON)
    CLANG_FORMAT := $(firstword $(wildcard $(dir $(PYTHON))clang-format) clang-format)
    READY := packages
else
    PY := .venv/bin/python
    CLANG_FORMAT := .venv/bin/clang-format
    # PyCUDA needs the driver to run. While pip builds it, it looks for the toolkit around the first nvcc on PATH.
    CUDA := $(or $(CUDA_HOME),$(wildcard /usr/local/cuda))
    CUDA_ENV := $(if $(CUDA),PATH="$(CUDA)/bin:$$PATH")
    GPU := $(shell python3 -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null && $(CUDA_ENV) command -v nvcc)
    REQUIREMENTS := requirements.txt $(if $(GPU),requirements-gpu.txt)
    READY := .venv/.ready$(if $(GPU),-gpu)
endif

CXX_FILES = $$(find steps common verify -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup step check bench profile compare worklog test lint clean

help:  ## this list
	@echo 'Usage: make TARGET [PYTHON=python3]'
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-9s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## make .venv from the pinned requirements

# The stamp is made last and removed first: an interrupted setup is never taken for a finished one.
.venv/.ready .venv/.ready-gpu: requirements.txt requirements-gpu.txt
	rm -f .venv/.ready*
	python3 -m venv .venv
	$(CUDA_ENV) .venv/bin/python -m pip install $(foreach file,$(REQUIREMENTS),-r $(file))
	touch $@

ifneq ($(filter step profile,$(MAKECMDGOALS)),)
    ifndef N
        $(error which step? For example: make $(MAKECMDGOALS) N=4)
    endif
endif

ifneq ($(filter compare,$(MAKECMDGOALS)),)
    ifeq ($(and $(N),$(M)),)
        $(error which two steps? For example: make compare N=8 M=9)
    endif
endif

.PHONY: packages
packages:
	@$(PY) -c 'from importlib.util import find_spec as f; exit(not (f("torch") and f("tqdm")))' || \
	    { echo "error: $(PY) lacks packages: $(PY) -m pip install -r requirements.txt" >&2; exit 2; }

step: $(READY)  ## N=4: build and check that step, time it if there is a GPU, regenerate its row
	$(PY) -m common step $(N)

check: $(READY)  ## all steps on all cases; STEPS="v01 v03" CASES=ragged,gqa SEED=1 SANITIZE=1 BACKEND=cpu
	$(PY) verify/check.py $(strip $(STEPS) $(if $(CASES),--cases $(CASES)) $(if $(SEED),--seed $(SEED)) \
	    $(if $(BACKEND),--backend $(BACKEND)) $(if $(SANITIZE),--sanitize))

bench: $(READY)  ## on a GPU: time all steps and the peers; EXPERIMENTS=1: the experiments; GRID=1: more shapes; LATENCY=1: small calls
	$(PY) -m common bench $(if $(EXPERIMENTS),--experiments) $(if $(GRID),--grid) $(if $(LATENCY),--latency)

profile: $(READY)  ## N=4: registers, instructions and bank conflicts of that step; on a GPU also ncu's counters and, of v09 and v10, a timeline
	$(PY) -m common profile $(N)

compare: $(READY)  ## N=8 M=9: the diff of two steps, and from profiles/ what changes with it: time, counters, resources
	$(PY) -m common compare $(N) $(M)

worklog: $(READY)  ## write tables, numbers and plots from profiles/; CHECK=1: fail where they differ
	$(PY) -m common.report.markdown $(if $(CHECK),--check)

test: $(READY)  ## pytest
	$(PY) -m pytest $(if $(PYTHON),,-n auto)

lint: $(READY)  ## ruff and clang-format, changing nothing
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)

clean:  ## remove what was built; .venv and profiles/ stay
	rm -rf build .pytest_cache .ruff_cache
	find common verify -name __pycache__ -prune -exec rm -rf {} +
