# Everything a person runs. Each target installs what it needs; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
ENV ?= dev
PY := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION := 1
export CDK_DISABLE_CLI_TELEMETRY := true

.PHONY: help setup up down serve synth check lint types unit synth-test test test-node test-serve test-rehearsal \
	numa-proof bench bench-streaming lock clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  \033[36mmake %-15s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv, the CDK command line and the host bundles
	@scripts/setup.sh

up: ## Deploy ENV (default dev) onto this machine and stream an answer
	@export NEURONFLEET_UP_STARTED=$$(date +%s); scripts/require_rehearsal.sh && scripts/setup.sh \
		&& scripts/debian_packages.sh && scripts/engine_venv.sh && $(PY) -m rehearsal.up --env $(ENV)

down: ## Remove everything that make up made
	@if [ -x $(PY) ]; then $(PY) -m rehearsal.down; else echo "nothing to remove: make up never ran here"; fi

serve: setup ## Run the Serve app alone on this machine (any Linux or macOS, no root)
	@scripts/engine_venv.sh && .venv-engine/bin/python -m app.serve.local

synth: setup ## Synthesize every environment into cdk.out/
	@$(PY) -m infra.synth_all

check: setup lint types unit synth-test ## The inner loop: lint, types, unit tests, synth tests

lint:
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . \
		&& .venv/bin/shellcheck $$(git ls-files '*.sh' .ci/run)

types:
	@.venv/bin/mypy

unit:
	@$(PY) -m pytest tests/unit -q -n 2

synth-test:
	@$(PY) -m pytest tests/synth -q

test: check test-node test-serve test-rehearsal ## Every test that needs no AWS account

test-node: setup
	@[ "$$(id -u)" != 0 ] || scripts/debian_packages.sh
	@$(PY) -m pytest tests/node -q

test-serve: setup
	@scripts/engine_venv.sh && .venv-engine/bin/python -m pytest tests/serve -q

test-rehearsal: setup
	@scripts/require_rehearsal.sh && scripts/debian_packages.sh && scripts/engine_venv.sh \
		&& $(PY) -m pytest tests/rehearsal -q -x

numa-proof: setup ## Prove the planned binding on an emulated machine with four NUMA nodes (QEMU)
	@scripts/debian_packages.sh && $(PY) -m rehearsal.numa_proof

bench: setup ## Side by side with peers, on this machine
	@$(PY) -m bench

bench-streaming: setup ## Streaming beside vLLM's own server and Serve's proxies
	@scripts/engine_venv.sh && .venv-engine/bin/python -m bench.streaming

lock: setup ## Resolve the lock files anew
	@scripts/lock.sh

clean: ## Remove what was built (not what make up made: that is make down)
	@rm -rf .venv .venv-engine node_modules cdk.out dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
