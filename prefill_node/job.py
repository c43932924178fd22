"""One request on a prefill node: find the cached prefix, compute the rest, stream it, commit, seal, clean up.

Everything here runs on the event loop. The writers and the loader move bytes, the engine computes tokens; the job
starts them, waits for them, and makes sure that none of them touches any memory once the job is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

from kvstore.client.store_client import StoreClient
from mooncake.engine.contract import StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.reused_kv import ReusedKV
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad
from mooncake.errors import InvalidRequest, MooncakeError
from mooncake.hashing import Chain
from mooncake.rpc import prefill_pb2 as pb
from mooncake.rpc.convert import (
    pooling_from_wire,
    prompt_logprobs_to_wire,
    report_to_wire,
    sampled_to_wire,
    sampling_from_wire,
    tokens_from_wire,
    vector_to_wire,
)
from mooncake.types import PrefillReport, SampledToken, Timings
from prefill_node.approximate_kv import ApproximateKV
from prefill_node.converted_prefix import ConvertedPrefix
from prefill_node.deadline import Deadline
from prefill_node.leases import Leases
from prefill_node.loader import PrefixLoad
from prefill_node.prompt_writes import PromptWrites
from prefill_node.resources import NodeResources
from prefill_node.stored_prefix import StoredPrefix
from prefill_node.streamer import StreamedPrompt

log = logging.getLogger(__name__)

REPORT_WAIT_S = 0.25  # how long the report waits for the pool, and the answer for the report


class PrefillJob:
    """Call ``responses`` once, then ``clean_up`` once, whatever happened in between."""

    def __init__(
        self, node: NodeResources, request: pb.PrefillRequest, deadline: float, *, is_chunk: bool = False
    ) -> None:
        """Raises InvalidRequest. ``deadline`` is monotonic (s); ``is_chunk``: the prompt is a chunk, computed alone."""
        self._node = node
        self._request = request
        self._deadline = Deadline(deadline)
        self._arrived_s = time.monotonic()
        self._tokens = tokens_from_wire(request.tokens)
        self._sampling = sampling_from_wire(request.sampling)
        self._pooling = pooling_from_wire(request.pooling)
        host = node.host
        self._block_tokens = host.cache_size.layout.block_tokens
        self._id = request.handoff_id or request.request_id
        self._is_chunk = is_chunk
        salt = request.cache_salt
        self._chain = (
            Chain(host.chunk_seed(salt)) if is_chunk else host.chain(salt, request.adapter, request.adapter_start)
        )
        self._keys = self._chain.keys(self._tokens, self._block_tokens)
        self._store = node.store_at(request.pools[0].control_address) if request.pools else None
        self._loop = asyncio.get_running_loop()
        self._leases = Leases(self._loop)
        self._prefix = self._stored_prefix(self._store) if self._store is not None else None
        self._writes = PromptWrites(node, request, self._keys, self._deadline)
        self._streamed: StreamedPrompt | None = None
        self._approximate = ApproximateKV(node, request, self._leases, self._deadline)

    async def responses(self) -> AsyncGenerator[pb.PrefillResponse, None]:
        """Yields an early report, each answer's first token (all tokens if there is no decode node) or what is pooled,
        then the report. Raises MooncakeError.
        """
        await self._node.host.prepare(self._sampling)
        stored_blocks = await self._count_stored()
        own_blocks = stored_blocks if self._prefix is None or self._prefix.is_ours else 0
        if self._allows_approximate:
            await self._approximate.find(self._tokens, self._keys, stored_blocks, self._store, self._compute_alone)
        sequence = self._make_sequence(stored_blocks)
        self._open_writes(own_blocks)
        tokens: dict[int, SampledToken] = {}
        computed_s = 0.0
        async for output in self._outputs(sequence):
            if not computed_s:
                computed_s = time.monotonic()
                self._writes.start_sealing()
                early = self._report(sequence.num_cached_tokens, computed_s, computed_s)
                yield pb.PrefillResponse(early_report=report_to_wire(early))
            if output.pooled is not None:
                yield pb.PrefillResponse(pooled=vector_to_wire(output.pooled))
                continue
            if output.prompt_logprobs is not None:
                yield pb.PrefillResponse(prompt_logprobs=prompt_logprobs_to_wire(self._tokens, output.prompt_logprobs))
            tokens[output.choice] = output.token
            reason = "" if self._writes.handoff is not None else output.finish_reason or ""
            yield pb.PrefillResponse(
                first_token=sampled_to_wire(output.token), choice=output.choice, finish_reason=reason
            )
        await self._writes.commit([tokens[choice] for choice in sorted(tokens)], self._approximate.num_exact)
        committed_s = time.monotonic()
        await self._writes.wait_sealed(REPORT_WAIT_S)
        yield pb.PrefillResponse(
            report=report_to_wire(self._report(sequence.num_cached_tokens, computed_s, committed_s))
        )

    def _make_sequence(self, stored_blocks: int) -> Sequence:
        sequence = self._node.host.sequence(
            self._id,
            self._tokens,
            self._request.num_prompt_tokens,
            self._sampling,
            self._chain,
            num_to_sample=1 if self._request.decode_address else None,
            reused=ReusedKV(stored_blocks, self._approximate.variant_blocks),
            hold_blocks=bool(self._request.decode_address),  # the write streams read them
            priority=self._request.priority,
            adapter=self._request.adapter,
            pooling=self._pooling,
        )
        if self._store is not None and self._keys:
            sequence.keep_window_of = self._writes.last_full_token
        return sequence

    async def clean_up(self) -> None:
        """Stop everything that still touches memory, release the blocks, then tell the peers, who may be slow.

        What has been computed is stored anyway, whether or not anybody still waits for the answer.
        """
        await self._writes.stop()
        streamed = self._streamed
        if streamed is not None:
            await self._end_loads(streamed)
        await self._writes.close_streams()
        if streamed is not None:
            await asyncio.wrap_future(self._node.host.thread.call(self._release))
            del self._node.streamer.prompts[self._id]
        if (chunks := self._node.blend_chunks) is not None and not self._is_chunk:
            chunks.compute_waiting()
        await self._writes.close()

    def _release(self, engine: Engine) -> None:
        """On the engine's thread: give back every block of the request."""
        engine.abort(self._id)
        self._writes.release_blocks(engine)
        self._approximate.release()

    async def _end_loads(self, streamed: StreamedPrompt) -> None:
        """Return once nothing reads into this request's blocks any more, nor ever will."""
        streamed.is_closing = True
        for load in streamed.loads:  # the engine may be waiting for it
            await asyncio.to_thread(load.cancel)
        await asyncio.wrap_future(self._node.host.thread.call(lambda engine: None))  # an admission in progress is over
        for load in streamed.loads:
            await asyncio.to_thread(load.cancel)

    # The prefix

    def _stored_prefix(self, store: StoreClient) -> StoredPrefix:
        request, layout = self._request, self._node.source_layout
        named = (request.cache_salt, request.adapter, request.adapter_start)
        open_converted = None if layout is None else partial(ConvertedPrefix, layout, store, self._tokens, *named)
        return StoredPrefix(self._node.host, store, self._leases, self._keys, open_converted)

    async def _count_stored(self) -> int:
        """How many leading blocks to read from the pool, if that is more than this node holds: what the pool has,
        limited to what the conductor found worth reading."""
        usable = min(len(self._keys), (len(self._tokens) - 1) // self._block_tokens)
        if self._request.HasField("pool_tokens"):
            usable = min(usable, self._request.pool_tokens // self._block_tokens)
        if self._prefix is None or not usable or self._node.host.engine.match(self._keys[:usable]) == usable:
            return 0
        try:
            return await self._prefix.count(usable)
        except MooncakeError as error:
            log.info("the pool does not answer, continuing without: %s", error.message)
            self._store = self._prefix = None
            return 0

    def _make_load(self, blocks: list[BlockToLoad]) -> PrefixLoad:
        """Called on the engine's thread when the sequence is admitted."""
        assert self._prefix is not None
        load = self._prefix.load(self._id, blocks, self._deadline.at_s)
        self._node.loader.submit(load)
        return load

    @property
    def _allows_approximate(self) -> bool:
        """Whether approximate KV is acceptable: a decode node would be told, and no prompt log-probabilities are asked
        for."""
        request = self._request
        return bool(request.decode_address) and not request.adapter and self._sampling.prompt_logprobs is None

    async def _compute_alone(self, chunk: pb.PrefillRequest, deadline: float) -> None:
        """Load or compute the chunk into this node's cache, and store it in the pool. Raises MooncakeError."""
        job = PrefillJob(self._node, chunk, deadline, is_chunk=True)
        try:
            async for _ in job.responses():
                pass
        finally:
            await job.clean_up()

    # The writes

    def _open_writes(self, stored_blocks: int) -> None:
        """Raises InvalidRequest for a duplicate request, before anything of the original could be cleaned up."""
        if self._id in self._node.streamer.prompts:
            raise InvalidRequest(f"request {self._id} is here already", "handoff_id")
        writes = self._writes
        if self._request.decode_address:
            writes.to_decode(len(self._tokens))
        if self._store is not None and len(self._keys) > stored_blocks:
            writes.to_pool(self._store, self._id, stored_blocks, lambda: self._approximate.num_exact)
        self._streamed = self._node.streamer.prompts[self._id] = StreamedPrompt(
            self._make_load,
            writes.streams,
            self._approximate.admitted,
            self._on_first_step,
            writes.retain_blocks,
            writes.first_pages,
        )

    def _on_first_step(self) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._writes.start)

    # The computation and what follows

    async def _outputs(self, sequence: Sequence) -> AsyncIterator[StepOutput]:
        """The prompt once, then the tokens of its answers, until each ends here: after its first token if another
        node continues."""
        outputs: asyncio.Queue[StepOutput | MooncakeError] = asyncio.Queue()

        def on_output(output: StepOutput | MooncakeError) -> None:
            self._loop.call_soon_threadsafe(outputs.put_nowait, output)

        self._node.host.thread.add(sequence, on_output)
        num_open = 1 if sequence.is_prefill_only and sequence.sampling.beam_search else sequence.sampling.num_answers
        while num_open:
            output = await self._deadline.wait_for(asyncio.ensure_future(outputs.get()))
            if isinstance(output, MooncakeError):
                raise output
            num_open -= output.finish_reason is not None
            yield output

    def _report(self, local_cached_tokens: int, computed_s: float, committed_s: float) -> PrefillReport:
        streamed = self._streamed
        handoff, pool = (write.stream if write else None for write in (self._writes.handoff, self._writes.pool))
        assert streamed is not None
        load = streamed.load
        first_step_s = streamed.first_step_s or computed_s
        return PrefillReport(
            prompt_tokens=self._request.num_prompt_tokens,
            local_cached_tokens=local_cached_tokens,
            pool_cached_tokens=load.num_blocks * self._block_tokens if load else 0,
            blended_tokens=self._approximate.blended_tokens,
            inherited_tokens=self._approximate.inherited_tokens,
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
