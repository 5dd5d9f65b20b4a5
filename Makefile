# One environment, .venv, made by the first target that needs it.
# Another interpreter: make test PYTHON=python3.12 (after deleting .venv).

PYTHON ?= python3
VENV := .venv
DIST ?= dist
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test audit opacus-suite docs lint format build ci clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## train a small private model and show what the threshold does
	$(VENV)/bin/python -m opacus_slaclip $(ARGS)

test: $(VENV)/.dev  ## run the tests on two processes; ARGS="-k name" goes to pytest
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 $(ARGS)

audit: $(VENV)/.dev  ## audit the privacy of whole steps for an hour; ARGS="--short" for a minute
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.audit $(ARGS)

opacus-suite: $(VENV)/.dev  ## run Opacus's own tests with its engine and with ours; ARGS=--all
	$(VENV)/bin/python scripts/opacus_suite.py $(ARGS)

docs: $(VENV)/.dev  ## build the API reference into build/docs, and fail on what pdoc warns of
	$(VENV)/bin/python scripts/api_reference.py

lint: $(VENV)/.dev  ## check style, format and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --strict

format: $(VENV)/.dev  ## apply what the linter can fix by itself
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

build: $(VENV)/.dev  ## build the sdist, and the wheel from it, into dist/
	rm -rf *.egg-info  # its list of files would outlive a change of MANIFEST.in
	$(VENV)/bin/python -m build --quiet --outdir "$(DIST)"

ci:  ## everything a change must pass
	.ci/run

clean:  ## remove what was built and cached; the environment stays
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# The stamps .venv/.demo and .venv/.dev: reinstall only when the requirements change.
$(VENV)/.%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@
