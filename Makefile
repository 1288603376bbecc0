# The verbs of the project. `make demo` and `make test` are all a visitor needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tiny models on few cores: threads of one process fight each other (see docs/performance.md).
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help setup demo test lint type protos clean
help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## make the environment

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@bash scripts/setup.sh $(VENV) $(PYTHON)
	@touch $(STAMP)

demo: $(STAMP) ## a student distils from a teacher over gRPC, end to end, about five minutes
	@$(BIN)/python examples/demo.py

test: $(STAMP) ## the CPU test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP) ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

type: $(STAMP) ## mypy
	$(BIN)/mypy

protos: $(STAMP) ## regenerate the gRPC stubs
	$(BIN)/python scripts/protos.py

clean: ## remove the environment and all runs
	rm -rf $(VENV) runs
