# `make run` and `make test` create their virtual environment first.
VENV ?= .venv
PYTHON ?= python3
export PYTHON
# Tests start hundreds of Python processes, which should not each compile Culet again.
export PYTHONDONTWRITEBYTECODE =
BIN = $(VENV)/bin

.PHONY: help run test test-all pytest test-clients lint format reference site clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run:  ## serve the built-in model, ask it something, and show the page's address
	@scripts/make-venv $(VENV)
	@$(BIN)/python scripts/first_run.py

test:  ## check format, lint and types beside the test suite (as CI does)
	@scripts/make-venv $(VENV) test
	@scripts/get-chromium $(VENV)
	@$(MAKE) --no-print-directory -j 2 lint pytest SELECTED="not slow and not gpu"

test-all:  ## the same with long soaks and full test matrices
	@scripts/make-venv $(VENV) test-all
	@scripts/get-chromium $(VENV)
	@$(MAKE) --no-print-directory -j 2 lint pytest SELECTED="not gpu"

# The tests' tensors are small, so one thread per process is fastest. Tests of servers often wait, so six processes suit two cores.
pytest:
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.forked -n 6 --dist loadfile --durations 20 -m "$(SELECTED)"

test-clients:  ## run real clients from PyPI and npm against the built-in model (CLIENTS=NAME for some)
	@scripts/make-venv $(VENV)
	$(BIN)/python scripts/clients/run.py $(CLIENTS)

lint:  ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format:  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference:  ## regenerate docs/reference and the README's table from the code
	$(BIN)/python scripts/make_reference.py

site:  ## build the documentation's site in build/site
	@scripts/make-venv $(VENV) docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
