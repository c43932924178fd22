"""Attention over ranks equals that of one process: every method, on threads that send to each other."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from mooncake.kernels import choose_kernels, reference
from mooncake.model.batch import ForwardBatch
from mooncake.model.parallel.context_attention import ContextAttention, Kind
from mooncake.model.parallel.context_home import Home
from mooncake.model.parallel.context_plan import ContextPlan, Method, Shape
from mooncake.model_config import ModelConfig

BLOCK_TOKENS, HEAD_DIM = 16, 32


class Boxes:
    """What is on its way between threads."""

    def __init__(self, size: int) -> None:
        ways = itertools.product(range(size), range(size), Kind)
        self.boxes: dict[tuple[int, int, Kind], queue.Queue[torch.Tensor]] = {way: queue.Queue() for way in ways}
        self.sent_bytes = [0] * size


@dataclass
class ThreadPost:
    rank: int
    size: int
    boxes: Boxes

    def send(self, values: torch.Tensor, to: int, kind: Kind) -> None:
        assert values.is_contiguous() and to != self.rank
        self.boxes.sent_bytes[self.rank] += values.nbytes
        self.boxes.boxes[self.rank, to, kind].put(values.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, kind: Kind) -> Letter:
        return Letter(self.boxes.boxes[source, self.rank, kind], tuple(shape), dtype)

    def settle(self) -> None:
        pass


@dataclass
class Letter:
    box: queue.Queue[torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.values is None:
            self.values = self.box.get(timeout=20)
            assert (tuple(self.values.shape), self.values.dtype) == (self.shape, self.dtype)
        return self.values


class Step:
    """Random queries, keys and values of a ragged step, and a cache that holds what came before."""

    def __init__(
        self, lengths: Sequence[tuple[int, int]], heads: tuple[int, int], dtype: torch.dtype, window: int, cap: float
    ) -> None:
        random = torch.Generator().manual_seed(sum(sum(pair) for pair in lengths))
        num_heads, num_kv_heads = heads
        contexts = [prefix + count for prefix, count in lengths]
        blocks = [-(-context // BLOCK_TOKENS) for context in contexts]
        order = torch.randperm(sum(blocks), generator=random).int()
        tables = torch.zeros((len(lengths), max(blocks)), dtype=torch.int32)
        slots, used = [], 0
        for index, ((prefix, _), context) in enumerate(zip(lengths, contexts, strict=True)):
            tables[index, : blocks[index]] = order[used : used + blocks[index]]
            used += blocks[index]
            at = torch.arange(prefix, context)
            slots.append(tables[index].long()[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
        starts = torch.tensor([0, *(count for _, count in lengths)]).cumsum(0)
        total = int(starts[-1])
        self.batch = ForwardBatch(
            tokens=torch.zeros(total, dtype=torch.int64),
            positions=torch.zeros(total, dtype=torch.int64),
            query_starts=starts.int(),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            slots=torch.cat(slots),
            logit_rows=torch.zeros(0, dtype=torch.int64),
        )
        self.config = ModelConfig(
            architecture="llama",
            hidden_size=num_heads * HEAD_DIM,
            intermediate_size=32,
            num_layers=2,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_DIM,
            vocab_size=8,
            max_model_len=4096,
            rope_theta=10_000.0,
            rope_scaling=None,
            rms_eps=1e-5,
            tie_embeddings=True,
            qkv_bias=False,
            qk_norm=False,
            bos_id=None,
            eos_ids=(),
            sliding_window=window or None,
            score_cap=cap,
        )
        shape = (sum(blocks), 2, 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM)
        self.cache = reference.as_page_rows(torch.randn(shape, generator=random), dtype)
        self.query = torch.randn(total, num_heads, HEAD_DIM, generator=random)
        self.sinks: torch.Tensor | None = None
        self.shape = Shape(num_heads, num_kv_heads, HEAD_DIM, self.cache.shape[-1] * self.cache.element_size())

    def whole(self, layer: int) -> torch.Tensor:
        batch, config = self.batch, self.config
        given = (self.query, self.cache[:, layer], batch.block_tables, batch.query_starts, batch.context_lens)
        slopes = torch.tensor(config.alibi_slopes) if config.alibi_slopes else None
        rest = (config.softmax_scale, config.window_of(layer), config.score_cap, self.sinks, slopes)
        return choose_kernels().paged_attention(*given, *rest)

    def new_rows(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        slots = self.batch.slots[rows]
        return self.cache[slots // BLOCK_TOKENS, layer, :, :, slots % BLOCK_TOKENS].permute(1, 2, 0, 3).contiguous()

    def over(self, plan: ContextPlan, method: Method | None, layer: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Output, the first rank's cache (initially without the step's tokens), and the bytes sent by all."""
        boxes, output = Boxes(plan.size), torch.full_like(self.query, float("nan"))
        cache, slots = self.cache.clone(), self.batch.slots
        cache[slots // BLOCK_TOKENS, layer, :, :, slots % BLOCK_TOKENS] = 0
        errors: list[BaseException] = []

        def compute(rank: int) -> None:
            rows = torch.from_numpy(plan.rows_of(rank))
            home = Home(plan, self.batch, cache) if rank == 0 else None
            post, own = ThreadPost(rank, plan.size, boxes), self.new_rows(layer, rows)
            attend = ContextAttention(plan, post, choose_kernels(), self.config, self.shape, own, method, home)
            try:
                output[rows] = attend(layer, self.query[rows], self.sinks)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(plan.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert all(box.empty() for box in boxes.boxes.values()), "something was sent that nobody wanted"
        return output, cache, sum(boxes.sent_bytes)


ONE, WITH_PREFIX = [(0, 101)], [(77, 101)]
RAGGED = [(40, 33), (300, 1), (0, 59), (3, 2), (1, 64)]
"""Two of which stay with the first rank."""


@pytest.mark.parametrize("lengths", [ONE, WITH_PREFIX, RAGGED], ids=["one", "with a prefix", "ragged"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", Method)
def test_each_way_is_attention(lengths: list[tuple[int, int]], size: int, method: Method) -> None:
    step = Step(lengths, (12, 12), torch.float32, 0, 0.0)
    plan = ContextPlan.of(size, step.batch.query_starts.numpy(), step.batch.context_lens.numpy(), 20)
    output, cache, sent_bytes = step.over(plan, method, layer=1)
    torch.testing.assert_close(output, step.whole(1), rtol=2e-6, atol=2e-6)
    assert torch.equal(cache, step.cache), "the first rank's cache is complete"
    assert sent_bytes == plan.sent_bytes(method, step.shape)


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize(("heads", "size"), [((6, 2), 2), ((8, 2), 4)], ids=["shared", "repeated"])
def test_heads_that_share_keys_are_attended(method: Method, heads: tuple[int, int], size: int) -> None:
    step = Step(RAGGED, heads, torch.float32, 0, 8.0)
    plan = ContextPlan.of(size, step.batch.query_starts.numpy(), step.batch.context_lens.numpy(), 20)
    output, _, sent_bytes = step.over(plan, method, layer=0)
    torch.testing.assert_close(output, step.whole(0), rtol=2e-6, atol=2e-6)
    assert sent_bytes == plan.sent_bytes(method, step.shape)


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("window", [0, 24])
def test_a_sink_counts_once(method: Method, window: int) -> None:
    step = Step(RAGGED, (6, 2), torch.float32, window, 0.0)
    plan = ContextPlan.of(2, step.batch.query_starts.numpy(), step.batch.context_lens.numpy(), 20)
    without = step.whole(0)
    step.sinks = torch.tensor([-2.0, 0.0, 1.0, 2.0, 4.0, 60.0])
    output, _, _ = step.over(plan, method, layer=0)
    torch.testing.assert_close(output, step.whole(0), rtol=2e-6, atol=2e-6)
    assert not torch.allclose(output, without, atol=0.1)


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=["bf16 pages", "int8 pages"])
def test_rows_travel_as_the_cache_holds_them(method: Method, dtype: torch.dtype) -> None:
    step = Step(RAGGED, (6, 2), dtype, 0, 0.0)
    plan = ContextPlan.of(2, step.batch.query_starts.numpy(), step.batch.context_lens.numpy(), 20)
    output, cache, sent_bytes = step.over(plan, method, layer=1)
    torch.testing.assert_close(output, step.whole(1), rtol=3e-2, atol=3e-2)  # narrow sums differ by machine
    assert torch.equal(cache, step.cache) and sent_bytes == plan.sent_bytes(method, step.shape)


@pytest.mark.parametrize("method", [None, Method.PASS_KV])
@pytest.mark.parametrize(("window", "slopes"), [(24, ()), (0, (0.5, 0.25, 0.1, 0.05, 0.02, 0.01))])
def test_layers_with_a_window_or_slopes_go_by_heads(
    method: Method | None, window: int, slopes: tuple[float, ...]
) -> None:
    step = Step(RAGGED, (6, 2), torch.float32, window, 0.0)
    without = step.whole(0)
    step.config = replace(step.config, alibi_slopes=slopes)
    assert torch.equal(step.whole(0), without) == (not slopes)
    plan = ContextPlan.of(2, step.batch.query_starts.numpy(), step.batch.context_lens.numpy(), 20)
    output, _, sent_bytes = step.over(plan, method, layer=0)
    assert torch.equal(output, step.whole(0)), "the same kernel, with fewer heads"
    assert sent_bytes == plan.sent_bytes(Method.HEADS, step.shape)
