# Two commands on a fresh machine: `make demo` and `make test`. Both build their own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The pin is for this repository's own set-up only; users choose any torch >= 2.6.
TORCH := torch==2.13.0
# pip would compile all files of torch, sympy, moto and a hundred others, for a minute. Python compiles what it imports.
INSTALL := $(BIN)/pip install --quiet --no-compile
# Python would compile them at each start.
unexport PYTHONDONTWRITEBYTECODE
# Begun at once, a dozen processes would each compile torch, for 10 s.
FIRST_IMPORT := $(BIN)/python -c 'import elaunch.trainer.train, torch._dynamo, torch.distributed.fsdp'

# Tests with jobs at a time: most wait for leases to end and processes to start, so more than there are cores.
JOBS ?= $(shell echo $$(($$(nproc) + 4)))
# The folder has a short name: tests make sockets in it, and a socket's path has at most 107 characters. A file of tests
# stays on one worker, since its tests share servers and recorded runs. A test that hangs ends its run, with the stack of
# each thread: another worker would take it up again. A run that does not end is broken off.
LIMIT ?= 45m
TEST_LIMIT_S ?= 900
PYTEST = folder=$$(mktemp -d /tmp/t.XXXX) && timeout --foreground --signal=ABRT --kill-after=30 $(LIMIT) $(NICE) \
	$(BIN)/python -X faulthandler -m pytest $(TEST_LIMIT_S:%=-o faulthandler_timeout=%) --max-worker-restart 0 \
	--dist loadfile --no-loadscope-reorder --basetemp=$$folder/t $(1); code=$$?; rm -rf $$folder; exit $$code

.PHONY: demo check test test-slow conformance integrations ecosystem mutants size tools bench gpu docs release lint clean

demo: $(VENV)/.installed  ## A training on 2 workers whose ranks are killed twice, the same one left alone, and the report
	rm -rf runs/demo
	$(BIN)/python -m bench.demo

check: $(VENV)/.installed-dev lint  ## The inner loop: linters, types, import rules, a part of the simulation, the unit tests without a server
	$(call PYTEST,-q -n $$(nproc) -m "not slow and not servers and not thorough" tests/sim tests/unit)

# All at the same time, and each may fail. Tests with jobs mostly wait, so they go first; the simulation and the unit tests
# keep the cores busy that the others leave idle. These are four runs without workers of pytest's, each of which would
# collect the tests of all: 20 s of CPU. Two of them mostly wait for stores; as one they would be the last to end. The
# lines of all but the jobs are shown at their end, since all would write into one line.
test: $(VENV)/.installed-dev tools  ## Everything but the slow tests
	@$(MAKE) --no-print-directory --keep-going --jobs=6 test-lint test-jobs test-units test-launcher test-rendezvous test-trainer

SHOWN_AT_END = log=$$(mktemp); ($(1)) >$$log 2>&1; code=$$?; cat $$log; rm $$log; exit $$code

JOB_TESTS := tests/e2e tests/faults tests/examples tests/conformance tests/ecosystem

.PHONY: test-jobs test-units test-launcher test-rendezvous test-trainer test-lint
test-jobs test-units test-launcher test-rendezvous test-trainer: $(VENV)/.compiled
test-jobs:
	@$(call PYTEST,-n $(JOBS) $(JOB_TESTS))

test-units test-launcher test-rendezvous test-trainer: NICE = nice -n 10
test-units:
	@$(call SHOWN_AT_END,$(call PYTEST,-n 0 tests/sim tests/unit $(addprefix --ignore tests/unit/,launcher rendezvous trainer)))

test-launcher test-rendezvous test-trainer:
	@$(call SHOWN_AT_END,$(call PYTEST,-n 0 tests/unit/$(@:test-%=%)))

test-lint:
	@$(call SHOWN_AT_END,timeout --foreground $(LIMIT) $(MAKE) --no-print-directory lint)

test-slow conformance integrations: LIMIT = 12h
# A test's limit is then pyproject.toml's.
test-slow conformance integrations: TEST_LIMIT_S =
test-slow: $(VENV)/.installed-dev tools  ## The slow tests: long simulations, many kills; programs of other libraries: make ecosystem
	@$(call PYTEST,-n $$(nproc) -m slow --ignore tests/ecosystem tests)

conformance: $(VENV)/.installed-dev  ## torchrun's behaviours against torchrun and elaunch: each trial of the list, minutes
	$(call PYTEST,-n $$(nproc) --dist load -m '' tests/conformance)

integrations: $(VENV)/.installed-dev  ## The trainer with other libraries (Lightning, transformers, torchao, TensorBoard): installs them, and runs their slow tests
	$(BIN)/pip install --quiet --editable '.[integrations]'
	$(call PYTEST,-m slow tests/integrations)

# In an environment of its own: gigabytes of libraries, and torch first, so that none of them brings another one.
ECOSYSTEM := .venv-ecosystem
ecosystem: $(ECOSYSTEM)/.installed  ## Programs of other libraries as they are (Lightning, transformers, DeepSpeed, …): each is killed and must go on; ARGS="-k lightning"
	folder=$$(mktemp -d /tmp/t.XXXX) && $(ECOSYSTEM)/bin/python -m pytest -q -m "" -n $$(nproc) --dist load \
		--basetemp=$$folder/t tests/ecosystem $(ARGS); code=$$?; rm -rf $$folder; exit $$code

mutants: $(VENV)/.installed-dev  ## Do the tests notice a wrong line of agent/core, the rules of agent/diagnosis or rendezvous/rules? ARGS="--seed 2 --only restart_policy"; half an hour
	nice $(BIN)/python -m tests.mutants $(ARGS)

size:  ## Files, lines and words beside their budgets, and the files of docs/architecture.md's walks
	@$(PYTHON) -m tests.size

tools:  ## The commands that tests on several nodes need: etcd, etcdctl, nft, ip, a Slurm (Debian packages; installed by root, else named)
	@tests/tools.sh

N ?= 20
bench: $(VENV)/.installed-dev  ## Measure beside torchrun, and print the tables and the command that puts them into bench/results/README.md; ARGS="--only start --workers 1,2"
	$(BIN)/python -m bench --samples $(N) $(ARGS)

# Needs neither $(VENV) nor its torch: the Python that has the GPU's torch makes an environment that sees it.
gpu:  ## On a machine with a GPU: its tests and benches in under nine minutes, and bench/results/gpu.md; WHEELS=DIR
	@$(PYTHON) bench/gpu/prepare.py $(if $(WHEELS),--wheels '$(WHEELS)')

docs: $(VENV)/.installed-dev  ## The documentation as a site in site/; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release: $(VENV)/.installed-dev  ## An sdist, a wheel and the notes of this version in dist/, checked with each Python that is here
	$(BIN)/pip install --quiet 'build>=1.2' 'twine>=6'
	$(BIN)/python deploy/release/release.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=src $(BIN)/mypy --config-file pyproject.toml -p elaunch -p bench
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(ECOSYSTEM) .venv-gpu build dist site src/elaunch.egg-info

# torch by its version: left to the dependency resolver, a newer one with gigabytes of CUDA would come. numpy, or torch warns.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH) numpy --editable .
	$(FIRST_IMPORT)
	touch $@

# fairscale and DeepSpeed are built here, and ask for torch while they are built.
$(ECOSYSTEM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/pip install --quiet $(TORCH) numpy setuptools wheel
	echo $(TORCH) > $(ECOSYSTEM)/constraints.txt
	$(ECOSYSTEM)/bin/pip install --quiet --constraint $(ECOSYSTEM)/constraints.txt --editable '.[ecosystem]'
	$(ECOSYSTEM)/bin/pip install --quiet --constraint $(ECOSYSTEM)/constraints.txt --no-build-isolation fairscale deepspeed
	touch $@

$(VENV)/.installed-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH) numpy --editable '.[dev,docs]'
	touch $(VENV)/.installed $@

# Beside the linters. The six processes of the tests with jobs would each compile all of their modules, for 5 s.
$(VENV)/.compiled: $(VENV)/.installed-dev
	@$(FIRST_IMPORT)
	@$(BIN)/python -m pytest --collect-only -qq $(JOB_TESTS) >/dev/null || true
	@touch $@
