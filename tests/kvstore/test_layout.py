"""KV from one layout to another: what a plan reads, that nothing is lost on the way, and the same tokens from it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.checksum import range_checksums
from kvstore.layout.convert import Converter, convert, convert_in_turns
from kvstore.layout.layout import ShardedLayout, numbers, rows, scales
from kvstore.layout.plan import Plan, plan
from kvstore.layout.reader import LayoutReader, Shard, _jobs, _rounds
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from mooncake.errors import ChecksumMismatch, InvalidRequest
from mooncake.types import KVLayout, SegmentAddress

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
NOWHERE = SegmentAddress("", 0, "", "", "", 1, 1)
WIDER = {"float32": ["float32"], "bfloat16": ["bfloat16", "float32"], "int8": ["int8", "float32"]}


def soon() -> float:
    return time.monotonic() + 20


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ShardedLayout, ShardedLayout]:
    """Two layouts of one model, the second able to hold what the first holds."""
    layers, heads, dim = draw(st.integers(1, 5)), draw(st.integers(1, 8)), draw(st.sampled_from([1, 4, 8]))
    dtype, num_kinds = draw(st.sampled_from(sorted(WIDER))), draw(st.sampled_from([2, 1]))

    def one(kind: str) -> ShardedLayout:
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
        edges = [0, *cuts, layers]
        stages = tuple(after - before for before, after in itertools.pairwise(edges))
        tokens, degree = draw(st.sampled_from([1, 2, 3, 4, 6, 16])), draw(st.integers(1, 12))
        return ShardedLayout(stages, heads, dim, tokens, kind, degree, num_kinds)

    return one(dtype), one(draw(st.sampled_from(WIDER[dtype])))


@pytest.fixture(scope="module")
def transfer() -> Iterator[TransferEngine]:
    engine = TransferEngine("layout", ("shm",))
    yield engine
    engine.close()


class Deployment:
    """The blocks of each rank in its own segment, served to readers."""

    def __init__(self, layout: ShardedLayout, num_blocks: int, transport: str = "shm") -> None:
        self.layout = layout
        self.segments = [
            Segment.create(f"rank{rank}", layout.block(rank).block_bytes, num_blocks)
            for rank in range(layout.num_ranks)
        ]
        self.servers = [SegmentServer(segment, f"rank{i}", (transport,)) for i, segment in enumerate(self.segments)]
        for server in self.servers:
            server.start()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        for server, segment in zip(self.servers, self.segments, strict=True):
            server.stop()
            segment.close()

    def blocks(self, rank: int) -> Bytes:
        segment = self.segments[rank]
        return segment.array.reshape(segment.num_blocks, segment.block_bytes)

    def shards(self, verified: bool = True) -> dict[int, Shard]:
        """Slots in reverse order, so that a block's number is never its slot."""
        found = {}
        for rank, segment in enumerate(self.segments):
            slots = range(segment.num_blocks - 1, -1, -1)
            sums = [range_checksums(segment.block(slot), self.layout.block(rank).num_layers) for slot in slots]
            found[rank] = Shard(self.servers[rank].address, slots, sums if verified else ())
        return found

    def fill_from(self, source: Deployment, transfer: TransferEngine) -> list[Plan]:
        reader = LayoutReader(transfer)
        plans = [plan(source.layout, self.layout, rank) for rank in range(self.layout.num_ranks)]
        for rank, how in enumerate(plans):
            reader.read_blocks(how, source.shards(), list(self.blocks(rank)[::-1]), soon())
        reader.close()
        return plans


def fill(deployment: Deployment, seed: int) -> None:
    """The same random values for every copy of a head. int8 has rows whose largest value is ±127, as rows have."""
    layout, tokens = deployment.layout, deployment.layout.block_tokens
    random = np.random.default_rng(seed)
    blocks = deployment.segments[0].num_blocks
    shape = (layout.num_layers, layout.num_kinds, layout.num_kv_heads, blocks * tokens, layout.head_dim)
    if layout.dtype == "int8":
        values = random.integers(-127, 128, shape).astype(np.int8)
        values[..., 0] = random.choice([-127, 127], shape[:-1])
        least = (random.integers(1 << 15, 1 << 16, shape[:-1]) * 2.0**-30).astype(np.float32)
    else:
        values = random.standard_normal(shape).astype(np.float32)
        values = values if layout.dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    for rank in range(layout.num_ranks):
        layers, heads, form = layout.layers(rank), layout.heads(rank), layout.block(rank)
        for block, memory in enumerate(deployment.blocks(rank)[::-1]):
            part = np.s_[layers.start : layers.stop, :, heads.start : heads.stop, block * tokens : (block + 1) * tokens]
            numbers(rows(form, memory), form.dtype)[:] = values[part]
            if layout.dtype == "int8":
                scales(rows(form, memory))[:] = least[part]


def there_and_back(pair: tuple[ShardedLayout, ShardedLayout], seed: int, transfer: TransferEngine) -> None:
    first, second = pair
    period = np.lcm(first.block_tokens, second.block_tokens)
    with Deployment(first, 2 * period // first.block_tokens) as source:
        fill(source, seed)
        with Deployment(second, 2 * period // second.block_tokens) as middle:
            middle.fill_from(source, transfer)
            with Deployment(first, 2 * period // first.block_tokens) as target:
                target.fill_from(middle, transfer)
                for rank in range(first.num_ranks):
                    assert np.array_equal(target.blocks(rank), source.blocks(rank))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.integers(0, 1 << 32))
def test_a_round_trip_changes_no_bit(transfer: TransferEngine, pair: tuple[ShardedLayout, ShardedLayout], seed: int):
    there_and_back(pair, seed, transfer)


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.integers(0, 1 << 32))
def test_many_round_trips_change_no_bit(transfer, pair, seed):
    there_and_back(pair, seed, transfer)


@settings(max_examples=60)
@given(layouts())
def test_every_byte_of_a_target_comes_from_somewhere_once(pair: tuple[ShardedLayout, ShardedLayout]):
    source, target = pair
    for rank in range(target.num_ranks):
        how = plan(source, target, rank)
        form = target.block(rank)
        hits = np.zeros((how.target_period, form.num_layers, form.num_kv_heads, form.block_tokens), np.int64)
        for box in how.boxes:
            layer, head, token = box.target_first
            layers, heads, tokens = box.count
            hits[box.target_block, layer : layer + layers, head : head + heads, token : token + tokens] += 1
            own = source.block(box.rank)
            assert all(
                first + size <= full
                for first, size, full in zip(
                    box.source_first, box.count, (own.num_layers, own.num_kv_heads, own.block_tokens), strict=True
                )
            )
        assert (hits == 1).all()
        assert plan(source, target, rank) is how  # computed once


@pytest.mark.parametrize(("degree", "tokens", "dtype"), [(3, 64, "float32"), (1, 16, "float32"), (2, 2, "bfloat16")])
def test_over_tcp_it_is_the_same(degree: int, tokens: int, dtype: str):
    """Heads and tokens in separate runs on both sides, directly or through scratch memory."""
    engine = TransferEngine("layout", ("tcp",))
    other = model(degree, 2, tokens, dtype)
    with (
        Deployment(model(dtype=dtype), 2, "tcp") as source,
        Deployment(other, 128 // tokens, "tcp") as middle,
        Deployment(model(dtype=dtype), 2, "tcp") as target,
    ):
        fill(source, 7)
        there, back = middle.fill_from(source, engine), target.fill_from(middle, engine)
        assert np.array_equal(source.segments[0].array, target.segments[0].array)
        assert any(not box.is_direct for how in there + back for box in how.boxes) is (tokens == 2)
    engine.close()


def model(
    tensor_parallel: int = 1, pipeline_parallel: int = 1, tokens: int = 64, dtype: str = "float32"
) -> ShardedLayout:
    return ShardedLayout.of(KVLayout(30, 3, tokens, 64, dtype), tensor_parallel, pipeline_parallel)


def num_reads(source: ShardedLayout, target: ShardedLayout) -> int:
    return sum(len(_joined(box.reads)) for rank in range(target.num_ranks) for box in plan(source, target, rank).boxes)


def _joined(reads: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    assert all(sum(a) != b[0] for a, b in itertools.pairwise(reads)), "two runs that are one"
    return reads


def test_a_plan_reads_as_few_runs_as_there_are():
    whole = model().block(0).block_bytes
    boxes = plan(model(), model(), 0).boxes
    assert sum(box.nbytes for box in boxes) == whole
    assert all(len(box.reads) == 1 == box.moves.shape[1] and box.is_direct for box in boxes)  # in 1 MiB pieces
    assert all(len(box.reads) == 1 for box in plan(model(3), model(1), 0).boxes)  # a whole shard is one run
    assert num_reads(model(1), model(3)) == 3 * 30 * 2  # a head of K or of V of one layer is one
    assert num_reads(model(1, 1, 64), model(1, 1, 16)) == 4 * 30 * 2 * 3  # a quarter of the tokens of each head
    assert num_reads(model(1, 2), model(1, 5)) == sum(len(plan(model(1, 2), model(1, 5), r).boxes) for r in range(5))
    sixteen = ShardedLayout((4,), 8, 128, 64, "bfloat16", 16)  # two ranks store each of 8 heads
    eight = ShardedLayout((4,), 8, 128, 64, "bfloat16", 8)
    assert [plan(sixteen, eight, rank).ranks for rank in range(4)] == [(0,), (3,), (4,), (7,)]  # the load is shared
    assert [plan(eight, sixteen, rank).ranks for rank in range(4)] == [(0,), (0,), (1,), (1,)]


def test_narrower_types_lose_what_they_must_and_no_more(transfer):
    with Deployment(model(1), 1) as source:
        fill(source, 3)
        before = numbers(rows(model(1).block(0), source.blocks(0)[0]), "float32")
        for dtype, bound in (("bfloat16", 2.0**-8), ("int8", 0.5 / 127 * 1.01)):
            with Deployment(model(3, 1, 64, dtype), 1) as narrow, Deployment(model(1), 1) as back:
                narrow.fill_from(source, transfer)
                back.fill_from(narrow, transfer)
                after = numbers(rows(model(1).block(0), back.blocks(0)[0]), "float32")
                error = np.abs(after - before)
                scale = np.abs(before).max(-1, keepdims=True) if dtype == "int8" else np.abs(before)
                assert 0 < (error / scale).max() <= bound
                assert narrow.blocks(0).nbytes * 3 < source.blocks(0).nbytes / (4 if dtype == "int8" else 2) * 1.07


@settings(max_examples=60)
@given(
    st.sampled_from(list(itertools.product(sorted(WIDER), repeat=2))),
    st.tuples(*(st.integers(1, most) for most in (3, 4, 70))),
    st.sampled_from([1, 4, 12, 128]),
    st.sampled_from([2, 1]),
    st.integers(0, 1 << 32),
)
def test_native_code_computes_the_same_bits(
    pair: tuple[str, str], shape: tuple[int, int, int], dim: int, num_kinds: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    layers, heads, tokens = shape
    wide = random.standard_normal((layers, num_kinds, heads, tokens, dim)).astype(np.float32)
    wide *= np.exp2(random.integers(-40, 40, (*wide.shape[:-1], 1)))
    wide[random.random(wide.shape) < 0.1] = 0.0
    source_form, target_form = (KVLayout(layers, heads, tokens, dim, dtype, num_kinds=num_kinds) for dtype in pair)
    source = np.zeros(source_form.block_bytes, np.uint8)
    convert(wide.view(np.uint8), rows(source_form, source), "float32", pair[0])
    count = max(1, layers - 1), heads - heads // 2, tokens - tokens // 3
    first = 0, heads // 2, tokens // 3
    natively, plainly = (np.zeros(target_form.block_bytes, np.uint8) for _ in range(2))
    Converter(source_form, first, target_form, (0, 0, 0), count)([source], [natively])
    Converter(source_form, first, target_form, (0, 0, 0), count, is_native=False)([source], [plainly])
    assert np.array_equal(natively, plainly)


@pytest.mark.parametrize("is_native", [True, False], ids=["C++", "Python"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_of_a_block_in_turns_are_what_they_are_one_by_one(dtype: str, is_native: bool):
    random = np.random.default_rng(1)
    whole, quarter = KVLayout(3, 2, 64, 8, "bfloat16"), KVLayout(3, 2, 16, 8, dtype)
    sources = [random.integers(0, 120, whole.block_bytes, np.uint8) for _ in range(2)]
    firsts = [(0, 0, 16 * part) for part in (2, 0, 3)]
    parts = [Converter(whole, first, quarter, (0, 0, 0), (3, 2, 16), is_native) for first in firsts]
    together, alone = ([np.zeros(quarter.block_bytes, np.uint8) for _ in range(6)] for _ in range(2))
    convert_in_turns(parts, [source for source in sources for _ in parts], together)
    for number, target in enumerate(alone):
        parts[number % 3]([sources[number // 3]], [target])
    assert all(map(np.array_equal, together, alone)) and not np.array_equal(alone[0], alone[1])


def test_a_block_that_is_split_is_read_as_it_lies_there():
    """In turns, a run for each of the blocks that it becomes."""
    split, shards = plan(model(1, 1, 64), model(1, 1, 16), 0), {0: Shard(NOWHERE, [7, 3])}
    targets = [None if number == 1 else _block(model(1, 1, 16)) for number in range(8)]
    rounds = _rounds(_jobs(split, shards, targets), split)
    assert {tuple(job.slot for job in jobs) for jobs in rounds} == {(7,) * 3, (3,) * 4}
    assert [job.box.source_first[2] for job in rounds[0]] == [0, 32, 48]


def test_a_block_that_is_joined_is_written_as_it_lies_there():
    """In turns, a run from each of the blocks that become it, where the prompt has so many."""
    joined, shards = plan(model(1, 1, 16), model(1, 1, 64), 0), {0: Shard(NOWHERE, [7, 3, 9, 1, 5, 6])}
    rounds = _rounds(_jobs(joined, shards, [_block(model(1, 1, 64)) for _ in range(2)]), joined)
    assert {tuple(job.slot for job in jobs) for jobs in rounds} == {(7, 3, 9, 1), (5, 6)}
    assert [job.box.target_first[2] for job in rounds[0]] == [0, 16, 32, 48]


@pytest.mark.parametrize("is_native", [True, False], ids=["C++", "Python"])
def test_what_is_no_number_and_what_is_endless_survive_bfloat16(is_native: bool):
    wide = np.array([np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -0.0, 1e-45, 1.00390625], np.float32)
    wide.view(np.uint32)[1] = 0xFFFFFFFF  # all of its bits
    single, half = (KVLayout(1, 1, 1, 4, dtype) for dtype in ("float32", "bfloat16"))
    narrow, back = np.zeros(half.block_bytes, np.uint8), np.zeros(single.block_bytes, np.uint8)
    whole = (0, 0, 0), (1, 1, 1)
    Converter(single, whole[0], half, *whole, is_native=is_native)([wide.view(np.uint8)], [narrow])
    Converter(half, whole[0], single, *whole, is_native=is_native)([narrow], [back])
    [first, second, *rest] = back.view(np.float32)
    assert np.isnan(first) and np.isnan(second)
    assert rest == [np.inf, -np.inf, np.inf, 0.0, 0.0, 1.0]  # the last is a tie, and goes to the even one
    assert np.signbit(rest[3])


def test_a_flipped_bit_is_found_where_whole_layers_are_read(transfer):
    with Deployment(model(3), 2) as source, Deployment(model(1), 2) as target:
        fill(source, 5)
        shards = source.shards()
        reader, how = LayoutReader(transfer), plan(model(3), model(1), 0)
        done = reader.read_blocks(how, shards, list(target.blocks(0)), soon())
        assert (done.nbytes, done.unverified_bytes) == (2 * model().block(0).block_bytes, 0)
        source.blocks(1)[0, -1] ^= 1
        with pytest.raises(ChecksumMismatch, match="rank1: layer 29 of slot 0"):
            reader.read_blocks(how, shards, list(target.blocks(0)), soon())
        parts = reader.read_blocks(plan(model(3), model(1, 1, 16), 0), shards, [_block(model(1, 1, 16))], soon())
        assert parts.unverified_bytes == parts.nbytes  # a quarter of a layer has no checksum, and the caller is told
        reader.close()


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mooncake-rank0")


def test_what_a_restarted_store_left_is_let_go_of(transfer, eventually):
    reader = LayoutReader(transfer)
    for _ in range(2):
        eventually(lambda: num_mapped() <= 1)  # a thread may still be touching pages that were mapped before
        with Deployment(model(), 2) as source:
            fill(source, 5)
            reader.read_blocks(plan(model(), model(1, 1, 16), 0), source.shards(), [_block(model(1, 1, 16))], soon())
            eventually(lambda: num_mapped() == 2)  # the store's own mapping, and ours
    reader.close()


def _block(layout: ShardedLayout) -> Bytes:
    return np.zeros(layout.block(0).block_bytes, np.uint8)


def test_what_does_not_fit_is_refused(transfer):
    with pytest.raises(InvalidRequest, match="different models"):
        plan(model(), ShardedLayout.of(KVLayout(30, 5, 64, 64, "float32")), 0)
    with pytest.raises(InvalidRequest, match="rank 3 of 3"):
        plan(model(), model(3), 3)
    with pytest.raises(InvalidRequest, match="float16"):
        model(dtype="float16")
    reader = LayoutReader(transfer)
    with Deployment(model(3), 1) as source:
        shards = source.shards()
        with pytest.raises(InvalidRequest, match="contiguous bytes"):
            reader.read_blocks(plan(model(3), model(), 0), shards, [np.zeros(7, np.uint8)], soon())
        del shards[1]
        with pytest.raises(InvalidRequest, match=r"no shard of source ranks \[1\]"):
            reader.read_blocks(plan(model(3), model(), 0), shards, [_block(model())], soon())
    reader.close()
