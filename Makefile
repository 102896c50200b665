# `make run` trains, `make test` checks; both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: run test test-all lint setup clean

run: $(READY)
	$(BIN)/python -m src.train mixer=loglinear_gdn

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "installing into .venv (a minute or two, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv
