# Everything runs from a virtual environment in .venv, made from the lock file when it is missing or older than it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint types bench e2e lock clean

run: $(VENV)/ready
	$(BIN)/vk-cocoon playground $(ARGS)

test: $(VENV)/ready
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python -m tests.bench $(ARGS)

$(VENV)/ready: requirements.lock setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vk-cocoon needs Python 3.11 or newer; choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# Renews the exact versions from the ranges in setup.py.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet pip-tools
	build/lock/bin/pip-compile --quiet --strip-extras --generate-hashes --allow-unsafe --no-emit-find-links --no-emit-index-url --no-emit-trusted-host --extra dev --output-file requirements.lock setup.py packaging/build.in

clean:
	rm -rf $(VENV) build dist *.egg-info
