# `make demo` and `make test` need Python >= 3.11, make and access to PyPI; they fetch everything else.
PYTHON ?= python3
# A kernel of OpenBLAS that the environment sets would not reach ranks that are started over ssh.
unexport OPENBLAS_CORETYPE OPENBLAS_L2_SIZE
# Without bytecode each of a thousand processes compiles all modules again, a quarter of its start.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Number of test files that run at once.
JOBS ?= 3

# The MLX for this machine: the usual one on macOS, CUDA with an NVIDIA driver, else CPU.
EXTRA := $(shell sh scripts/choose_extra.sh)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-long soak lint format docs bench dist clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml scripts/choose_extra.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "allhands needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=/path/to/python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRA),dev]'
	@touch $(STAMP)

install: $(STAMP) ## install allhands and its packages into .venv

demo: $(STAMP) ## a small chat model learns to talk like a pirate, on one process and on two (about 6 minutes)
	$(BIN)/allhands demo $(DEMO)

# These measure the times of dying and hanging processes, and run alone on the computer.
TIMED := $(addprefix tests/distributed/test_,hierarchy.py launch_script.py netbench_groups.py remote.py) \
  $(addprefix tests/fault/test_,attempt.py reaper.py restarts.py supervisor.py)
# A part of the suite: make test TESTS="tests/unit tests/parity".
TESTS ?=
test: $(STAMP) ## tests of every part and every strategy (9 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(or $(TESTS),$(addprefix --ignore=,$(TIMED)))

test-slow: $(STAMP) ## more cases, and trainings in processes of their own (20 minutes)
	$(BIN)/python -m pytest -m "slow and not long" -n $(JOBS) --dist loadfile $(addprefix --ignore=,$(TIMED))
	$(BIN)/python -m pytest -m "not long" $(TIMED)

# Long tests that measure times, or the speed of a cable, also run alone.
TIMED_LONG := $(addprefix tests/distributed/test_,netbench_groups.py remote.py) \
  $(addprefix tests/fault/test_,broken_cluster_network.py recovery_pipeline_network.py)
test-long: $(STAMP) ## trainings under every kind of fault, here and on several computers, and every architecture's gradient (about 70 minutes)
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile $(addprefix --ignore=,$(TIMED_LONG))
	$(BIN)/python -m pytest -m long $(TIMED_LONG)

soak: $(STAMP) ## a hundred faults in a row on three ranks; the run must end with the bits of an undisturbed one (about half an hour)
	$(BIN)/python scripts/soak.py

lint: $(STAMP) ## style, types, imports between directories, unused names and dependencies, links between pages, workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/vulture
	$(BIN)/deptry src
	$(BIN)/actionlint -shellcheck $(BIN)/shellcheck
	@site=$$(mktemp -d); $(MKDOCS) --site-dir "$$site"; status=$$?; rm -rf "$$site"; exit $$status

format: $(STAMP) ## rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without the variable the theme prints its own news.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
docs: $(STAMP) ## the pages as a site: build/site/index.html
	$(MKDOCS)

# A benchmark that needs more than Python (sync.py: root, sshd, rsync) prints that and is skipped.
BENCHES ?= cpu_lora cpu_scaling startup data process_memory backends recovery sync instructions ceilings
bench: $(STAMP) ## every table of a CPU, then figures that are worse than before (cpu_lora 25 minutes, cpu_scaling 10, startup 10, data 35, process_memory 8, backends 4, recovery 8, sync 6, instructions 8, ceilings 3; one of them: ONLY=cpu_lora)
	@failed=; for name in $(or $(ONLY),$(BENCHES)); do \
	  echo "== $$name"; $(BIN)/python benchmarks/$$name.py --write || failed="$$failed $$name"; \
	done; \
	$(BIN)/python benchmarks/regressions.py || failed="$$failed regressions"; \
	$(BIN)/python scripts/write_performance_docs.py; \
	if [ -n "$$failed" ]; then echo "not done, or worse than before:$$failed" >&2; exit 1; fi

dist: $(STAMP) ## wheel, sdist and notes of a release, into dist/: make dist TAG=v0.1.0
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python scripts/release_notes.py "$(TAG)" dist >$(VENV)/notes.md
	mv $(VENV)/notes.md dist/

clean: ## remove the results of the other targets, and .venv
	rm -rf $(VENV) demo-run build dist .pytest_cache .ruff_cache
