# Everything a contributor or a user runs. Two commands set up and show everything: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check unit stress bench format clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,demo,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.demo

test: $(STAMP)
	$(BIN)/python -m pytest --second-attempts=3

unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit tests/test_architecture.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit tests/test_architecture.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

stress: $(STAMP)
	$(BIN)/python -m tests.stress.kill --kills 5000 --hostile
	$(BIN)/python -m tests.stress.leaks
	$(BIN)/python -m tests.stress.sequences

bench: $(STAMP)
	$(BIN)/python -m bench.latency
	$(BIN)/python -m bench.throughput
	$(BIN)/python -m bench.control
	$(BIN)/python -m bench.ensembles
	$(BIN)/python -m bench.hop

clean:
	rm -rf $(VENV) .assets demo-output bench/results
