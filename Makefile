# make demo, make test: each does all of its own set-up on a bare Debian or Ubuntu with Python 3.11 or newer, and is quick when run again.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
# Relative, since the path to here may have spaces, which no prerequisite of make may.
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# The CPU build where this index has one; installed before the package, whose own `torch` may be gigabytes of CUDA.
TORCH := torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -q
BUILD_TOOLS := "scikit-build-core>=0.10" "nanobind==3.1.0" "cmake>=3.18,<5" ninja
CPP_FILES = $(shell find csrc tests benchmarks -name '*.hpp' -o -name '*.cpp')
# What the installed package is made of. The stubs' own rule compares them with the built modules.
SOURCES := $(shell find csrc src -type f \( -name '*.hpp' -o -name '*.cpp' -o -name '*.py' -o -name '*.pyi' -o -name py.typed \)) \
	CMakeLists.txt pyproject.toml README.md LICENSE

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_NO_INPUT := 1

SEEDS ?= 2000
# Processes that run tests, a file at a time. More than two cores' worth: much of a test of faults is waiting for a silence to be long enough.
WORKERS ?= 3

.PHONY: help demo test sim lint format stubs sanitize fuzz clean system pytest check-stubs test-vllm

help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: $(STAMPS)/package ## set up, then one mixture-of-experts layer on eight ranks, verified (DEMO="--tokens 512" for options)
	@$(BIN)/expertwire demo $(DEMO)
	@echo "The command is $(BIN)/expertwire; after \`source $(BIN)/activate\` it is expertwire. What is here: expertwire doctor"

test: lint check-stubs pytest ## set up, then everything that must hold: linters, types, stubs, all tests (under 10 minutes on two cores)

# A worker that had to be ended is begun anew once; the test that hung would be run again each time.
pytest: $(STAMPS)/package $(STAMPS)/dev ## the tests alone, against the installed package (PYTEST="-k name" for options, PYTEST=--long for every variant)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 1 $(PYTEST)

sim: $(STAMPS)/package ## seeds of the simulation on all cores (SEEDS=100000); one that fails prints the command that replays it
	@$(BIN)/python -m expertwire.testing.sweep --seeds $(SEEDS) $(SIM)

lint: $(STAMPS)/package $(STAMPS)/dev ## ruff, mypy --strict, clang-format, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/codespell

format: $(STAMPS)/dev ## let ruff and clang-format rewrite what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

check-stubs: $(STAMPS)/package $(STAMPS)/dev
	@mkdir -p build/stubs
	@for module in _native _simulation; do \
	  $(BIN)/python -m nanobind.stubgen -q -m expertwire.$$module -o build/stubs/$$module.pyi; \
	  diff -u src/expertwire/$$module.pyi build/stubs/$$module.pyi \
	    || { echo "src/expertwire/$$module.pyi is not what the built module offers: run \`make stubs\` and commit it"; exit 1; }; \
	done; echo "stubs: the same as the built modules"

stubs: $(STAMPS)/package $(STAMPS)/dev ## write src/expertwire/_native.pyi and _simulation.pyi anew from the built modules
	@for module in _native _simulation; do \
	  $(BIN)/python -m nanobind.stubgen -q -m expertwire.$$module -o src/expertwire/$$module.pyi; \
	done

test-vllm: ## real vLLM on CPU behind the proxy, KV by NIXL and by ours, in an environment of its own (VLLM="--kv ours --parts tokens"; docs/vllm.md)
	@PYTHON="$(PYTHON)" scripts/vllm_check $(VLLM)

sanitize: $(STAMPS)/package $(STAMPS)/dev ## the core under the address, undefined-behaviour and thread sanitizers (SANITIZE="thread" for one)
	@PYTHON=$(BIN)/python sh tools/sanitize.sh $(SANITIZE)

fuzz: $(STAMPS)/package $(STAMPS)/dev ## libFuzzer on the engine's inputs and on what peers send, each for SECONDS (clang; kept inputs come first)
	@PYTHON=$(BIN)/python sh tools/fuzz.sh $(SECONDS)

clean: ## remove everything that make made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up, each step once

system:
	@PYTHON="$(PYTHON)" sh tools/system.sh

$(STAMPS)/venv:
	@PYTHON="$(PYTHON)" sh tools/system.sh
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@echo "set-up: $(TORCH)"
	@$(PIP) install "$(TORCH)" "numpy>=1.26" "rich>=13"
	@touch $@

$(STAMPS)/build-tools: $(STAMPS)/torch
	@echo "set-up: build tools"
	@$(PIP) install $(BUILD_TOOLS) "mpich>=5.0"
	@touch $@

$(STAMPS)/package: $(STAMPS)/build-tools $(SOURCES)
	@echo "set-up: building and installing expertwire (a few minutes the first time, only what has changed after that)"
	@$(PIP) install --no-build-isolation --no-deps --force-reinstall .
	@touch $@

$(STAMPS)/dev: $(STAMPS)/build-tools pyproject.toml
	@echo "set-up: linters and test tools"
	@$(BIN)/python tools/extra.py dev | xargs -d '\n' $(PIP) install
	@touch $@
