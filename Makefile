# Every target sets up what it needs: a .venv with the versions of constraints.txt.
# It needs Python 3.11 or newer, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/python -m pip install $(PIP_FLAGS)
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
DOCS_READY := $(VENV)/.docs-ready

# Tests that run in one process use so many threads. Ranks are processes with one thread each, whatever this says
# (scrimp/ext/ranks.py), or 8 of them fight over the cores.
export OMP_NUM_THREADS ?= 1

# Tests start hundreds of processes that import the same modules: their bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

# So many files of tests run at a time, each with ranks of its own: one more than there are cores, because some only wait.
JOBS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 16 ? cores + 1 : 16)))

.PHONY: help demo test test-full test-run test-faults test-gpu lint bench-move bench-gpu bench-network bench-memory bench-solver bench-plan bench-rehearse bench-lowered bench-run bench-checkpoint bench-convergence contenders performance release check-release docs clean

help:
	@echo "make demo        training within a memory budget, killed and resumed, on this machine, in a minute"
	@echo "make test        lint, types, layering and a fixed sample of the tests"
	@echo "make test-full   all tests, and more examples of every property"
	@echo "make test-run    every model under every plan on 2, 4 and 8 ranks: thousands of cases, it resumes (CASES=\"--seconds 600\" for a part)"
	@echo "make test-faults ranks and hosts that are killed, disks and ranks that are slow, memory that runs short (half an hour; as root also hosts)"
	@echo "make test-gpu    the tests that need a CUDA device"
	@echo "make docs        the documentation as a site, in site/"
	@echo "make release     wheel and sdist in dist/, each tested in a clean environment"
	@echo "make bench-gpu   training within a memory cap against PyTorch and DeepSpeed, on one GPU (minutes per section)"
	@echo "make bench-convergence  convergence with sparse exchange against dense (an hour or two on one core; it resumes)"
	@echo "make contenders  installs DeepSpeed and torchao into a folder, for make bench-gpu where nothing can be installed"
	@echo "make performance writes docs/results/raw/performance.md from the results of make bench-gpu"
	@echo "make bench-network  training over slow links against PyTorch's exchanges, on this machine, as root (about 15 minutes)"
	@echo "make bench-memory  peak memory of gradient exchanges and of whole steps, against DDP and DGC's layout (a few minutes)"
	@echo "make bench-solver  solve times and optimality gaps of the planner's integer program (a few minutes)"
	@echo "make bench-plan  plans against Megatron-LM, data parallelism and ZeRO in one memory model (a few minutes)"
	@echo "make bench-rehearse  plan large models for up to 10,240 devices and rehearse a rank of each (a few minutes)"
	@echo "make bench-lowered  a rank of a plan on one GPU against a block written by hand, and against the plan's bytes (a minute)"
	@echo "make bench-run  a planned step against DTensor and FSDP2, the time until the first one, and one process against eager PyTorch (a few minutes)"
	@echo "make bench-checkpoint  what a save costs training, in the background and not (a few minutes)"
	@echo "make bench-move  moves against DTensor and XLA, in one run (about 10 minutes)"

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; this downloads torch)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "scrimp needs Python 3.11 or newer, this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV)
	@# torch first and alone, so that the pinned build is there before anything asks for it
	@$(PIP) setuptools torch
	@$(PIP) --no-build-isolation --editable ".[dev]"
	@touch $@

$(BENCH_READY): $(READY)
	@$(PIP) --no-build-isolation --editable ".[bench]"
	@touch $@

$(DOCS_READY): $(READY)
	@$(PIP) --no-build-isolation --editable ".[docs]"
	@touch $@

demo: $(READY)
	@$(BIN)/scrimp demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --durations 40

test-full: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --full

test-run: $(READY)
	$(BIN)/python -m tests.run $(CASES)

test-faults: $(READY)
	$(BIN)/python -m pytest --full -s tests/faults tests/engine/entry/test_resize.py

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

bench-move: $(BENCH_READY)
	$(BIN)/python -m bench.move

bench-gpu: $(READY)
	$(BIN)/python -m bench.gpu
	$(BIN)/python -m bench.selection
	$(BIN)/python -m bench.selection.step

bench-network: $(READY)
	$(BIN)/python -m bench.network

bench-plan: $(READY)
	$(BIN)/python -m bench.plan
	$(BIN)/python -m bench.plan.speed

bench-rehearse: $(READY)
	$(BIN)/python -m bench.rehearse

bench-lowered: $(READY)
	$(BIN)/python -m bench.lowered

bench-run: $(READY)
	$(BIN)/python -m bench.run
	$(BIN)/python -m bench.run.start
	$(BIN)/python -m bench.run.alone

bench-checkpoint: $(READY)
	$(BIN)/python -m bench.checkpoint
	$(BIN)/python -m bench.checkpoint.export

bench-memory: $(READY)
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.memory.page

bench-solver: $(READY)
	$(BIN)/python -m bench.solver

bench-convergence: $(READY)
	$(BIN)/python -m bench.convergence

contenders: $(READY)
	$(BIN)/python -m bench.gpu.contenders_folder

release: $(READY)
	@$(PIP) build
	@rm -rf dist build
	@$(BIN)/python -m build --no-isolation --outdir dist .
	@for made in dist/*.whl dist/*.tar.gz; do $(MAKE) --no-print-directory check-release MADE=$$made || exit 1; done

# A clean environment that has nothing but the package and what it asks for: the kernels must be in it, and the demo must run.
check-release:
	@echo "checking $(MADE)"
	@rm -rf build/check && $(PYTHON) -m venv build/check
	@build/check/bin/python -m pip install $(PIP_FLAGS) setuptools torch
	@build/check/bin/python -m pip install $(PIP_FLAGS) --no-build-isolation $(MADE)
	@cd build/check && bin/python -c "import scrimp, sys; assert 'site-packages' in scrimp.__file__; assert 'torch' not in sys.modules"
	@cd build/check && bin/scrimp doctor
	@cd build/check && bin/scrimp plan gpt-tiny --cluster 8xA100-80 --mesh x=8 --time-limit 5
	@cd build/check && bin/scrimp demo

performance: $(READY)
	$(BIN)/python -m bench.gpu.page

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
