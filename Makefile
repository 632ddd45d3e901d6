# Everything runs inside .venv, which is made on first use and again after a change of the pins.

PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS ?= 2
PYTEST_ARGS ?=
HF_VERSIONS ?= 5.0.0 5.8.0 newest

.DEFAULT_GOAL := help
.PHONY: help venv demo lint test test-slow test-hf-matrix bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Prepare .venv with everything the tests need

# torch goes first and by its pin: as a dependency of the rest, pip may choose a far larger build.
$(STAMP): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no python3 found" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e '.[cli,triton,hf,bench,dev]'
	@touch $@

demo: $(STAMP) ## Train a small MoE model and write its report to runs/demo
	$(BIN)/tokenyard train --out runs/demo --overwrite

lint: $(STAMP) ## Check style (ruff) and types (mypy)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint ## Lint, then run every test that is not slow (PYTEST_ARGS and JOBS are passed on)
	$(BIN)/python -m pytest -n $(JOBS) -m 'not slow' $(PYTEST_ARGS)

test-slow: $(STAMP) ## Run the slow tests
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-hf-matrix: $(STAMP) ## Test against several versions of transformers (HF_VERSIONS), each in its environment
	JOBS=$(JOBS) tests/integrations/matrix.sh $(BIN)/python $(HF_VERSIONS)

bench: $(STAMP) ## Measure the expert MLP on this machine
	$(BIN)/python -m benchmarks.expert_mlp_cpu

clean: ## Remove .venv, caches, builds and runs
	rm -rf $(VENV) .venv-hf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
