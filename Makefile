# Everything runs from a virtual environment in .venv, made from the lock file when it is missing or older than it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test lint types bench e2e dist docs lock clean

run: $(VENV)/ready
	$(BIN)/vk-cocoon playground $(ARGS)

test: $(VENV)/ready
	$(BIN)/python -m tests.side_by_side $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python -m tests.bench $(ARGS)

# Against a real control plane, built into a cache when it is not there, and against the fake one.
e2e: $(VENV)/ready
	$(if $(findstring --control-plane=fake,$(ARGS)),,$(BIN)/python -m tests.e2e.programs build)
	$(BIN)/python -m tests.e2e -p no:randomly $(ARGS)

# Renews the pages that are made from tables in the code.
docs: $(VENV)/ready
	$(BIN)/python -m vkcocoon_settings configuration > docs/configuration.md
	$(BIN)/python docs/reference.py
	$(BIN)/python -m simulator.reference > docs/scenarios.md
	$(BIN)/python -m simulator.catalog docs/simulator.md
	$(BIN)/python -m tests.tutorial docs/tutorial.md
	$(BIN)/python -m vkcocoon_settings environment > packaging/vk-cocoon.env.example

# Compat mode makes the whole directory importable: a module added later needs no new installation.
$(VENV)/ready: requirements.lock setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; choose another with make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vk-cocoon needs Python 3.11 or newer and %s is %d.%d; choose another with make PYTHON=python3.12" % (sys.executable, *sys.version_info[:2]))'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Making $(VENV) with the packages of requirements.lock. It is done once and takes about a minute."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

# What is shipped: built twice, compared, and tried as somebody would who has nothing else.
dist: $(VENV)/ready
	$(BIN)/python packaging/build_dist.py
	$(BIN)/python packaging/build_dist.py --output build/dist-again
	$(BIN)/python packaging/try_dist.py dist build/dist-again

# Renews the exact versions from the ranges in setup.py: of everything, of what is shipped, and of what builds that.
LOCK := build/lock/bin/pip-compile --quiet --strip-extras --generate-hashes --allow-unsafe --no-emit-find-links --no-emit-index-url --no-emit-trusted-host
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet pip-tools
	$(LOCK) --extra dev --output-file requirements.lock setup.py packaging/build.in
	$(LOCK) --extra sim --constraint requirements.lock --output-file packaging/runtime.lock setup.py
	$(LOCK) --output-file packaging/pack.lock packaging/pack.in

clean:
	rm -rf $(VENV) build dist *.egg-info
