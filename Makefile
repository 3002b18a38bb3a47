# make install · make test · make test-builds · make test-all · make test-oldest · make lint · make docs · make demo ·
# make wheel
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The oldest timm supported; keep it in step with pyproject.toml.
OLDEST := timm==1.0.22

.PHONY: install demo test test-builds test-all test-oldest lint docs wheel clean
.DELETE_ON_ERROR:

install: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Reinstalled when the project's definition or a kernel's source changes; Python sources are used in place.
$(STAMP): $(BIN)/python pyproject.toml $(shell find native -type f 2>/dev/null)
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.10" "nanobind>=2.4" ninja cmake
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	@touch $@

# Takes about ten minutes on two cores; an interrupted demo resumes.
demo: $(STAMP)
	$(BIN)/attendless demo --pretrained --out attendless-out/demo

# Each worker computes with one thread, so that workers do not compete for cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow and not builds"

# The kernels' tests with sanitizers, and the kernels by other compilers and on an emulated processor.
test-builds: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "builds and not slow"

test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# The suite against the oldest timm we support, laid over the environment that has everything else. An old timm uses
# what a new torch calls deprecated; its warnings are not ours, in child processes either.
test-oldest: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/oldest $(OLDEST)
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/build/oldest PYTHONWARNINGS=ignore::DeprecationWarning,ignore::FutureWarning \
		PYTEST_ADDOPTS="-W ignore::DeprecationWarning -W ignore::FutureWarning" \
		$(BIN)/python -m pytest -n auto -m "not slow and not builds"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site in build/site: it opens from disk. A link that leads nowhere, or anything from the network, is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev,docs]"
	@touch $@

# A wheel for this Python that other machines can take (docs/wheels.md). OpenMP's runtime stays PyTorch's own: with a
# second copy in the process there would be two pools of threads.
DIST ?= build/dist
wheel: $(STAMP)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --exclude libgomp.so.1 --wheel-dir $(DIST) \
		build/wheel/*.whl

clean:
	rm -rf $(VENV) build
