# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= cpu
REPORT ?= build/matrix
STAMP := $(VENV)/.installed-$(EXTRA)

export OMP_WAIT_POLICY = PASSIVE
export TOKENIZERS_PARALLELISM = false
export DO_NOT_TRACK = 1

.PHONY: help setup quickstart demo-rlhf up down test test-faults test-cluster test-gpu test-matrix test-examples check format docs clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(STAMP) ## make .venv and install everything into it

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[$(EXTRA),dev]"
	$(BIN)/python -m rlhf_cli.repair
	@touch $@

quickstart: $(STAMP) ## start the local stack, train the tiny model, show the result
	$(BIN)/rlhf up
	$(BIN)/rlhf launch -c configs/grpo_tiny_cpu.yaml

demo-rlhf: $(STAMP) ## classical RLHF on the tiny model: SFT, a reward model, PPO with it
	$(BIN)/rlhf up
	$(BIN)/rlhf chain -c configs/chain_tiny_cpu.yaml

up: $(STAMP) ## start the local stack: Prefect server and worker, MLflow, Ray
	$(BIN)/rlhf up

down: $(STAMP) ## stop it
	$(BIN)/rlhf down

test: $(STAMP) ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-faults: $(STAMP) ## SIGKILL of every process in every stage, with a table of what it cost; cancel, retry, retraining by its schedule
	$(BIN)/python -m pytest tests/faults tests/stack -m faults

test-cluster: $(STAMP) ## several machines as namespaces of this one, and a real Slurm: as root; installs Slurm from Debian's packages
	tests/cluster/packages.sh
	$(BIN)/python -m pytest tests/cluster -m cluster

test-gpu: $(STAMP) ## what needs a GPU, with a table; EXTRA=gpu
	$(BIN)/python -m pytest tests/gpu

test-matrix: $(STAMP) ## every algorithm × execution mode × pipeline as a short run, with a table; REPORT=DIR for files
	MATRIX_REPORT=$(REPORT) $(BIN)/python -m pytest tests/matrix -m ""

test-examples: $(STAMP) ## whole runs that make test leaves out, of the shipped configurations among them
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m examples

check: $(STAMP) ## format, lint, types, import layers, deployments
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_deployments.py

format: $(STAMP) ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## write docs/configuration.md from the schema
	$(BIN)/python -m rlhf_core.config.document docs/configuration.md

clean: ## remove the virtual environment and what tools left
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
