"""One engine with everything that a node needs around it: model, paged cache, thread, step times, events.

Both compute roles build on it; what differs between them (where KV comes from and goes to) stays in their own packages.
It knows nothing of gRPC calls, hand-offs or the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter

import torch

from mooncake.adapters import AdapterTable, open_adapters, parse_adapters
from mooncake.checkpoint import Checkpoint
from mooncake.common_settings import node_settings
from mooncake.config import Config, EngineSection
from mooncake.engine.backends.backend import Backend, open_for_node
from mooncake.engine.contract import StepHook
from mooncake.engine.decoding.draft_model import DraftModel
from mooncake.engine.engine import Engine
from mooncake.engine.hosting.configured import backend_spec, engine_config, open_drafter, plan_cache, read_variant
from mooncake.engine.hosting.live_adapters import LiveAdapters
from mooncake.engine.hosting.node_hook import NodeHook, StepSamples
from mooncake.engine.hosting.warm_up import warm_up
from mooncake.engine.loop import EngineThread, RestAfter, watch_steps
from mooncake.engine.reused_kv import ReusedKV
from mooncake.engine.sequence import Sequence
from mooncake.errors import MooncakeError
from mooncake.events import EventLog
from mooncake.guides import Guides
from mooncake.hashing import Chain, chunk_seed, kv_fingerprint
from mooncake.kernels.cpu_threads import use_threads
from mooncake.model.pages import Mappable
from mooncake.pooling import Pooling
from mooncake.rpc import cluster_pb2 as pb
from mooncake.sampling import SamplingParams
from mooncake.types import KVLayout, TokenIds
from mooncake.vital import vital

log = logging.getLogger(__name__)


class HostPlan:
    """What a node's engine will be: known, and comparable with the cluster's, before anything is loaded."""

    def __init__(self, config: Config, section: EngineSection, checkpoint: Checkpoint) -> None:
        """Raises ConfigError, and ModelError for an adapter that cannot be read."""
        self.config = config
        self.section = section
        self.checkpoint = checkpoint
        self.cache_size = plan_cache(config, section, checkpoint)
        self.precision = config.precision(checkpoint.coding)
        self.content = self.precision.identity(checkpoint.digest)
        self.fingerprint = kv_fingerprint(self.content, self.cache_size.layout, self.cache_size.groups.name)
        self.max_model_len = checkpoint.config.context(config.model.max_model_len)  # asked for: the cache's may be less
        self.settings = node_settings(config, checkpoint)
        self.variant = read_variant(section, self.content, checkpoint.config.num_layers)
        self.limits = engine_config(config, section, self.cache_size, self.variant)
        self.adapters = open_adapters(parse_adapters(config.model.adapters))


class EngineHost:
    """Owns the engine of one node, on the event loop that it publishes its block events on. ``open`` it, then ``run``
    it."""

    def __init__(
        self, plan: HostPlan, backend: Backend, adapters: AdapterTable, drafter: DraftModel | None, events: EventLog
    ) -> None:
        """Use ``open``."""
        model = plan.checkpoint.config
        assert backend.mirror is not None
        self.config = plan.config
        self.cache_size = plan.cache_size
        self.content = plan.content
        self.variant = plan.variant
        self.samples = StepSamples()
        self.counters: Counter[str] = Counter()  # kept by roles, for heartbeats
        self.mirror = backend.mirror  # the cache, as other nodes see it
        self._guides = Guides(plan.checkpoint.load_tokenizer, model.vocab_size)
        self.engine = Engine(backend.model, backend.cache, plan.limits, self._guides, drafter)
        self.thread = EngineThread(self.engine)
        self.adapters = LiveAdapters(adapters, backend, self.thread, model)
        self._plan = plan
        self._checkpoint = plan.checkpoint
        self._backend = backend
        self._events = events
        self._hook: NodeHook | None = None  # once it runs
        self._watch: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[MooncakeError] = self._loop.create_future()
        backend.watch(self._tell_failure)

    @classmethod
    async def open(cls, plan: HostPlan, events: EventLog, memory: Mappable | None = None) -> EngineHost:
        """Load the model, place the cache or its mirror in ``memory`` (or memory of its own), and measure a few steps.

        Raises ModelError for weights that cannot be loaded, ConfigError for a missing device.
        """
        config, section, size = plan.config, plan.section, plan.cache_size
        if section.threads:
            use_threads(section.threads)
            torch.set_num_threads(min(section.threads, torch.get_num_threads()))
        started_s, vocab_size = time.monotonic(), plan.checkpoint.config.vocab_size
        log.info("reading %s for %s", plan.checkpoint.name, section.device)
        adapters = AdapterTable(plan.adapters)
        spec = backend_spec(config, section, plan.checkpoint, plan.precision, size, adapters.adapters)
        backend = await asyncio.to_thread(open_for_node, spec, memory, config.node.step_timeout_s)
        try:
            drafter = await asyncio.to_thread(open_drafter, config, section, size, vocab_size)
            host = cls(plan, backend, adapters, drafter, events)
            await asyncio.to_thread(warm_up, host.engine, vocab_size, host.samples)
        except BaseException:
            await asyncio.to_thread(backend.close)
            raise
        host._log_ready(time.monotonic() - started_s)
        return host

    def run(self, hook: StepHook, rest_after: RestAfter | None = None) -> None:
        """Start stepping; see ``EngineThread.start``."""
        node_hook = self._hook = NodeHook(hook, self.samples, self._publish_events)
        self.thread.start(node_hook, rest_after)
        if timeout_s := self.config.node.step_timeout_s:
            watch = watch_steps(self.thread, lambda: node_hook.num_layers, timeout_s)
            self._watch = vital(watch, "watch steps")

    @property
    def has_computed_prompts(self) -> bool:
        """Whether the last step computed part of a prompt."""
        return self._hook is not None and self._hook.computed_prompts

    def _log_ready(self, seconds: float) -> None:
        size = self.cache_size
        log.info(
            "%s ready on %s in %.1f s: weights %s, %d pages of %d tokens (%.2f GB, %d a block%s), context %d, steps of "
            "%d prompt tokens and %d sequences",
            self._checkpoint.name,
            self._plan.section.device,
            seconds,
            self._plan.precision.weights,
            size.num_blocks,
            self.config.block.tokens,
            size.num_bytes / 1e9,
            size.groups.num_groups,
            f"; {size.why}" if size.why else "",
            size.max_model_len,
            size.max_step_tokens or size.max_model_len,
            size.max_sequences,
        )

    async def stop(self) -> None:
        """Whether or not it runs."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self.thread.stop)
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
        return Chain.of(self._plan.fingerprint, salt, adapter, adapter_start)

    def chunk_seed(self, salt: str) -> bytes:
        return chunk_seed(self._plan.fingerprint, salt)

    def encode(self, text: str) -> TokenIds:
        """Loads the tokenizer; for use while a node starts."""
        return self._checkpoint.load_tokenizer().encode(text)

    @property
    def hidden_size(self) -> int:
        return self._checkpoint.config.hidden_size

    def layout_with(self, keep_hidden: tuple[int, ...]) -> KVLayout:
        """The block layout of a node like this one that keeps those layers' inputs. Raises ConfigError."""
        return self._checkpoint.kv_layout(self.config.block.tokens, self._plan.precision.kv_dtype, keep_hidden)

    def sequence(
        self,
        request_id: str,
        tokens: TokenIds,
        num_prompt: int,
        sampling: SamplingParams,
        chain: Chain,
        *,
        num_to_sample: int | None = None,
        reused: ReusedKV | None = None,
        hold_blocks: bool = False,
        priority: int = 0,
        adapter: str = "",
        pooling: Pooling | None = None,
    ) -> Sequence:
        """A sequence for this engine. ``chain`` names its blocks; ``adapter`` is a digest, and acts from token
        ``chain.start`` on. Raises InvalidRequest, ContextTooLong or NotFound when it can never run here."""
        loaded = self.adapters.get(adapter)
        return Sequence(
            request_id,
            tokens,
            num_prompt,
            sampling,
            chain,
            eos_ids=self._checkpoint.config.eos_ids,
            max_model_len=self.cache_size.max_model_len,
            num_to_sample=num_to_sample,
            reused=reused or ReusedKV(),
            hold_blocks=hold_blocks,
            priority=priority,
            adapter=-1 if loaded is None else loaded.place,
            adapter_held=loaded,
            pooling=pooling,
        )

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

    def _tell_failure(self, error: MooncakeError) -> None:
        """Called on any thread."""

        def tell() -> None:
            if not self._failure.done():
                self._failure.set_result(error)

        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(tell)

    def _publish_events(self) -> None:
        """From the engine's thread to the event log on the event loop."""
        if events := self.engine.block_pool.take_events():
            self._loop.call_soon_threadsafe(self._events.append, events)
