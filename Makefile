# Everything a contributor needs, from a bare Python 3.11 or newer. `make help` lists it.

PYTHON ?= python3
JOB ?= examples/quickstart/job.toml
PROCESSES ?= 2
BUDGET ?= 500
WORKERS ?= 3
SAMPLE ?= 8
NTH ?= 8
MUTANTS ?= --touched
CELLS ?= 72
ALL := 100000
EXTRAS := hf,data,report,boards,remote,kernels,dev
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install train test test-all test-status durations slow matrix peers kernels interop lint bench docs walks rules mutants clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: $(STAMP) ## make the virtual environment .venv (the others do it by themselves)
	@:

# PIP_CONSTRAINT holds in the build environment too, which -c does not reach. -qq leaves errors visible and drops
# warnings. The stamp is written last: an installation that was broken off starts again.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once, and again when pyproject.toml or constraints.txt change) ..."
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

train: ## train the quickstart on two processes (another job or plan: JOB=... PROCESSES=...)
	@set -e; begin=$$(date +%s); $(MAKE) --no-print-directory install; \
	  ready=$$(date +%s); echo "installation: $$((ready - begin)) s"; \
	  $(BIN)/tangram train $(JOB) --processes $(PROCESSES); echo "job: $$(($$(date +%s) - ready)) s"

# Compiled modules are kept, whatever the environment says: hundreds of processes import them. A file's tests stay in one
# worker, for what they share is started once in each, and the files that take longest come first. Some wait rather than
# work, for signals and deadlines: one worker more than cores.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## what a change touches and a turn of the rest, in about 6 minutes (BUDGET: CPU seconds)
	@$(PYTEST) $(SPREAD) --budget $(BUDGET)

test-all: $(STAMP) ## every test, the slow ones, all cells and all other parts of the CI: hours
	@$(PYTEST) $(SPREAD) --all
	@$(MAKE) --no-print-directory slow matrix peers kernels interop rules mutants SAMPLE=$(ALL) CELLS=$(ALL) MUTANTS=

test-status: $(STAMP) ## what has not had its turn since when
	@$(BIN)/python -m tests.selection.status

durations: $(STAMP) ## measure every test anew, for the selection: tests/durations.tsv
	@mkdir -p .pytest_cache
	@$(PYTEST) $(SPREAD) --all -p tests.selection.cpu --record .pytest_cache/seconds.tsv || test -s .pytest_cache/seconds.tsv
	@$(BIN)/python -m tests.selection.durations .pytest_cache/seconds.tsv --everything

walks: $(STAMP) ## how many files a call crosses, and how often it climbs
	$(BIN)/python -m tests.house.walks

slow: $(STAMP) ## run some of the slow tests, others with every commit (SAMPLE=100000 for all)
	@$(BIN)/python -m pytest -n 2 -m slow --sample $(SAMPLE)

# One process starts the ranks of all cells, and these take all cores.
matrix: $(STAMP) ## run some cells of the capability matrix, others with every commit (CELLS=100000 for all)
	@$(BIN)/python -m pytest -p no:xdist -m matrix --sample $(CELLS) tests/matrix

# Never a sample: what another project loads, computes and saves is the proof of every family.
peers: $(STAMP) ## every family and the optimiser's states through megatron-core itself; the chain
	@$(BIN)/python -m pytest -p no:xdist -m slow $(addprefix tests/checkpoint/test_,megatron.py optimiser_states.py chain.py examples.py)

# Another release of Triton than the usual one: that of torch 2.11 for accelerators. Its interpreter takes arrays of one
# element for numbers, which numpy warns of until 2.3 and refuses from 2.4 on.
kernels: $(STAMP) ## the kernels in a run, and under Triton 3.6 (about 190 MB, into .venv-triton)
	@test -d .venv-triton/triton || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target .venv-triton numpy==2.2.6 triton==3.6.0
	@PYTHONPATH=.venv-triton $(BIN)/python -m pytest -p no:xdist -W "ignore:Conversion of an array:DeprecationWarning" \
	  tests/kernels/flash/test_kernels.py tests/kernels/compiled tests/kernels/fused
	@$(BIN)/python -m pytest -p no:xdist -m slow tests/training/test_low_attention.py

# In an environment of their own: transformers loads torchao wherever it is installed, with warnings, and Paddle is large.
interop: ## compare with Paddle, DeepSpeed, bitsandbytes, torchao, TRL and what parses our exports (about 600 MB, into .venv-interop)
	@$(MAKE) --no-print-directory install VENV=.venv-interop EXTRAS=dev,hf,data,eval,kernels,lowbit,paddle,parsers
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt .venv-interop/bin/python -m pip install -qq --disable-pip-version-check trl==1.16.0
	@DS_ACCELERATOR=cpu .venv-interop/bin/python -W ignore -c "import deepspeed, lm_eval, paddle, trl" # without them their tests would only be skipped
	@.venv-interop/bin/python -m pytest tests/interop
	@.venv-interop/bin/python -m pytest -m slow --sample 1000 tests/planner/exports/test_own_parsers.py

lint: $(STAMP) ## ruff check, ruff format --check and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP) ## run the benches of the layout algebra, of relayout and of the training loop
	@$(BIN)/tangram bench layout
	@$(BIN)/tangram bench relayout
	@$(BIN)/tangram bench training

# In an environment of its own, of a few small packages: docstrings are read from the source, and nothing is imported.
docs: ## build the site of the documentation into site/, and look at it in a browser
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt mkdocs mkdocstrings mkdocstrings-python
	@.venv-docs/bin/mkdocs build -q --strict
	@$(MAKE) --no-print-directory install
	@$(BIN)/python -m pytest -p no:xdist -m slow tests/house/test_site.py

rules: $(STAMP) ## prove every op rule, and plant some mistakes that the proof must find
	@$(BIN)/tangram shard check
	@$(BIN)/tangram shard check --mutants $(NTH)

mutants: $(STAMP) ## plant mistakes in the algebra that the tests must find: of changed files, others in turn (MUTANTS= for all)
	@$(BIN)/python tests/mutants/run.py $(MUTANTS)

clean: ## remove the virtual environment and every cache
	@rm -rf $(VENV) .venv-interop .venv-triton .venv-docs site .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
