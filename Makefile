# Everything here sets up .venv first if it is missing or older than what it is made from.
#   make setup PYTHON=python3.12               another interpreter (>= 3.10)
#   make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu130
#                                              that index's build of the torch that constraints.txt pins
#   make setup TORCH='torch==2.13.0+cu130'     another torch than the pinned one
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?=
HOME_DIR ?= quickstart
SCHEDULES ?= 5000
SEED   ?=
# A file a worker. One that crashes ends the run: restarted, it would run the same test again, and again.
SPREAD := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
export PYTHONUNBUFFERED = 1
# Else each worker of pytest compiles every test again, and each of hundreds of peers the program.
unexport PYTHONDONTWRITEBYTECODE

# Where `make floors` and `make audit` install what is theirs.
FLOORS := .venv-floors
AUDIT  := .venv-audit

BIN   := $(VENV)/bin
STAMP := $(VENV)/.stamp
TOOLS := $(VENV)/.tools

.PHONY: setup tools quickstart test test-fast simulate durations soak lint floors audit bench clean
ifneq ($(TORCH),)
.PHONY: $(STAMP) # asked for another torch: install it, whatever is there
endif

setup: $(STAMP)

# What developers need beside it: tests, lint, benchmarks' rivals.
tools: $(TOOLS)

# constraints.txt with TORCH in place of its pin, if given; one pip call, so that one resolution fits everything
$(STAMP): pyproject.toml constraints.txt tools/check_system.sh $(wildcard optim/kernels/*.[ch])
	@PYTHON='$(PYTHON)' sh tools/check_system.sh
	@$(PYTHON) -m venv $(VENV)
	@sed $(if $(TORCH),'s/^torch==.*/$(TORCH)/',-n p) constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python tools/install.py --upgrade pip
	@$(BIN)/python tools/install.py --editable '.[all]' --constraint $(VENV)/constraints.txt
	@touch $@

$(TOOLS): $(STAMP)
	@$(BIN)/python tools/install.py --editable '.[dev]' --constraint $(VENV)/constraints.txt
	@touch $@

quickstart: $(STAMP)
	$(BIN)/peer quickstart --home $(HOME_DIR)

# Two passes, and the second runs whatever the first one came to. Most tests wait for sockets, timers and processes, so
# three of them share a core.
define passes
status=0; \
$(BIN)/python -m pytest --numprocesses 6 $(SPREAD) $(RECORD) -m "not process and not soak" $(1) || status=$$?; \
$(BIN)/python -m pytest --numprocesses 6 $(SPREAD) $(RECORD) -m "process and not soak" $(1) || status=$$?; \
exit $$status
endef
# .ci/run wants to know which tests failed (tools/second_try.py).
RECORD := $(if $(TEST_OUTCOMES),-p tools.second_try)

test: $(TOOLS)
	@$(call passes)

# What a developer runs between two edits: no test that starts processes or waits for real deadlines.
test-fast: $(TOOLS)
	$(BIN)/python -m pytest --numprocesses 4 $(SPREAD) -m "not process and not slow and not soak"

# The agreement's core under random schedules, from the first seed SEED on, else with those of the day; `--shrink` tells
# what broke as a timeline. `.ci/run` has fixed ones, so that no landing is a matter of luck.
simulate: $(TOOLS)
	$(BIN)/python -m tests.simulation --schedules $(SCHEDULES) $(if $(SEED),--seed $(SEED)) --workers 2

# Measures what each test file takes in both passes together; the longest run first (tests/durations.json).
durations: $(TOOLS)
	@TEST_DURATIONS=$$(mktemp); export TEST_DURATIONS; $(call passes,--durations 20)

soak: $(TOOLS)
	$(BIN)/python -m pytest -m "hypothesis and not soak" --hypothesis-profile explore -o timeout=0
	$(BIN)/python -m pytest -m soak -s
	$(BIN)/python -m tests.simulation --schedules 100000 --workers 2

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests of web and data on the lowest releases that pyproject.toml allows, but for torch.
floors: $(STAMP)
	@$(PYTHON) -m venv --clear $(FLOORS)
	@$(FLOORS)/bin/python tools/install.py uv
	$(if $(PIP_CERT),SSL_CERT_FILE=$(PIP_CERT)) $(FLOORS)/bin/uv pip install --quiet --python $(FLOORS)/bin/python --resolution lowest-direct \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) \
		$(if $(PIP_EXTRA_INDEX_URL),--extra-index-url $(PIP_EXTRA_INDEX_URL)) --editable '.[data,serve,monitor]' \
		torch==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))') \
		$$(grep -E '^(hypothesis|pytest[a-z-]*)==' constraints.txt)
	$(FLOORS)/bin/python -m pytest --numprocesses 2 $(SPREAD) -m "not process and not soak" \
		tests/swarm/web tests/swarm/gateway tests/swarm/status tests/swarm/monitor tests/peer/data tests/cli/commands/test_api.py

# Advisories on the pins of constraints.txt and on those lowest releases. Offline it fails: it knows nothing then.
audit:
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python tools/install.py pip-audit; }
	@$(AUDIT)/bin/python tools/audit.py

bench: $(TOOLS)
	$(BIN)/python benchmarks/rounds/averaging.py --peers 4 --params 25000000 --rival hivemind

clean:
	rm -rf $(VENV) $(FLOORS) $(AUDIT) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info optim/kernels/*.so
