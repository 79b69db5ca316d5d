# VENV is the environment to use; give several checkouts the same one and they share it.
VENV ?= .venv
PY := $(VENV)/bin/python

# The checkout is never installed into the environment: it is run from here.
export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format env

help:
	@echo "make demo     three training jobs on two CPU ranks: stock, create, reuse; one table"
	@echo "make test     lint, type check and tests"
	@echo "make lint     lint and type check only"
	@echo "make format   let ruff rewrite the code"
	@echo "VENV=PATH     the environment to use or to make (now: $(VENV))"

demo: env
	@$(PY) functional_tests/demo.py

test: lint
	$(PY) -m pytest -q -m "not slow"

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: env
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

env:
	@tools/setup_env.sh "$(VENV)"
