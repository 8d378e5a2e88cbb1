# `make demo` and `make test` from a fresh clone need Python 3.11 or 3.12 and, for Inductor on a CPU, a C++ compiler.
PYTHON ?= python3
# Inductor hands the folder of torch's libraries to the linker unquoted. Where this directory's path has spaces, the
# environment is therefore made in the user's cache, under a name of its own.
ifeq ($(words $(CURDIR)),1)
VENV ?= .venv
else
VENV ?= $(shell echo "$${XDG_CACHE_HOME:-$$HOME/.cache}")/fp4compile/venv-$(firstword $(shell pwd | cksum))
endif
ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV): expected a path without spaces)
endif
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --disable-pip-version-check --quiet --no-compile
# pip compiles one file after the other; this takes all cores, and leaves out the tests that packages ship. What another
# Python is for does not compile, and need not.
BYTECODE = $(RUN) -m compileall -qq -j 0 -x 'site-packages/.*/tests/'
PACKAGES = `$(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))"`
TORCH := 2.13.0
TRITON := 3.9.0
CONSTRAINTS := constraints.txt
TORCHAO := 0.18.0
# Each process takes half of the tests, files together, and what the other one has left when it has nothing to do.
WORKERS := -n 2 --dist worksteal --max-worker-restart=0
# pytest rewrites assertions, and each process of a test imports the package: once for all of them.
unexport PYTHONDONTWRITEBYTECODE
# Stamps: set-up runs once, and again when one of these files changes.
INSTALLED := $(VENV)/installed
TESTABLE := $(VENV)/testable
DOCUMENTABLE := $(VENV)/documentable
SETUP := pyproject.toml constraints.txt Makefile

.PHONY: demo test suite quick gpu lint style types versions ecosystem docs setup bench clean

demo: $(INSTALLED)
	$(RUN) -m fp4compile demo

# mypy has one process and takes a while: it runs beside the tests.
test: style
	$(MAKE) --no-print-directory --jobs=2 types suite

suite: $(TESTABLE)
	$(RUN) -m pytest $(WORKERS) $(PYTEST)

# For the edit loop: every folder of tests, without what takes more than some seconds (marked `slow`: kernels in
# Triton's interpreter, machine code, whole models, scripts and processes). About 2 minutes on two quiet cores.
quick: $(TESTABLE)
	$(RUN) -m pytest $(WORKERS) -m "not slow and not gpu" $(PYTEST)

# On a machine with GPUs, with the Python that has a torch for them: `make gpu RUN=python3 GPU="--limit 430"`. A second
# call runs what has not passed yet.
gpu:
	$(RUN) -m tests.gpu_run $(GPU)

lint: style types

style: $(TESTABLE)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(TESTABLE)
	$(RUN) -m mypy

# The CPU suite under every supported version of torch, each in an environment of its own beside $(VENV), of some GB.
# One version: make versions ONLY=2.14.1; a part of the tests: make versions PYTEST=tests/passes.
versions:
	$(PYTHON) -m benchmarks.versions --environments $(VENV)-versions $(if $(ONLY),--only $(ONLY)) -- $(PYTEST)

# The libraries that people use (trl, torchtitan, diffusers and others) with small models, in an environment of its own
# that sees the packages of $(VENV). A part: make ecosystem ECOSYSTEM="--only Lightning".
LIBRARIES := $(VENV)-ecosystem
ecosystem: $(TESTABLE)
	test -x $(LIBRARIES)/bin/python || $(PYTHON) -m venv $(LIBRARIES)
	$(LIBRARIES)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement benchmarks/ecosystem.txt
	$(RUN) -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" > \
	  `$(LIBRARIES)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"`/shared.pth
	$(LIBRARIES)/bin/python -m benchmarks.ecosystem $(ECOSYSTEM)

# The pages of docs/ and the API reference, in build/docs. A warning, of a link that leads nowhere too, is an error.
docs: $(DOCUMENTABLE)
	$(RUN) -m benchmarks.run_all --check
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs

bench: $(TESTABLE)
	$(RUN) -m benchmarks.compile_time
	$(RUN) -m benchmarks.minilm

setup: $(TESTABLE)

clean:
	rm -rf $(VENV) $(VENV)-versions $(LIBRARIES) build *.egg-info

# torch first: the right build of it decides which Triton fits.
$(INSTALLED): $(SETUP)
	@echo "setting up $(VENV) (torch is large, this takes some minutes)"
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint $(CONSTRAINTS) torch==$(TORCH)
	$(RUN) -c "import triton" 2>/dev/null || $(PIP) triton==$(TRITON)
	$(PIP) --constraint $(CONSTRAINTS) --editable .
	touch $@

# torchao is an oracle of the tests only; its dependencies are none that they need. pip keeps one core busy: the other
# one compiles torch meanwhile.
$(TESTABLE): $(INSTALLED)
	$(BYTECODE) $(PACKAGES)/torch & \
	$(PIP) --constraint $(CONSTRAINTS) --editable ".[test]" && $(PIP) --no-deps torchao==$(TORCHAO); \
	status=$$?; wait; exit $$status
	$(BYTECODE) fp4compile ptxsim tests $(PACKAGES) || true
	touch $@

$(DOCUMENTABLE): $(INSTALLED)
	$(PIP) --constraint $(CONSTRAINTS) --editable ".[docs]"
	touch $@
