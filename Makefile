# On a fresh machine `make demo`, `make check` and `make test` are all it takes. Each makes .venv once and installs what it needs, every
# version pinned in ci/constraints.txt.
#
# torch comes from pip's own index, whose wheel for Linux serves NVIDIA GPUs (and machines with none). For AMD or Intel
# name the index that pytorch.org's "Get started" page gives; its wheels bring their own Triton:
#     make demo TORCH_INDEX=<index URL for ROCm or XPU>
#     make demo TORCH='torch==2.12.*' TORCH_INDEX=...        another version than the pinned one
# The CPU index there spares a machine without a GPU gigabytes of CUDA libraries. These are read when .venv is made;
# `make clean` starts over.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch
TORCH_INDEX ?=
DEMO ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := $(VENV)/oldest/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
CONSTRAINTS := $(if $(findstring =,$(TORCH)),$(VENV)/constraints.txt,ci/constraints.txt)

.PHONY: demo check test lint docs docs-serve evidence release-check install clean help
help:
	@echo "make demo    train a small Mistral before and after patching and compare  (DEMO='--size tiny' adds options)"
	@echo "make check   lint and a quick look at every part: two minutes on two cores"
	@echo "make test    the lanes that need no GPU: eight minutes  (LANES=full: with everything; LANES='cpu gpu' picks lanes)"
	@echo "make lint    ruff, its formatter, shellcheck, and whether what is generated in ci/ and docs/ is current"
	@echo "make release-check   the wheel in environments of its own, the sdist's tests, types, version and changelog"
	@echo "make docs    build the site into site/; a broken link fails  (make docs-serve: look at it while writing)"
	@echo "make evidence   what docs/support.md rests on, made again where it is stale  (STEPS, TRITONS: ci/evidence.sh)"
	@echo "make clean   remove $(VENV)"

demo: $(STAMP)
	$(BIN)/python benchmarks/demo.py $(DEMO)

check: lint
	PYTHON=$(BIN)/python bash ci/test.sh check kernels

test: $(STAMP) $(OLDEST)
	PYTHON=$(BIN)/python bash ci/test.sh $(LANES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/shellcheck --external-sources --source-path=SCRIPTDIR ci/*.sh .ci/run
	$(BIN)/python ci/workflows.py --check
	$(BIN)/python ci/support.py --check
	$(BIN)/python ci/distributed_page.py --check
	$(BIN)/python ci/stubs.py --check

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

evidence: $(STAMP)
	PYTHON=$(BIN)/python TRITON_AT=$(VENV) bash ci/evidence.sh

release-check: $(STAMP)
	$(BIN)/python ci/release.py

install: $(STAMP) $(OLDEST)

# torch first and alone, so that nothing else decides which build it is. Then Triton, only where torch did not bring one:
# the vendors' builds share the import name and would be overwritten.
$(STAMP): pyproject.toml ci/constraints.txt ci/transformers4.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "liger_hw needs Python 3.10 or newer; say make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "installing into $(VENV), once; minutes, most of them torch's download"
	@echo "  1 of 3: torch, and Triton where it brings none"
	@grep -v '^torch==\|^triton==' ci/constraints.txt > $(VENV)/constraints.txt
	@$(PIP) -c $(CONSTRAINTS) setuptools $(TORCH) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) -c $(CONSTRAINTS) triton
	@echo "  2 of 3: liger_hw, transformers, and what its tests, plots and docs need"
	@$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[transformers,bench,docs,dev]'
	@echo "  3 of 3: transformers 4 beside it, for the tests"
	@$(PIP) --no-deps --upgrade --target $(VENV)/transformers4 -r ci/transformers4.txt
	@touch $@

# Half a gigabyte for the lane `oldest`, which `make demo` and `make check` do without.
$(OLDEST): ci/oldest.txt | $(STAMP)
	@echo "installing the oldest Triton into $(VENV)/oldest, once"
	@$(PIP) --no-deps --upgrade --target $(VENV)/oldest -r $<
	@touch $@

clean:
	rm -rf $(VENV)
