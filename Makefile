# Verbs of cellpipe. Everything lives in .venv and .cellpipe; `make clean` removes both.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= Why is the sky blue?
GROUPS ?= 3
WORKERS ?= 3
PORT ?= 8000
PYTEST_ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PROMPT  # through the environment: the shell must not read a prompt as code

.PHONY: help run test lint up down bench docs clean
.DEFAULT_GOAL := help

help: ## show the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

$(BIN)/python:
	@infra/venv $(PYTHON) $(VENV)

$(VENV)/.run: pyproject.toml setup.py $(wildcard shared/kernel/csrc/*) shared/kernel/build.py | $(BIN)/python
	@echo "installing cellpipe into $(VENV) and building its kernel: minutes, the first time"
	@$(BIN)/pip install --quiet -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing the test tools into $(VENV)"
	@$(BIN)/pip install --quiet -e '.[dev]'
	@touch $@

$(VENV)/.up: $(VENV)/.run
	@$(BIN)/pip install --quiet -e '.[up]'
	@touch $@

run: $(VENV)/.run ## pull the small real model and answer PROMPT, in one process, no servers
	@$(BIN)/cellpipe run -- "$$PROMPT"

test: $(VENV)/.dev ## start private RabbitMQ and Redis on free ports, run all tests, stop them
	@infra/run-tests $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, mypy strict, import-linter
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: $(VENV)/.run ## measure the kernel, the embedded pipeline and a cluster on this machine
	@$(BIN)/cellpipe bench kernel
	@$(BIN)/cellpipe bench decode
	@$(BIN)/cellpipe bench prefill
	@$(BIN)/cellpipe bench cluster

up: $(VENV)/.up ## private servers, the model in GROUPS groups, then the Procfile; HTTP on PORT
	@$(BIN)/python -c 'import socket; socket.create_server(("127.0.0.1", $(PORT)))' 2>/dev/null || \
		{ echo 'port $(PORT) is taken, or none; choose another: make up PORT=8001' >&2; exit 1; }
	@infra/servers up >/dev/null
	@$(BIN)/cellpipe load smollm2-135m --groups $(GROUPS)
	@echo 'ready in a moment; in another terminal: $(BIN)/cellpipe run --cluster "Hello"'
	@echo 'for other programs and other folders: eval "$$(infra/servers env)"'
	@HTTP_PORT=$(PORT) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/honcho start -c scheduler=1,gateway=1,worker=$(WORKERS)

down: ## stop the private servers
	@infra/servers down

clean: down ## remove the venv, the private servers' data and build products
	@rm -rf $(VENV) .cellpipe build dist *.egg-info shared/kernel/_native*.so shared/kernel/_native.c
