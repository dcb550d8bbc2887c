# Targets with a description show up in `make help`.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
COMPOSE := docker compose --file docker/compose.yaml
EXPERIMENT ?= experiments/resnet.yaml
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
ALL := $(VENV)/.installed-all
# MISSING_PACKAGES_FAIL: make has installed what tests import, see tests/support/packages.py.
PYTEST := MISSING_PACKAGES_FAIL=1 GPU_REHEARSAL=1 $(BIN)/python -m pytest
# Tests mostly wait for processes, so four at a time; tests of one file share what is costly.
SPREAD := --numprocesses=4 --dist=loadfile --no-loadscope-reorder
# Lint and what starts Ray first: they take longest.
SYSTEM := tests/system/test_lint.py tests/system/journeys tests/system/contract tests/system/replay
SLOW ?= tests/slow

.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

run: $(RUNS)  ## Install, then run the main experiment: ResNet-18, two DDP workers under Ray, with its measured speedup
	$(BIN)/pipeline run experiments/resnet.yaml

ui: $(RUNS)  ## Browse the results in the MLflow UI on loopback
	$(BIN)/pipeline ui

test: $(STAMP)  ## Everything that a change must pass, in four minutes on two quiet cores: lint, unit, system
	@$(PYTEST) $(SPREAD) $(SYSTEM) tests/unit

lint: $(STAMP)  ## Format, style, types and layers alone, in half a minute
	@$(PYTEST) tests/system/test_lint.py

test-unit: $(STAMP)
	@$(PYTEST) $(SPREAD) tests/unit

test-system: $(STAMP)
	@$(PYTEST) $(SPREAD) $(SYSTEM)

test-slow: $(ALL)  ## What make test has no time for, hours; SLOW=tests/slow/faults runs a part
	@$(PYTEST) $(SLOW)

test-fuzz: $(STAMP)  ## The fuzz tests with more and new examples
	@HYPOTHESIS_PROFILE=default $(PYTEST) $(SPREAD) -k fuzz tests/unit

test-mutation: $(STAMP)  ## Put faults into a copy of the tree, one at a time, and say which test of make test noticed; ten minutes
	@$(BIN)/python tests/mutations/run.py $(FAULTS)

test-versions: $(STAMP)  ## Run contract and journeys with other versions; gigabytes, hours; CELLS="lowest newest" chooses: docs/status.md
	@$(BIN)/python tests/versions.py $(CELLS)

test-docker: $(STAMP)  ## Build the images, run an experiment on the compose cluster and kill a worker; needs Docker
	docker info --format 'Docker {{.ServerVersion}}'
	@$(PYTEST) tests/slow/docker

test-browser: $(STAMP)  ## Look at the MLflow UI and the report in Chromium; screenshots in browser-screenshots/
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { echo "no chromium here; install it: apt-get install --yes chromium"; exit 1; }
	@$(PYTEST) tests/slow/browser

cluster-env:  ## Draw the secrets of the compose cluster into docker/.env; those that are there stay
	@docker/create-env.sh docker/.env

cluster-up: cluster-env  ## Build and start Ray, two workers, MLflow and PostgreSQL in containers
	$(COMPOSE) up --build --wait
	@echo "MLflow  http://$$($(COMPOSE) port mlflow 5000), user admin, MLFLOW_ADMIN_PASSWORD of docker/.env"
	@echo "Ray     http://$$($(COMPOSE) port ray-head 8265), RAY_AUTH_TOKEN of docker/.env"

cluster-run:  ## Train on it, a container for each worker; EXPERIMENT=experiments/resnet.yaml ARGS="train.epochs=2"
	$(COMPOSE) exec ray-head pipeline run $(EXPERIMENT) parallel.launcher=ray parallel.placement=strict_spread $(ARGS)

cluster-down:  ## Stop it; runs and results stay (docker compose -f docker/compose.yaml down --volumes deletes them)
	$(COMPOSE) down

bench: $(STAMP)  ## The same training through pipeline, by hand, and through other libraries; 20 minutes on an idle machine
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/peers.py

bench-all: bench  ## All benchmarks that need no GPU (benchmarks/README.md); an hour
	for one in speedup long_run runs_list flat_memory known_factors studies intervals; do $(BIN)/python benchmarks/$$one.py || exit 1; done

gpu: $(STAMP)  ## What a CUDA GPU proves: its tests, ResNet-50 and a GPT beside a script; half an hour; docs/status.md
	$(BIN)/python benchmarks/gpu.py --tests

gpu-bundle: $(STAMP)  ## A folder that runs these tests and benchmarks on a machine with torch and a GPU, but no network
	$(BIN)/python benchmarks/gpu_bundle.py build/gpu-bundle

schema: $(STAMP)  ## Write what is generated: experiments/experiment.schema.json for editors, docs/keys.md, docs/reference.md, tests/PROMISES.md
	$(SCHEMA)
	$(BIN)/python docs/keys_page.py > docs/keys.md
	$(BIN)/python docs/reference_page.py
	$(BIN)/python tests/promises.py > tests/PROMISES.md

docs: $(STAMP)  ## Build the documentation as a site, site/index.html; a broken link or a forgotten page is an error
	$(BIN)/mkdocs build --strict

install: $(RUNS)  ## Create .venv with the pinned versions of what running needs, and the schema for editors

clean:  ## Remove the environment and the caches; runs and results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# One command with torch named first and pinned: a range would let pip fetch another build of it.
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 --editable
SCHEMA = $(BIN)/pipeline schema > experiments/experiment.schema.json

$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	$(SCHEMA)
	touch $(RUNS)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	$(SCHEMA)
	touch $(STAMP) $(RUNS)

$(ALL): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev,test-slow]'
	$(SCHEMA)
	touch $(ALL) $(STAMP) $(RUNS)

.PHONY: help run ui lint test test-unit test-system test-slow test-fuzz test-mutation test-versions test-docker test-browser cluster-env cluster-up cluster-run cluster-down bench bench-all gpu gpu-bundle schema docs install clean
