# Two commands on a fresh machine: `make demo` and `make test`. Both build their own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The pin is for this repository's own set-up only; users choose any torch >= 2.6.
TORCH := torch==2.13.0

.PHONY: demo test test-slow bench lint clean

demo: $(VENV)/.installed  ## Train a small language model on this machine's own Python sources, on 2 workers
	rm -rf runs/demo
	$(BIN)/elaunch --nproc-per-node 2 -m elaunch.trainer --out runs/demo

test: $(VENV)/.installed-dev lint  ## Everything but the slow tests
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev  ## The slow tests: long simulations, many kills
	$(BIN)/python -m pytest -m slow

N ?= 20
bench: $(VENV)/.installed-dev  ## Measure beside torchrun; all sections make docs/performance.md anew; ARGS="--only start --workers 1,2"
	$(BIN)/python -m bench --samples $(N) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd src && ../$(BIN)/mypy --config-file ../pyproject.toml
	$(BIN)/mypy --config-file pyproject.toml -p bench
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist src/elaunch.egg-info

# torch first: left to the dependency resolver, a newer one with gigabytes of CUDA would come. numpy, or torch warns.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH) numpy
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
