# The two commands of the README are `make run` and `make test`; each makes its own virtual environment first.
VENV ?= .venv
PYTHON ?= python3
export PYTHON
BIN = $(VENV)/bin
# Two processes of one thread each beat one process of two on the small tensors of the tests.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: help run test test-all lint format reference clean

help:  ## list these targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run:  ## ask the built-in model something
	@scripts/make-venv $(VENV)
	@$(BIN)/culet generate "Hello! What can you do?"

test:  ## format, lint and type checks, then the test suite (what CI runs)
	@scripts/make-venv $(VENV) test
	@scripts/get-chromium $(VENV)
	@$(MAKE) --no-print-directory lint
	$(PYTEST) -m "not slow and not gpu"

test-all:  ## the test suite with the long soaks and full matrices
	@scripts/make-venv $(VENV) test
	@scripts/get-chromium $(VENV)
	@$(MAKE) --no-print-directory lint
	$(PYTEST) -m "not gpu"

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format:  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference:  ## write docs/reference anew from the code
	$(BIN)/python scripts/make_reference.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
