# `make` alone lists the targets. PYTHON=python3.12 picks an interpreter, PORT=9000 a port, ARGS="-k sse" goes to pytest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
RUN := $(VENV)/run.stamp
DEV := $(VENV)/dev.stamp
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-index-url --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo serve test unit test-faults bench bench-peers check format lock reference migration clean stale

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# exec: the program takes the place of the shell, so that Ctrl-C and SIGTERM reach it and nothing else.
demo: $(RUN) ## Set everything up and serve with an embedded Postgres (PORT=8400)
	@exec $(BIN)/strata demo $(if $(PORT),--port $(PORT))

serve: $(RUN) ## Serve with the settings of the environment (PORT=8400)
	@exec $(BIN)/strata serve $(if $(PORT),--port $(PORT))

test: check ## Everything that has to hold: check, then all tests (ARGS= for pytest, TODAY="+60 days" for another date)
	$(if $(TODAY),tests/clock/at_date.sh "$(TODAY)") $(BIN)/pytest $(ARGS)

unit: $(DEV) ## The fast tests: no database, no browser, no long property tests (ARGS= for pytest)
	$(BIN)/pytest tests/unit -m "not slow" $(ARGS)

# Outside `make test`: it takes about half an hour. KILLS=50 for a shorter one, SEED=7 to repeat one.
test-faults: $(DEV) ## Kill servers, workers and Postgres 500 times while clients talk, and check what is left (KILLS=, SEED=)
	$(BIN)/pytest tests/faults
	$(BIN)/python -m tests.faults.chaos --kills $(or $(KILLS),500) $(if $(SEED),--seed $(SEED))

# Not tests: they measure, and nothing fails because it is slow. See docs/operations/benchmarks.md.
bench: $(DEV) ## Measure Strata beside its floors, as ratios (ARGS="--output FILE --compare EARLIER.json --quick")
	$(BIN)/python -m tests.bench $(ARGS)

bench-peers: $(DEV) ## Measure comparable servers and libraries in the same way, each in .venv-peers (ARGS="--only smg")
	$(BIN)/python -m tests.bench.peers $(ARGS)

check: $(DEV) ## Lint, format, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(DEV) ## Format, and correct what can be corrected by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: $(DEV) ## Write the lock files anew after a change in pyproject.toml (UPGRADE=1 takes newer releases)
	$(COMPILE) pyproject.toml --output-file requirements/run.txt
	$(COMPILE) --group build --constraint requirements/run.txt --output-file requirements/build.txt
	$(COMPILE) --group dev --constraint requirements/run.txt --constraint requirements/build.txt \
		--output-file requirements/dev.txt

reference: $(RUN) ## Write the generated pages of docs/ anew
	$(BIN)/strata reference docs/reference

migration: $(RUN) ## Begin a migration (NAME=add_segments)
	@exec $(BIN)/strata migrate new $(or $(NAME),$(error Say what it does: make migration NAME=add_segments))

clean: ## Remove the virtual environment and the caches of the tools
	rm -rf $(VENV) .venv-peers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist

# A stamp is written last: an installation that was interrupted is not taken for a complete one. A changed lock starts
# from nothing, so that what left the lock leaves the environment, and so does one that was moved or lost its Python.
STALE := $(shell test -x $(BIN)/python && grep -qsF " $(CURDIR)/$(VENV)" $(VENV)/pyvenv.cfg || echo stale)

$(VENV)/locked.stamp: requirements/build.txt requirements/run.txt $(STALE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 \
		"Strata needs Python 3.11 or newer as $(PYTHON). Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo >&2 \
		"This Python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Installing the locked dependencies into $(VENV), this once ..."
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --require-hashes -r requirements/build.txt -r requirements/run.txt
	@touch $@

$(RUN): $(VENV)/locked.stamp pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): $(RUN) requirements/dev.txt
	@echo "Installing the tools of development ..."
	@$(PIP) install --require-hashes -r requirements/dev.txt
	@touch $@
