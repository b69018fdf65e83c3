# The commands of this repository. Two words of configuration:
#   MACHINE  which constraints/*.txt is installed: `cuda` where nvidia-smi answers, `cpu` elsewhere, or what you say
#   PYTHON   the interpreter that .venv is made from: 3.11, 3.12 or 3.13
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
MACHINE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
MACHINE := $(MACHINE)

PRESET ?= small
RUN_DIR ?=
TRAIN_ARGS ?=
PYTEST_ARGS ?=
# Processes that share the tests, one thread each; nproc would say 1 where OMP_NUM_THREADS does.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n < 8 ? n : 8)))
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# pytest's code 5: PYTEST_ARGS may name tests of one kind only. In CI an empty run is an error.
NONE_IS_FINE := || { (($$? == 5)) && [[ -z $${CI:-} ]]; }

PACKAGES := libs/jagged libs/precision libs/parallel libs/netmem recipes/gem tools
CONSTRAINTS := constraints/$(MACHINE).txt
STAMP := .venv/.installed-$(MACHINE)
PIP := .venv/bin/python -m pip --disable-pip-version-check
# On a CPU a stand-in of the same name takes the place of the CUDA-only fbgemm-gpu that torchrec asks for.
STUB_cpu := constraints/fbgemm-gpu-stub
STUB_cuda :=

# What `make train` runs: the recipe's component on torchx's local scheduler. It takes a GPU if PyTorch sees one.
TRAIN = torchx run --scheduler local_cwd --wait --log recipes/gem/src/gemworks/gem/components.py:train \
    --preset $(PRESET) $(if $(RUN_DIR),--run_dir $(RUN_DIR)) -- $(TRAIN_ARGS)

# torchx starts the trainer by name, so the environment's programs come first.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help install train test test-slow test-gpu test-ranges lint docs release clean

help: ## list the commands
	@echo "gemworks on this machine: MACHINE=$(MACHINE) PYTHON=$(PYTHON)"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | while IFS=$$'\t' read -r name what; do printf '  make %-12s %s\n' "$$name" "$$what"; done

install: $(STAMP) ## make .venv with everything pinned

# A stamp says that an installation ended well. Without one whatever lies in .venv is half-made and is thrown away;
# with an older one (constraints or a pyproject changed, or another MACHINE) the environment is brought up to date.
$(STAMP): $(CONSTRAINTS) requirements-dev.txt $(PACKAGES:=/pyproject.toml) constraints/fbgemm-gpu-stub/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"{sys.executable} is Python {v[0]}.{v[1]}; needed: 3.11, 3.12 or 3.13. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	@ls .venv/.installed-* >/dev/null 2>&1 || { rm -rf .venv && $(PYTHON) -m venv .venv; }
	@rm -f .venv/.installed-*
	$(PIP) install --constraint $(CONSTRAINTS) torch hatchling
	$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --requirement requirements-dev.txt \
	    $(STUB_$(MACHINE)) $(patsubst %,--editable ./%,$(PACKAGES:recipes/gem=recipes/gem[launch]))
	$(PIP) check
	@touch $@

$(CONSTRAINTS):
	@echo "MACHINE=$(MACHINE): no $@; known: $(patsubst constraints/%.txt,%,$(wildcard constraints/c*.txt))" >&2; exit 1

train: $(STAMP) ## train GEM on MovieLens-100K (PRESET, RUN_DIR, TRAIN_ARGS='--set a.b=1 c.d=2')
	$(TRAIN)

test: $(STAMP) ## the CPU tests, without the slow ones (PYTEST_ARGS)
	$(ONE_THREAD) pytest -m "not slow and not gpu" --numprocesses $(WORKERS) $(PYTEST_ARGS)

# Tests of several processes have time-outs and fill the cores themselves, so they take turns.
test-slow: $(STAMP) ## the slow tests: wheels in clean environments, many processes
	$(ONE_THREAD) pytest -m "slow and not dist and not gpu" --numprocesses $(WORKERS) --dist loadfile $(PYTEST_ARGS) $(NONE_IS_FINE)
	$(ONE_THREAD) pytest -m "slow and dist and not gpu" $(PYTEST_ARGS) $(NONE_IS_FINE)

test-gpu: $(STAMP) ## the tests that need a GPU
	pytest -m gpu $(PYTEST_ARGS)

lint: $(STAMP) ## ruff (rules and format) and pyright
	ruff check .
	ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright

docs: $(STAMP) ## the documentation site, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

release: $(STAMP) ## what a release needs: pinned API, changelog entries, wheels that work alone (PYTEST_ARGS)
	pytest tests/test_repo_release.py tests/test_repo_packages.py tests/test_repo_wheels.py $(PYTEST_ARGS)

test-ranges: $(STAMP) ## both ends of Triton's range: the interpreter on the newest, kernels compiled by the oldest
	$(PIP) install --quiet --no-deps --upgrade --target .cache/triton-newest --constraint constraints/interpret.txt triton
	$(PIP) install --quiet --no-deps --upgrade --target .cache/triton-oldest --constraint constraints/oldest.txt triton
	$(ONE_THREAD) PYTHONPATH=.cache/triton-newest TRITON_INTERPRET=1 pytest -m "interpret and not slow" --numprocesses $(WORKERS) $(PYTEST_ARGS)
	$(ONE_THREAD) PYTHONPATH=.cache/triton-oldest pytest -m "compile and not slow" --numprocesses $(WORKERS) $(PYTEST_ARGS)

clean: ## remove .venv, caches and built files; runs/ stays
	rm -rf .venv .cache .triton38 site .pytest_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
