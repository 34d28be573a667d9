# Everything runs in .venv, which the first target to need it makes. `make help` lists the targets.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
NATIVE := $(shell find native -name '*.[ch]pp' -o -name '*.map' -o -name CMakeLists.txt)
TOOLS := scikit-build-core nanobind cmeel-eigen cmake ninja setuptools wheel
CORE := build/core
SANITIZED := build/sanitize
OTHER := build/torch-$(VERSION)

# Where there is a compiler, a core that does not build is an error; elsewhere the package installs without one.
export FASTH_REQUIRE_CORE ?= $(if $(shell command -v $${CXX:-c++}),1,0)

# What the Triton kernels are tested with in their interpreter, which is slow: files of all backends, and their own.
IN_INTERPRETER := tests/test_kernels.py tests/test_householder.py::test_values_and_gradients \
  tests/test_svd_linear.py::test_value_and_gradients tests/test_svd_linear.py::test_one_gradient_at_a_time \
  tests/test_svd_linear.py::test_strides \
  $(addprefix tests/test_numbers.py::test_,a_zero_reflector_gets_a_zero_gradient nan_and_infinity_pass_through \
    scale_does_not_matter what_is_left_of_the_diagonal_is_ignored_even_if_it_is_nan)
TOO_SLOW := (many and rows) or (more and rows) or 200 or 300 or 130 or 100x65

.PHONY: help demo test test-kernels test-torch lint format gpu-resources bench reproduce study flow recurrent readme phases sanitize clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.stamp ## train a digit classifier plain and with SVDs, and compare; ARGS=--quick
	$(BIN)/python examples/demo.py $(ARGS)

test: $(VENV)/.stamp ## run all tests; ARGS="-k name" picks some
	$(BIN)/python -m pytest $(ARGS)

test-kernels: $(VENV)/.stamp ## run the GPU kernels' tests, in Triton's interpreter on the CPU
	FASTH_BACKEND=triton TRITON_INTERPRET=1 $(BIN)/python -m pytest $(IN_INTERPRETER) --dtype float32 -k "not ($(TOO_SLOW))" $(ARGS)

gpu-resources: $(VENV)/.stamp ## compile the GPU kernels for real GPUs, without one; put what they take into docs/gpu.md
	$(BIN)/python benchmarks/gpu_resources.py --write $(ARGS)

lint: $(VENV)/.stamp ## check format, style and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/.stamp ## rewrite the Python files in the project's format
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/.peers ## time every method, after verifying its answer
	$(BIN)/python benchmarks/bench.py $(ARGS)

reproduce: $(VENV)/.peers ## run the paper's experiments; ARGS=--full for its own grid
	$(BIN)/fasth reproduce --out benchmarks/reproduction $(ARGS)

study: $(VENV)/.peers ## train plain, SVD and orthogonal networks on real tasks, and compare; ARGS=--quick
	$(BIN)/python -m fasth.reproduce.study --out $(if $(findstring --quick,$(ARGS)),build/study-quick,benchmarks/study) $(ARGS)

flow: $(VENV)/.stamp ## train flows whose channels are mixed by one linear map or another, and compare; ARGS=--quick
	$(BIN)/python examples/flow.py --out $(if $(findstring --quick,$(ARGS)),build/flow-quick,benchmarks/flow) $(ARGS)

recurrent: $(VENV)/.peers ## train recurrent nets to remember, to add and to see, and compare; ARGS=--quick
	$(BIN)/python examples/recurrent.py --out $(if $(findstring --quick,$(ARGS)),build/recurrent-quick,benchmarks/recurrent) $(ARGS)

readme: $(VENV)/.stamp ## put the last benchmark's tables into README.md; ARGS=--check only compares
	$(BIN)/python benchmarks/readme.py $(ARGS)

phases: $(VENV)/.stamp ## show where the compiled core's time goes
	$(BIN)/python benchmarks/phases.py

sanitize: $(VENV)/.stamp ## run the tests on a core built with AddressSanitizer and UBSan
	$(BIN)/cmake -S native -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=Debug -DFASTH_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build $(SANITIZED)
	FASTH_CORE_DIR=$(abspath $(SANITIZED)) \
	  LD_PRELOAD="$$(for lib in asan ubsan stdc++; do $${CXX:-c++} -print-file-name=lib$$lib.so; done | xargs)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(BIN)/python -m pytest --capture=sys $(ARGS)

test-torch: ## run the tests with another release of PyTorch, in an environment of its own: VERSION=2.15.0
	test -n "$(VERSION)" || { echo "say which: make test-torch VERSION=2.15.0"; exit 2; }
	test -e $(OTHER)/.stamp || { $(PYTHON) -m venv --clear $(OTHER) && grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt; }
	test -e $(OTHER)/.stamp || PIP_CONSTRAINT=$(abspath $(OTHER))/constraints.txt $(OTHER)/bin/python -m pip install --quiet \
	  torch==$(VERSION) $(TOOLS)
	PIP_CONSTRAINT=$(abspath $(OTHER))/constraints.txt $(OTHER)/bin/python -m pip install --quiet --no-build-isolation \
	  --config-settings=build-dir=build/core-$(VERSION) -e .[dev,flows,reproduce]
	touch $(OTHER)/.stamp
	FASTH_CORE_DIR= $(OTHER)/bin/python -m pytest $(ARGS)

clean: ## remove everything that was made here
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Torch and the tools: all that comes from the network. An interrupted set-up leaves no stamp and starts afresh.
$(VENV)/.tools: pyproject.toml constraints.txt
	test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	rm -f $@
	$(PIP) install --quiet $(TOOLS)
	$(PIP) install --quiet --no-build-isolation --config-settings=wheel.cmake=false -e .[dev,flows,reproduce]
	touch $@

# The package again, now with its core compiled.
$(VENV)/.stamp: $(VENV)/.tools $(NATIVE)
	$(PIP) install --quiet --no-deps --no-build-isolation --config-settings=build-dir=$(CORE) -e .
	touch $@

# What the benchmarks compare with, but for nflows, which the tests need too. What they depend on is there.
$(VENV)/.peers: $(VENV)/.stamp
	$(PIP) install --quiet --no-deps --no-build-isolation geotorch torch-householder
	touch $@
