"""Reads KV from segments with another layout, by a plan, and converts it on the way.

A segment on this host is copied from its mapping. From others, bytes that are contiguous on both sides are read
straight to their place; the rest goes through scratch buffers the size of a core's cache while the next boxes are on
their way. A whole source block is never assembled. It uses the transfer engine's ranges; it knows neither sockets,
models nor why blocks move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.checksum import Checksums
from kvstore.layout.convert import Converter, convert_in_turns
from kvstore.layout.plan import BOX_BYTES, Box, Plan
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.piece_table import Lot, Pattern, PieceTable
from kvstore.transfer.requests import Request, Transfer
from kvstore.transfer.shm import SegmentView
from kvstore.transfer.sockets import time_left
from kvstore.transfer.transport import PathFailed
from mooncake.errors import ChecksumMismatch, InvalidRequest
from mooncake.threads import Threads
from mooncake.types import SegmentAddress

BOXES_AHEAD = 4  # in flight while one is converted
ROUNDS_AT_ONCE = 64  # between two looks at the clock, and near each other in the source


@dataclass(frozen=True, slots=True)
class Shard:
    """One source rank's blocks: block i of the prompt in ``slots[i]`` of the segment at ``address``.

    ``checksums[i]`` has one entry per layer of this shard; if empty, nothing is verified.
    """

    address: SegmentAddress
    slots: Sequence[int]
    checksums: Sequence[Checksums] = ()


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of ``read_blocks``."""

    nbytes: int  # read
    unverified_bytes: int  # of those: parts of layers, which have no checksum, and shards without checksums


class WrongBytes(ChecksumMismatch):
    """Names the block by its ``slot`` in a segment."""

    def __init__(self, node_id: str, slot: int, layer: int) -> None:
        super().__init__(f"{node_id}: layer {layer} of slot {slot} differs from what was sealed")
        self.slot = slot


class LayoutReader:
    """Reads blocks through a transfer engine and converts them on the way. Not thread-safe; ``close`` it."""

    def __init__(self, transfer: TransferEngine) -> None:
        self._transfer = transfer
        self._scratch = [np.zeros(BOX_BYTES, np.uint8) for _ in range(BOXES_AHEAD)]
        self._views: dict[tuple[str, int], SegmentView | None] = {}
        self._helper = Threads(1, "layout")  # two threads saturate a machine's memory bus

    def read_blocks(
        self, plan: Plan, shards: Mapping[int, Shard], targets: Sequence[npt.NDArray[np.uint8] | None], deadline: float
    ) -> Conversion:
        """Fill ``targets`` (bytes of consecutive blocks of the plan's target rank; None: not wanted) from the blocks of
        the shards.

        Tokens that no source block holds leave their bytes unchanged. Mapped blocks are verified before they are
        copied: a caller with a lease on them must check its clock after this returns.

        Raises what ``TransferEngine.read`` does, WrongBytes, and InvalidRequest when a shard is missing or a target has
        the wrong size.
        """
        jobs = _jobs(plan, shards, targets)
        elsewhere: list[_Job] = []
        for shard in {id(job.shard): job.shard for job in jobs}.values():
            mine = [job for job in jobs if job.shard is shard]
            if not self._copy(shard.address, mine, plan, deadline):
                elsewhere += mine
        if elsewhere:
            self._read(elsewhere, plan, deadline)
        unverified = sum(job.box.nbytes for job in jobs if not job.is_verifiable)
        return Conversion(sum(job.box.nbytes for job in jobs), unverified)

    def close(self) -> None:
        self._helper.shutdown()
        for view in self._views.values():
            if view is not None:
                view.close()
        self._views.clear()

    def _copy(self, address: SegmentAddress, jobs: Sequence[_Job], plan: Plan, deadline: float) -> bool:
        """Copy from the mapped segment, if it is on this host. False when it is not, or not any more."""
        key = (address.node_id, address.incarnation)
        try:
            if key not in self._views:
                self._forget_gone()
                self._views[key] = self._transfer.view(address, deadline)
            view = self._views[key]
            if view is None:
                return False
            blocks = view.bytes.reshape(address.num_blocks, address.block_bytes)
            view.check()
            rounds = _rounds(jobs, plan)
            # In turns: halves lie so far apart that they may be in the same banks of memory all the time.
            other = self._helper.submit(_copy_all, rounds[::2], plan, blocks, deadline)
            try:
                _copy_all(rounds[1::2], plan, blocks, deadline)
            finally:
                other.exception()  # until then it writes into the caller's memory
            other.result()
            view.check()
        except PathFailed:
            self._forget(key)
            return False
        return True

    def _read(self, jobs: Sequence[_Job], plan: Plan, deadline: float) -> None:
        direct = self._start_direct([job for job in jobs if job.box.is_direct], deadline)
        try:
            self._read_through_scratch([job for job in jobs if not job.box.is_direct], plan, deadline)
        finally:
            for transfer, _ in direct:
                transfer.wait()
        for transfer, group in direct:
            transfer.result()
            for job in group:
                if job.is_verifiable:
                    _verify(job, job.pieces_in_place())

    def _forget_gone(self) -> None:
        """A view would keep the memory of a dead process."""
        for key, view in list(self._views.items()):
            try:
                if view is not None:
                    view.check()
            except PathFailed:
                self._forget(key)

    def _forget(self, key: tuple[str, int]) -> None:
        view = self._views.pop(key, None)
        if view is not None:
            view.close()

    def _start_direct(self, jobs: Sequence[_Job], deadline: float) -> list[tuple[Transfer, list[_Job]]]:
        """One request per shard, for what is in long runs on both sides."""
        groups: dict[int, list[_Job]] = {}
        for job in jobs:
            groups.setdefault(job.box.rank, []).append(job)
        requests = [
            Request(group[0].shard.address, _table(group, [job.target.data for job in group]), deadline)
            for group in groups.values()
        ]
        return list(zip(self._transfer.submit(requests), groups.values(), strict=True))

    def _read_through_scratch(self, jobs: Sequence[_Job], plan: Plan, deadline: float) -> None:
        """Boxes are read ahead while earlier ones are converted."""
        largest = max((job.box.nbytes for job in jobs), default=0)
        if largest > self._scratch[0].nbytes:
            self._scratch = [np.zeros(largest, np.uint8) for _ in self._scratch]
        target = plan.target.block(plan.target_rank)
        converters = {
            id(box): Converter(box.shape(plan.source), (0, 0, 0), target, box.target_first, box.count)
            for box in plan.boxes
        }
        waiting, free = deque(jobs), deque(self._scratch)
        reading: deque[tuple[_Job, npt.NDArray[np.uint8], Transfer]] = deque()
        try:
            while waiting or reading:
                while waiting and free:
                    job, scratch = waiting.popleft(), free.popleft()
                    request = Request(job.shard.address, _table([job], [scratch.data]), deadline)
                    [transfer] = self._transfer.submit([request])
                    reading.append((job, scratch, transfer))
                job, scratch, transfer = reading[0]
                transfer.result()
                reading.popleft()
                if job.is_verifiable:
                    _verify(job, [scratch.data[: job.box.nbytes]])
                converters[id(job.box)]([scratch], [job.target])
                free.append(scratch)
        finally:  # nothing may write into the scratch memory after this
            for _, _, transfer in reading:
                transfer.cancel()
            for _, _, transfer in reading:
                transfer.wait()


@dataclass(frozen=True, slots=True)
class _Job:
    """One box of one period, with the memory it is written to."""

    box: Box
    shard: Shard
    slot: int
    checksums: Checksums | None  # one per layer of the source block
    target: npt.NDArray[np.uint8]

    @property
    def is_verifiable(self) -> bool:
        return self.checksums is not None and self.box.has_whole_layers

    def pieces_in_place(self) -> list[memoryview]:
        """The pieces of a direct box."""
        memory = self.target.data
        return [memory[place : place + nbytes] for _, nbytes, place in self.box.moves.T.tolist()]


def _table(jobs: Sequence[_Job], memories: Sequence[memoryview]) -> PieceTable:
    """The transfers of these jobs, each into its memory. A block's parts are read in the order in which it stores
    them."""
    blocks: dict[int, list[tuple[Box, memoryview]]] = {}
    for job, memory in zip(jobs, memories, strict=True):
        blocks.setdefault(job.slot, []).append((job.box, memory))
    lots = []
    for slot, pairs in blocks.items():
        boxes, into = zip(*pairs, strict=True)
        lots.append(Lot(_pattern(boxes), slot, into))
    return PieceTable.reading(lots)


@lru_cache(maxsize=1024)
def _pattern(boxes: tuple[Box, ...]) -> Pattern:
    """The transfers from one block, with one destination per box."""
    return Pattern.of(
        np.concatenate([np.insert(box.moves, 2, owner, axis=0) for owner, box in enumerate(boxes)], axis=1)
    )


def _rounds(jobs: Sequence[_Job], plan: Plan) -> list[list[_Job]]:
    """Jobs of one shard that are copied run by run, in turns: those that are the same but for their tokens, of one
    source block where blocks are split, and of one target block where they are joined."""
    joins = plan.source.block_tokens < plan.target.block_tokens
    rounds: dict[tuple[object, ...], list[_Job]] = {}
    for job in jobs:
        layer, head, _ = job.box.source_first
        whole = id(job.target) if joins else job.slot
        rounds.setdefault((whole, layer, head, job.box.count), []).append(job)
    return list(rounds.values())


def _copy_all(rounds: Sequence[Sequence[_Job]], plan: Plan, blocks: npt.NDArray[np.uint8], deadline: float) -> None:
    """Straight from the blocks of the mapped source. Raises ChecksumMismatch or DeadlineExceeded."""
    converters = _converters(plan)
    for alike in _alike(rounds):
        time_left(deadline)
        sources: list[npt.NDArray[np.uint8]] = []
        last, source = -1, blocks[0]
        for jobs in alike:
            for job in jobs:
                if job.slot != last:
                    last, source = job.slot, blocks[job.slot]
                sources.append(source)
                if job.is_verifiable:
                    _verify(job, [source.data[offset : offset + nbytes] for offset, nbytes in job.box.reads])
        together = [converters[id(job.box)] for job in alike[0]]
        convert_in_turns(together, sources, [job.target for jobs in alike for job in jobs])


@lru_cache(maxsize=256)
def _converters(plan: Plan) -> dict[int, Converter]:
    """By the ``id`` of each box: from its place in a source block to that in a target block."""
    target = plan.target.block(plan.target_rank)
    return {
        id(box): Converter(plan.source.block(box.rank), box.source_first, target, box.target_first, box.count)
        for box in plan.boxes
    }


def _alike(rounds: Sequence[Sequence[_Job]]) -> Iterator[list[Sequence[_Job]]]:
    """Of ``ROUNDS_AT_ONCE`` those of the same boxes; one by one, if they are verified: much of that is then in a cache
    when it is copied."""
    for start in range(0, len(rounds), ROUNDS_AT_ONCE):
        by_boxes: dict[tuple[int, ...], list[Sequence[_Job]]] = {}
        for jobs in rounds[start : start + ROUNDS_AT_ONCE]:
            by_boxes.setdefault(tuple(id(job if job.is_verifiable else job.box) for job in jobs), []).append(jobs)
        yield from by_boxes.values()


def _jobs(plan: Plan, shards: Mapping[int, Shard], targets: Sequence[npt.NDArray[np.uint8] | None]) -> list[_Job]:
    """Raises InvalidRequest."""
    size = plan.target.block(plan.target_rank).block_bytes
    if any(
        each.nbytes != size or each.dtype != np.uint8 or not each.flags.c_contiguous
        for each in targets
        if each is not None
    ):
        raise InvalidRequest(f"a target block is {size} contiguous bytes")
    if missing := set(plan.ranks) - set(shards):
        raise InvalidRequest(f"no shard of source ranks {sorted(missing)}")
    jobs: list[_Job] = []
    for period in range(-(-len(targets) // plan.target_period)):
        for box in plan.boxes:
            shard = shards[box.rank]
            index = period * plan.target_period + box.target_block
            source = period * plan.source_period + box.source_block
            target = targets[index] if index < len(targets) else None
            if target is not None and source < len(shard.slots):
                sums = shard.checksums[source] if shard.checksums else None
                jobs.append(_Job(box, shard, shard.slots[source], sums, target))
    return jobs


def _verify(job: _Job, pieces: Sequence[memoryview]) -> None:
    """Verify its layers. ``pieces`` are the bytes of the box, in order. Raises WrongBytes."""
    box = job.box
    assert job.checksums is not None
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
            raise WrongBytes(job.shard.address.node_id, job.slot, layer)
