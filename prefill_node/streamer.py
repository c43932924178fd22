"""The engine's hook on a prefill node: sends layers as they are computed, and waits for reused layers being loaded.

It runs on the engine's thread, so it only decides which layer runs are final and hands them to the sinks. A block's
layer is final once all of the prompt's tokens in it are computed; each is sent exactly once, except after an abandoned
step, which sends the same bytes again. A step that runs through a pipeline in pieces is streamed in pieces. On a GPU,
final layers are copied to host memory while computation continues, and the sinks wait for the copy.

Tokens with a variant's KV become final, in all layers, together with the first tokens after them, which wait for all of
it. A sequence that continues here may be preempted: its prompt blocks get one more reference each, so that they stay
unchanged until they are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake.engine.engine import StepPlan
from mooncake.engine.kv_cache import Mirror
from mooncake.engine.scheduler import BlockToLoad
from mooncake.engine.sequence import Sequence
from mooncake.errors import KVLoadFailed
from mooncake.page_groups import UNIFORM, PageGroups, page_key, page_number
from prefill_node.loader import PrefixLoad
from prefill_node.outbox import LayerRun, Outbox, Sink


@dataclass(slots=True)
class Stream:
    """What the hook knows of one request: its sinks, and how far it has been streamed."""

    request_id: str
    make_load: Callable[[list[BlockToLoad]], PrefixLoad]  # given pages, the first group's first
    outlets: list[tuple[Sink, Outbox]]
    on_first_step: Callable[[], None]  # its turn has come; called on the engine's thread
    hold: Callable[[list[int]], None] | None = None  # on the engine's thread, with full blocks handed to sinks
    first_pages: tuple[int, ...] = ()  # per group of layers, the first block whose page is sent; (): all, one group
    load: PrefixLoad | None = None
    inherited: PrefixLoad | None = None  # the load of a variant's KV
    next_block: int = 0  # blocks before it have been handed to the sinks
    has_ended: bool = False  # the whole prompt has been handed to the sinks
    first_step_s: float = 0.0  # monotonic; 0 until it ran
    is_closing: bool = False  # no further load may start
    on_admitted: Callable[[Sequence], None] | None = None  # called on the engine's thread, before its first step

    @property
    def loads(self) -> list[PrefixLoad]:
        return [load for load in (self.load, self.inherited) if load is not None]


@dataclass(frozen=True, slots=True)
class StreamStep:
    """One request's part of the current step: its blocks before ``end`` become final layer by layer. A prompt's last
    block may be partial: only ``num_full`` blocks are never written again. ``runs``: per group of layers, the first
    block whose page is sent, and the pages."""

    stream: Stream
    end: int
    num_full: int
    runs: tuple[tuple[int, tuple[int, ...]], ...]
    is_last: bool
    first_token: int  # its first token's position in the sequence
    place: int  # that token's position in the step
    pushed: dict[int, int] = field(default_factory=dict)  # by layer: earlier blocks have been handed to the sinks

    def num_final(self, num_tokens: int, block_tokens: int) -> int:
        """Blocks of the sequence that are final once the step's first ``num_tokens`` tokens are computed."""
        return min((self.first_token + num_tokens - self.place) // block_tokens, self.end)

    def next_run(self, layer: int, group: int, end: int) -> tuple[int, tuple[int, ...]]:
        """The first block, and the pages of the blocks before ``end``, not yet handed on in this layer."""
        begin, pages = self.runs[group]
        first = self.pushed.get(layer, begin)
        self.pushed[layer] = max(first, end)
        return first, pages[first - begin : max(end - begin, 0)]


@dataclass(slots=True)
class LayerStreamer:
    """The StepHook of a prefill node. The event loop changes ``streams`` by single assignments."""

    block_tokens: int
    mirror: Mirror = field(init=False)  # set, with its groups of layers, once the cache exists; nothing streams before
    groups: PageGroups = UNIFORM
    streams: dict[str, Stream] = field(default_factory=dict)
    listeners: list[Callable[[int], None]] = field(default_factory=list)  # called with each computed layer
    _step: list[StreamStep] = field(default_factory=list)
    _loads: list[PrefixLoad] = field(default_factory=list)  # loads this step reads from
    _leaves: bool = False  # whether anything in this step becomes final and has a destination

    @property
    def wants_layers(self) -> bool:
        return bool(self._leaves or self.listeners or self._loads)

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        stream = self.streams.get(sequence.request_id)
        if stream is None or stream.is_closing:
            # Nobody would fill these blocks, and the engine must not consider them filled.
            if to_load or sequence.reused.variant_tokens:
                raise KVLoadFailed("the request is gone", (sequence.request_id,))
            return
        # Admitted again after a failed load: there is nothing to load any more.
        stream.load = stream.make_load(self._pages_to_load(sequence, to_load)) if to_load else None
        if stream.on_admitted is not None:
            stream.on_admitted(sequence)

    def begin_step(self, plan: StepPlan) -> None:
        self._step, self._loads = [], []
        for entry in plan.variant_entries:
            stream = self._begin(entry.sequence.request_id)
            if stream is None or stream.inherited is None:
                raise KVLoadFailed("the request is gone", (entry.sequence.request_id,))
            stream.inherited.wait_aside()
            if stream.load is not None:  # the prefix before them; of the variant's KV they read only the inputs
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
        """For each part, hand on what is final before its end and was not handed on yet."""
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

    def _pages_to_load(self, sequence: Sequence, to_load: list[BlockToLoad]) -> list[BlockToLoad]:
        """The other groups' pages for these blocks; they follow those of the whole prefix."""
        blocks, pages = sequence.blocks, list(to_load)
        begin, end = pages[0].index, pages[-1].index + 1
        place = end
        for group in range(1, self.groups.num_groups):
            for index in range(max(begin, blocks.first_held[group]), end):
                key = page_key(sequence.block_keys[index], group)
                pages.append(BlockToLoad(place, blocks.tables[group][index], key, group))
                place += 1
        return pages


def _runs(sequence: Sequence, stream: Stream, first: int, end: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """For each group, the wanted pages of blocks ``first`` ≤ i < ``end`` that the sequence has."""
    wanted = stream.first_pages or (0,)
    blocks = sequence.blocks
    firsts = [min(max(first, held, asked), end) for held, asked in zip(blocks.first_held, wanted, strict=True)]
    return tuple((begin, tuple(table[begin:end])) for begin, table in zip(firsts, blocks.tables, strict=True))
