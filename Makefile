# Plain commands that a person can copy. `make demo` and `make test` set up what they need first.
PYTHON ?= python3.11
TORCH ?= cpu
VENV := .venv
BIN := $(VENV)/bin
# Python keeps what it compiles, whatever the environment says: tests start hundreds of processes, which compiled all of
# ours anew.
export PYTHONDONTWRITEBYTECODE :=
PROTOS := $(patsubst proto/%,mooncake/rpc/%,$(wildcard proto/*.proto))

.PHONY: help setup demo test test-slow test-all check sanitize bench gpu gpu-site proto clean

help:
	@echo 'make demo      a cluster on this machine: a streamed answer, a second turn that reuses the first, a replay'
	@echo 'make test      the tests, without the slow ones'
	@echo 'make test-slow the slow tests alone'
	@echo 'make test-all  all tests, one after the other'
	@echo 'make check     lint, formatting, types, the import diagram, generated code'
	@echo 'make sanitize  the C++ code under AddressSanitizer and UBSan: kernels, transfer, store, placement'
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

# Two processes share the tests; `make test TESTS=…` names some of them, which one process does.
test: setup
	$(BIN)/python -m pytest -m "not slow" $(if $(TESTS),$(TESTS),-n 2 --dist worksteal)

# Those with clusters take the cores in turns: eight processes of one would take them from another's. The others share them.
CLUSTERS := $(addprefix tests/,app bench e2e kvstore prefill rdma)
test-slow: setup
	@failed=0; \
	$(BIN)/python -m pytest -m slow $(CLUSTERS) || failed=1; \
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal $(CLUSTERS:%=--ignore=%) || failed=1; \
	exit $$failed

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

# Sweeps as a whole: memory is read in other places in each combination. A test that limits a process's addresses is left
# out: the sanitizer needs terabytes of them.
SANITIZED := tests/kernels/test_cpu_kernels.py tests/kvstore tests/conductor/test_prefix_index.py \
    tests/conductor/test_pending_prefixes.py tests/conductor/test_policies.py tests/sim/test_sim_steps.py
sanitize: setup
	CXXFLAGS='-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined' \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	    $(BIN)/python -m pytest -m "not slow or sweep" $(SANITIZED) \
	    --deselect 'tests/kvstore/test_segment.py::test_the_limits_of_the_process_count[RLIMIT_AS]'

bench: setup
	$(BIN)/mooncake bench engine
	$(BIN)/mooncake bench serve

# GPU_PYTHON: an interpreter with a CUDA build of torch; the environment of `make setup TORCH=cuda` has one.
# It ends after nine minutes (GPU_FLAGS: `--only cascade`, `--minutes 30`); another one goes on where it ended.
GPU_PYTHON ?= $(BIN)/python
GPU_OUT ?= gpu.json
gpu:
	PYTHONPATH=build/gpu-site $(GPU_PYTHON) -m mooncake.app.bench.gpu --resume --out $(GPU_OUT) $(GPU_FLAGS)

# For a machine that has torch, Triton and transformers and can fetch nothing: the rest, for its Python (GPU_VERSION),
# into a folder to take there.
GPU_VERSION ?= 3.12
GPU_NEEDS ?= msgspec grpcio grpcio-health-checking grpcio-reflection googleapis-common-protos protobuf llguidance gguf \
    starlette uvicorn httptools pytest-asyncio requests prometheus-client xxhash
gpu-site:
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps --no-compile --upgrade --target build/gpu-site \
	    --only-binary=:all: --python-version $(GPU_VERSION) --implementation cp \
	    $(foreach glibc,17 24 27 28 31 34,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64 $(GPU_NEEDS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
