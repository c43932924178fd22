"""From one KV layout to another: which bytes of which shards make up a block, and how to fetch them.

A deployment cuts a model's KV over pipeline stages (layers) and tensor-parallel ranks (heads), into blocks of some
number of tokens, as some type of number. ``plan`` says for one rank of a target deployment which boxes of which source
blocks it is made of; that part is pure, and computed once for a pair of layouts. ``read_blocks`` follows a plan: a
segment of this host is copied from where it is mapped; from others bytes go straight to their place where they lie in
one run there, and otherwise through scratch buffers the size of a core's cache while the next boxes are on their way.
A whole source block is never put together anywhere.
This module knows the transfer engine's ranges; it must not know sockets, models or why blocks move.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.checksum import Checksums
from kvstore.transfer.engine import ReadRange, Request, Transfer, TransferEngine
from kvstore.transfer.shm import SegmentView
from kvstore.transfer.sockets import time_left
from kvstore.transfer.transport import PathFailed
from mooncake.errors import ChecksumMismatch, InvalidRequest
from mooncake.types import KVLayout, SegmentAddress

BOX_BYTES = 1 << 20  # read at once into scratch memory: it stays in a core's L2 until it is converted
BOXES_AHEAD = 4  # on their way while one is converted
DIRECT_BYTES = 64 << 10  # runs from here on are read straight to their place
_SCALE_BYTES = 4
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2"), "int8": np.dtype("i1")}
_INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The bytes of one block of one shard: ``layers`` times ``[K|V][head][token][dim]``, contiguous.

    With int8 each layer is followed by its scales, float32 ``[K|V][head][token]``: value = scale times integer.
    """

    num_layers: int
    num_heads: int
    num_tokens: int
    head_dim: int
    dtype: str  # "float32" | "bfloat16" | "int8"

    @property
    def row_bytes(self) -> int:
        """One token of one head."""
        return self.head_dim * _ITEM_BYTES[self.dtype]

    @property
    def values_bytes(self) -> int:
        return 2 * self.num_heads * self.num_tokens * self.row_bytes

    @property
    def layer_bytes(self) -> int:
        scales = 2 * self.num_heads * self.num_tokens * _SCALE_BYTES if self.dtype == "int8" else 0
        return self.values_bytes + scales

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def values(self, block: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """A view ``[layer, K|V, head, token, dim]`` of a block's bytes; bfloat16 shows as uint16."""
        item, row = _ITEM_BYTES[self.dtype], self.row_bytes
        shape = (self.num_layers, 2, self.num_heads, self.num_tokens, self.head_dim)
        head = self.num_tokens * row
        strides = (self.layer_bytes, self.num_heads * head, head, row, item)
        return np.ndarray(shape, _NUMPY[self.dtype], block.data, strides=strides)

    def scales(self, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """A view ``[layer, K|V, head, token]``, of int8 alone."""
        shape = (self.num_layers, 2, self.num_heads, self.num_tokens)
        head = self.num_tokens * _SCALE_BYTES
        strides = (self.layer_bytes, self.num_heads * head, head, _SCALE_BYTES)
        return np.ndarray(shape, "<f4", block.data, offset=self.values_bytes, strides=strides)


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """How a deployment stores the KV of a model. Rank = stage · tensor_parallel + tensor rank.

    With more tensor ranks than KV heads, neighbouring ranks store the same head. With fewer, heads are dealt out in
    order as evenly as they divide. ``stages`` is the number of layers of each pipeline stage.
    """

    stages: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        counts = (*self.stages, self.num_kv_heads, self.head_dim, self.block_tokens, self.tensor_parallel)
        if not self.stages or min(counts) < 1:
            raise InvalidRequest("a KV layout needs at least one layer a stage, head, dimension, token and rank")
        if self.dtype not in _ITEM_BYTES:
            raise InvalidRequest(f"KV of type {self.dtype!r}; known: {', '.join(_ITEM_BYTES)}")

    @classmethod
    def of(cls, layout: KVLayout, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> ShardedLayout:
        """The layout of a whole model's block, cut up; layers are dealt out as evenly as they divide."""
        cuts = [layout.num_layers * stage // pipeline_parallel for stage in range(pipeline_parallel + 1)]
        stages = tuple(after - before for before, after in pairwise(cuts))
        return cls(stages, layout.num_kv_heads, layout.head_dim, layout.block_tokens, layout.dtype, tensor_parallel)

    @property
    def num_layers(self) -> int:
        return sum(self.stages)

    @property
    def num_ranks(self) -> int:
        return len(self.stages) * self.tensor_parallel

    def layers(self, rank: int) -> range:
        stage = rank // self.tensor_parallel
        first = sum(self.stages[:stage])
        return range(first, first + self.stages[stage])

    def heads(self, rank: int) -> range:
        tensor_rank, degree = rank % self.tensor_parallel, self.tensor_parallel
        first = tensor_rank * self.num_kv_heads // degree
        return range(first, max((tensor_rank + 1) * self.num_kv_heads // degree, first + 1))

    def block(self, rank: int) -> BlockFormat:
        """The bytes of this rank's blocks."""
        return BlockFormat(len(self.layers(rank)), len(self.heads(rank)), self.block_tokens, self.head_dim, self.dtype)


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie in one piece in a source block and, as far as types agree, in one piece in the target block."""

    source_offset: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """What one source block gives to one target block: some layers, heads and tokens. Indices are local to the blocks;
    block numbers count from the start of the plan's period."""

    rank: int  # of the source
    source_block: int
    target_block: int
    source_first: tuple[int, int, int]  # layer, head, token
    target_first: tuple[int, int, int]
    count: tuple[int, int, int]
    reads: tuple[tuple[int, int], ...]  # offset and bytes of each run of the source block, in the order of the box
    runs: tuple[Run, ...]  # the same with where they belong, when nothing has to be converted; else empty
    has_whole_layers: bool  # of the source block, so that their checksums can be verified

    @property
    def is_direct(self) -> bool:
        """Whether it is read straight to its place."""
        return bool(self.runs) and min(run.nbytes for run in self.runs) >= DIRECT_BYTES

    def shape(self, layout: ShardedLayout) -> BlockFormat:
        """The box as a block of its own."""
        return BlockFormat(*self.count, layout.head_dim, layout.dtype)

    @property
    def nbytes(self) -> int:
        """To be read."""
        return sum(nbytes for _, nbytes in self.reads)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the blocks of one target rank are made. It repeats every ``source_period`` source blocks."""

    source: ShardedLayout
    target: ShardedLayout
    target_rank: int
    source_period: int
    target_period: int
    boxes: tuple[Box, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The source ranks that are read from."""
        return tuple(sorted({box.rank for box in self.boxes}))


@lru_cache(maxsize=256)
def plan(source: ShardedLayout, target: ShardedLayout, target_rank: int) -> Plan:
    """Of heads that several source ranks store, neighbouring target ranks read from different ones.

    Raises InvalidRequest when the two are not of one model.
    """
    same = ("num_layers", "num_kv_heads", "head_dim")
    if any(getattr(source, name) != getattr(target, name) for name in same):
        raise InvalidRequest("KV of different models: layers, heads and dimensions must agree")
    if not 0 <= target_rank < target.num_ranks:
        raise InvalidRequest(f"rank {target_rank} of {target.num_ranks}")
    tokens = math.lcm(source.block_tokens, target.block_tokens)
    boxes = [
        box
        for rank, heads in _sources(source, target, target_rank)
        for span in _spans(source.block_tokens, target.block_tokens)
        for box in _boxes(source, target, target_rank, rank, heads, span)
    ]
    boxes.sort(key=lambda box: (box.target_block, box.source_block, box.target_first, box.rank))
    return Plan(source, target, target_rank, tokens // source.block_tokens, tokens // target.block_tokens, tuple(boxes))


@dataclass(frozen=True, slots=True)
class Shard:
    """Where one source rank's blocks lie: block i of the prompt in ``slots[i]`` of the segment at ``address``.

    ``checksums[i]`` has one entry a layer of this shard; empty: nothing is verified.
    """

    address: SegmentAddress
    slots: Sequence[int]
    checksums: Sequence[Checksums] = ()


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a call of ``read_blocks`` did."""

    nbytes: int  # read
    unverified_bytes: int  # of those, parts of layers, for which no checksum exists, or shards that came without
    num_ranges: int


class LayoutReader:
    """Reads blocks through a transfer engine and converts them on the way. Not thread-safe; ``close`` it."""

    def __init__(self, transfer: TransferEngine) -> None:
        self._transfer = transfer
        self._scratch = [np.zeros(BOX_BYTES, np.uint8) for _ in range(BOXES_AHEAD)]
        self._views: dict[tuple[str, int], SegmentView | None] = {}
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="layout")  # two threads fill a machine's memory bus

    def read_blocks(
        self, plan: Plan, shards: Mapping[int, Shard], targets: Sequence[npt.NDArray[np.uint8]], deadline: float
    ) -> Conversion:
        """Fill ``targets`` (bytes of consecutive blocks of the plan's target rank) from the blocks of the shards.

        Tokens that no source block holds leave their bytes as they are. Mapped blocks are verified before they are
        copied: whoever holds a lease on them looks at its clock after this returns.

        Raises what ``TransferEngine.read`` does, ChecksumMismatch, and InvalidRequest when a shard is missing or a
        target has the wrong size.
        """
        jobs = _jobs(plan, shards, targets)
        elsewhere: list[_Job] = []
        for shard in {id(job.shard): job.shard for job in jobs}.values():
            mine = [job for job in jobs if job.shard is shard]
            if not self._copy(shard.address, mine, plan, deadline):
                elsewhere += mine
        if elsewhere:
            direct = self._start_direct([job for job in elsewhere if job.box.is_direct], deadline)
            try:
                self._read_through_scratch([job for job in elsewhere if not job.box.is_direct], plan, deadline)
            finally:
                for transfer, _ in direct:
                    transfer.wait()
            for transfer, group in direct:
                transfer.result()
                for job in group:
                    _verify(job, job.pieces_in_place())
        unverified = sum(job.box.nbytes for job in jobs if not job.is_verifiable)
        return Conversion(sum(job.box.nbytes for job in jobs), unverified, sum(len(job.box.reads) for job in jobs))

    def close(self) -> None:
        self._helper.shutdown()
        for view in self._views.values():
            if view is not None:
                view.close()
        self._views.clear()

    def _copy(self, address: SegmentAddress, jobs: Sequence[_Job], plan: Plan, deadline: float) -> bool:
        """Out of the mapped segment, when this host has it. False when it has not, or not any more."""
        key = (address.node_id, address.incarnation)
        try:
            if key not in self._views:
                self._views[key] = self._transfer.view(address, deadline)
            view = self._views[key]
            if view is None:
                return False
            blocks = view.bytes.reshape(address.num_blocks, address.block_bytes)
            view.check()
            half = len(jobs) // 2
            other = self._helper.submit(_copy_all, jobs[:half], plan, blocks, deadline)
            try:
                _copy_all(jobs[half:], plan, blocks, deadline)
            finally:
                other.exception()  # it writes into the caller's memory until then
            other.result()
            view.check()
        except PathFailed:
            self._forget(key)
            return False
        return True

    def _forget(self, key: tuple[str, int]) -> None:
        view = self._views.pop(key, None)
        if view is not None:
            view.close()

    def _start_direct(self, jobs: Sequence[_Job], deadline: float) -> list[tuple[Transfer, list[_Job]]]:
        """One request a shard, for what lies in long runs on both sides."""
        groups: dict[int, list[_Job]] = {}
        for job in jobs:
            groups.setdefault(job.box.rank, []).append(job)
        requests = [
            Request(
                group[0].shard.address,
                [
                    ReadRange(job.slot, run.source_offset, piece)
                    for job in group
                    for run, piece in zip(job.box.runs, job.pieces_in_place(), strict=True)
                ],
                deadline,
            )
            for group in groups.values()
        ]
        return list(zip(self._transfer.submit(requests), groups.values(), strict=True))

    def _read_through_scratch(self, jobs: Sequence[_Job], plan: Plan, deadline: float) -> None:
        """Boxes are read ahead while earlier ones are converted."""
        largest = max((job.box.nbytes for job in jobs), default=0)
        if largest > self._scratch[0].nbytes:
            self._scratch = [np.zeros(largest, np.uint8) for _ in self._scratch]
        waiting, free = deque(jobs), deque(self._scratch)
        reading: deque[tuple[_Job, npt.NDArray[np.uint8], Transfer]] = deque()
        try:
            while waiting or reading:
                while waiting and free:
                    job, scratch = waiting.popleft(), free.popleft()
                    [transfer] = self._transfer.submit([job.request(scratch.data, deadline)])
                    reading.append((job, scratch, transfer))
                job, scratch, transfer = reading[0]
                transfer.result()
                reading.popleft()
                _verify(job, [scratch.data[: job.box.nbytes]])
                _place(plan, job, job.box.shape(plan.source), scratch, (0, 0, 0))
                free.append(scratch)
        finally:  # nothing may write into the scratch memory after this
            for _, _, transfer in reading:
                transfer.cancel()
            for _, _, transfer in reading:
                transfer.wait()


@dataclass(frozen=True, slots=True)
class _Job:
    """One box of one period, with the memory that it goes to."""

    box: Box
    shard: Shard
    slot: int
    checksums: Checksums | None  # one a layer of the source block
    target: npt.NDArray[np.uint8]

    @property
    def is_verifiable(self) -> bool:
        return self.checksums is not None and self.box.has_whole_layers

    def request(self, into: memoryview, deadline: float) -> Request:
        """Its bytes one behind the other."""
        ranges: list[ReadRange] = []
        start = 0
        for offset, nbytes in self.box.reads:
            ranges.append(ReadRange(self.slot, offset, into[start : start + nbytes]))
            start += nbytes
        return Request(self.shard.address, ranges, deadline)

    def pieces_in_place(self) -> list[memoryview]:
        """Where each run goes."""
        memory = self.target.data
        return [memory[run.target_offset : run.target_offset + run.nbytes] for run in self.box.runs]


def _copy_all(jobs: Sequence[_Job], plan: Plan, blocks: npt.NDArray[np.uint8], deadline: float) -> None:
    """Straight from the blocks of the mapped source. Raises ChecksumMismatch or DeadlineExceeded."""
    for job in jobs:
        time_left(deadline)
        block = blocks[job.slot]
        if job.is_verifiable:
            _verify(job, [block.data[offset : offset + nbytes] for offset, nbytes in job.box.reads])
        _place(plan, job, plan.source.block(job.box.rank), block, job.box.source_first)


def _jobs(plan: Plan, shards: Mapping[int, Shard], targets: Sequence[npt.NDArray[np.uint8]]) -> list[_Job]:
    """Raises InvalidRequest."""
    size = plan.target.block(plan.target_rank).block_bytes
    if any(target.nbytes != size or target.dtype != np.uint8 or not target.flags.c_contiguous for target in targets):
        raise InvalidRequest(f"a target block is {size} contiguous bytes")
    if missing := set(plan.ranks) - set(shards):
        raise InvalidRequest(f"no shard of source ranks {sorted(missing)}")
    jobs: list[_Job] = []
    for period in range(-(-len(targets) // plan.target_period)):
        for box in plan.boxes:
            shard = shards[box.rank]
            target = period * plan.target_period + box.target_block
            source = period * plan.source_period + box.source_block
            if target < len(targets) and source < len(shard.slots):
                sums = shard.checksums[source] if shard.checksums else None
                jobs.append(_Job(box, shard, shard.slots[source], sums, targets[target]))
    return jobs


def _verify(job: _Job, pieces: Sequence[memoryview]) -> None:
    """Check the layers that the box has whole. ``pieces`` are its bytes, in order. Raises ChecksumMismatch."""
    box = job.box
    if job.checksums is None or not box.has_whole_layers:
        return
    layer_bytes = box.nbytes // box.count[0]
    rest = deque(pieces)
    for layer in range(box.source_first[0], box.source_first[0] + box.count[0]):
        digest, left = xxhash.xxh3_64(), layer_bytes
        while left:
            piece = rest.popleft()
            digest.update(piece[:left])
            if piece.nbytes > left:
                rest.appendleft(piece[left:])
            left -= min(left, piece.nbytes)
        if digest.intdigest() != int(job.checksums[layer]):
            raise ChecksumMismatch(
                f"{job.shard.address.node_id}: layer {layer} of slot {job.slot} differs from what was sealed"
            )


def _place(
    plan: Plan, job: _Job, source: BlockFormat, memory: npt.NDArray[np.uint8], first: tuple[int, int, int]
) -> None:
    """Convert a box into its place, out of a block of format ``source`` in which it begins at ``first``."""
    count, target = job.box.count, plan.target.block(plan.target_rank)
    there, here = _part(first, count), _part(job.box.target_first, count)
    convert(
        source.values(memory)[there],
        source.scales(memory)[there] if source.dtype == "int8" else None,
        target.values(job.target)[here],
        target.scales(job.target)[here] if target.dtype == "int8" else None,
        source.dtype,
        target.dtype,
    )


def _part(first: tuple[int, int, int], count: tuple[int, int, int]) -> tuple[slice, slice, slice, slice]:
    layers, heads, tokens = (slice(start, start + size) for start, size in zip(first, count, strict=True))
    return layers, slice(None), heads, tokens


def convert(
    source: npt.NDArray[Any],
    source_scales: npt.NDArray[np.float32] | None,
    target: npt.NDArray[Any],
    target_scales: npt.NDArray[np.float32] | None,
    source_dtype: str,
    target_dtype: str,
) -> None:
    """Copy values ``[…, token, dim]`` from one type to another; scales ``[…, token]`` go with int8.

    What widens and comes back is unchanged, bit for bit: float32 holds every bfloat16 and every product of an int8
    and a scale, because scales have 16 significant bits.
    """
    if source_dtype == target_dtype:
        np.copyto(target, source)
        if source_scales is not None and target_scales is not None:
            np.copyto(target_scales, source_scales)
        return
    if target_dtype == "float32":
        _widen(source, source_scales, source_dtype, target)
        return
    for index in np.ndindex(source.shape[:2]):  # K or V of one layer: what comes in between stays in the cache
        wide = source[index]
        if source_dtype != "float32":
            wide = np.empty(source.shape[2:], np.float32)
            _widen(source[index], source_scales[index] if source_scales is not None else None, source_dtype, wide)
        if target_dtype == "bfloat16":
            np.copyto(target[index], _to_bfloat16(wide), casting="unsafe")
        else:
            assert target_scales is not None
            _to_int8(wide, target[index], target_scales[index])


def _widen(
    values: npt.NDArray[Any], scales: npt.NDArray[np.float32] | None, dtype: str, wide: npt.NDArray[np.float32]
) -> None:
    """To float32, in one pass."""
    if dtype == "bfloat16":
        np.left_shift(values, 16, out=wide.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        assert scales is not None
        np.multiply(values, scales[..., None], out=wide, dtype=np.float32, casting="unsafe")


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """The bits, rounded to the nearest, ties to even; what is no number stays none. In place, because what is
    allocated costs more than what is computed."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    if (nothing := np.isnan(values)).any():
        rounded[nothing] = (bits[nothing] >> np.uint32(16)) | np.uint32(0x40)
    return rounded


def _to_int8(
    values: npt.NDArray[np.float32], target: npt.NDArray[np.int8], target_scales: npt.NDArray[np.float32]
) -> None:
    scales = _scales_of(values)
    np.copyto(target_scales, scales)
    steps = np.divide(values, np.where(scales > 0, scales, np.float32(1))[..., None])
    np.copyto(target, np.rint(steps, out=steps), casting="unsafe")


def _scales_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The least scales of 16 significant bits that bring each row ``[…, dim]`` into the range of int8."""
    exact = (np.abs(values).max(axis=-1) / np.float32(_INT8_MAX)).astype(np.float32)
    bits = np.ascontiguousarray(exact).view(np.uint32)
    return ((bits + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)).view(np.float32)


def _sources(source: ShardedLayout, target: ShardedLayout, target_rank: int) -> Iterator[tuple[int, range]]:
    """The source ranks to read from, with the heads to take from each: every head once for each layer wanted."""
    wanted = target.heads(target_rank)
    degree = source.tensor_parallel
    for stage in range(len(source.stages)):
        for heads, replicas in _owners(source):
            taken = range(max(wanted.start, heads.start), min(wanted.stop, heads.stop))
            if taken:
                yield stage * degree + replicas[target_rank % len(replicas)], taken


def _owners(layout: ShardedLayout) -> list[tuple[range, list[int]]]:
    """Each different range of heads with the tensor ranks that store it."""
    owners: dict[range, list[int]] = {}
    for rank in range(layout.tensor_parallel):
        owners.setdefault(layout.heads(rank), []).append(rank)
    return list(owners.items())


def _spans(source_tokens: int, target_tokens: int) -> Iterator[tuple[int, int]]:
    """(first token, number) of each stretch of one period that lies in one block on both sides."""
    period = math.lcm(source_tokens, target_tokens)
    cuts = sorted({*range(0, period, source_tokens), *range(0, period, target_tokens), period})
    yield from ((first, last - first) for first, last in pairwise(cuts))


def _boxes(
    source: ShardedLayout, target: ShardedLayout, target_rank: int, rank: int, heads: range, span: tuple[int, int]
) -> Iterator[Box]:
    """The boxes for some heads of one source rank and one stretch of tokens, none much larger than BOX_BYTES."""
    have, wanted = source.layers(rank), target.layers(target_rank)
    shared = range(max(have.start, wanted.start), min(have.stop, wanted.stop))
    first_token, num_tokens = span
    slim = BlockFormat(1, len(heads), num_tokens, source.head_dim, source.dtype)
    step = max(1, BOX_BYTES // slim.block_bytes)
    for first in shared[::step]:
        count = (min(step, shared.stop - first), len(heads), num_tokens)
        at_source = (first - have.start, heads.start - source.heads(rank).start, first_token % source.block_tokens)
        at_target = (
            first - wanted.start,
            heads.start - target.heads(target_rank).start,
            first_token % target.block_tokens,
        )
        source_format = source.block(rank)
        reads = tuple(_merge(_cells(source_format, at_source, count)))
        runs: tuple[Run, ...] = ()
        if source.dtype == target.dtype:
            places = _cells(target.block(target_rank), at_target, count)
            runs = tuple(_pair(_cells(source_format, at_source, count), places))
        yield Box(
            rank,
            first_token // source.block_tokens,
            first_token // target.block_tokens,
            at_source,
            at_target,
            count,
            reads,
            runs,
            has_whole_layers=count[1:] == (source_format.num_heads, source_format.num_tokens),
        )


def _cells(block: BlockFormat, first: tuple[int, int, int], count: tuple[int, int, int]) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the part of a block that each head of each layer has, in the order in which a block of
    exactly this size would store them."""
    parts = [(0, block.row_bytes)]
    if block.dtype == "int8":
        parts.append((block.values_bytes, _SCALE_BYTES))
    for layer in range(first[0], first[0] + count[0]):
        for base, row in parts:
            for kind in range(2):
                for head in range(first[1], first[1] + count[1]):
                    token = (kind * block.num_heads + head) * block.num_tokens + first[2]
                    yield layer * block.layer_bytes + base + token * row, count[2] * row


def _merge(cells: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbours that touch."""
    merged: list[tuple[int, int]] = []
    for offset, nbytes in cells:
        if merged and sum(merged[-1]) == offset:
            offset, nbytes = merged[-1][0], merged.pop()[1] + nbytes
        merged.append((offset, nbytes))
    return merged


def _pair(sources: Iterable[tuple[int, int]], places: Iterable[tuple[int, int]]) -> list[Run]:
    """Join neighbours that touch on both sides."""
    runs: list[Run] = []
    for (source, nbytes), (place, _) in zip(sources, places, strict=True):
        if runs:
            last = runs[-1]
            if (last.source_offset + last.nbytes, last.target_offset + last.nbytes) == (source, place):
                runs[-1] = Run(last.source_offset, last.target_offset, last.nbytes + nbytes)
                continue
        runs.append(Run(source, place, nbytes))
    return runs
