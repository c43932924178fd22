"""One engine with everything that a node needs around it: model, paged cache, thread, step times, events.

Both compute roles build on it; what differs between them (where KV comes from and goes to) stays in their own packages.
It knows nothing of gRPC calls, hand-offs or the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from dataclasses import dataclass, replace

import torch

from mooncake.adapters import Adapter, AdapterTable, open_adapters, parse_adapters
from mooncake.alike import node_settings
from mooncake.checkpoint import Checkpoint
from mooncake.config import Config, EngineSection, PrefillSection
from mooncake.engine.backend import Backend, BackendSpec, CacheSize, Processes, draft_on, open_for_node, prepare_adapter
from mooncake.engine.cache.kv_cache import Mirror
from mooncake.engine.contract import EngineConfig, StepHook
from mooncake.engine.decoding.draft_model import DraftModel
from mooncake.engine.engine import Engine
from mooncake.engine.loop import EngineThread
from mooncake.engine.node_hook import NodeHook, StepSamples
from mooncake.engine.reused_kv import ReusedKV
from mooncake.engine.sequence import Sequence
from mooncake.engine.warm_up import warm_up
from mooncake.errors import ConfigError, MooncakeError
from mooncake.events import EventLog
from mooncake.guides import Guides
from mooncake.hashing import Chain, chunk_seed, kv_fingerprint
from mooncake.kernels.cpu_threads import use_threads
from mooncake.model.pages import Mappable
from mooncake.page_groups import UNIFORM, PageGroups
from mooncake.rpc import cluster_pb2 as pb
from mooncake.types import KVLayout, SamplingParams, TokenIds
from mooncake.variants import Profile, read_profile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of a node's paged cache, and the sequence length that follows from it."""

    layout: KVLayout  # of a page
    num_blocks: int  # number of pages
    max_model_len: int  # tokens
    groups: PageGroups = UNIFORM  # a block is one page of each

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


def plan_cache(config: Config, section: EngineSection, checkpoint: Checkpoint) -> CachePlan:
    """Raises ConfigError when fewer than two blocks fit into ``kv_gb``, or the configured context exceeds the
    model's."""
    groups = config.page_groups(checkpoint.config)
    block = checkpoint.kv_layout(config.block.tokens, config.precision().kv_dtype, config.model.keep_hidden)
    layout = groups.page_layout(block)
    num_pages = int(section.kv_gb * 1e9) // layout.block_bytes
    context = checkpoint.config.context(config.model.max_model_len)
    max_model_len = groups.max_model_len(num_pages, section.chunk_tokens or context, config.block.tokens, context)
    if num_pages < 2 * groups.num_groups:
        raise ConfigError(
            f"kv_gb = {section.kv_gb:g} holds {num_pages} pages of {layout.block_bytes / 1e6:.1f} MB; at least "
            f"{2 * groups.num_groups} are needed, for 2 blocks: raise kv_gb or lower block.tokens"
        )
    return CachePlan(layout, num_pages, max_model_len, groups)


class EngineHost:
    """Owns the engine of one node. ``start`` it on the event loop that will publish its block events."""

    def __init__(self, config: Config, section: EngineSection, checkpoint: Checkpoint, plan: CachePlan) -> None:
        self.config = config
        self.plan = plan
        self.incarnation = secrets.randbits(63) | 1
        self._precision = config.precision(checkpoint.coding)
        self.content = self._precision.identity(checkpoint.digest)
        self.fingerprint = kv_fingerprint(self.content, plan.layout, plan.groups.name)
        self.max_model_len = checkpoint.config.context(config.model.max_model_len)  # asked for: the plan's may be less
        self.settings = node_settings(config, checkpoint)
        self.samples = StepSamples()
        self.events = EventLog(self.incarnation)
        self._section = section
        self._checkpoint = checkpoint
        self.variant = self._read_variant()
        self.counters: Counter[str] = Counter()  # kept by roles, for heartbeats
        self._adapters = AdapterTable(open_adapters(parse_adapters(config.model.adapters)), self._free_place)
        self._guides = Guides(checkpoint.load_tokenizer, checkpoint.config.vocab_size)
        self.device = section.device
        self._failure: asyncio.Future[MooncakeError]
        self._backend: Backend | None = None
        self._watch: asyncio.Task[None] | None = None
        self.mirror: Mirror  # the cache, as other nodes see it
        self.engine: Engine
        self.thread: EngineThread

    async def start(self, hook: StepHook, memory: Mappable | None = None) -> None:
        """Load the model, place the cache or its mirror in ``memory`` (or memory of its own), and measure a few steps.

        Raises ModelError for weights that cannot be loaded, ConfigError for a missing device.
        """
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        if self._section.threads:
            use_threads(self._section.threads)
            torch.set_num_threads(min(self._section.threads, torch.get_num_threads()))
        started_s, settings = time.monotonic(), self._engine_config
        log.info("reading %s for %s", self._checkpoint.name, self.device)
        backend = self._backend = await asyncio.to_thread(self._open_backend, self._cache_size, memory)
        drafter = await asyncio.to_thread(self._drafter) if self._section.draft_model else None
        backend.watch(self._tell_failure)
        assert backend.mirror is not None
        self.mirror = backend.mirror
        self.engine = Engine(backend.model, backend.cache, settings, self._guides, drafter)
        await asyncio.to_thread(warm_up, self.engine, self._checkpoint.config.vocab_size, self.samples)
        node_hook = NodeHook(hook, self.samples, self._publish_events)
        self.thread = EngineThread(self.engine, node_hook)
        if timeout_s := self.config.node.step_timeout_s:
            self._watch = asyncio.create_task(self._watch_steps(node_hook, timeout_s), name="watch steps")
        self._log_ready(time.monotonic() - started_s)

    @property
    def _cache_size(self) -> CacheSize:
        plan, section = self.plan, self._section
        num_places = int(section.swap_gb * 1e9) // plan.layout.block_bytes
        sizes = (plan.num_blocks, plan.max_model_len, num_places, section.max_sequences)
        return CacheSize(plan.layout, *sizes, plan.groups)

    @property
    def _engine_config(self) -> EngineConfig:
        section = self._section
        return EngineConfig(
            block_tokens=self.config.block.tokens,
            chunk_tokens=section.chunk_tokens,
            tbt_limit_ms=section.tbt_limit_ms,
            speculative_tokens=section.speculative_tokens,
            max_sequences=section.max_sequences,
            max_model_len=self.plan.max_model_len,
            own_layers=self.variant.layers if self.variant else None,
            groups=self.plan.groups,
        )

    def _drafter(self) -> DraftModel:
        section = self._section
        return draft_on(
            self.device,
            section.draft_model,
            self.config.model.dtype,
            self._cache_size,
            self._checkpoint.config.vocab_size,
            section.speculative_tokens,
            section.chunk_tokens,
        )

    def _log_ready(self, seconds: float) -> None:
        log.info(
            "%s ready on %s in %.1f s: weights %s, %d pages of %d tokens (%.2f GB, %d a block), context %d",
            self._checkpoint.name,
            self.device,
            seconds,
            self._precision.weights,
            self.plan.num_blocks,
            self.config.block.tokens,
            self.plan.num_bytes / 1e9,
            self.plan.groups.num_groups,
            self.plan.max_model_len,
        )

    async def stop(self) -> None:
        """Also after ``start`` failed or was not called."""
        if self._watch is not None:
            self._watch.cancel()
        if hasattr(self, "thread"):
            await asyncio.to_thread(self.thread.stop)
        if self._backend is not None:
            await asyncio.to_thread(self._backend.close)

    async def wait_broken(self) -> MooncakeError:
        """Return the error once the engine is broken, or a process that computes for it has died: then this node is
        too."""
        ends: list[asyncio.Future[MooncakeError]] = [asyncio.wrap_future(self.thread.broken), self._failure]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def prepare(self, sampling: SamplingParams) -> None:
        """Do outside the engine's thread what would delay its steps. Raises InvalidRequest."""
        if sampling.guide is not None:
            await asyncio.to_thread(self._guides.compile, sampling.guide)

    def chain(self, salt: str = "", adapter: str = "", adapter_start: int = 0) -> Chain:
        return Chain.of(self.fingerprint, salt, adapter, adapter_start)

    def chunk_seed(self, salt: str) -> bytes:
        return chunk_seed(self.fingerprint, salt)

    def encode(self, text: str) -> TokenIds:
        """Loads the tokenizer; for use while a node starts."""
        return self._checkpoint.load_tokenizer().encode(text)

    @property
    def hidden_size(self) -> int:
        return self._checkpoint.config.hidden_size

    def layout_with(self, keep_hidden: tuple[int, ...]) -> KVLayout:
        """The block layout of a node like this one that keeps those layers' inputs. Raises ConfigError."""
        return self._checkpoint.kv_layout(self.config.block.tokens, self._precision.kv_dtype, keep_hidden)

    def sequence(
        self,
        request_id: str,
        tokens: TokenIds,
        num_prompt: int,
        sampling: SamplingParams,
        salt: str,
        *,
        num_to_sample: int | None = None,
        reused: ReusedKV | None = None,
        hold_blocks: bool = False,
        priority: int = 0,
        adapter: str = "",
        adapter_start: int = 0,
        is_chunk: bool = False,
    ) -> Sequence:
        """A sequence for this engine; ``adapter`` is a digest, and acts from token ``adapter_start`` on;
        ``is_chunk``: its blocks get the names of a chunk's. Raises InvalidRequest, ContextTooLong or NotFound when
        it can never run here."""
        loaded = self._adapters.get(adapter)
        return Sequence(
            request_id,
            tokens,
            num_prompt,
            sampling,
            Chain(self.chunk_seed(salt)) if is_chunk else self.chain(salt, adapter, adapter_start),
            eos_ids=self._checkpoint.config.eos_ids,
            max_model_len=self.plan.max_model_len,
            num_to_sample=num_to_sample,
            reused=reused or ReusedKV(),
            hold_blocks=hold_blocks,
            priority=priority,
            adapter=-1 if loaded is None else loaded.place,
            adapter_held=loaded,
        )

    def has_adapter(self, digest: str) -> bool:
        return digest in self._adapters

    async def load_adapter(self, adapter: Adapter) -> None:
        """For sequences from now on. Raises ModelError for one that does not fit the model, or a model that takes
        none, and NodeUnavailable when the engine ends."""
        backend = self._backend
        assert backend is not None
        prepared = await asyncio.to_thread(prepare_adapter, backend, adapter, self._checkpoint.config)
        place = self._adapters.take_place()
        await asyncio.wrap_future(self.thread.call(lambda _: _put(backend, place, prepared)))
        self._adapters.add(adapter, place)

    def drop_adapter(self, digest: str) -> None:
        """For no sequence from now on; those that have it keep it."""
        self._adapters.remove(digest)

    def _free_place(self, place: int) -> None:
        """Called on any thread, even in the middle of other work there, so it only leaves a message."""

        def free() -> None:
            backend = self._backend
            if backend is not None:
                self.thread.call(lambda _: _put(backend, place, None))
                self._adapters.freed(place)

        with contextlib.suppress(RuntimeError):  # the event loop is closed: the node ends
            self._loop.call_soon_threadsafe(free)

    def load(self) -> pb.Load:
        """A snapshot for a heartbeat; numbers may be one step apart."""
        load = self.engine.load()
        return pb.Load(
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            context_tokens=load.context_tokens,
            blocks_total=load.blocks_total,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            blocks_in_use=load.blocks_in_use,
            preemptions=load.preemptions,
            counters={
                "blocks_swapped": load.swapped_blocks,
                "tokens_drafted": load.drafted_tokens,
                "drafts_accepted": load.accepted_tokens,
                "tokens_computed": load.computed_tokens,
                "tokens_blended": load.blended_tokens,
                "tokens_inherited": load.inherited_tokens,
                "sequences_forked": load.forks,
                "blocks_shared_by_forks": load.shared_blocks,
                "blocks_copied_on_write": load.copied_blocks,
                **self.counters,
            },
        )

    def _open_backend(self, size: CacheSize, memory: Mappable | None) -> Backend:
        section, config = self._section, self.config
        processes = Processes(section.tensor_parallel, threads=section.threads, cores=config.node.cores)
        if isinstance(section, PrefillSection):
            stages, context = section.pipeline_stages, section.context_parallel
            processes = replace(processes, stages=stages, context=context)
        spec = BackendSpec(
            self._checkpoint,
            self._precision,
            size,
            self.device,
            processes,
            self._adapters.adapters,
            config.model.max_model_len,
            can_blend=isinstance(section, PrefillSection) and section.blend_share > 0,
        )
        return open_for_node(spec, memory, config.node.step_timeout_s)

    async def _watch_steps(self, hook: NodeHook, timeout_s: float) -> None:
        """Declare the engine broken when a layer of a step takes longer than any step may. Time in which this
        process itself was stopped does not count."""
        every_s, looks, before = min(timeout_s / 4, 1.0), 0, (-1, -1)
        while looks * every_s < timeout_s:
            await asyncio.sleep(every_s)
            now = self.thread.num_done, hook.num_layers
            looks, before = looks + 1 if now == before and not self.thread.is_idle else 0, now
        why = f"no step has ended for {timeout_s:g} s: what computes hangs (node.step_timeout_s)"
        log.critical(why)
        self.thread.give_up(why)

    def _tell_failure(self, error: MooncakeError) -> None:
        """Called on any thread."""

        def tell() -> None:
            if not self._failure.done():
                self._failure.set_result(error)

        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(tell)

    def _read_variant(self) -> Profile | None:
        """Raises ConfigError."""
        section = self._section
        if not isinstance(section, PrefillSection) or not section.variant:
            return None
        profile = read_profile(section.variant)
        profile.check(self.content, self._checkpoint.config.num_layers)
        return profile

    def _publish_events(self) -> None:
        """From the engine's thread to the event log on the event loop."""
        if events := self.engine.block_pool.take_events():
            self._loop.call_soon_threadsafe(self.events.append, events)


def _put(backend: Backend, place: int, prepared: object | None) -> None:
    assert backend.adapters is not None
    backend.adapters.put(place, prepared)
