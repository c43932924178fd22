"""The engine's hook on a prefill node: streams layers as they are computed, and waits for reused layers being loaded.

It runs on the engine's thread, so it only decides which blocks are final in a layer and appends them to the prompt's
write streams. A block is final in a layer once all of the prompt's tokens in it are computed; each is sent exactly
once, except after an abandoned step, which is sent anew. A step that runs through a pipeline in pieces is streamed in
pieces. On a GPU, final layers are copied to host memory while computation continues, and the streams wait for the copy.

Tokens with a variant's KV become final, in all layers, together with the first tokens after them, which wait for all of
it. A sequence that continues here may be preempted: its prompt blocks get one more reference each, so that they stay
unchanged until they are written.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mooncake.engine.cache.kv_cache import Mirror
from mooncake.engine.cache.sequence_blocks import NEVER
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepPlan
from mooncake.errors import KVLoadFailed
from mooncake.page_groups import UNIFORM, PageGroups, page_key, page_number
from prefill_node.kv_writer import LayerBlocks, WriteStream
from prefill_node.loader import PrefixLoad


@dataclass(slots=True)
class StreamedPrompt:
    """What the hook knows of one prompt: its write streams, and how far it has been streamed."""

    make_load: Callable[[list[BlockToLoad]], PrefixLoad]  # given pages, the first group's first
    streams: list[WriteStream]
    on_admitted: Callable[[StreamedPrompt, Sequence], None]  # called on the engine's thread, as often as it happens
    on_first_step: Callable[[], None]  # called on the engine's thread
    retain_blocks: Callable[[list[int]], None] | None = None  # called on the engine's thread, with full streamed blocks
    first_pages: tuple[int, ...] = ()  # per group of layers, the first block whose page is sent; (): all, one group
    load: PrefixLoad | None = None
    variant_load: PrefixLoad | None = None  # of a variant's KV
    next_block: int = 0  # blocks before it have been streamed
    has_ended: bool = False  # the whole prompt has been streamed
    first_step_s: float = 0.0  # monotonic; 0 until it ran
    is_closing: bool = False  # no further load may start

    @property
    def loads(self) -> list[PrefixLoad]:
        return [load for load in (self.load, self.variant_load) if load is not None]


@dataclass(frozen=True, slots=True)
class StepPart:
    """One prompt's part of the current step: its blocks before ``end`` become final layer by layer. A prompt's last
    block may be partial: only ``num_full`` blocks are never written again. ``runs``: per group of layers, the first
    block whose page is sent, and the pages."""

    prompt: StreamedPrompt
    sequence: Sequence
    end: int
    num_full: int
    runs: tuple[tuple[int, tuple[int, ...]], ...]
    is_last: bool
    first_token: int  # its first token's position in the sequence
    offset: int  # that token's position in the step
    pushed: dict[int, int] = field(default_factory=dict)  # by layer: earlier blocks have been streamed

    def num_final(self, num_tokens: int, block_tokens: int) -> int:
        """Blocks of the sequence that are final once the step's first ``num_tokens`` tokens are computed."""
        return min((self.first_token + num_tokens - self.offset) // block_tokens, self.end)

    def next_run(self, layer: int, group: int, end: int) -> tuple[int, tuple[int, ...]]:
        """The first block not yet streamed in this layer, and the pages from it to ``end``."""
        begin, pages = self.runs[group]
        first = self.pushed.get(layer, begin)
        self.pushed[layer] = max(first, end)
        return first, pages[first - begin : max(end - begin, 0)]


@dataclass(slots=True)
class LayerStreamer:
    """The StepHook of a prefill node. The event loop changes ``prompts`` by single assignments."""

    block_tokens: int
    mirror: Mirror
    groups: PageGroups = UNIFORM
    prompts: dict[str, StreamedPrompt] = field(default_factory=dict)  # by sequence
    listeners: list[Callable[[int], None]] = field(default_factory=list)  # called with each computed layer
    _parts: list[StepPart] = field(default_factory=list)  # of the current step
    _loads: list[PrefixLoad] = field(default_factory=list)  # loads this step reads from
    _has_output: bool = False  # whether anything in this step becomes final and has a destination

    @property
    def wants_layers(self) -> bool:
        return bool(self._has_output or self.listeners or self._loads)

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        prompt = self.prompts.get(sequence.request_id)
        if prompt is None or prompt.is_closing:
            # Nobody would fill these blocks, and the engine must not consider them filled.
            if to_load or sequence.reused.variant_tokens:
                raise KVLoadFailed("the request is gone", (sequence.request_id,))
            return
        # Admitted again after a failed load: there is nothing to load any more.
        prompt.load = prompt.make_load(self._pages_to_load(sequence, to_load)) if to_load else None
        prompt.on_admitted(prompt, sequence)

    def begin_step(self, plan: StepPlan) -> None:
        self._parts, self._loads = [], []
        for entry in plan.variant_entries:
            prompt = self._begin(entry.sequence.request_id)
            if prompt is None or prompt.variant_load is None:
                raise KVLoadFailed("the request is gone", (entry.sequence.request_id,))
            with self._failing_together():
                prompt.variant_load.wait_side_buffers()
            if prompt.load is not None:  # the prefix before them; of the variant's KV they read only the inputs
                self._loads.append(prompt.load)
        next_offset = 0
        for entry in plan.entries:
            offset, next_offset = next_offset, next_offset + entry.num_tokens
            prompt = self._begin(entry.sequence.request_id)
            if prompt is None:
                continue
            self._loads += prompt.loads
            is_last = entry.end == entry.sequence.num_tokens and not prompt.has_ended
            num_full = entry.end // self.block_tokens
            end = prompt.next_block if prompt.has_ended else -(-entry.end // self.block_tokens) if is_last else num_full
            runs = _runs(entry.sequence, prompt, min(prompt.next_block, end), end)
            self._parts.append(StepPart(prompt, entry.sequence, end, num_full, runs, is_last, entry.first, offset))
        self._has_output = any(pages for part in self._parts if part.prompt.streams for _, pages in part.runs)

    def _begin(self, request_id: str) -> StreamedPrompt | None:
        prompt = self.prompts.get(request_id)
        if prompt is not None and not prompt.first_step_s:
            prompt.first_step_s = time.monotonic()
            prompt.on_first_step()
        return prompt

    def before_layer(self, layer: int) -> None:
        with self._failing_together():
            for load in self._loads:
                load.wait(layer)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """A sequence whose load fails gives its blocks back, so its other load ends first."""
        try:
            yield
        except KVLoadFailed as error:
            for prompt in filter(None, map(self.prompts.get, error.request_ids)):
                for load in prompt.loads:
                    load.cancel()
            raise

    def after_layer(self, layer: int) -> None:
        for listener in self.listeners:
            listener(layer)
        if self._has_output:
            self._push(layer, [(part, part.end) for part in self._parts])

    def after_piece(self, layer: int, num_tokens: int) -> None:
        if self._has_output:
            began = [part for part in self._parts if part.offset < num_tokens]
            self._push(layer, [(part, part.num_final(num_tokens, self.block_tokens)) for part in began])

    def _push(self, layer: int, ends: list[tuple[StepPart, int]]) -> None:
        """Stream what is final before each part's end and was not streamed yet."""
        group, rows = self.groups.rows_with(layer)
        runs = [(part.prompt.streams, *part.next_run(layer, group, end)) for part, end in ends if part.prompt.streams]
        final = tuple(page for _, _, pages in runs for page in pages)
        for row in rows if final else ():
            arrival = self.mirror.to_host(final, row)
            for streams, first, pages in runs:
                if pages:
                    blocks = LayerBlocks(row, page_number(group, first), pages, arrival)
                    for stream in streams:
                        if stream.push(blocks):
                            stream.writer.kick(stream)

    def end_step(self, plan: StepPlan) -> None:
        for part in self._parts:
            prompt = part.prompt
            prompt.next_block = max(prompt.next_block, part.end)
            if prompt.retain_blocks is not None:
                prompt.retain_blocks([p for first, pages in part.runs for p in pages[: max(part.num_full - first, 0)]])
            if part.is_last:
                prompt.has_ended = True
                part.sequence.keep_window_of = NEVER  # all of it is streamed: an answer that continues here moves on
                for stream in prompt.streams:
                    stream.end()
                    stream.writer.kick(stream)
        self._parts, self._loads, self._has_output = [], [], False

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


def _runs(sequence: Sequence, prompt: StreamedPrompt, first: int, end: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """For each group, the wanted pages of blocks ``first`` ≤ i < ``end`` that the sequence has."""
    wanted = prompt.first_pages or (0,)
    blocks = sequence.blocks
    firsts = [min(max(first, held, asked), end) for held, asked in zip(blocks.first_held, wanted, strict=True)]
    return tuple((begin, tuple(table[begin:end])) for begin, table in zip(firsts, blocks.tables, strict=True))
