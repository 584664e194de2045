# make tour · make test · make lint · make bench
#
# Each target makes .venv and installs what it needs, once: a stamp in .venv remembers what is there.
# Needed beforehand: Python 3.11 or newer and make. A C++17 compiler makes the native operators; without one the
# package installs as pure Python and says so. PIP_ARGS is passed to every pip install (an index, a proxy, …).

VENV     := .venv
PY       := $(VENV)/bin/python
PIP      := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
SOURCES  := pyproject.toml constraints.txt $(wildcard CMakeLists.txt csrc/*)
ARGS     ?=
NATIVE_NOTICE = $(PY) -c "from gnomon.kernels import native; why = native.unavailable(); \
    print('gnomon: notice: pure Python install: ' + why if why else 'gnomon: C++ operators built (' + native.instruction_set() + ')')"
# The tests take both cores of a small machine: one process per core, one thread per process.
TEST_ARGS ?= -n 2

.PHONY: tour test slow sanitize lint bench clean help
.DEFAULT_GOAL := help

help:
	@echo "make tour    the whole system in miniature, some ten minutes on two cores"
	@echo "make test    the tests (make slow: the long ones)"
	@echo "make sanitize  the C++ operators under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make lint    ruff and mypy"
	@echo "make bench   the benchmarks; make bench ONLY=startup runs one"
	@echo "make clean   remove .venv and build outputs"

tour: $(VENV)/core
	$(VENV)/bin/gnomon tour $(ARGS)

test: $(VENV)/test
	$(PY) -m pytest $(TEST_ARGS) $(ARGS)

slow: $(VENV)/test
	$(PY) -m pytest $(TEST_ARGS) -m slow $(ARGS)

# A build of its own with AddressSanitizer and UndefinedBehaviorSanitizer, under the contract tests of the operators.
sanitize: $(VENV)/test
	$(PY) -m pytest -m slow $(ARGS) tests/contracts/test_sanitizers.py

lint: $(VENV)/test
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(VENV)/test
	@for file in benchmarks/$(or $(ONLY),*).py; do \
	    grep -q '__main__' $$file || continue; \
	    echo "== $$file"; $(PY) $$file $(ARGS) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# --- installation -------------------------------------------------------------------------------------------------

# An environment that is there already and is recent enough is kept.
$(VENV)/python:
	@if $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then touch $@; exit 0; fi; \
	found=""; \
	for name in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python); do \
	    if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$name; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "gnomon: error: no Python 3.11 or newer found; install one, or name it: make tour PYTHON=/path/to/python3.11" >&2; exit 2; \
	fi; \
	$$found -m venv $(VENV) || { \
	    echo "gnomon: error: $$found cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2; exit 2; }; \
	echo "gnomon: $(VENV) made with $$($(PY) --version)"; \
	touch $@

$(VENV)/core: $(VENV)/python $(SOURCES)
	@echo "gnomon: installing the package and what it needs (PyTorch is the large one) ..."
	@$(PIP) -e .
	@$(NATIVE_NOTICE)
	@touch $@

# The tools and the independent implementations that the parity tests compare with. Where one of the latter has no
# wheel, its tests skip and say so.
$(VENV)/test: $(VENV)/python $(SOURCES)
	@echo "gnomon: installing the package, the test tools and the peers of the parity tests ..."
	@$(PIP) -e '.[test,lint,parity]' || { \
	    echo "gnomon: notice: a peer package is not available here; its parity tests will be skipped"; \
	    $(PIP) -e '.[test,lint]'; }
	@# Of these peers one file each is read, by path. They stand apart: beside Triton and without a GPU fla-core would break transformers,
	@# and mlx-vlm has many dependencies that its chat encoder does not use.
	@for peer in fla-core==0.6.0 mlx-vlm==0.7.10; do \
	    $(PIP) --no-deps --upgrade --target $(VENV)/peers $$peer || echo "gnomon: notice: $$peer is not available here; its parity tests will be skipped"; \
	done
	@$(NATIVE_NOTICE)
	@touch $(VENV)/core $@
