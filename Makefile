# Everything is done in a virtual environment of the project's own; nothing but Python 3.11+, make and git is needed.
PYTHON ?= python3
CORES ?= 4
CONFIG ?= config/config.yaml
TORCH ?= 2.13.0
BIN := .venv/bin
SNAKEMAKE := $(BIN)/snakemake --cores $(CORES) --configfile $(CONFIG)
RUN = $(shell $(BIN)/python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["run"])' $(CONFIG))
REPORT = results/$(RUN)/report.html
OVERVIEW = results/$(RUN)/overview.rst
REPORTED = all $(if $(wildcard results/$(RUN)/costs.csv),costs) $(if $(wildcard results/$(RUN)/padding.csv),padding)

.DEFAULT_GOAL := help
.PHONY: help plan run report measure durability verify prune clean test lint format lock

help: ## Say what can be made
	@echo "make [CONFIG=config/config.yaml] [CORES=4] TARGET"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST)

plan: .venv/run.stamp ## Forecast time and disk from a short pilot, before the run
	$(SNAKEMAKE) --forcerun forecast_run -- plan

run: .venv/run.stamp ## Run the workflow, or go on with a run that ended early
	$(SNAKEMAKE)

# A failed check belongs in the report: what does not depend on it is made all the same, and the status is the run's. The
# first page is removed, so that it is there only if this run made it. What `make measure` made is
# told of too, and made anew if something that decides it has changed.
report: .venv/run.stamp ## Run the workflow, then write its report: figures, captions and provenance in one HTML file
	rm -f $(REPORT) $(OVERVIEW)
	@$(SNAKEMAKE) --keep-going -- $(REPORTED); status=$$?; \
	if [ ! -e $(OVERVIEW) ]; then \
	  echo "no report: the run failed before its first page could be written; the reason is above (a cache that is not" \
	    "whole is measured by nothing)" >&2; \
	  exit $$status; \
	fi; \
	$(SNAKEMAKE) --report $(REPORT) --report-stylesheet workflow/report/report.css -- $(REPORTED) || exit; \
	echo "open $(REPORT)"; \
	exit $$status

measure: .venv/run.stamp ## Measure what the choices of a capture cost, and what pads do to it: some 20 minutes
	$(SNAKEMAKE) -- measurements

durability: .venv/run.stamp ## Judge by crashes what saving can lose, this package's writers included; whole as root on Linux
	$(SNAKEMAKE) -- durability

verify: .venv/run.stamp ## Check every stored byte; damage is removed, and `make run` captures it again
	$(SNAKEMAKE) --config 'verify={depth: full}' --forcerun verify_cache -- verify

prune: .venv/run.stamp ## Remove staged shards of earlier configurations of the run
	$(SNAKEMAKE) -- prune

clean: ## Remove all results; downloaded resources and the environment stay
	rm -rf results .snakemake

test: .venv/dev.stamp ## Run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: .venv/dev.stamp ## Check style, types and the workflow
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/mypy
	$(BIN)/snakemake --lint

format: .venv/dev.stamp ## Bring all code into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow
	$(BIN)/python -c 'import json; from anchorage.settings import Settings; \
	  print(json.dumps(Settings.model_json_schema(), indent=2))' > workflow/schemas/config.schema.json

lock: ## Pin the newest packages that pyproject.toml allows; torch as TORCH says
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet torch==$(TORCH) setuptools .
	.venv-lock/bin/python -m pip freeze --all --exclude pip --exclude anchorage | sed 's/+[a-z0-9.]*$$//' > requirements.lock
	.venv-lock/bin/python -m pip install --quiet '.[dev]'
	(echo '-r requirements.lock'; .venv-lock/bin/python -m pip freeze --all --exclude pip --exclude anchorage \
	  | sed 's/+[a-z0-9.]*$$//' | grep -vxF -f requirements.lock) > requirements-dev.lock
	{ sed '/==/d' workflow/envs/anchorage.yaml; sed -n '/==/s/^/      - /p' requirements.lock; } > .venv-lock/env.yaml
	cp .venv-lock/env.yaml workflow/envs/anchorage.yaml && rm -rf .venv-lock

.venv/run.stamp: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Anchorage needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

.venv/dev.stamp: requirements-dev.lock .venv/run.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	@touch $@
