# make prints what there is. PYTHON=python3 uses that interpreter and makes no environment; without it .venv is made.

ifdef PYTHON
    PY := $(PYTHON)
    CLANG_FORMAT := $(firstword $(wildcard $(dir $(PYTHON))clang-format) clang-format)
    READY := packages
else
    PY := .venv/bin/python
    CLANG_FORMAT := .venv/bin/clang-format
    # PyCUDA is built here: against the driver, Python's headers and the toolkit around the first
    # nvcc on PATH. Where there is no nvcc, NVIDIA's packages in .venv/cuda take its place.
    DRIVER := $(shell python3 -c 'import ctypes; ctypes.CDLL("libcuda.so.1"); \
        print(*{line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line})' 2>/dev/null)
    HEADERS := $(shell python3 -c 'from sysconfig import get_path; print(get_path("include") + "/Python.h")')
    GPU := $(and $(DRIVER),$(wildcard $(HEADERS)))
    CUDA := $(or $(CUDA_HOME),$(wildcard /usr/local/cuda))
    CUDA_ENV := $(if $(CUDA),PATH="$(CUDA)/bin:$$PATH")
    ifneq ($(GPU),)
        ifeq ($(shell $(CUDA_ENV) command -v nvcc),)
            CUDA_FILES := $(CURDIR)/.venv/lib/python3.*/site-packages/nvidia/cu13
            CUDA_ENV := PATH="$(CURDIR)/.venv/cuda/bin:$$PATH" LDFLAGS=-Wl,-rpath,$(CURDIR)/.venv/cuda/lib
        endif
    endif
    REQUIREMENTS := requirements.txt $(if $(GPU),requirements-gpu.txt)
    READY := .venv/.ready$(if $(GPU),-gpu)
endif

CXX_FILES = $$(find steps common verify -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup step check bench profile pictures train compare worklog page test fa3-tests lint clean

help:  ## this list
	@echo 'Usage: make TARGET [PYTHON=python3]'
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-9s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## make .venv from the pinned requirements
ifeq ($(GPU),)
ifneq ($(DRIVER),)
	@echo 'note: without a GPU backend, as PyCUDA cannot be built: there is no $(HEADERS). Install it'
	@echo '      (on Debian and Ubuntu: apt install python3-dev), then make setup again.'
endif
endif

# The stamp is made last and removed first: an interrupted setup is never taken for a finished one.
.venv/.ready: requirements.txt
.venv/.ready-gpu: requirements.txt requirements-gpu.txt requirements-cuda.txt
.venv/.ready .venv/.ready-gpu:
	@python3 -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 14) or sys.exit( \
	    "error: python3 is Python %d.%d: put one of 3.10 to 3.13 first on PATH" % v[:2])'
	@echo 'Making .venv from $(strip $(REQUIREMENTS)): pip downloads up to 3 GB, most of it torch'
	@echo 'with its CUDA libraries (a CPU build: 0.3 GB)$(if $(GPU), and compiles PyCUDA for some minutes). This is done once.'
	rm -f .venv/.ready*
	python3 -m venv .venv
ifdef CUDA_FILES
	@echo 'There is a CUDA driver and no nvcc: the compiler comes from PyPI, into .venv/cuda.'
	.venv/bin/python -m pip install -r requirements-cuda.txt
	rm -rf .venv/cuda
	mkdir -p .venv/cuda/lib
	ln -s $(CUDA_FILES)/bin $(CUDA_FILES)/include $(CUDA_FILES)/nvvm .venv/cuda
	ln -s $(firstword $(DRIVER)) .venv/cuda/lib/libcuda.so
	ln -s $(CUDA_FILES)/lib/libcurand.so.10 .venv/cuda/lib
	ln -s libcurand.so.10 .venv/cuda/lib/libcurand.so
endif
	$(CUDA_ENV) .venv/bin/python -m pip install $(foreach file,$(REQUIREMENTS),-r $(file))
	touch $@

# Of a variable that is given twice, make takes the last and says nothing.
GIVEN := $(shell tr '\0' '\n' 2>/dev/null </proc/$$PPID/cmdline || ps -o args= -p $$PPID)
define refuse_twice
    ifneq ($(word 2,$(filter $(1)=%,$(GIVEN))),)
        $$(error $(1) is given twice, $(filter $(1)=%,$(GIVEN)): give it once, as in $(2))
    endif
endef
$(eval $(call refuse_twice,N,make step N="7 8"))
$(eval $(call refuse_twice,M,make compare N=8 M=9))
$(eval $(call refuse_twice,STEPS,make check STEPS="v01 v03"))
$(eval $(call refuse_twice,CASES,make check CASES="ragged gqa"))

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

step: $(READY)  ## N=4, N="4 5": build and check these steps, time them if there is a GPU, regenerate their rows
	$(PY) -m common step $(N)

check: $(READY)  ## all steps on all cases; STEPS="v01 v03" CASES=ragged,gqa SEED=1 SANITIZE=1 BACKEND=cpu TIME_LIMIT=20
	$(PY) verify/check.py $(strip $(STEPS) $(if $(CASES),--cases '$(CASES)') $(if $(SEED),--seed $(SEED)) \
	    $(if $(BACKEND),--backend $(BACKEND)) $(if $(SANITIZE),--sanitize) $(if $(TIME_LIMIT),--time-limit $(TIME_LIMIT)))

bench: $(READY)  ## on a GPU: time all steps and the peers; EXPERIMENTS=1: the experiments; GRID=1: more shapes; DIST=1: more kinds of inputs; LARGE=1: head_dim 256 and more, or v's own; DECODE=1: few queries on many keys; LENGTHS=1: packed sequences and windows; LATENCY=1: small calls; TRAIN=1: training; GPUS=2: one sequence over two GPUs
	$(PY) -m common bench $(if $(EXPERIMENTS),--experiments) $(if $(GRID),--grid) $(if $(DIST),--distributions) $(if $(LARGE),--large-head-dim) $(if $(DECODE),--decode) $(if $(LENGTHS),--lengths) $(if $(LATENCY),--latency) $(if $(TRAIN),--training) $(if $(GPUS),--gpus $(GPUS))

profile: $(READY)  ## N=4, N="4 5": registers, instructions and bank conflicts of these steps; on a GPU also ncu's counters and, of v09 to v11, b06 and b08, a timeline
	$(PY) -m common profile $(N)

pictures: $(READY)  ## what heads look at, and what the steps err that attention() takes; recorded on a GPU; N="10 b06": other steps, only drawn
	$(PY) -m common pictures $(N)

train: $(READY)  ## on a GPU, in minutes: train a GPT on attention() and on torch's SDPA; without one, some steps of a tiny one
	$(PY) -m common train

compare: $(READY)  ## N=8 M=9: the diff of two steps, and from profiles/ what changes with it: time, counters, resources
	$(PY) -m common compare $(N) $(M)

worklog: $(READY)  ## write tables, numbers and plots from profiles/; CHECK=1: fail where they differ
	$(PY) -m common worklog $(if $(CHECK),--check)

page: $(READY)  ## write docs/index.html, the worklog told by scrolling, and what make worklog writes
	$(PY) -m common page

test: $(READY)  ## pytest, with a 64th of the mutants and experiments, another one with each commit; MUTANTS=all: with all; MUTANTS=3: sample 3
	$(PY) -m pytest --mutants=$(or $(MUTANTS),sample) $(if $(PYTHON),,-n auto --dist worksteal)

# What neither we nor the shim have is switched off; of a cache, only one without pages or padding is tested.
fa3-tests: $(READY)  ## on a GPU: FlashAttention-3's own tests on attention(); HOPPER=path/to/flash-attention/hopper K="varlen and 128"
	PYTHONPATH=verify/flash_attention_3:$(HOPPER) FLASH_ATTENTION_DISABLE_FP8=TRUE FLASH_ATTENTION_DISABLE_SOFTCAP=TRUE \
	    FLASH_ATTENTION_DISABLE_PACKGQA=TRUE FLASH_ATTENTION_DISABLE_SPLIT=TRUE FLASH_ATTENTION_DISABLE_PAGEDKV=TRUE \
	    FLASH_ATTENTION_DISABLE_APPENDKV=TRUE $(PY) -m pytest --import-mode=importlib -q -rs \
	    $(HOPPER)/test_flash_attn.py -k '$(or $(K),output or kvcache)'

lint: $(READY)  ## steps/, ruff and clang-format, changing nothing
	$(PY) -m common lint
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)

clean:  ## remove what was built; .venv and profiles/ stay
	rm -rf build .pytest_cache .ruff_cache
	find common examples verify -name __pycache__ -prune -exec rm -rf {} +
