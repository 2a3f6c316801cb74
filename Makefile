# A fresh machine needs Python >= 3.11, make and g++; everything else is set up by the first target that needs it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TYPED  := build/typed

.DEFAULT_GOAL := help
.PHONY: help setup lint types check quick test test-all tests docs pictures demo wheel smoke clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(STAMP)  ## create .venv and install the project in it (only when stale)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[dev]"
	@touch $@

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check .

# mypy reads a folder of links: in the checkout `passes` and `runtime` lie beside `megacompile`, and mypy does not follow that
# mapping.
types: $(STAMP)  ## mypy, of the package and of the benchmarks
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/megacompile
	@ln -s $(CURDIR)/megacompile/* $(CURDIR)/passes $(CURDIR)/runtime $(TYPED)/megacompile/
	cd $(TYPED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache --python-executable $(abspath $(BIN))/python -p megacompile
	cd $(TYPED) && MYPYPATH=$(abspath $(TYPED)) $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache --python-executable $(abspath $(BIN))/python $(CURDIR)/benchmarks/*.py

check: lint types

# Threads of OpenMP would take the cores from the lanes of the next test, and gain nothing on models so small. A worker takes
# about a gigabyte.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

quick: lint  ## ruff, mypy, and the tests that answer soonest: rules of the code, programs, kernels, and what you changed
	@$(MAKE) --no-print-directory -j 2 types tests ARGUMENTS="tests/lint tests/ir tests/kernels $$($(BIN)/python tests/support/changed.py)"

test: lint  ## ruff, mypy and the tests of every commit
	@$(MAKE) --no-print-directory -j 2 types tests

test-all: lint  ## ruff, mypy and all tests that need no GPU, for an hour or more
	@$(MAKE) --no-print-directory -j 2 types tests ARGUMENTS=--nightly

tests: $(STAMP)  # mypy takes one core for a minute, so it runs beside them
	$(PYTEST) $(ARGUMENTS)

docs: $(STAMP)  ## build the documentation in build/docs, without network; warnings and broken links are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs

PICTURE = $(BIN)/megacompile inspect --hardware h200 --batch 64 --length 1024 --resident-state none

pictures: $(STAMP)  ## draw docs/pictures anew: simulated steps, no GPU needed
	$(PICTURE) docs/pictures/four-layers.json --micro-batch-size 16 --saved-layers 0 --picture docs/pictures/four-layers.svg
	$(PICTURE) docs/pictures/four-layers.json --micro-batch-size 16 --saved-layers 0 --checkpoint-interval 2 \
		--picture docs/pictures/four-layers-k2.svg
	$(PICTURE) docs/pictures/qwen2-7b.json --micro-batch-size 16 --saved-layers 0 --picture docs/pictures/qwen2-7b.svg
	$(PICTURE) docs/pictures/qwen2-7b.json --train-step --update arrival --waves 2 --picture docs/pictures/qwen2-7b-waves.svg
	$(BIN)/megacompile inspect --hardware h200 --batch 16 --length 1024 docs/pictures/qwen2-7b.json --train-step \
		--device-memory 24GiB --picture docs/pictures/deferred-moments.svg
	$(PICTURE) docs/pictures/qwen2-7b.json --gpus 8 --batch 512 --micro-batch-size 16 --saved-layers 0 --picture docs/pictures/eight-gpus.svg

demo: $(STAMP)  ## train a small model on the Python standard library, streamed on the CPU
	$(BIN)/python examples/demo.py

wheel: $(STAMP)  ## build the wheel and the source archive, in dist/
	@rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >/dev/null
	@ls dist

SMOKE  ?= build/smoke

smoke: wheel  ## install the wheel in a fresh environment (of PYTHON=python3.12, say) and run the README's example there
	$(PYTHON) -m venv --clear $(SMOKE)
	$(SMOKE)/bin/python -m pip install --disable-pip-version-check --quiet dist/*.whl
	$(SMOKE)/bin/python -W error tests/smoke.py README.md

clean:  ## remove everything that the targets made
	rm -rf $(VENV) build dist runs *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
