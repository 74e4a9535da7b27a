# Everything a fresh clone needs: each target sets up a virtual environment of its own, once.
#
#   make test    run the tests              make demo    see a job survive the loss of a replica
#   make check   lint, types and tests      make clean   remove what these made
#   make chaos   each fault alone with 2, 3 and 5 groups, 100 kills, three etcds, five seeds; proven from the logs
#   make soak    the same for MINUTES=30, with a fault every few seconds and one SEED
#
# PYTHON=python3.12 chooses the interpreter; ARGS="-k name" goes on to pytest, the demo or the chaos.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
MINUTES ?= 30
SEED   ?= 0
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help venv test check demo chaos soak clean

help:
	@sed -n '3,8s/^# \{0,1\}//p' Makefile

venv: $(STAMP)

# Only rebuilt when the dependencies change; a failed installation leaves no stamp and is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ftkit needs Python 3.10 or newer; try: make PYTHON=python3.12")'
	@echo "Setting up $(VENV) with $$($(PYTHON) --version); torch is large, so the first time takes minutes ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
	@echo "$(VENV) is ready."

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	@PYTHON=$(BIN)/python scripts/check $(ARGS)

demo: $(STAMP)
	@$(BIN)/ftkit demo $(ARGS)

chaos: $(STAMP)
	@$(BIN)/python scripts/chaos_night.py -- $(ARGS)

soak: $(STAMP)
	@$(BIN)/python scripts/chaos.py --groups 3 --seconds $$(($(MINUTES) * 60)) --seed $(SEED) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
