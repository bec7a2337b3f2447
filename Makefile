# Two commands from a bare checkout: `make demo` and `make test`. Both are quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LLAMA_CPP := $(shell sed -n 's/.*"\(llama-cpp-python==[^"]*\)".*/\1/p' pyproject.toml)
SOURCES := pyproject.toml setup.py $(wildcard cspec/*.py cspec/*.[ch] cspec/matmul/*)
PROMPT := Write a Python function that merges two sorted lists into one.

.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(BIN)/pyspec generate --stats --show-drafts "$(PROMPT)"

test: $(VENV)/installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info pyspec/_cspec.*

$(VENV)/installed: $(SOURCES) $(VENV)/llama-cpp
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-test: $(SOURCES) $(VENV)/llama-cpp
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/installed

# Installed by itself, since it takes minutes and can show how far it is.
$(VENV)/llama-cpp: pyproject.toml | $(VENV)/created
	@echo "Installing $(LLAMA_CPP). Unless pip has built it before, it is compiled: about five minutes on two cores."
	@if [ -t 1 ]; then terminal=1; fi; \
	$(BIN)/python -m pip install --verbose "$(LLAMA_CPP)" 2>&1 | tee $(VENV)/llama-cpp.log | awk -v terminal="$$terminal" ' \
	    match($$0, /\[[0-9]+\/[0-9]+\]/) { step = substr($$0, RSTART, RLENGTH); \
	        if (terminal) printf "\r  compiling %s ", step; else if (++n % 50 == 0) print "  compiling " step; \
	        fflush() } \
	    END { if (terminal) print "" }'
	@$(BIN)/python -m pip show --quiet llama-cpp-python && $(BIN)/python -c "import llama_cpp" || \
	    { tail -n 20 $(VENV)/llama-cpp.log; echo "llama-cpp-python did not install: see $(VENV)/llama-cpp.log"; exit 1; }
	@touch $@

$(VENV)/created:
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
