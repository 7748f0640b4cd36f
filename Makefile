PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TORCH := $(shell sed -n 's/.*"torch==\([^"]*\)".*/\1/p' pyproject.toml)
# Python compiles what it imports. To compile all 18,000 files takes pip a minute.
PIP := $(BIN)/python -m pip install --no-compile
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
PICTURES := digits digit_lines digit_transducer language_model train_parallel alignment hmm regimes tagger post_training recorded_support basecaller

.PHONY: help demo test test-kernels test-versions test-gpu digests bench docs clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 15

demo: $(READY)  ## train CTC on lines of handwritten digits (ARGS="--batches 300 --out picture.png")
	$(BIN)/python examples/digit_lines.py $(ARGS)

test: $(READY)  ## lint, format, types and the tests on the CPU (ARGS="-k cross_entropy" for pytest)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(PYTEST) --ignore tests/kernels $(ARGS)

test-kernels: $(READY)  ## run the kernels in Triton's interpreter, and compile them for four GPUs
	TRITON_INTERPRET=1 PARTITA_BACKEND=triton $(PYTEST) -m "interpreted and not gpu" -W ignore $(ARGS)
	$(PYTEST) tests/kernels $(ARGS)

test-versions:  ## test with each supported torch and triton (VERSIONS="oldest 2.14+3.9", ARGS="-k ctc")
	$(PYTHON) tests/run_versions.py $(VERSIONS) --pytest="$(ARGS)"

test-gpu:  ## run all tests that need a GPU, with $(PYTHON) and its PyTorch (ARGS="--resume" runs what has not passed)
	PYTHONPATH=src:tests $(PYTHON) tests/run_gpu.py $(ARGS)

digests: $(READY)  ## keep the bits of all results on this machine (REASON="why they are others")
	PYTHONPATH=src:tests $(BIN)/python -m helpers.digests "$(REASON)"

bench: $(READY)  ## time the ops beside PyTorch and the installed peers (ARGS="softmax")
	$(BIN)/python -m partita bench $(ARGS)

docs: .venv/.docs  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open site/index.html"

clean:  ## remove the environment and all generated files
	rm -rf .venv .venv-versions site .hypothesis .mypy_cache .pytest_cache .ruff_cache dist $(PICTURES:=.png)
	find src tests examples -name __pycache__ -prune -exec rm -rf {} +

# pip's own index may have the build of torch without CUDA. Otherwise uv knows where that build is.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Partita needs Python 3.11 or newer; try: make demo PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || { \
		$(PIP) uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu "torch==$(TORCH)"; }
	$(PIP) --editable . --group dev
	@touch $@

.venv/.docs: $(READY)
	$(PIP) --group docs
	@touch $@
