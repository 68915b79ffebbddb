# PYTHON=PATH/bin/python runs tests and checks under another environment, as .ci/run does.
PYTHON = .venv/bin/python
BASE = $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c 'import ensurepip, venv' 2>&- && echo $$p && break; done)
# Two files of tests at a time: the slow ones wait for processes more than they compute.
# They keep the order of tests/conftest.py.
PYTEST = $(PYTHON) -P -m pytest -n 2 --dist loadfile --no-loadscope-reorder
READY := $(if $(filter .venv/bin/python,$(PYTHON)),.venv/complete)

.PHONY: venv demo test check lint fast format bench links clean

venv: .venv/complete

# The stamp comes last: an install that was interrupted is done again.
.venv/complete: pyproject.toml constraints.txt
	$(or $(BASE),$(error dugnad needs Python 3.11 or newer with its venv module)) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[demo,dev,fast]' && touch $@

demo: venv
	.venv/bin/dugnad demo

test: $(READY)
	$(PYTEST) -m ""

check: lint fast

lint: $(READY) links
	$(PYTHON) -m ruff format --check . && $(PYTHON) -m ruff check .
	$(PYTHON) -m mypy .typing/dugnad tests $(wildcard benchmarks) && $(dir $(PYTHON))lint-imports --no-logo

fast: $(READY)
	$(PYTEST)

format: $(READY)
	$(PYTHON) -m ruff format . && $(PYTHON) -m ruff check --fix .

bench: $(READY)
	$(PYTHON) benchmarks/short.py

# mypy cannot follow setuptools' package-dir, so it is shown the folders under their import name.
links:
	mkdir -p .typing/dugnad && for d in dht averaging peer dashboard simulation; do ln -sfn ../../$$d .typing/dugnad/$$d; done

clean:
	rm -rf .venv .typing build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
