# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= cpu
STAMP := $(VENV)/.installed-$(EXTRA)

export OMP_WAIT_POLICY = PASSIVE
export TOKENIZERS_PARALLELISM = false
export DO_NOT_TRACK = 1

.PHONY: help setup quickstart demo-rlhf up down test test-faults test-examples check format docs clean

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

test-faults: $(STAMP) ## SIGKILL of every process in every stage, with a table of what it cost; retraining by its schedule
	$(BIN)/python -m pytest tests/faults tests/stack -m matrix

test-examples: $(STAMP) ## whole runs of the shipped configurations that make test leaves out
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m examples

check: $(STAMP) ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP) ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## write docs/configuration.md from the schema
	$(BIN)/python -m rlhf_core.config.document docs/configuration.md

clean: ## remove the virtual environment and what tools left
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
