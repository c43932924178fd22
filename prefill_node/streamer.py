"""The engine's hook on a prefill node: layers out as they are computed, reused layers in ahead of the computation.

Runs on the engine's thread, so it only decides which layer runs are final and hands them to the sinks. A block's layer
is final once every one of its tokens that the prompt has is computed; each is sent exactly once, unless a step is
abandoned, and then again with the same bytes. A step that goes through a pipeline in pieces is streamed in pieces.
Where the cache is on a GPU, final layers are copied to host memory beside the computation, and the sinks wait for the
copy. Tokens with a variant's KV are final, in all layers, with the first ones behind them: those wait for all of it. Of
a sequence that goes on here, and may have to give its blocks up, those of the prompt get one more reference each, so
that they stay as they are until they are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake.engine.engine import StepPlan
from mooncake.engine.kv_cache import Mirror
from mooncake.engine.sequence import Sequence
from mooncake.errors import KVLoadFailed
from mooncake.page_groups import UNIFORM, PageGroups, page_key, page_number
from mooncake.types import BlockKey
from prefill_node.loader import BlockToLoad, PrefixLoad
from prefill_node.outbox import LayerRun, Outbox, Sink


@dataclass(slots=True)
class Stream:
    """What the hook knows of one request: its sinks, and how far it has streamed."""

    request_id: str
    make_load: Callable[[list[BlockToLoad]], PrefixLoad]  # given pages, the first group's first
    outlets: list[tuple[Sink, Outbox]]
    on_first_step: Callable[[], None]  # its turn has come; told on the engine's thread
    hold: Callable[[list[int]], None] | None = None  # full blocks handed to the sinks, on the engine's thread
    first_pages: tuple[int, ...] = ()  # of each group of layers, the first block whose page is wanted; (): all of one
    load: PrefixLoad | None = None
    inherited: PrefixLoad | None = None  # of a variant's KV
    next_block: int = 0  # blocks before it have been handed to the sinks
    has_ended: bool = False  # so have all of the prompt's
    first_step_s: float = 0.0  # monotonic; 0 until it ran
    is_closing: bool = False  # no load may start any more
    on_admitted: Callable[[Sequence], None] | None = None  # told on the engine's thread, before its first step

    @property
    def loads(self) -> list[PrefixLoad]:
        return [load for load in (self.load, self.inherited) if load is not None]


@dataclass(frozen=True, slots=True)
class StreamStep:
    """One request's part in the current step: its blocks before ``end`` become final layer by layer. The last one of a
    prompt may be a part: it is ``num_full`` blocks that nobody writes into any more. ``runs``: of each group of layers,
    the first of them whose page goes out, and the pages."""

    stream: Stream
    end: int
    num_full: int
    runs: tuple[tuple[int, tuple[int, ...]], ...]
    is_last: bool
    first_token: int  # of the sequence
    place: int  # of that token in the step
    pushed: dict[int, int] = field(default_factory=dict)  # by layer: blocks before it have been handed to the sinks

    def num_final(self, num_tokens: int, block_tokens: int) -> int:
        """Blocks of the sequence that are final once the step's first ``num_tokens`` tokens are computed."""
        return min((self.first_token + num_tokens - self.place) // block_tokens, self.end)

    def next_run(self, layer: int, group: int, end: int) -> tuple[int, tuple[int, ...]]:
        """The first block, and the pages of those before ``end``, that have not been handed on in this layer."""
        begin, pages = self.runs[group]
        first = self.pushed.get(layer, begin)
        self.pushed[layer] = max(first, end)
        return first, pages[first - begin : max(end - begin, 0)]


@dataclass(slots=True)
class LayerStreamer:
    """The StepHook of a prefill node. ``streams`` is changed from the event loop, one assignment at a time."""

    block_tokens: int
    mirror: Mirror = field(init=False)  # set once the cache is there, and its groups of layers; nothing streams before
    groups: PageGroups = UNIFORM
    streams: dict[str, Stream] = field(default_factory=dict)
    listeners: list[Callable[[int], None]] = field(default_factory=list)  # told each layer when it is computed
    _step: list[StreamStep] = field(default_factory=list)
    _loads: list[PrefixLoad] = field(default_factory=list)  # that this step reads from
    _leaves: bool = False  # whether something becomes final in this step that has somewhere to go

    @property
    def wants_layers(self) -> bool:
        return bool(self._leaves or self.listeners or self._loads)

    def admitted(self, sequence: Sequence, to_load: list[tuple[int, int, BlockKey]]) -> None:
        stream = self.streams.get(sequence.request_id)
        if stream is None or stream.is_closing:
            # Nobody would fill these blocks, and the engine must not take them for filled.
            if to_load or sequence.inherits:
                raise KVLoadFailed("the request is gone", (sequence.request_id,))
            return
        # Admitted again after a failed load, there is nothing to load any more.
        stream.load = stream.make_load(self._pages_to_load(sequence, to_load)) if to_load else None
        if stream.on_admitted is not None:
            stream.on_admitted(sequence)

    def begin_step(self, plan: StepPlan) -> None:
        self._step, self._loads = [], []
        for entry in plan.inherited:
            stream = self._begin(entry.sequence.request_id)
            if stream is None or stream.inherited is None:
                raise KVLoadFailed("the request is gone", (entry.sequence.request_id,))
            stream.inherited.wait_aside()
            if stream.load is not None:  # of what is before them; of the variant's KV they read nothing else
                self._loads.append(stream.load)
        place = 0
        for entry in plan.entries:
            place += entry.num_tokens
            stream = self._begin(entry.sequence.request_id)
            if stream is None:
                continue
            self._loads += stream.loads
            is_last = entry.end == entry.sequence.num_tokens and not stream.has_ended
            num_full = entry.end // self.block_tokens
            end = stream.next_block if stream.has_ended else -(-entry.end // self.block_tokens) if is_last else num_full
            runs = _runs(entry.sequence, stream, min(stream.next_block, end), end)
            first_place = place - entry.num_tokens
            self._step.append(StreamStep(stream, end, num_full, runs, is_last, entry.first, first_place))
        self._leaves = any(pages for part in self._step if part.stream.outlets for _, pages in part.runs)

    def _begin(self, request_id: str) -> Stream | None:
        stream = self.streams.get(request_id)
        if stream is not None and not stream.first_step_s:
            stream.first_step_s = time.monotonic()
            stream.on_first_step()
        return stream

    def before_layer(self, layer: int) -> None:
        for load in self._loads:
            load.wait(layer)

    def after_layer(self, layer: int) -> None:
        for listener in self.listeners:
            listener(layer)
        if self._leaves:
            self._push(layer, [(part, part.end) for part in self._step])

    def after_piece(self, layer: int, num_tokens: int) -> None:
        if self._leaves:
            began = [part for part in self._step if part.place < num_tokens]
            self._push(layer, [(part, part.num_final(num_tokens, self.block_tokens)) for part in began])

    def _push(self, layer: int, ends: list[tuple[StreamStep, int]]) -> None:
        """Of each part what is final before its end, and has not gone yet."""
        group, rows = self.groups.rows_with(layer)
        runs = [(part.stream.outlets, *part.next_run(layer, group, end)) for part, end in ends if part.stream.outlets]
        leaving = tuple(page for _, _, pages in runs for page in pages)
        for row in rows if leaving else ():
            arrival = self.mirror.to_host(leaving, row)
            for outlets, first, pages in runs:
                if pages:
                    run = LayerRun(row, page_number(group, first), pages, arrival)
                    for sink, outbox in outlets:
                        sink.push(run)
                        outbox.kick(sink)

    def end_step(self, plan: StepPlan) -> None:
        for part in self._step:
            part.stream.next_block = max(part.stream.next_block, part.end)
            if part.stream.hold is not None:
                part.stream.hold([p for first, pages in part.runs for p in pages[: max(part.num_full - first, 0)]])
            if part.is_last:
                part.stream.has_ended = True
                for sink, outbox in part.stream.outlets:
                    sink.end()
                    outbox.kick(sink)
        self._step, self._loads, self._leaves = [], [], False

    def _pages_to_load(self, sequence: Sequence, to_load: list[tuple[int, int, BlockKey]]) -> list[BlockToLoad]:
        """The other groups' pages of these blocks come behind those of the whole prefix."""
        pages = [BlockToLoad(*block) for block in to_load]
        begin, end = pages[0].index, pages[-1].index + 1
        place = end
        for group in range(1, self.groups.num_groups):
            for index in range(max(begin, sequence.first_held[group]), end):
                key = page_key(sequence.block_keys[index], group)
                pages.append(BlockToLoad(place, sequence.tables[group][index], key, group))
                place += 1
        return pages


def _runs(sequence: Sequence, stream: Stream, first: int, end: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Pages of the blocks ``first`` ≤ i < ``end`` that are wanted and that the sequence has, of each group."""
    wanted = stream.first_pages or (0,)
    firsts = [min(max(first, held, asked), end) for held, asked in zip(sequence.first_held, wanted, strict=True)]
    return tuple((begin, tuple(table[begin:end])) for begin, table in zip(firsts, sequence.tables, strict=True))
