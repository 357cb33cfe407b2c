PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# pip knows groups since 25.1; the one that a new .venv comes with may be older.
DEV_GROUP := import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")
CLUSTER := tests/faults/test_nats_cluster.py
JUDGE   := tests/faults/judge

.PHONY: help setup demo lint check test judge bench benchmarks pictures mutants clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with everything that the other targets need

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c '$(DEV_GROUP)' > $(VENV)/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e . -r $(VENV)/dev.txt
	@touch $@

demo: setup ## orders, deadlines and a killed worker, on the embedded store
	@$(BIN)/tickwheel demo

check: lint ## format, lint, types, imports, and fast tests: under a minute
	$(BIN)/python -m pytest -q -n 4 -m "not slow" tests/unit tests/engine

# Tests mostly wait, for servers that keep the time themselves and for processes, so many run side by
# side. The last ones measure and kill: two at a time, and each file keeps its servers; those with
# three servers, whose clocks decide who leads, have the machine to themselves.
test: lint ## the same, and all tests, with real processes and servers killed and frozen
	$(BIN)/python -m pytest -q -n 8 --maxschedchunk 2 tests/unit tests/engine tests/contract tests/model
	$(BIN)/python -m pytest -q -n 4 tests/faces tests/simulation tests/releases
	@if $(BIN)/python tests/chromium.py; then $(BIN)/python -m pytest -q -n 2 tests/browser; fi
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/faults --ignore $(CLUSTER) --ignore $(JUDGE)
	$(BIN)/python -m pytest -q $(CLUSTER)
	$(BIN)/python -m pytest -q -n 2 --maxschedchunk 1 $(JUDGE)

# For any duration, with your own seed or a random one, which is printed.
SECONDS ?= 60
judge: setup ## run stores under random faults: SECONDS=600 SEED=7 STORES=sqlite,nats
	JUDGE_SECONDS=$(SECONDS) JUDGE_SEED=$(or $(SEED),$(shell date +%s)) JUDGE_STORES=$(STORES) \
		$(BIN)/python -m pytest -q -s $(JUDGE)/test_judge.py

lint: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports > /dev/null || $(BIN)/lint-imports

bench: setup ## measure on this machine; tables here, JSON in bench/results
	$(BIN)/python -m bench

# Alone on the machine: the page says so if it was not.
benchmarks: setup ## measure every store and other libraries; writes docs/benchmarks.md (25 minutes)
	$(BIN)/tickwheel bench --save docs

pictures: setup ## take the pictures of the dashboard in docs/images
	PYTHONPATH=tests:tests/browser $(BIN)/python tests/browser/pictures.py

mutants: setup ## plant faults for each invariant and check that a test fails
	$(BIN)/python tests/mutants.py

clean: ## remove what the targets above made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
