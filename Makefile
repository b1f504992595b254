# Bottega's commands. Every target sets up what it needs in .venv; a machine needs Python 3.11 and make.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

# Busy-waiting threads of two torch processes starve each other up to eightyfold on few cores.
export OMP_WAIT_POLICY := PASSIVE
# A shell that already sits in another virtual environment must not leak into this one.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
# Where it is set, as in many containers, each engine process compiles torch and Diffusers anew: 12 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-gpu gpu-report fuzz chaos soak like faults lint protos page-library benches clean
.PRECIOUS: .venv/.ready

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.ready .venv/.stubs ## Set up, start the suite, draw a picture of PROMPT, say where it is, stop the suite
	@PATH="$(CURDIR)/$(BIN):$$PATH" deploy/demo.sh $(if $(PROMPT),"$(PROMPT)")

test: .venv/.ready .venv/.stubs ## Set up and run the tests that need no GPU (ARGS goes to pytest)
	$(BIN)/python -m tests $(ARGS)

test-gpu: .venv/.ready .venv/.stubs ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

# It installs nothing: a machine with a GPU has a torch of its own, and may reach no package index.
gpu-report: REPORT_PYTHON := $(if $(wildcard .venv/.ready),$(BIN)/python,$(PYTHON))
gpu-report: export TRANSFORMERS_VERBOSITY = error
gpu-report: ## Measure what a GPU does, with the torch that is there; goes on where it was (ARGS="--small" on a CPU)
	@test -f protos/bottega/v1/generation_pb2.py || $(REPORT_PYTHON) protos/generate.py
	@PYTHONPATH="protos:libs:services:kernels:$(PYTHONPATH)" $(REPORT_PYTHON) -m load.gpu_report $(ARGS)

fuzz: .venv/.ready .venv/.stubs ## Send thousands of bad requests to every method (ARGS goes to it)
	$(BIN)/python -m tests.fuzz.run $(ARGS)

chaos: export BENCH_RECORD = $(RECORD)
chaos: .venv/.ready .venv/.stubs ## Kill, freeze, fill and restart real services under load (ARGS="--part kill-workers"; RECORD as for benches)
	$(BIN)/python -m tests.chaos $(ARGS)
	@test -z "$(RECORD)" || $(BIN)/python -m load.results.table

like: export TRANSFORMERS_VERBOSITY = error
like: .venv/.ready .venv/.stubs ## Draw random requests of every kind, and each picture again as --like does (ARGS="--pair")
	$(BIN)/python -m tests.like $(ARGS)

faults: .venv/.ready .venv/.stubs ## Make one mistake after the other in a copy, and see that a test fails for each (ARGS goes to it)
	$(BIN)/python -m tests.faults $(ARGS)

lint: .venv/.ready .venv/.stubs ## Run ruff, mypy, import-linter and buf
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	protos/check.sh

protos: .venv/.ready ## Write the stubs of the contract again, after an edit of a .proto
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python protos/generate.py
	@touch .venv/.stubs

# Nothing else needs npm: the copy in the repository is what is installed.
page-library: FOLDER := services/bottega/http/page/vendor
page-library: ## Fetch the library of the HTTP API's page with npm, and compare it with the copy here (LIT=3.3.3)
	@fetched=$$(mktemp -d); trap 'rm -rf "$$fetched"' EXIT; \
	npm pack --silent --pack-destination "$$fetched" lit-html@$(or $(LIT),3.3.3) >/dev/null; \
	tar -xzf "$$fetched"/lit-html-*.tgz -C "$$fetched"; \
	cp "$$fetched/package/lit-html.js" "$$fetched/package/LICENSE" $(FOLDER); \
	git diff --exit-code --stat -- $(FOLDER) && echo "$(FOLDER) is lit-html $(or $(LIT),3.3.3) as npm has it"

soak: export TRANSFORMERS_VERBOSITY = error
soak: .venv/.ready .venv/.stubs ## Run every service under a constant mix, a fault a minute, and see what grows (MINUTES=60)
	$(BIN)/python -m load.soak $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

# Transformers warns of each image processor for which torchvision, which nothing here uses, is missing.
bench-%: export TRANSFORMERS_VERBOSITY = error
bench-%: NAME = $(subst -,_,$*)
bench-%: export BENCH_RECORD = $(RECORD)
bench-%: .venv/.ready .venv/.stubs ## Run one comparison of load/bench (ARGS goes to it; RECORD="nothing beside" keeps the figures)
	@grep -qs '^BENCH = ' load/bench/$(NAME).py || { echo "no bench '$*': make benches lists them"; exit 2; }
	$(BIN)/python -m load.bench.awake $(BIN)/python -m load.bench.$(NAME) $(ARGS)
	@test -z "$(RECORD)" || $(BIN)/python -m load.results.table

benches: .venv/.ready ## List the comparisons of load/bench and what each asks
	@$(BIN)/python -m load.bench

clean: ## Remove everything that the commands made
	rm -rf .venv out build .mypy_cache .ruff_cache .pytest_cache .hypothesis .grimp_cache .import_linter_cache
	rm -rf {protos,libs,libs/serving,libs/weights,services,kernels}/{*.egg-info,build}
	rm -f protos/bottega/v1/*_pb2.py protos/bottega/v1/*_pb2.pyi protos/bottega/v1/*_pb2_grpc.py protos/bottega/v1/*_pb2_grpc.pyi
	find protos libs services kernels tests load -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: constraints.txt requirements-dev.txt deploy/set_up.py protos/pyproject.toml protos/setup.py libs/pyproject.toml libs/serving/pyproject.toml libs/weights/pyproject.toml services/pyproject.toml kernels/pyproject.toml
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then \
		echo "Bottega needs Python 3.11, 3.12 or 3.13; say where it is: make PYTHON=/path/to/python3.11"; exit 2; fi
	@echo "Setting up .venv. torch is a large download (on Linux, the CUDA build with its libraries: several GB);"
	@echo "the CPU build is far smaller: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make ..."
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python deploy/set_up.py
	@touch $@

.venv/.stubs: .venv/.ready protos/generate.py $(wildcard protos/bottega/v1/*.proto)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python protos/generate.py
	@touch $@
