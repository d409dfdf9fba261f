# Two commands on a machine with Python 3.11 and nothing else: `make demo` and `make test`.
# Plain PyPI serves torch for CUDA on Linux; for the small CPU build set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
SOURCES := meshwright planner passes runtime tests examples benchmarks
# One thread per rank: four ranks on two cores with a thread pool each would spend their time switching.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-all check format clean

demo: $(VENV)/.base
	$(BIN)/python -m meshwright.demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadgroup

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(VENV)/.dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that nothing else's resolution can replace the tested build.
$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) $(TORCH)
	$(PIP) -e '.[hf]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[hf,test,dev]'
	touch $@
