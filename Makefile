PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TORCH := $(shell sed -n 's/.*"torch==\([^"]*\)".*/\1/p' pyproject.toml)

.PHONY: help demo test bench docs clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' Makefile | expand -t 10

demo: $(READY)  ## learn to read lines of handwritten digits with CTC, and draw it (ARGS="--batches 300 --out picture.png")
	$(BIN)/python examples/digit_lines.py $(ARGS)

test: $(READY)  ## lint, types and tests (ARGS="-k cross_entropy" goes to pytest)
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

bench: $(READY)  ## time every op against PyTorch and the installed peers (ARGS="softmax")
	$(BIN)/python -m partita bench $(ARGS)

docs: .venv/.docs  ## build the documentation into site/, to be read at site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:  ## remove the environment and all that was generated
	rm -rf .venv site .hypothesis .mypy_cache .pytest_cache .ruff_cache dist digits.png digit_lines.png language_model.png train_parallel.png alignment.png hmm.png tagger.png
	find src tests examples -name __pycache__ -prune -exec rm -rf {} +

# The build of torch without CUDA comes from the index that pip is set up with, where it has one; otherwise uv knows where that build is.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Partita needs Python 3.11 or newer; try: make demo PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade "pip>=25.1"
	$(BIN)/python -m pip install "torch==$(TORCH)+cpu" 2>/dev/null || { \
		$(BIN)/python -m pip install uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu "torch==$(TORCH)"; }
	$(BIN)/python -m pip install --editable . --group dev
	@touch $@

.venv/.docs: $(READY)
	$(BIN)/python -m pip install --group docs
	@touch $@
