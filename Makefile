# Every target that needs the environment makes it first, in .venv.

PYTHON ?= python3

# Extra arguments for pip, such as a package source or --no-index.
PIP_ARGS ?=

VENV  := .venv
BIN   := $(VENV)/bin
EXPERIMENTS := $(VENV)/.kronfac-experiments
DEV   := $(VENV)/.kronfac-dev
PINS  := $(VENV)/.kronfac-constraints.txt
# Modules are compiled when they are first imported: most of what is installed never is.
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_ARGS)
# Another torch goes without the other pins: `make fast-tests TORCH=torch==2.7.0`, or TORCH=torch for the newest.
PINNED_TORCH := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(PINNED_TORCH)

# One thread for each of the two test workers. A file goes to one of them as a whole: its tests share the
# processes, models and pages that its fixtures make.
PYTEST_ARGS ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(PYTEST_ARGS)

# What `make dist` makes besides the distributions.
RELEASE := build/release
TOOLS   := $(RELEASE)/tools/bin/python
INSTALLED := $(RELEASE)/installed/bin/python
RELEASE_PIP := $(TOOLS) -m pip --disable-pip-version-check

.PHONY: help setup demo checks browser test fast-tests nightly docs figures format dist release-check clean

help:
	@echo "make demo      train a deep autoencoder with four optimizers, two minutes"
	@echo "make test      all checks and the fast tests"
	@echo "make nightly   all checks and all tests, the slow ones too"
	@echo "make docs      build the documentation site, site/index.html"
	@echo "make figures   draw the pictures of the documentation anew"
	@echo "make dist      build wheel and sdist, and try the wheel out in an empty environment"
	@echo "make format    format the code and apply safe lint fixes"
	@echo "make setup     only make the environment in $(VENV)"
	@echo "make clean     remove caches and builds, keep $(VENV)"

setup: $(DEV)

# torch comes first and exactly as pinned, so that nothing after it can pull in
# another build. The pins are for Python 3.11 and later: some of them have no
# release for 3.10, where only the pin of torch is used.
$(EXPERIMENTS): pyproject.toml experiments/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kronfac needs Python 3.10 or later; set PYTHON=...")'
	@test -x $(BIN)/python || { echo "==> creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@if test "$(TORCH)" = "$(PINNED_TORCH)" && $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then cp constraints.txt $(PINS); else echo "$(TORCH)" > $(PINS); fi
	@echo "==> installing $(TORCH)"
	@$(PIP) -c $(PINS) "$(TORCH)"
	@test "$(TORCH)" = "$(PINNED_TORCH)" || \
	    $(BIN)/python -m pip freeze --disable-pip-version-check | grep '^torch==' > $(PINS)
	@echo "==> installing kronfac and its experiments"
	@$(PIP) -c $(PINS) -e . -e ./experiments
	@touch $(EXPERIMENTS)

$(DEV): $(EXPERIMENTS)
	@echo "==> installing what its tests need"
	@$(PIP) -c $(PINS) -e ".[dev,docs]"
	@$(PIP) -c $(PINS) --no-deps curvlinops-for-pytorch
	@touch $(DEV)

demo: $(EXPERIMENTS)
	@$(BIN)/kronfac demo

checks: $(DEV)
	@echo "==> ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --quiet --check .
	@echo "==> mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "==> lint-imports"
	@$(BIN)/lint-imports --no-logo

# For the tests that open a page; they are skipped where it can't be installed.
browser: $(DEV)
	@$(BIN)/python -m tests.browser

test: checks browser
	@echo "==> pytest, fast tests"
	@$(PYTEST) -m "not slow"

# Without the checks: mypy's findings depend on the version of torch.
fast-tests: $(DEV)
	@$(PYTEST) -m "not slow"

nightly: checks browser
	@echo "==> pytest, all tests"
	@$(PYTEST)

docs: $(DEV)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "==> site/index.html; to search it too: $(BIN)/python -m http.server --directory site"

# From committed results, and from runs of a few seconds.
figures: $(DEV)
	@OMP_NUM_THREADS=1 $(BIN)/python docs/tools/pictures.py
	@OMP_NUM_THREADS=1 $(BIN)/python docs/tools/notebooks.py

format: $(DEV)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The wheel is built from the sdist, so that both are known to be whole. The environment that it is tried
# out in has no pip, so that the bill of materials lists what kronfac needs and nothing else.
dist:
	@rm -rf dist $(RELEASE)
	@$(PYTHON) -m venv $(RELEASE)/tools
	@$(PYTHON) -m venv --without-pip $(RELEASE)/installed
	@echo "==> installing what builds and checks"
	@$(RELEASE_PIP) install --quiet --upgrade $(PIP_ARGS) pip
	@$(RELEASE_PIP) install --quiet $(PIP_ARGS) -r release-tools.txt
	@echo "==> building"
	@$(TOOLS) -m build --outdir dist > $(RELEASE)/build.log || { cat $(RELEASE)/build.log; exit 1; }
	@$(TOOLS) -m twine check --strict dist/*
	@echo "==> installing the wheel with $(TORCH)"
	@$(RELEASE_PIP) --python $(INSTALLED) install --quiet $(PIP_ARGS) "$(TORCH)" dist/*.whl
	@$(INSTALLED) -I tests/release/smoke.py
	@echo "==> bill of materials"
	@$(TOOLS) -m cyclonedx_py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
	    --output-format JSON --output-file $(RELEASE)/kronfac.cdx.json $(INSTALLED)
	@ls dist/* $(RELEASE)/kronfac.cdx.json

# The tag against version and changelog: make release-check TAG=v0.2.0
release-check:
	@$(PYTHON) -m tests.release.check $(TAG)

clean:
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist site
	@find . -path ./$(VENV) -prune -o -path ./.git -prune -o \
	    -type d -name __pycache__ -print | xargs rm -rf
