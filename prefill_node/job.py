"""One request on a prefill node: find the cached prefix, compute the rest, stream it, commit, seal, clean up.

Everything here runs on the event loop. The outboxes and the loader move bytes, the engine computes tokens; the job
starts them, waits for them, and makes sure that none of them touches any memory once the job is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

from kvstore.client import StoreClient
from mooncake.engine.engine import Engine, StepOutput
from mooncake.engine.sequence import Sequence
from mooncake.errors import InvalidRequest, MooncakeError
from mooncake.hashing import Chain
from mooncake.rpc import prefill_pb2 as pb
from mooncake.rpc.convert import (
    prompt_logprobs_to_wire,
    report_to_wire,
    sampled_to_wire,
    sampling_from_wire,
    tokens_from_wire,
)
from mooncake.types import PrefillReport, SampledToken, Timings
from prefill_node.chunks import Chunk
from prefill_node.deadline import Deadline
from prefill_node.foreign import ForeignPrefix
from prefill_node.handoff import Handoff
from prefill_node.inherit import Inheritance, Sender, find
from prefill_node.leases import CONTROL_TIMEOUT_S, Leases
from prefill_node.loader import BlockToLoad, PrefixLoad
from prefill_node.outbox import Outbox, Sink
from prefill_node.pool_write import PoolWrite
from prefill_node.stored_prefix import StoredPrefix
from prefill_node.streamer import Stream
from prefill_node.workshop import Workshop

log = logging.getLogger(__name__)

REPORT_PATIENCE_S = 0.25  # how long the report waits for the pool, and the answer for the report


class PrefillJob:
    """Call ``responses`` once, then ``clean_up`` once, whatever happened in between."""

    def __init__(self, shop: Workshop, request: pb.PrefillRequest, deadline: float, *, is_chunk: bool = False) -> None:
        """Raises InvalidRequest. ``deadline`` is monotonic (s); ``is_chunk``: the prompt is a chunk, computed alone."""
        self._shop = shop
        self._request = request
        self._deadline = Deadline(deadline)
        self._arrived_s = time.monotonic()
        self._tokens = tokens_from_wire(request.tokens)
        self._sampling = sampling_from_wire(request.sampling)
        host = shop.host
        self._layout = host.plan.layout  # of a page: a block has one page per group of layers
        self._groups = host.plan.groups
        self._id = request.handoff_id or request.request_id
        self._is_chunk = is_chunk
        salt = request.cache_salt
        chain = Chain(host.chunk_seed(salt)) if is_chunk else host.chain(salt, request.adapter, request.adapter_start)
        self._keys = chain.keys(self._tokens, self._layout.block_tokens)
        self._store = shop.store_at(request.pools[0].control_address) if request.pools else None
        self._loop = asyncio.get_running_loop()
        self._leases = Leases(self._loop)
        self._has_started = asyncio.Event()
        self._prefix = self._stored_prefix(self._store) if self._store is not None else None
        self._handoff: Handoff | None = None
        self._pool: PoolWrite | None = None
        self._sealing: asyncio.Task[None] | None = None  # started once everything is computed
        self._stream: Stream | None = None
        self._chunks: list[Chunk] = []  # of the prompt, for blending
        self._chunk_blocks: list[int] = []  # blocks of chunks on which we hold a reference
        self._blended_tokens = 0
        self._inheritance: Inheritance | None = None  # a variant's KV, after what we have ourselves
        self._inherited_tokens = 0
        self._num_exact: int | None = None  # leading tokens whose KV is neither inherited nor blended; None: all
        self._tasks: list[asyncio.Task[None]] = []

    async def responses(self) -> AsyncIterator[pb.PrefillResponse]:
        """Yields each answer's first token (all tokens if there is no decode node), then the report.

        Raises MooncakeError.
        """
        await self._shop.host.prepare(self._sampling)
        stored_blocks = await self._count_stored()
        own_blocks = stored_blocks if self._prefix is None or self._prefix.is_ours else 0
        if (chunks := self._shop.chunks) is not None and self._may_be_inexact:
            self._chunks = await chunks.bring(self._request, self._tokens, self._store, self._compute_alone)
        if (sender := self._shop.sender) is not None and self._may_be_inexact:
            self._inheritance = await self._find_inheritance(sender, stored_blocks)
        sequence = self._make_sequence(stored_blocks)
        self._open_outlets(own_blocks)
        tokens: dict[int, SampledToken] = {}
        computed_s = 0.0
        async for output in self._outputs(sequence):
            if self._sealing is None:
                computed_s = time.monotonic()
                self._sealing = asyncio.create_task(self._seal())
            if output.prompt_logprobs is not None:
                yield pb.PrefillResponse(prompt_logprobs=prompt_logprobs_to_wire(self._tokens, output.prompt_logprobs))
            tokens[output.choice] = output.token
            reason = "" if self._handoff is not None else output.finish_reason or ""
            yield pb.PrefillResponse(
                first_token=sampled_to_wire(output.token), choice=output.choice, finish_reason=reason
            )
        assert self._sealing is not None
        if self._handoff is not None:
            await self._handoff.commit([tokens[choice] for choice in sorted(tokens)], self._num_exact)
        committed_s = time.monotonic()
        await asyncio.wait([self._sealing], timeout=REPORT_PATIENCE_S)
        yield pb.PrefillResponse(
            report=report_to_wire(self._report(sequence.num_cached_tokens, computed_s, committed_s))
        )

    def _make_sequence(self, stored_blocks: int) -> Sequence:
        sequence = self._shop.host.sequence(
            self._id,
            self._tokens,
            self._request.num_prompt_tokens,
            self._sampling,
            self._request.cache_salt,
            num_to_sample=1 if self._request.decode_address else None,
            external_blocks=stored_blocks,
            inheritable_blocks=self._inheritance.end if self._inheritance else 0,
            hold_blocks=bool(self._request.decode_address),  # the sinks read them
            priority=self._request.priority,
            adapter=self._request.adapter,
            adapter_start=self._request.adapter_start,
            is_chunk=self._is_chunk,
        )
        if self._store is not None and self._keys:
            sequence.kept_from = self._last_full_token
        return sequence

    async def clean_up(self) -> None:
        """Stop everything that still touches memory, release the blocks, then tell the peers, who may be slow.

        What has been computed is stored anyway, whether or not anybody still waits for the answer.
        """
        if self._sealing is not None:
            await asyncio.wait([self._sealing], timeout=CONTROL_TIMEOUT_S)
            self._sealing.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stream = self._stream
        if stream is not None:
            await self._end_loads(stream)
        for outlet in (self._handoff, self._pool):
            if outlet is not None:
                await asyncio.to_thread(outlet.sink.close)
        if stream is not None:
            call = self._shop.host.thread.call
            await asyncio.wrap_future(call(lambda engine: engine.abort(self._id)))
            await asyncio.wrap_future(call(lambda engine: engine.release(self._id)))
            if self._pool is not None:
                await asyncio.wrap_future(call(self._pool.let_go))
            await asyncio.wrap_future(call(self._let_chunks_go))
            del self._shop.streamer.streams[self._id]
        if self._handoff is not None:
            await self._handoff.close()
        if (chunks := self._shop.chunks) is not None and not self._is_chunk:
            chunks.go_on()
        if self._pool is not None:
            await self._pool.close()

    async def _end_loads(self, stream: Stream) -> None:
        """Return once nothing reads into this request's blocks any more, nor ever will."""
        stream.is_closing = True
        for load in stream.loads:  # the engine may be waiting for it
            await asyncio.to_thread(load.cancel)
        await asyncio.wrap_future(self._shop.host.thread.call(lambda engine: None))  # an admission in progress is over
        for load in stream.loads:
            await asyncio.to_thread(load.cancel)

    # The prefix

    def _stored_prefix(self, store: StoreClient) -> StoredPrefix:
        request, layout = self._request, self._shop.foreign
        named = (request.cache_salt, request.adapter, request.adapter_start)
        foreign = None if layout is None else partial(ForeignPrefix, layout, store, self._tokens, *named)
        return StoredPrefix(self._shop.host, store, self._leases, self._keys, foreign)

    async def _count_stored(self) -> int:
        """How many leading blocks to read from the pool, if that is more than this node holds: what the pool has,
        limited to what the conductor found worth reading."""
        usable = min(len(self._keys), (len(self._tokens) - 1) // self._layout.block_tokens)
        if self._request.HasField("pool_tokens"):
            usable = min(usable, self._request.pool_tokens // self._layout.block_tokens)
        if self._prefix is None or not usable or self._shop.host.engine.match(self._keys[:usable]) == usable:
            return 0
        try:
            return await self._prefix.count(usable)
        except MooncakeError as error:
            log.info("the pool cannot be asked, going on without: %s", error.message)
            self._store = self._prefix = None
            return 0

    def _make_load(self, blocks: list[BlockToLoad]) -> PrefixLoad:
        """Called on the engine's thread when the sequence is admitted."""
        assert self._prefix is not None
        load = self._prefix.load(self._id, blocks, self._deadline.at_s)
        self._shop.loader.submit(load)
        return load

    # A variant's KV

    @property
    def _may_be_inexact(self) -> bool:
        """Whether inexact KV is acceptable: a decode node would be told, and no prompt log-probabilities are asked
        for."""
        request = self._request
        return bool(request.decode_address) and not request.adapter and self._sampling.prompt_logprobs is None

    async def _find_inheritance(self, sender: Sender, stored_blocks: int) -> Inheritance | None:
        """Look beyond our own blocks. Prompts for which there was nothing, though it would have helped, are counted."""
        usable = (len(self._tokens) - 1) // self._layout.block_tokens
        first = max(stored_blocks, self._shop.host.engine.block_pool.match(self._keys[:usable]))
        if first >= usable:
            return None
        keys = sender.keys(self._tokens[: usable * self._layout.block_tokens], self._request.cache_salt)
        stores = [self._shop.store_at(address) for address in sender.pools] or ([self._store] if self._store else [])
        found = await find(sender, stores, keys, first)
        if found is None:
            self._shop.host.counters["prompts_not_inherited"] += 1
        return found

    def _inherit(self, sequence: Sequence) -> None:
        """Called on the engine's thread whenever the sequence is admitted."""
        stream, found = self._stream, self._inheritance
        assert stream is not None
        stream.inherited, sequence.hidden = None, None
        if self._inherited_tokens:  # the first load failed
            self._shop.host.counters["prompts_not_inherited"] += 1
        self._inherited_tokens = len(sequence.inherits)
        if found is not None and sequence.inherits:
            deadline = min(self._deadline.at_s, time.monotonic() + self._shop.host.config.store.lease_s)
            stream.inherited = found.load(sequence, self._leases.take, self._leases.end, deadline)
            self._num_exact = sequence.num_exact
            self._shop.loader.submit(stream.inherited)

    # Chunks

    async def _compute_alone(self, chunk: pb.PrefillRequest, deadline: float) -> None:
        """Get the chunk into this node's cache, from the pool or computed, and then into the pool. Raises
        MooncakeError."""
        job = PrefillJob(self._shop, chunk, deadline, is_chunk=True)
        try:
            async for _ in job.responses():
                pass
        finally:
            await job.clean_up()

    def _take_chunks(self, sequence: Sequence) -> None:
        """Called on the engine's thread whenever the sequence is admitted, and not before: a waiting request holds
        nothing."""
        engine, chunks = self._shop.host.engine, self._shop.chunks
        self._let_chunks_go(engine)
        if chunks is None:
            return
        sequence.blend, self._chunk_blocks = chunks.take(engine.block_pool, self._chunks, sequence.num_computed)
        self._blended_tokens = sequence.blend.num_tokens if sequence.blend else 0
        if sequence.blend is not None:  # never more than before: what was blended may have been kept
            first = sequence.blend.first
            sequence.num_exact = first if sequence.num_exact is None else min(first, sequence.num_exact)
        self._num_exact = sequence.num_exact

    def _let_chunks_go(self, engine: Engine) -> None:
        """On the engine's thread. Idempotent."""
        held, self._chunk_blocks = self._chunk_blocks, []
        engine.block_pool.release(held)

    # The outlets

    def _open_outlets(self, stored_blocks: int) -> None:
        """Raises InvalidRequest for a duplicate request, before anything of the original could be cleaned up."""
        if self._id in self._shop.streamer.streams:
            raise InvalidRequest(f"request {self._id} is here already", "handoff_id")
        outlets: list[tuple[Sink, Outbox]] = []
        if self._request.decode_address:
            self._handoff = Handoff(self._shop, self._request, len(self._tokens), self._deadline)
            outlets.append((self._handoff.sink, self._shop.handoffs))
            self._tasks.append(asyncio.create_task(self._open_handoff(self._handoff)))
        if self._store is not None and len(self._keys) > stored_blocks:
            self._pool = PoolWrite(self._shop, self._store, self._id, self._keys, self._deadline)
            outlets.append((self._pool.sink, self._shop.stores))
            self._pool_opening = asyncio.create_task(self._open_pool(self._pool, stored_blocks))
            self._tasks.append(self._pool_opening)
        hold = self._pool.hold if self._pool is not None and self._handoff is None else None
        self._stream = Stream(self._id, self._make_load, outlets, self._on_first_step, hold, self._first_pages)
        if self._chunks:
            self._stream.on_admitted = self._take_chunks
        elif self._inheritance is not None:
            self._stream.on_admitted = self._inherit
        self._shop.streamer.streams[self._id] = self._stream

    def _on_first_step(self) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._has_started.set)

    @property
    def _last_full_token(self) -> int:
        """The last token of the last full block: what follows it needs the windows it sees."""
        return len(self._keys) * self._layout.block_tokens - 1

    @property
    def _first_pages(self) -> tuple[int, ...]:
        """For each group, the first block whose page is needed elsewhere: windows are handed on, and stored, only at
        the prompt's end."""
        groups, block_tokens = self._groups, self._layout.block_tokens
        return tuple(groups.first_page(g, self._last_full_token, block_tokens) for g in range(groups.num_groups))

    async def _open_handoff(self, handoff: Handoff) -> None:
        """Called only when it is our turn: the decode node's blocks are not held while a request queues here."""
        await self._has_started.wait()
        await handoff.open()

    async def _open_pool(self, pool: PoolWrite, first: int) -> None:
        """Called only when it is our turn: a reservation that waited in our queue could expire."""
        await self._has_started.wait()
        end = len(self._keys) if self._num_exact is None else self._num_exact // self._layout.block_tokens
        await pool.open(first, end, self._first_pages, into_dram=self._request.HasField("pool_tokens"))

    # The computation and what follows

    async def _outputs(self, sequence: Sequence) -> AsyncIterator[StepOutput]:
        """The prompt once, then the tokens of its answers, until each ends here: after its first token if another
        node continues."""
        outputs: asyncio.Queue[StepOutput | MooncakeError] = asyncio.Queue()

        def on_output(output: StepOutput | MooncakeError) -> None:
            self._loop.call_soon_threadsafe(outputs.put_nowait, output)

        self._shop.host.thread.add(sequence, on_output)
        num_open = 1 if sequence.is_first_leg and sequence.sampling.beam_search else sequence.sampling.num_answers
        while num_open:
            output = await self._deadline.wait_for(asyncio.ensure_future(outputs.get()))
            if isinstance(output, MooncakeError):
                raise output
            num_open -= output.finish_reason is not None
            yield output

    async def _seal(self) -> None:
        if self._pool is not None:
            await self._pool_opening
            await self._pool.seal()

    def _report(self, local_cached_tokens: int, computed_s: float, committed_s: float) -> PrefillReport:
        stream = self._stream
        handoff, pool = (outlet.sink if outlet else None for outlet in (self._handoff, self._pool))
        assert stream is not None
        load = stream.load
        first_step_s = stream.first_step_s or computed_s
        return PrefillReport(
            prompt_tokens=self._request.num_prompt_tokens,
            local_cached_tokens=local_cached_tokens,
            pool_cached_tokens=load.num_blocks * self._layout.block_tokens if load else 0,
            blended_tokens=self._blended_tokens,
            inherited_tokens=self._inherited_tokens,
            sent_bytes=handoff.sent_bytes if handoff else 0,
            pool_bytes=pool.sent_bytes if pool else 0,
            transport=handoff.transport if handoff else "",
            timings=Timings(
                queue_ms=(first_step_s - self._arrived_s) * 1e3,
                load_ms=load.load_ms if load else 0.0,
                prefill_ms=(computed_s - first_step_s) * 1e3,
                handoff_ms=(committed_s - computed_s) * 1e3,
            ),
        )
