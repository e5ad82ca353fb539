# Everything runs from .venv, which `setup` makes from requirements.lock and refreshes when that changes.

PYTHON ?= $(shell for name in python3.11 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
WORKERS ?= 2
STAMP := .venv/.installed

.DELETE_ON_ERROR:
.PHONY: setup check audit test test-fast soak fuzz demo bench docs reference dist lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml src/tailrace/source/postgres/row_reader.c
	@test -n "$(PYTHON)" || { echo "tailrace needs Python 3.11 or newer: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	-$(BIN)/tailrace warm  # half a minute once, and every later start of Spark is shorter; nothing depends on it
	touch $@

# At most once a day, and again when the lock changes: the package index is asked about every pin.
AUDITED := .build/audited-$(shell date +%Y-%m-%d)

check: setup $(AUDITED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py

$(AUDITED): requirements.lock pyproject.toml | setup
	$(BIN)/python -m tools.audit
	mkdir -p .build && rm -f .build/audited-* && touch $@

audit: setup
	$(BIN)/python -m tools.audit

# Tests wait for servers half of the time, so two at once take little more than one. Tests that share a pipeline are a
# group: they stay in one process, and begin first.
PYTEST := $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup

test: setup
	$(PYTEST)

# What needs neither Spark nor a server, with a quarter of hypothesis's examples.
test-fast: setup
	$(PYTEST) -m "not spark and not server and not slow" --quick

# Pipelines killed at random under load. What fails with a seed fails with it again: make soak SEED=…
KILLS ?= 20
SEED ?= $(shell date +%s)
soak: setup
	TAILRACE_SOAK_KILLS=$(KILLS) TAILRACE_SOAK_SEED=$(SEED) $(BIN)/pytest -s tests/live/test_soak.py

# Random sequences of DDL, rows and crashes for this long; each that fails is printed as a short script.
SECONDS ?= 600
fuzz: setup
	$(BIN)/pytest -s --timeout 0 tests/fuzz/test_sequences.py --fuzz-seconds $(SECONDS) --fuzz-seed $(SEED)

demo: setup
	$(BIN)/tailrace demo --seconds 30

bench: setup
	$(BIN)/python -m bench

# The documentation as a site, in .build/site. Its builder is large and needed by no one else: an environment of its own.
DOCS := .build/docs
docs: setup $(DOCS)/.installed
	$(BIN)/python -m tools.site $(DOCS)/bin/zensical

$(DOCS)/.installed: requirements-docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --require-hashes -r requirements-docs.txt
	touch $@

# The pages that list every key, every option and every answer of the API, from the code.
reference: setup
	$(BIN)/python -m tools.reference

# The sdist, and the wheel that is built from it, in dist/.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# Hashes only: no index, no addresses.
LOCK := pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header --annotation-style line
lock: setup
	$(BIN)/$(LOCK) --all-extras --output-file requirements.lock pyproject.toml
	$(BIN)/$(LOCK) --output-file requirements-docs.txt requirements-docs.in

clean:
	rm -rf .venv .build .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
