# Everything runs in .venv inside the clone; `make plan` is the first thing to try.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out

.PHONY: plan test check bench format clean

plan: $(VENV)/installed  ## plan the sample trace, into out/
	$(BIN)/plan --slo examples/slo.yaml --trace examples/traces/azure-conversation-sample.csv -o $(OUT)

test: $(VENV)/installed-dev  ## the tests, warnings as errors
	$(BIN)/python -m pytest -n 2

check: $(VENV)/installed-dev  ## what CI runs: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed-dev  ## speed of the simulator and of whole plans; see benchmarks/
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/plans.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml $(VENV)/installed
	$(BIN)/pip install --quiet --group dev
	touch $@

clean:
	rm -rf $(VENV) $(OUT) .mypy_cache .ruff_cache .pytest_cache
