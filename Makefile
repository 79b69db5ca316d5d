# VENV is the environment to use; give several checkouts the same one and they share it.
VENV ?= .venv
PY := $(VENV)/bin/python

# The checkout is never installed into the environment: it is run from here.
export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help demo demo-fsdp demo-manager functional matrix bridge bench gpu-check test slow faults lint format env

help:
	@echo "make demo     three training jobs on two CPU ranks: stock, create, reuse; one table"
	@echo "make demo-fsdp  the same for Megatron-FSDP and fsdp_dtensor, and a job without NVRx"
	@echo "make demo-manager  a plain FSDP2 trainer: sync against async saves, a kill in the middle of a write, a resume"
	@echo "make functional  real jobs on a two-node Slurm on this machine: a verdict a case (needs root and apt; SCOPE=, CASES=)"
	@echo "make matrix   the core tests and one job against every supported pair of megatron-core and NVRx; a table"
	@echo "make bridge   Megatron-Bridge's own training on two CPU ranks, and its tests; installs it into build/bridge"
	@echo "make bench    what it costs, and against stock; tables, JSON and plots in build/bench; fails at a missed limit"
	@echo "make gpu-check  the tests that need a GPU and pinned staging, in under four minutes; without a GPU it says so"
	@echo "make test     lint, type check and tests"
	@echo "make slow     the tests that make test leaves out, the faults apart"
	@echo "make faults   kill, stop and starve ranks and writers in every phase of a save; a table (needs root)"
	@echo "make lint     lint and type check only"
	@echo "make format   let ruff rewrite the code"
	@echo "VENV=PATH     the environment to use or to make (now: $(VENV))"

demo: env
	@$(PY) functional_tests/demo.py

demo-fsdp: env
	@$(PY) functional_tests/demo_fsdp_dtensor.py

demo-manager: env
	@$(PY) functional_tests/demo_manager.py

functional: env
	@$(PY) functional_tests/run_cases.py $(if $(SCOPE),--scope $(SCOPE)) $(CASES)

matrix: env
	@$(PY) tools/matrix.py

bridge: env
	@tools/setup_bridge.sh "$(VENV)" build/bridge
	PYTHONPATH="$(CURDIR)/build/bridge:$(CURDIR)" $(PY) -m pytest -q tests/bridge

bench: env
	@status=0; for name in guard drift_save scaling steady_save memory flags_unset manager offline; do \
		$(PY) benchmarks/$$name.py --json build/bench/$$name.json --plot build/bench/$$name.png || status=1; \
	done; exit $$status

gpu-check: env
	@$(PY) tools/gpu_check.py

test: lint
	$(PY) -m pytest -q -m "not slow"

slow: env
	$(PY) -m pytest -q -m slow --deselect tests/test_faults.py

faults: env
	$(PY) -m pytest -q -s -m slow tests/test_faults.py

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: env
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

env:
	@tools/setup_env.sh "$(VENV)"
