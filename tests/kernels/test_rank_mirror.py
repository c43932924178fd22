"""A node's ranks on GPUs and the mirror that they share, here in Triton's interpreter: what leaves it are whole blocks,
what comes in reaches every rank, and nobody waits for a rank that is gone."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tiny_model import LATENT, write_tiny_model

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.backends.backend import Backend, BackendSpec, CacheSize, Processes, on_cpu, open_for_node
from mooncake.engine.backends.gpu_passes import FirstPass, OtherPass
from mooncake.engine.backends.gpu_ranks import TensorParallelGpuModel
from mooncake.engine.cache.device_cache import DeviceCache, HostMirror
from mooncake.engine.cache.kv_cache import Arrival, Mirror
from mooncake.engine.cache.rank_mirror import RankCopies, RanksMirror, connect
from mooncake.errors import KVLoadFailed, MooncakeError, NodeUnavailable
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.pages import pages_over
from mooncake.precision import resolve_precision
from mooncake.types import KVLayout

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="compares with a CPU, number by number"),
]

BLOCK, NUM_BLOCKS = 8, 8
PROMPT = torch.arange(5, 24)  # two full blocks and a partial one
FAMILIES = {
    "two-heads": ("llama", {"head_dim": 16, "hidden_size": 64}),
    "one-head": ("llama", {"head_dim": 16, "hidden_size": 64, "num_key_value_heads": 1}),  # on both ranks
    "latent": ("deepseek_v3", LATENT),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    family, changes = FAMILIES[request.param]
    write_tiny_model(folder, family, **changes)
    return str(folder)


@pytest.fixture
def one_family(tmp_path: Path) -> str:
    write_tiny_model(tmp_path, "llama", head_dim=16, hidden_size=64)
    return str(tmp_path)


def size_of(folder: str) -> CacheSize:
    return CacheSize(open_checkpoint(folder).kv_layout(BLOCK, "float32"), NUM_BLOCKS, 32)


@contextlib.contextmanager
def two_ranks(folder: str, timeout_s: float = 0.0) -> Iterator[Backend]:
    precision, two = resolve_precision("float32", devices=("cuda",)), Processes(tensor=2)
    checkpoint = open_checkpoint(folder)
    backend = open_for_node(BackendSpec(checkpoint, precision, size_of(folder), "cuda", two), timeout_s=timeout_s)
    with contextlib.closing(backend):
        yield backend


def pages_of(mirror: Mirror, folder: str) -> torch.Tensor:
    return pages_over(mirror.memory.reshape(-1), size_of(folder).layout, NUM_BLOCKS)


def rows_of(pages: torch.Tensor, layer: int, count: int) -> torch.Tensor:
    """The first ``count`` tokens in this layer of blocks that follow each other: [tokens, K|V, Hkv, D]."""
    return pages[:, layer].permute(0, 3, 1, 2, 4).flatten(0, 1)[:count]


@dataclass
class Sending:
    """A prefill node's hook: each layer of these blocks leaves when it is computed."""

    mirror: Mirror
    block_ids: list[int]
    arrivals: list[Arrival] = field(default_factory=list)
    wants_layers: bool = True

    def before_layer(self, layer: int) -> None:
        pass

    def after_layer(self, layer: int) -> None:
        self.arrivals.append(self.mirror.to_host(self.block_ids, layer))


@dataclass
class Loading:
    """A hook that has each layer of these blocks brought in when the step gets there, as a thread of the loader would,
    and goes on behind the copy."""

    mirror: Mirror
    block_ids: list[int]
    wants_layers: bool = True

    def before_layer(self, layer: int) -> None:
        arrivals: list[Arrival] = []
        loading = threading.Thread(target=lambda: arrivals.append(self.mirror.to_device(self.block_ids, layer)))
        loading.start()
        loading.join()
        arrivals[0].order()

    def after_layer(self, layer: int) -> None:
        pass


@dataclass
class Failing(Sending):
    """It fails at a layer."""

    layer: int = 1
    where: str = "before"

    def before_layer(self, layer: int) -> None:
        if self.where == "before" and layer == self.layer:
            raise KVLoadFailed("it did not come", ("r",))

    def after_layer(self, layer: int) -> None:
        super().after_layer(layer)
        if self.where == "after" and layer == self.layer:
            raise KVLoadFailed("it did not come", ("r",))


def prompt() -> ForwardBatch:
    return ForwardBatch.of_prompt(PROMPT, BLOCK, torch.tensor([len(PROMPT) - 1]))


def one_more(block_ids: list[int]) -> ForwardBatch:
    """The token after the prompt, whose KV is in these blocks."""
    return ForwardBatch.of_last_token(torch.cat([PROMPT, torch.tensor([77])]), BLOCK, block_ids)


@pytest.mark.slow
def test_whole_blocks_leave_layer_by_layer_and_come_back_to_every_rank(folder: str) -> None:
    alone = on_cpu(BackendSpec(open_checkpoint(folder), resolve_precision("float32"), size_of(folder)))
    expected = alone.model.forward(prompt(), alone.cache.tensor, NoHook())
    with two_ranks(folder) as ranks:
        mirror = ranks.mirror
        assert isinstance(mirror, RanksMirror)
        hook = Sending(mirror, [0, 1, 2])
        logits = ranks.model.forward(prompt(), ranks.cache.tensor, hook)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for arrival in hook.arrivals:
            arrival.wait()
        seen = pages_of(mirror, folder)
        for layer in range(size_of(folder).layout.num_layers):
            sent, wanted = (rows_of(pages, layer, len(PROMPT)) for pages in (seen, alone.cache.tensor))
            torch.testing.assert_close(sent, wanted, rtol=1e-4, atol=1e-4)

        # Blocks 3, 4, 5 get the same bytes from outside, and the next token reads them there.
        follows = ranks.model.forward(one_more([0, 1, 2]), ranks.cache.tensor, NoHook())
        seen[[3, 4, 5]] = seen[[0, 1, 2]]
        again = ranks.model.forward(one_more([3, 4, 5]), ranks.cache.tensor, Loading(mirror, [3, 4, 5]))
        assert torch.equal(again, follows)
        assert not torch.equal(again, ranks.model.forward(one_more([6, 7, 5]), ranks.cache.tensor, NoHook()))

        # A hand-off comes in as a whole, and what generation has filled leaves as a whole.
        seen[[6, 7]], seen[5] = seen[[0, 1]], 0
        mirror.to_device([6, 7]).wait()
        mirror.to_host([5]).wait()
        again = ranks.model.forward(one_more([6, 7, 5]), ranks.cache.tensor, NoHook())
        assert torch.equal(again, follows)
        filled = len(PROMPT) - 2 * BLOCK
        torch.testing.assert_close(rows_of(seen[5:6], 0, filled), rows_of(seen[2:3], 0, filled), rtol=0, atol=0)


COMES_IN = "[7] of layer None come in"


class Recorded:
    """``Arrival`` of a copy on one rank."""

    def __init__(self, calls: list[str], may_end: threading.Event) -> None:
        self._calls, self._may_end = calls, may_end

    def wait(self) -> None:
        assert self._may_end.wait(60)

    def order(self) -> None:
        self._calls.append("computing goes on behind it")


class RecordingMirror(HostMirror):
    """One rank's, which says what is copied, and copies only when it may."""

    def __init__(self) -> None:
        layout = KVLayout(2, 1, BLOCK, 8, "float32")
        super().__init__(DeviceCache(layout, NUM_BLOCKS, torch.device("cpu")))
        self.calls: list[str] = []
        self.may_start, self.may_end = threading.Event(), threading.Event()
        self.may_start.set()
        self.may_end.set()

    def to_host(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        self.calls.append(f"{list(block_ids)} of layer {layer} go out")
        return Recorded(self.calls, self.may_end)

    def to_device(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        self.may_start.wait(60)
        self.calls.append(f"{list(block_ids)} of layer {layer} come in")
        return Recorded(self.calls, self.may_end)


class InThisProcess:
    """Two ranks of which only messages and copies are real, and the first one's are not looked at."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[tuple[int, list[torch.Tensor]]] = SimpleQueue()
        link, its_end = connect()
        self.first, self.other = RecordingMirror(), RecordingMirror()
        self.mirror = RanksMirror(self.first, [link], lambda: None)
        self.copies = RankCopies(self.other, its_end.detach())

    def send(self, kind: int, *arrays: npt.NDArray[np.int64]) -> None:
        self.messages.put((kind, [torch.from_numpy(array) for array in arrays]))

    def receive(self) -> tuple[int, list[torch.Tensor]]:
        return self.messages.get(timeout=60)


def test_another_rank_copies_a_layer_out_when_it_has_computed_it_too() -> None:
    ranks = InThisProcess()
    other = OtherPass(ranks, ranks.copies)
    with ranks.mirror.in_step():
        hook = Sending(ranks.mirror, [3, 1])
        first = FirstPass(ranks, hook, ranks.mirror)
        first.before_layer(0)
        first.after_layer(0)
        other.before_layer(0)
        with ThreadPoolExecutor(1) as elsewhere:  # what had gone that way before would have arrived before
            elsewhere.submit(lambda: ranks.mirror.to_device([7]).wait()).result(60)
        assert ranks.first.calls == ["[3, 1] of layer 0 go out", COMES_IN]
        assert ranks.other.calls == [COMES_IN]
        first.before_layer(1)
        first.after_layer(1)
        other.before_layer(1)
        assert ranks.other.calls == [COMES_IN, "[3, 1] of layer 0 go out"]
        first.end()
        other.hear()
    for arrival in hook.arrivals:
        arrival.wait()
    assert ranks.other.calls == [COMES_IN, "[3, 1] of layer 0 go out", "[3, 1] of layer 1 go out"]
    assert sorted(ranks.first.calls) == sorted(ranks.other.calls)


def test_another_rank_goes_on_behind_a_copy_in_of_which_it_hears_later_than_of_the_layer() -> None:
    ranks = InThisProcess()
    other = OtherPass(ranks, ranks.copies)
    ranks.other.may_start.clear()
    ranks.other.may_end.clear()
    with ranks.mirror.in_step(), ThreadPoolExecutor(1) as computing:
        FirstPass(ranks, Loading(ranks.mirror, [2]), ranks.mirror).before_layer(1)
        going_on = computing.submit(other.before_layer, 1)
        assert not wait([going_on], 0.2).done, "it computes before the bytes have come"
        ranks.other.may_start.set()
        going_on.result(60)  # the host does not wait for the end
    assert ranks.other.calls == ranks.first.calls == ["[2] of layer 1 come in", "computing goes on behind it"]
    ranks.other.may_end.set()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_the_hook_abandons_ends_on_all_ranks_and_the_next_one_works(one_family: str, where: str) -> None:
    with two_ranks(one_family) as ranks:
        assert ranks.mirror is not None
        expected = ranks.model.forward(prompt(), ranks.cache.tensor, NoHook())
        for layer in range(size_of(one_family).layout.num_layers):
            hook = Failing(ranks.mirror, [0, 1, 2], layer=layer, where=where)
            with pytest.raises(KVLoadFailed, match="it did not come"):
                ranks.model.forward(prompt(), ranks.cache.tensor, hook)
            assert len(hook.arrivals) == layer + (where == "after")
            for arrival in hook.arrivals:  # whoever sends them is not left waiting
                arrival.wait()
            assert torch.equal(ranks.model.forward(prompt(), ranks.cache.tensor, NoHook()), expected)


def told_by(ranks: Backend) -> Callable[[], MooncakeError]:
    told: list[MooncakeError] = []
    heard = threading.Event()
    ranks.watch(lambda error: (told.append(error), heard.set()))  # type: ignore[func-returns-value]

    def first() -> MooncakeError:
        assert heard.wait(30)
        return told[0]

    return first


def rank_of(ranks: Backend) -> int:
    assert isinstance(ranks.model, TensorParallelGpuModel)
    [process] = ranks.model._workers.processes
    return process.pid


def test_whoever_waits_for_a_copy_of_a_rank_that_dies_is_told(one_family: str) -> None:
    with two_ranks(one_family) as ranks:
        assert ranks.mirror is not None
        first = told_by(ranks)
        os.kill(rank_of(ranks), signal.SIGSTOP)
        arrival = ranks.mirror.to_host([0])
        os.kill(rank_of(ranks), signal.SIGKILL)
        with pytest.raises(NodeUnavailable, match="rank has ended"):
            arrival.wait()
        assert "ranks [1] have failed" in first().message
        with pytest.raises(NodeUnavailable):
            ranks.mirror.to_device([0]).wait()
        with pytest.raises(NodeUnavailable, match=r"ranks \[1\] have failed"):
            ranks.model.forward(prompt(), ranks.cache.tensor, Sending(ranks.mirror, [0, 1, 2]))


def test_ranks_of_a_node_that_is_dropped_end(one_family: str) -> None:
    precision, two = resolve_precision("float32", devices=("cuda",)), Processes(tensor=2)
    ranks = open_for_node(BackendSpec(open_checkpoint(one_family), precision, size_of(one_family), "cuda", two))
    assert isinstance(ranks.model, TensorParallelGpuModel)
    [process] = ranks.model._workers.processes
    del ranks
    gc.collect()
    assert process.wait(30) == -signal.SIGKILL


def test_a_block_is_copied_on_all_ranks_before_its_next_owner_gets_it(one_family: str) -> None:
    with two_ranks(one_family) as ranks, ThreadPoolExecutor(1) as engine:
        os.kill(rank_of(ranks), signal.SIGSTOP)
        copying = engine.submit(ranks.cache.copy_block, 0, 1)
        assert not wait([copying], 0.5).done, "the first rank did not wait for the other"
        os.kill(rank_of(ranks), signal.SIGCONT)
        copying.result(30)


def test_a_rank_that_does_not_copy_in_time_ends_and_the_node_is_told(one_family: str) -> None:
    with two_ranks(one_family, timeout_s=1) as ranks:
        assert ranks.mirror is not None
        first = told_by(ranks)
        os.kill(rank_of(ranks), signal.SIGSTOP)
        with pytest.raises(NodeUnavailable, match="has not copied blocks for 1 s"):
            ranks.mirror.to_device([0]).wait()
        assert "ranks [1] have failed" in first().message


@pytest.mark.slow
def test_a_rank_that_takes_no_messages_ends_too(one_family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.engine.cache.rank_mirror.TELL_S", 1)
    with two_ranks(one_family) as ranks:
        assert ranks.mirror is not None
        first = told_by(ranks)
        os.kill(rank_of(ranks), signal.SIGSTOP)
        with pytest.raises(NodeUnavailable, match="a tensor parallel rank takes no messages"):
            for _ in range(100_000):  # until the connection is full
                ranks.mirror.to_device([0])
        assert "ranks [1] have failed" in first().message
