# Every target sets up .venv by itself, and finds it ready the second time.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
# The first Python that runs and is new enough; name another with `make PYTHON=…`.
PYTHON ?= $(shell for python in python3.11 python3 python3.13 python3.12; do \
	"$$python" -c '$(SUPPORTED)' 2>/dev/null && { echo "$$python"; break; }; done)

MODEL ?= lenet-300-100
RECIPE ?= quick

.DEFAULT_GOAL := help
.PHONY: help setup compress test check docs bench results

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv with bayeszip and all it needs
	@echo "$(VENV) is ready; . $(BIN)/activate uses it in this shell"

compress: $(READY) ## Train, compress and evaluate LeNet-300-100 on MNIST, within minutes (MODEL=, RECIPE=)
	$(BIN)/bayeszip compress $(MODEL) --data mnist --recipe $(RECIPE) -o $(MODEL).bayz
	$(BIN)/bayeszip evaluate $(MODEL).bayz --data mnist

test: $(READY) ## Run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

check: $(READY) ## Check style, types and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

docs: $(READY) ## Build the guide and the other pages as HTML into build/docs; a broken link is an error
	$(BIN)/mkdocs build --strict --quiet
	@echo "open build/docs/index.html"

results: $(READY) ## Render the tables of RESULTS.md and the README, and the pictures, from results/
	$(BIN)/bayeszip reproduce --render

bench: $(READY) ## Measure training steps (time, memory) and the latency of shrunk networks
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/latency.py

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "bayeszip needs Python 3.11 or newer, and none was found; install one," \
		"or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "bayeszip needs Python 3.11 or newer; $(PYTHON) is not;" \
		"name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(BIN)/python -c '$(SUPPORTED)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing bayeszip into $(VENV); the first time takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev]'
	@touch $(READY)
