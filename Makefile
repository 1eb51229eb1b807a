# Every command sets up what it needs, in .venv, from a machine that has Python >= 3.11 and make.

SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := bin/python -m pip install --disable-pip-version-check --constraint constraints.txt
INSTALL := $(VENV)/$(PIP)
COMMA := ,
# the environment of the site: that of the tests if it is there, else one with the packages of the site alone
SITE := $(if $(wildcard $(VENV)/.installed-dev),$(VENV),.venv-docs)
# a line for each package, and one every few seconds while they are unpacked, so that nobody waits in silence
BRIEF := | awk '/^Collecting/ {print "  " $$2; fflush()} /^Installing collected/ {print "  unpacking them"; fflush()}'
BUSY := @while sleep 5; do echo "  ..."; done & trap "kill $$!" EXIT;

.PHONY: train compare test test-slow test-matrix test-trl test-verl coverage check-speed check-wheel release lint mypy docs notebooks format clean

# 180 rollouts of GRPO with two methods, a minute or two; ends with a table and traced tokens. One thread: the
# model is so small that a second one gains little, and loses much on a machine that is busy.
train: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/rlstab train examples/countdown.yaml --overwrite

# S2T, plain GRPO and a random mask, three seeds each, and a report on them, about five minutes on two cores
compare: $(VENV)/.installed
	$(BIN)/rlstab bench examples/bench_s2t.yaml
	$(BIN)/rlstab report runs/s2t --metric reward/true/area --metric eval/mean --metric eval/entropy --out runs/s2t/report

# compiled modules are kept also where the environment says otherwise: else each process would compile them again;
# pytest rewrites the modules of every plugin that it finds, which takes seconds in each process, so it looks for none
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
		$(BIN)/python -m pytest -p xdist.plugin -n auto --dist loadfile

test-slow: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# noxfile.py, hours; make test-matrix ARGS=--list, or ARGS='-s py311-torch29-sse4-1'
test-matrix: $(VENV)/.installed
	$(BUSY) $(INSTALL) 'nox>=2026.4' $(BRIEF)
	$(BIN)/nox $(ARGS)

# the adapter for TRL, in an environment with its newest release; make test skips these.
# Older releases too: make test-trl ARGS='trl-1.12.0 trl-1.13.0 trl-1.14.1'
test-trl: $(VENV)/.installed
	$(BUSY) $(INSTALL) 'nox>=2026.4' $(BRIEF)
	$(BIN)/nox -s trl $(ARGS)

# the adapter for verl, likewise
test-verl: $(VENV)/.installed
	$(BUSY) $(INSTALL) 'nox>=2026.4' $(BRIEF)
	$(BIN)/nox -s verl $(ARGS)

# by paths: naming packages would make coverage import torch, and pytest import it again
coverage: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/core tests/zoo tests/testing tests/test_explain.py \
		--cov=rlstab/core --cov=rlstab/zoo --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=98

# the goals that hold on any machine, by CPU-seconds and ratios; under a minute
check-speed: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks check

# sdist and wheel: built, checked, and the wheel used far from the clone; half a minute, without the network
check-wheel: $(VENV)/.installed-dev
	$(BIN)/python .ci/check_wheel.py

# what a person then uploads: built, checked, and left in dist/ with the command that uploads it
release: $(VENV)/.installed-dev
	$(BIN)/python .ci/check_wheel.py dist

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_names.py
	$(BIN)/mypy

mypy: $(VENV)/.installed-dev
	$(BIN)/mypy

# the documentation site, into site/; strict: a broken link or an undocumented public name fails
docs: $(SITE)/.installed-docs
	@echo "Building the site: a minute or two, without output unless something is wrong."
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet
	@echo "built: open $(CURDIR)/site/index.html"

# run the notebooks of the site again and keep what they print
notebooks: $(VENV)/.installed-dev
	PYTHONWARNINGS=ignore $(BIN)/jupyter nbconvert --execute --inplace --to notebook docs/notebooks/*.ipynb

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-docs runs build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and by exact version: a range would let another package choose a build
define install
	@$(PYTHON) -c 'import sys; sys.exit("rlstab needs Python >= 3.11; say which with make PYTHON=...") if sys.version_info < (3, 11) else None'
	@echo "Setting up $(@D), once: torch (a download of 0.2 GB, or of 3 GB with CUDA), then some $(2) packages; minutes."
	$(PYTHON) -m venv $(@D)
	$(BUSY) $(@D)/$(PIP) torch==2.13.0 $(BRIEF)
	$(BUSY) $(@D)/$(PIP) --editable '.[$(1)]' $(BRIEF)
	touch $@
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,train$(COMMA)report,60)

.venv-docs/.installed-docs: pyproject.toml constraints.txt
	$(call install,report$(COMMA)docs,90)

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Adding what the tests need, once: some 150 packages, minutes."
	$(BUSY) $(INSTALL) --editable '.[dev,release]' $(BRIEF)
	touch $@ $(VENV)/.installed-docs
