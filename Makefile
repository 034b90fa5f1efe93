VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
CANARY ?= temp/canary

# What an import compiles has to be kept: without it each of the tests' processes takes eight seconds more to begin.
unexport PYTHONDONTWRITEBYTECODE

# The two commands of the README. Both make the environment on their first run.

run: $(VENV)/.installed ## train the real SmolLM2-135M through the store; RAM tier too small for its optimizer state
	$(BIN)/python examples/fetch_smollm2.py
	$(BIN)/megatrain-tier run examples/quickstart.toml $(ARGS)

test: $(VENV)/.kvikio-installed ## the CPU test suite, on two cores; a costly test runs once a week
	$(BIN)/python -m pytest -n 2 --dist worksteal --today $(ARGS)

# For development

docs: $(VENV)/.docs-installed ## the site of the documentation, in site/: open site/index.html. A broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(VENV)/.lint-installed ## lint, format, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(VENV)/.lint-installed ## rewrite the files as check wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-slow: $(VENV)/.kvikio-installed ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

SEEDS ?= 7 8 9
mutants-record: $(VENV)/.kvikio-installed ## draw 40 random mistakes per seed (SEEDS="7 8 9"), and run the suite once to learn which tests reach them
	cd tests && $(abspath $(BIN))/python -m mutants.campaign record --seeds $(SEEDS) $(ARGS)

mutants-sample: $(VENV)/.kvikio-installed ## plant the mistakes of one recorded seed (SEED=7), each with the tests that reach it; prints survivors
	cd tests && $(abspath $(BIN))/python -m mutants.campaign sample --seed $(SEED) $(ARGS)

canary: ## the newest transformers, pre-releases too: whether it has what we use beside its public interface
	test -x $(CANARY)/bin/python || $(PYTHON) -m venv $(CANARY)
	$(CANARY)/bin/pip install --quiet --quiet --upgrade --pre transformers
	$(CANARY)/bin/pip install --quiet --quiet torch accelerate
	$(CANARY)/bin/python -m megatrain.models.internals

null-gpu: $(VENV)/.installed ## the GPU path on a machine without a GPU, 20 minutes after a download of 1 GB; docs/null_gpu.md
	PYTHON=$(abspath $(BIN)/python) tests/null_gpu/run.sh $(ARGS)

null-gpu-long: $(VENV)/.installed ## the tests of tests/gpu and the bench script on it, an hour
	PYTHON=$(abspath $(BIN)/python) tests/null_gpu/run.sh long

bench: $(VENV)/.installed ## step time against plain PyTorch
	$(BIN)/python bench/step.py $(ARGS)

# A new pip: the one of Python 3.11 takes half a minute to choose the versions.
$(BIN)/python:
	$(PYTHON) -m venv --upgrade-deps $(VENV)

# Not compiled: most modules of the large libraries are never imported, and the first import compiles the others.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --no-compile --quiet --quiet -c constraints.txt -e ".[test,quickstart]"
	touch $@

# Without what it depends on: cupy and 1.3 GB of CUDA, which no test needs.
$(VENV)/.kvikio-installed: $(VENV)/.installed requirements-kvikio.txt
	$(BIN)/pip install --no-compile --quiet --quiet --no-deps -r requirements-kvikio.txt
	touch $@

# The packages of the extra alone, here and below: nothing of the project is installed again beside its tests.
packages_of = $(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'], sep='\n')"

$(VENV)/.lint-installed: $(VENV)/.installed
	$(call packages_of,lint) | xargs $(BIN)/pip install --no-compile --quiet --quiet -c constraints.txt
	touch $@

# The site needs neither the project nor torch.
$(VENV)/.docs-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(call packages_of,docs) | xargs $(BIN)/pip install --no-compile --quiet --quiet -c constraints.txt
	touch $@

help: ## this list
	@grep -E "^[a-z-]+:.*## " $(MAKEFILE_LIST) | sed -E "s/^([a-z-]+):.*## /\1\t/"

.PHONY: run test check format test-slow mutants-record mutants-sample canary null-gpu null-gpu-long bench docs help
.DEFAULT_GOAL := help
