# Two commands for a newcomer: `make demo`, `make test`. Each installs what it needs into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NAME ?= house

.PHONY: install demo test lint peers evidence clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,tasks,parquet]"
	$(BIN)/python -m nonet.native
	touch $(STAMP)

# Tokenizer, cold start, held-out reward, RL, held-out reward again, report. Continues where it stopped.
demo: install
	$(BIN)/nonet run recipes/nano.toml --quick --out runs/demo

test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: install
	$(BIN)/ruff check nonet tests peers
	$(BIN)/pyright

# One venv per peer under .peers/, for comparisons only; without what its .drop names.
peers: $(patsubst peers/%.txt,.peers/%/.installed,$(wildcard peers/*.txt))

.peers/%/.installed: peers/%.txt
	test -x .peers/$*/bin/python || $(PYTHON) -m venv .peers/$*
	.peers/$*/bin/python -m pip install --quiet --constraint constraints.txt torch
	.peers/$*/bin/python -m pip install --quiet --constraint constraints.txt --requirement peers/$*.txt
	test ! -f peers/$*.drop || .peers/$*/bin/python -m pip uninstall --quiet --yes --requirement peers/$*.drop
	touch $@

# What an issue must show, as a table; long parts are stages that resume.
evidence: install
	$(BIN)/python -m nonet.bench.evidence $(NAME)

clean:
	rm -rf $(VENV) .peers runs models
