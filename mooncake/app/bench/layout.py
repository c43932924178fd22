"""``mooncake bench layout``: KV read into another layout, compared with the same bytes read as they are.

Both go alternately through the transfer engine from segments of another process. It must not know how a plan is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.layout.layout import ShardedLayout
from kvstore.layout.plan import plan
from kvstore.layout.reader import LayoutReader, Shard
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.requests import ReadRange
from mooncake.app.bench.peers.spawned import spawned
from mooncake.app.bench.report import Figure, Report, tell
from mooncake.app.cli.flags import Flags, names
from mooncake.types import KVLayout, SegmentAddress

SMOLLM2 = KVLayout(30, 3, 64, 64, "float32")
LLAMA_8B = KVLayout(32, 8, 64, 128, "bfloat16")
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    source: ShardedLayout
    target: ShardedLayout


def _cases() -> list[Case]:
    def case(name: str, source: ShardedLayout, target: ShardedLayout) -> Case:
        return Case(name, source, target)

    small, large, of = SMOLLM2, LLAMA_8B, ShardedLayout.of
    wide = KVLayout(32, 8, 64, 128, "float32")
    narrow = KVLayout(32, 8, 64, 128, "int8")
    pages = KVLayout(32, 8, 16, 128, "bfloat16")
    return [
        case("smollm2_tp3_to_1", of(small, 3), of(small, 1)),
        case("smollm2_tp1_to_3", of(small, 1), of(small, 3)),
        case("8b_tp8_to_1", of(large, 8), of(large, 1)),
        case("8b_tp8_to_2", of(large, 8), of(large, 2)),
        case("8b_tp4_to_8", of(large, 4), of(large, 8)),
        case("8b_tp2_to_16", of(large, 2), of(large, 16)),
        case("8b_pp4_to_1", of(large, 1, 4), of(large, 1)),
        case("8b_block64_to_16", of(large), of(pages)),
        case("8b_block16_to_64", of(pages), of(large)),
        case("8b_bf16_to_fp32", of(large), of(wide)),
        case("8b_int8_to_bf16", of(narrow), of(large)),
    ]


@dataclass(frozen=True, slots=True)
class Options:
    transports: tuple[str, ...]
    cases: tuple[str, ...]
    mb: int
    reps: int
    seed: int
    save: Path | None


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    report = Report("layout", {"mb": options.mb, "reps": options.reps, "block_tokens": 64}, options.seed)
    with report.measuring("layout") as shown:
        for transport in options.transports:
            for case in _cases():
                if not options.cases or case.name in options.cases:
                    tell(shown, f"{case.name} over {transport}")
                    _measure(case, transport, options, report)
    report.notes.append("ratios of times: at 1.10 a conversion takes a tenth longer than a copy")
    report.finish(options.save)


def _options(arguments: Sequence[str]) -> Options:
    flags = Flags("bench layout", __doc__)
    add = flags.add
    flags.transports("shm,tcp", "to read over")
    add("--cases", default="", help="names of cases, comma-separated; default: all")
    add("--mb", type=int, default=96, help="approximate MB read per repetition")
    flags.reps(7)
    flags.seed()
    flags.json_file()
    given = flags.read(arguments)
    transports = names("--transports", given.transports, ("shm", "rdma", "tcp"))
    cases = names("--cases", given.cases, [case.name for case in _cases()], may_be_none=True)
    return Options(transports, cases, max(1, given.mb), given.reps, given.seed, given.json)


def _measure(case: Case, transport: str, options: Options, report: Report) -> None:
    """Alternately: the conversion for one target rank, and a plain read of as many bytes from the same segments."""
    how = plan(case.source, case.target, case.target.num_ranks // 2)
    period_bytes = sum(box.nbytes for box in how.boxes)
    periods = max(1, options.mb * 1_000_000 // period_bytes)
    size = case.target.block(how.target_rank).block_bytes
    targets = _touched(periods * how.target_period * size).reshape(-1, size)
    source_blocks = periods * how.source_period
    formats = {rank: case.source.block(rank).block_bytes for rank in how.ranks}
    total = periods * period_bytes
    plain = _touched(total)
    transfer = TransferEngine("bench-layout", (transport,))
    reader = LayoutReader(transfer)
    with spawned(dict, _own, formats, source_blocks, transport, options.seed) as addresses:
        shards = {rank: Shard(address, range(source_blocks)) for rank, address in addresses.items()}

        def convert() -> None:
            reader.read_blocks(how, shards, list(targets), time.monotonic() + DEADLINE_S)

        def copy() -> None:
            for address, ranges in _plain_ranges(addresses, source_blocks, plain, total):
                transfer.read(address, ranges, time.monotonic() + DEADLINE_S)

        converted, copied = _alternate((convert, copy), options.reps)
    reader.close()
    transfer.close()
    labels: dict[str, str | int | float | bool] = {"case": case.name, "over": transport}
    ours = Figure("converted", "read", "ms", tuple(s * 1e3 for s in converted), params=labels)
    theirs = Figure("copied", "read", "ms", tuple(s * 1e3 for s in copied), params=labels)
    report.add(ours, theirs)
    report.compare(f"{case.name}_vs_copy_{transport}", ours, theirs)


def _plain_ranges(
    addresses: dict[int, SegmentAddress], num_blocks: int, into: npt.NDArray[np.uint8], total: int
) -> Iterator[tuple[SegmentAddress, list[ReadRange]]]:
    """Whole blocks of the shards, one shard per request, up to ``total`` bytes."""
    start = 0
    share = -(-total // len(addresses))
    for address in addresses.values():
        ranges: list[ReadRange] = []
        end = min(total, start + share)
        for block in range(num_blocks):
            length = min(address.block_bytes, end - start)
            if length <= 0:
                break
            ranges.append(ReadRange(block, 0, into[start : start + length].data))
            start += length
        if ranges:
            yield address, ranges


def _alternate(ways: tuple[Callable[[], None], Callable[[], None]], reps: int) -> tuple[list[float], list[float]]:
    """Seconds of both per repetition, measured alternately after a warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    for rep in range(reps + 1):
        for index in (0, 1) if rep % 2 else (1, 0):
            started = time.perf_counter()
            ways[index]()
            if rep:
                times[index].append(time.perf_counter() - started)
    return times


def _touched(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.full(nbytes, 1, np.uint8)


def _own(pipe: Connection, block_bytes: dict[int, int], num_blocks: int, transport: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    owned: list[tuple[Segment, SegmentServer]] = []
    for rank, size in block_bytes.items():
        segment = Segment.create(f"rank{rank}", size, num_blocks)
        segment.array[:] = random.integers(
            0, 64, segment.array.nbytes, dtype=np.uint8
        )  # small numbers, whatever the type
        server = SegmentServer(segment, f"rank{rank}", (transport, "tcp"))
        server.start()
        owned.append((segment, server))
    pipe.send({rank: server.address for rank, (_, server) in zip(block_bytes, owned, strict=True)})
    with suppress(EOFError):
        pipe.recv()
    for segment, server in owned:
        server.stop()
        segment.close()
