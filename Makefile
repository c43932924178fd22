# Plain commands that a person can copy. `make demo` and `make test` set up what they need first.
PYTHON ?= python3.11
TORCH ?= cpu
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(patsubst proto/%,mooncake/rpc/%,$(wildcard proto/*.proto))

.PHONY: help setup demo test test-all check bench gpu proto clean

help:
	@echo 'make demo      a cluster on this machine: a streamed answer, a second turn that reuses the first, a replay'
	@echo 'make test      the tests, without the slow ones'
	@echo 'make test-all  all tests'
	@echo 'make check     lint, formatting, types, the import diagram, generated code'
	@echo 'make bench     measure the engine and the served cluster'
	@echo 'make gpu       check every GPU kernel and time it against the limits of the card; needs a GPU'
	@echo 'make proto     generate the Python code of proto/*.proto anew'
	@echo 'make setup     only the environment; TORCH=cuda for GPUs, PYTHON=... for another interpreter'
	@echo 'make clean     remove the environment and everything built'

setup: $(VENV)/.ready-$(TORCH)

$(VENV)/.ready-$(TORCH): pyproject.toml constraints.txt deploy/setup.sh
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' VENV='$(VENV)' sh deploy/setup.sh
	@rm -f $(VENV)/.ready-* && touch $@

demo: setup
	@$(BIN)/mooncake demo

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-all: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py
	$(MAKE) --no-print-directory proto OUT=build/proto
	diff -r -x '*.py' -x '__pycache__' build/proto/mooncake/rpc mooncake/rpc

OUT := .
proto: setup
	mkdir -p $(OUT)
	PATH=$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -Imooncake/rpc=proto --python_out=$(OUT) \
	    --grpc_python_out=$(OUT) --mypy_out=$(OUT) --mypy_grpc_out=$(OUT) $(PROTOS)

bench: setup
	$(BIN)/mooncake bench engine
	$(BIN)/mooncake bench serve

# GPU_PYTHON: an interpreter with a CUDA build of torch; the environment of `make setup TORCH=cuda` has one.
GPU_PYTHON ?= $(BIN)/python
gpu:
	$(GPU_PYTHON) -m pytest -q -p no:cacheprovider tests/kernels/test_attention_plan.py \
	    tests/kernels/test_gpu_kernels.py tests/kernels/test_device_cache.py
	$(GPU_PYTHON) -m mooncake.app.bench_gpu --out gpu.json
	$(GPU_PYTHON) -m pytest -q -p no:cacheprovider tests/e2e/test_gpu_nodes.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
