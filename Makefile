# Targets with a description show up in `make help`.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

run: $(STAMP)  ## Install, then run the main experiment: ResNet-18, two DDP workers under Ray, with its measured speedup
	$(BIN)/pipeline run experiments/resnet.yaml

ui: $(STAMP)  ## Browse the results in the MLflow UI on loopback
	$(BIN)/pipeline ui

test: $(STAMP)  ## Run all tests
	$(BIN)/python -m pytest

test-deep: $(STAMP)  ## Run what make test leaves out because it takes long
	$(BIN)/python -m pytest -m deep

test-faults: $(STAMP)  ## Kill, stop, starve and fill for real; the greater part is in make test, too
	$(BIN)/python -m pytest -m faults

bench: $(STAMP)  ## Measure what the documentation claims: reported speedups against a hand-written script
	$(BIN)/python benchmarks/speedup.py

check: $(STAMP)  ## Everything that a change must pass: format, lint, types, layers, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

install: $(STAMP)  ## Create .venv with the pinned versions

clean:  ## Remove the environment and the caches; runs and results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# One command with torch named first and pinned: a range would let pip fetch another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 --editable '.[dev]'
	touch $(STAMP)

.PHONY: help run ui test test-deep test-faults bench check install clean
