# `make` alone prints the targets.
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
PYTEST := $(VENV_PYTHON) -m pytest
# Test processes side by side, one thread each; a file's tests stay together. An engine takes about
# 5 GiB.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile
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

# One thread for tests: engines and servers that run side by side would fight for the cores.
test test-fast fuzz test-triton test-triton-oldest test-next test-engine test-ray test-vllm-next support-matrix soak sanitize: export OMP_NUM_THREADS := 1

.PHONY: test
test: lint test-fast test-next test-triton test-triton-oldest test-engine ## lint, then every test

.PHONY: test-fast
test-fast: setup ## the tests that start no vLLM engine
	$(PYTEST) $(PARALLEL) -m "not engine" $(ARGS)

.PHONY: test-triton
test-triton: setup ## the Triton kernels' tests, in Triton's interpreter
	$(PYTEST) $(PARALLEL) tests/triton $(ARGS)

# The oldest Triton that the kernels support, beside the one that vLLM brings.
OLDEST_TRITON := 3.6.0
.PHONY: test-triton-oldest
test-triton-oldest: setup ## the same in the oldest supported Triton
	test -d .venv-triton/$(OLDEST_TRITON) || $(VENV_PYTHON) -m pip install --quiet --no-deps \
		--target .venv-triton/$(OLDEST_TRITON) triton==$(OLDEST_TRITON)
	PYTHONPATH=$(CURDIR)/.venv-triton/$(OLDEST_TRITON) $(PYTEST) $(PARALLEL) tests/triton \
		--ignore tests/triton/test_engine.py $(ARGS)

.PHONY: fuzz
fuzz: setup ## random schedules against the oracle; MINUTES=10 by default
	KVQ_FUZZ_MINUTES=$(or $(MINUTES),10) $(PYTEST) tests/plugin/test_schedules.py $(ARGS)

.PHONY: test-engine
test-engine: setup ## the tests that start a vLLM engine
	$(PYTEST) $(PARALLEL) -m engine $(ARGS)

# What vLLM's Ray executor needs beyond what vLLM brings.
RAY := ray==2.60.0 msgpack==1.2.4
.PHONY: test-ray
test-ray: setup ## vLLM's Ray executor with two workers; Ray comes in an overlay
	test -d .venv-ray || { $(VENV_PYTHON) -m pip install --quiet --no-deps \
		--target .venv-ray.unfinished $(RAY) && mv .venv-ray.unfinished .venv-ray; }
	PYTHONPATH=$(CURDIR)/.venv-ray:$(CURDIR)/tests:$(CURDIR) $(PYTEST) tests/ray $(ARGS)

.PHONY: soak
soak: setup ## load a server for MINUTES (5), then look for what it left behind
	PYTHONPATH=$(CURDIR)/tests:$(CURDIR) $(VENV_PYTHON) -m tools.soak \
		--minutes $(or $(MINUTES),5) $(ARGS)

.PHONY: test-next
test-next: setup ## the plugin's tests against the next vLLM, on this one's libraries
	$(MAKE) test-vllm-next TESTS=tests/plugin ARGS="$(PARALLEL) $(ARGS)"

.PHONY: test-vllm-next
test-vllm-next: setup ## the tests that use vLLM, or TESTS=..., against the next one on this one's libraries
	$(VENV_PYTHON) tools/vllm_next.py
	PYTHONPATH=$(CURDIR)/.venv-next/overlay $(PYTEST) $(or $(TESTS),tests/plugin tests/engine) \
		--ignore tests/engine/test_figures.py $(ARGS)

.PHONY: try-install
try-install: setup ## install into a bare environment and try every command there
	$(VENV_PYTHON) tools/try_install.py

.PHONY: sanitize
sanitize: setup ## the C++ kernels' tests under AddressSanitizer and UBSan
	tools/sanitize.sh

.PHONY: capacity
capacity: setup ## benchmarks/capacity.py; JSON=out.json keeps the result
	$(VENV_PYTHON) benchmarks/capacity.py $(if $(JSON),--json "$(JSON)")

.PHONY: quality
quality: setup ## kvq eval on the test model, all formats; OUT=folder keeps the results
	$(VENV_PYTHON) -m kvq_vllm.cli eval "$$($(VENV_PYTHON) -c 'from tools.setup_env import MODEL; print(MODEL)')" \
		--dtype float32 --out "$(or $(OUT),build/kvq-eval)"

.PHONY: bench
bench: setup ## speed: the C++ kernels against vLLM's, then the engine end to end
	$(VENV_PYTHON) benchmarks/cpu_bench.py $(if $(JSON),--json "$(JSON)")
	$(VENV_PYTHON) benchmarks/e2e_bench.py $(if $(JSON),--json "$(JSON:.json=-e2e.json)")

.PHONY: support-matrix
support-matrix: setup ## write docs/models.md: every model with every format, as the tests find it
	$(PYTEST) -n $(WORKERS) --junitxml=build/models.xml tests/engine/test_model_matrix.py \
		tests/plugin/test_refusals.py -k test_model
	$(VENV_PYTHON) tools/support_matrix.py build/models.xml

.PHONY: pictures
pictures: setup ## draw docs/images/ again
	$(VENV_PYTHON) tools/draw_capacity.py

EXAMPLE_VENV := .venv-example
EXAMPLE_OUT := $(or $(KVQ_CACHE_DIR),$(HOME)/.cache/kvq-vllm)/smollm2-135m-fp8

.PHONY: example-fp8
example-fp8: setup ## calibrate fp8 scales with llm-compressor, and serve with them
	test -x $(EXAMPLE_VENV)/bin/python || $(PYTHON) -m venv $(EXAMPLE_VENV)
	$(EXAMPLE_VENV)/bin/python -m pip install --quiet -r examples/calibrate_fp8/requirements.txt
	for strategy in tensor attn_head; do \
	    $(EXAMPLE_VENV)/bin/python examples/calibrate_fp8/calibrate.py \
	        "$(EXAMPLE_OUT)-$$strategy" --strategy $$strategy || exit 1; \
	done
	$(VENV_PYTHON) examples/calibrate_fp8/serve.py \
	    "$(EXAMPLE_OUT)-tensor" "$(EXAMPLE_OUT)-attn_head"

.PHONY: clean
clean: ## remove environments, caches and build results
	rm -rf .venv .venv-next .venv-ray .venv-ray.unfinished .venv-triton .venv-example build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf kernels/*.egg-info src/*.egg-info *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
