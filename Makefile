# `make` alone prints the targets.
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
PYTEST := $(VENV_PYTHON) -m pytest
# Extra arguments for pytest: make test-fast ARGS="-k formats -x"
ARGS ?=

# More threads than cores slow vLLM's CPU backend down about tenfold.
OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

# The stages of a target run in the order written, also under `make -j`.
.NOTPARALLEL:

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make or update .venv, the test model and the corpus
	@$(PYTHON) tools/setup_env.py

.PHONY: demo
demo: setup ## run examples/demo.py
	$(VENV_PYTHON) examples/demo.py

.PHONY: lint
lint: setup ## ruff and mypy
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

.PHONY: test
test: lint test-fast test-engine ## lint, then every test

.PHONY: test-fast
test-fast: setup ## the tests that start no vLLM engine
	$(PYTEST) -m "not engine" $(ARGS)

.PHONY: test-engine
test-engine: setup ## the tests that start a vLLM engine
	$(PYTEST) -m engine $(ARGS)

.PHONY: test-vllm-next
test-vllm-next: setup ## every test against the next vLLM, on this one's compiled libraries
	$(VENV_PYTHON) tools/vllm_next.py
	PYTHONPATH=$(CURDIR)/.venv-next/overlay $(PYTEST) $(ARGS)

.PHONY: capacity
capacity: setup ## benchmarks/capacity.py; JSON=out.json keeps the result
	$(VENV_PYTHON) benchmarks/capacity.py $(if $(JSON),--json "$(JSON)")

.PHONY: quality
quality: setup ## benchmarks/quality.py; JSON=out.json keeps the result
	$(VENV_PYTHON) benchmarks/quality.py $(if $(JSON),--json "$(JSON)")

.PHONY: clean
clean: ## remove environments, caches and build results
	rm -rf .venv .venv-next build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf kernels/*.egg-info src/*.egg-info *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
