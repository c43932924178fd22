"""How the other ranks of a model start and end: one that cannot start says so, one that dies is told at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from select import select

import msgspec
import pytest
import torch
from live import workers_of
from ranks import ranks_of
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ConfigError, ModelError, MooncakeError, NodeUnavailable
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.pages import SharedMemory
from mooncake.model.parallel import context_parallel, tensor_parallel
from mooncake.model.parallel.ranks import Workers, leave_group
from mooncake.precision import FLOAT32

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK_TOKENS, NUM_BLOCKS, LIMIT = 16, 24, 256


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> None:
    """Here they are started as they are."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "tiny"
    write_tiny_model(folder, "llama")
    return folder


@pytest.mark.timeout(90)  # less than torch waits for a rank that does not come
@pytest.mark.parametrize("way", ["tensor_parallel", "context_parallel"])
def test_a_rank_that_dies_as_it_starts_is_told_at_once(folder: Path, way: str) -> None:
    def kill_the_first() -> None:
        while not (found := workers_of(os.getpid(), f"model.parallel.{way}")):
            time.sleep(0.01)
        os.kill(found[0], signal.SIGKILL)

    killing = threading.Thread(target=kill_the_first)
    killing.start()
    counts = {"tensor_parallel_size" if way == "tensor_parallel" else "context_parallel_size": 2}
    with pytest.raises(NodeUnavailable, match=r"parallel ranks \[1\] have failed"):
        LLM(str(folder), kv_gb=0.01, block_tokens=16, **counts)  # type: ignore[arg-type]
    killing.join()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("way", ["tensor_parallel", "context_parallel"])
def test_a_rank_that_cannot_load_its_part_says_why(folder: Path, tmp_path: Path, way: str) -> None:
    layout = open_checkpoint(str(folder)).kv_layout(BLOCK_TOKENS, "float32")
    memory = SharedMemory.create(NUM_BLOCKS * layout.block_bytes)
    model = str(tmp_path / "nowhere")
    setup: msgspec.Struct
    if way == "tensor_parallel":
        setup = tensor_parallel.Setup(2, model, LIMIT, FLOAT32, layout, NUM_BLOCKS, 1, memory.fd)
    else:
        setup = context_parallel.Setup(2, model, LIMIT, LIMIT, FLOAT32, "float32", threads=1)
    workers = Workers("ranks", leave_group)
    port = workers.open_store()
    try:
        workers.start(f"mooncake.model.parallel.{way}", [msgspec.json.encode(setup).decode(), 1, port], [memory.fd])
        workers.join(2)
        with pytest.raises(ModelError, match="nowhere"):
            workers.await_ready()
    finally:
        workers.end()


@pytest.mark.slow
def test_who_watches_ranks_is_told_of_one_that_dies_and_not_of_a_close(folder: Path) -> None:
    for is_killed in (True, False):
        told: list[MooncakeError] = []
        heard = threading.Event()
        with ranks_of(str(folder), 2, NUM_BLOCKS, BLOCK_TOKENS) as ranks:
            ranks.model.watch(lambda error, told=told, heard=heard: (told.append(error), heard.set()))  # type: ignore[misc]
            if is_killed:
                os.kill(ranks.model.pids[0], signal.SIGKILL)
                assert heard.wait(30)
        assert [type(error) for error in told] == ([NodeUnavailable] if is_killed else [])


@pytest.mark.slow
def test_a_process_has_one_group_and_a_second_one_does_not_end_it(folder: Path) -> None:
    with ranks_of(str(folder), 2, NUM_BLOCKS, BLOCK_TOKENS) as ranks:
        with pytest.raises(ConfigError, match="has a model over several ranks already"):
            LLM(str(folder), kv_gb=0.01, block_tokens=16, tensor_parallel_size=2)
        ranks.model.forward(
            ForwardBatch.of_prompt(torch.arange(5), BLOCK_TOKENS, torch.tensor([4])), ranks.cache.tensor, NoHook()
        )


@pytest.mark.timeout(90)
@pytest.mark.parametrize("way", ["tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    "what",
    ["has died", *(pytest.param(what, marks=pytest.mark.slow) for what in ("hangs", "hangs in a step"))],
)
def test_closing_waits_for_no_rank_that_hangs_or_has_died(
    folder: Path, way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.model.parallel.ranks.END_S", 2)
    llm = LLM(str(folder), kv_gb=0.01, block_tokens=16, threads=1, **{way: 2})  # type: ignore[arg-type]
    ranks = workers_of(os.getpid(), "model")
    os.kill(ranks[-1], signal.SIGKILL if what == "has died" else signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        if what == "hangs in a step":
            prompt, sampling = list(range(3, 203)), SamplingParams(max_tokens=2)
            asking = threads.submit(llm.generate, [prompt], sampling, use_tqdm=False)
            assert not wait([asking], 1).done, "it did without the rank that hangs"
        ends = [os.pidfd_open(pid) for pid in ranks]
        started_s = time.monotonic()
        llm.close()
        assert time.monotonic() - started_s < 5
        gone = [select([end], [], [], 5)[0] for end in ends]  # a killed process takes a moment to free its memory
        assert all(gone), "one of them is still there"
        if what == "hangs in a step":
            assert isinstance(asking.exception(30), NodeUnavailable)
    for end in ends:
        os.close(end)
