"""Text chunks that prompts share at different positions (blending): where prompts are cut, which chunks are cached, and
which are to be computed alone for later prompts.

To compute a chunk alone is an ordinary prefill job, except for the names of its blocks. If the pool has all of a chunk,
the job loads it before the prompt that needs it; otherwise it computes it in the background, at the lowest priority,
after a prompt that contained it. Only full blocks are reused: the rest of a chunk is computed with the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvstore.client.store_client import StoreClient
from mooncake.engine.blend import Blend
from mooncake.engine.cache.block_pool import BlockPool
from mooncake.engine.hosting.host import EngineHost
from mooncake.errors import ConfigError, MooncakeError
from mooncake.hashing import extend_chain
from mooncake.rpc import prefill_pb2 as pb
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.sampling import SamplingParams
from mooncake.types import BlockKey, TokenIds
from mooncake.vital import vital

log = logging.getLogger(__name__)

MAX_WAITING = 64  # chunks to compute; beyond that they wait for the next prompt that contains them
LOWEST_PRIORITY = 2**31 - 1  # larger numbers run later
FETCH_TIMEOUT_S = 5.0  # for chunks that a prompt waits for
COMPUTE_TIMEOUT_S = 120.0  # for one in the background
ONE_TOKEN = sampling_to_wire(SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))

Compute = Callable[[pb.PrefillRequest, float], Awaitable[None]]
"""Load or compute a chunk into this node's cache before a deadline (monotonic, s). Raises MooncakeError."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Full blocks of a prompt from token ``start`` on, and their names as a chunk's blocks."""

    start: int
    tokens: TokenIds
    keys: list[BlockKey]


def chunk_spans(tokens: TokenIds, separator: TokenIds) -> list[tuple[int, int]]:
    """Chunks as (first token, end), each starting with a separator. Neither the part before the first separator (a
    prefix) nor the last part (the question) is a chunk."""
    size = len(separator)
    if len(tokens) < size:
        return []
    starts: list[int] = []
    for start in np.flatnonzero((sliding_window_view(tokens, size) == separator).all(-1)).tolist():
        if not starts or start >= starts[-1] + size:  # overlapping separators count as one
            starts.append(start)
    return [span for span in pairwise(starts) if span[0]]


class BlendChunks:
    """The chunks of all prompts: those in this node's cache are acquired, others are loaded or computed.

    Everything runs on the event loop but ``acquire``, which is called on the engine's thread.
    """

    def __init__(self, host: EngineHost, separator: TokenIds, share: float) -> None:
        self._host = host
        self._separator = separator
        self._share = share
        self._block_tokens = host.cache_size.layout.block_tokens
        self._numbers = count()
        self._waiting: dict[BlockKey, tuple[pb.PrefillRequest, Compute]] = {}  # by the name of the last block
        self._worker: asyncio.Task[None] | None = None

    @classmethod
    def configured(cls, host: EngineHost) -> BlendChunks | None:
        """None if blending is off. Raises ConfigError."""
        section = host.config.prefill
        if not section.blend_share:
            return None
        separator = host.encode(section.blend_separator)
        if not len(separator):
            raise ConfigError("prefill.blend_separator must not be empty")
        return cls(host, separator, section.blend_share)

    async def prepare(
        self, request: pb.PrefillRequest, tokens: TokenIds, store: StoreClient | None, compute: Compute
    ) -> list[Chunk]:
        """The prompt's chunks; those the pool has are loaded into this node's cache if there is room. Chunks that
        nobody has are computed once ``compute_waiting`` is called."""
        chunks = self._cut(tokens[: request.num_prompt_tokens], request.cache_salt)
        pool = self._host.engine.block_pool
        absent = {chunk.keys[-1]: chunk for chunk in chunks if pool.match(chunk.keys) < len(chunk.keys)}
        stored = await _stored(store, list(absent.values()))
        fetches = []
        for key, chunk in absent.items():
            if key in stored:
                priority = max(request.priority - 1, -LOWEST_PRIORITY)  # it computes one token
                chunk_request = self._request_for(request, chunk, priority)
                fetches.append(_quietly(compute(chunk_request, time.monotonic() + FETCH_TIMEOUT_S)))
            elif len(self._waiting) < MAX_WAITING:
                self._waiting.setdefault(key, (self._request_for(request, chunk, LOWEST_PRIORITY), compute))
        await asyncio.gather(*fetches)
        self._host.thread.call(lambda engine: _touch(engine.block_pool, chunks))  # before the prompt allocates blocks
        return chunks

    def compute_waiting(self) -> None:
        """A prompt is done: compute waiting chunks in the background, one after another."""
        if self._waiting and self._worker is None:
            self._worker = vital(self._run_waiting(), "compute chunks")

    def acquire(self, pool: BlockPool, chunks: Sequence[Chunk], first: int) -> tuple[Blend | None, list[int]]:
        """What a prompt can reuse after its first ``first`` tokens, and the blocks with that KV, which the caller must
        release."""
        places: list[tuple[int, list[int]]] = []
        for chunk in chunks:
            num_here = pool.match(chunk.keys)
            if num_here and chunk.start + num_here * self._block_tokens > first:
                places.append((chunk.start, pool.take_prefix(chunk.keys, num_here)))
        blend = Blend.of_chunks(places, first, self._block_tokens, self._share)
        return blend, [block_id for _, block_ids in places for block_id in block_ids]

    async def stop(self) -> None:
        """Stop computing in the background."""
        worker, self._worker = self._worker, None
        self._waiting.clear()
        if worker is not None:
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await worker

    def _cut(self, tokens: TokenIds, salt: str) -> list[Chunk]:
        size, seed = self._block_tokens, self._host.chunk_seed(salt)
        chunks = []
        for start, end in chunk_spans(tokens, self._separator):
            whole = tokens[start : start + (end - start) // size * size]
            if len(whole):
                chunks.append(Chunk(start, whole, extend_chain(seed, whole, size)))
        return chunks

    def _request_for(self, request: pb.PrefillRequest, chunk: Chunk, priority: int) -> pb.PrefillRequest:
        return pb.PrefillRequest(
            request_id=f"chunk-{next(self._numbers)}-{chunk.keys[-1].hex()[:8]}",
            tokens=tokens_to_wire(chunk.tokens),
            num_prompt_tokens=len(chunk.tokens),
            sampling=ONE_TOKEN,
            cache_salt=request.cache_salt,
            pools=request.pools,
            priority=priority,
        )

    async def _run_waiting(self) -> None:
        while self._waiting:
            key, (chunk_request, compute) = next(iter(self._waiting.items()))
            try:
                await _quietly(compute(chunk_request, time.monotonic() + COMPUTE_TIMEOUT_S))
            finally:
                self._waiting.pop(key, None)
        self._worker = None


def _touch(pool: BlockPool, chunks: list[Chunk]) -> None:
    """Mark the chunks as recently used, so that others are evicted first. On the engine's thread."""
    for chunk in chunks:
        pool.release(pool.take_prefix(chunk.keys, pool.match(chunk.keys)))


async def _stored(store: StoreClient | None, chunks: list[Chunk]) -> set[BlockKey]:
    """Last block names of those chunks that are complete in the pool."""
    if store is None or not chunks:
        return set()
    try:
        there = await store.exists([key for chunk in chunks for key in chunk.keys], timeout_s=FETCH_TIMEOUT_S)
    except MooncakeError as error:
        log.info("the pool does not answer for chunks: %s", error.message)
        return set()
    found = iter(there)
    whole = [all(list(islice(found, len(chunk.keys)))) for chunk in chunks]
    return {chunk.keys[-1] for chunk, is_whole in zip(chunks, whole, strict=True) if is_whole}


async def _quietly(call: Awaitable[None]) -> None:
    """Ignore failures: a missing chunk is computed with its prompt."""
    try:
        await call
    except MooncakeError as error:
        log.info("a chunk was neither loaded nor computed: %s", error.message)
    except Exception:  # a bug must cost this chunk, not its prompt or all chunks behind it
        log.exception("loading or computing a chunk")
