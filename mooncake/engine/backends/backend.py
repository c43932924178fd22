"""What an engine computes with: a model on one processor, on a GPU or over several processes, and the cache beside it.

The one place that knows which of them go together. It must not know requests or steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.distributed import is_nccl_available

from mooncake.adapters import Adapter
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.backends.cards import check_gpus_here, first_of, is_interpreted
from mooncake.engine.cache.kv_cache import KVCache, Mirror
from mooncake.engine.contract import Cache, CausalModel
from mooncake.engine.decoding.draft_model import DraftModel
from mooncake.errors import ConfigError, ModelError, MooncakeError
from mooncake.kernels import Kernels
from mooncake.kernels.cpu_threads import num_threads
from mooncake.model import load_model
from mooncake.model.decoder import Decoder
from mooncake.model.llama import CausalLM
from mooncake.model.lora import AdapterPlaces, load_adapter
from mooncake.model.pages import TORCH_DTYPES, Mappable, SharedMemory
from mooncake.model_config import ModelConfig
from mooncake.page_groups import UNIFORM, PageGroups, as_one_group, groups_of
from mooncake.precision import Precision, resolve_precision
from mooncake.prefault import prefault_in_background
from mooncake.types import KVLayout


@dataclass(frozen=True, slots=True)
class CacheSize:
    layout: KVLayout
    num_blocks: int
    max_model_len: int  # tokens
    num_places: int = 0  # for blocks of preempted sequences
    max_sequences: int = 64  # in one step
    groups: PageGroups = UNIFORM  # of layers, if ``layout`` is of their pages
    max_step_tokens: int = 0  # of prompts, in one step; 0: whole prompts
    why: str = ""  # so many blocks, where that was left to the machine

    @property
    def num_bytes(self) -> int:
        """Without the places."""
        return self.num_blocks * self.layout.block_bytes


@dataclass(frozen=True, slots=True)
class Processes:
    """Over how many processes of this machine one engine computes, and how: of the three, one at most is not 1.

    Each tensor parallel rank and each stage of a pipeline has ``threads``, and a stage as many of ``cores`` where there
    are enough; the ranks of a context share those of this process.
    """

    tensor: int = 1
    stages: int = 1
    context: int = 1
    threads: int = 0
    cores: Sequence[int] = ()

    @property
    def count(self) -> int:
        return max(self.tensor, self.stages, self.context)


ALONE = Processes()


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Which model to compute with, how precisely, over which cache and where."""

    checkpoint: Checkpoint
    precision: Precision
    size: CacheSize
    device: str = "cpu"  # or the name of a GPU: the first one's, where there are several
    processes: Processes = ALONE
    adapters: Sequence[Adapter] = ()
    context: int = 0  # tokens that the model was opened for; 0: what it reads
    can_blend: bool = False  # whether batches may have ``reuse``: on CPUs alone

    @property
    def asked_context(self) -> int:
        """Tokens. For processes that open the model themselves: the cache may be for fewer."""
        return self.checkpoint.config.context(self.context)


@dataclass(frozen=True, slots=True)
class Backend:
    """``mirror`` is the cache as other nodes see it, where there are any; ``close`` ends what was started for it, and
    ``watch`` has its argument called, on some thread, once that has died by itself. ``adapters``: where more of them
    can be put, if the model takes any."""

    model: CausalModel
    cache: Cache
    mirror: Mirror | None = None
    close: Callable[[], None] = lambda: None
    watch: Callable[[Callable[[MooncakeError], None]], None] = lambda _: None
    adapters: AdapterPlaces | None = None


def prepare_adapter(backend: Backend, adapter: Adapter, config: ModelConfig) -> object:
    """For ``backend.adapters.put``; any thread may call it. Raises ModelError, also where the model takes none."""
    if backend.adapters is None:
        raise ModelError("adapters are for the Llama family, computed by one process and without model.key_scales")
    return backend.adapters.prepare(load_adapter(adapter, config))


def plan_pages(
    checkpoint: Checkpoint, layout: KVLayout, context: int, num_processes: int = 1
) -> tuple[PageGroups, KVLayout]:
    """In which groups layers keep KV there, in sequences of up to ``context`` tokens, and what a page of a group is,
    where ``layout`` is a whole block. Over several processes all layers are one group."""
    config = checkpoint.config
    groups = groups_of(config, context, layout) if num_processes == 1 else as_one_group(config, layout)
    return groups, groups.page_layout(layout)


def open_backend(spec: BackendSpec, memory: Mappable | None = None) -> Backend:
    """For an engine on its own. ``memory`` is for a cache that other processes map (None: the backend's own). Raises as
    the others do."""
    _check_processes(spec)
    processes = spec.processes
    if processes.tensor > 1:
        return over_ranks(spec, memory) if spec.device == "cpu" else over_gpus(spec)
    if processes.stages > 1:
        return over_stages(spec)
    return on_cpu(spec) if spec.device == "cpu" else on_gpu(spec)


def open_for_node(spec: BackendSpec, memory: Mappable | None = None, timeout_s: float = 0.0) -> Backend:
    """The same with a cache that others see, in ``memory`` or in memory of its own. ``timeout_s``: what no step takes,
    and so no copy of blocks on another GPU (0: never mind)."""
    _check_processes(spec)
    processes = spec.processes
    if processes.tensor > 1 and spec.device != "cpu":
        with contextlib.ExitStack() as opened:
            shared = memory or opened.enter_context(contextlib.closing(SharedMemory.create(spec.size.num_bytes)))
            return over_gpus(spec, shared, timeout_s)
    if processes.tensor > 1 or processes.stages > 1:
        return open_backend(spec, memory)
    if spec.device == "cpu":
        return on_cpu(spec, memory)
    if spec.can_blend:
        raise ConfigError("prefill.blend_share is for prefill nodes on CPUs")
    if spec.size.layout.inputs_of:
        raise ConfigError("model.keep_hidden is for nodes on CPUs")
    backend = on_gpu(spec)
    from mooncake.engine.cache.device_cache import DeviceCache, HostMirror, SettledModel

    assert isinstance(backend.cache, DeviceCache)
    mirror = HostMirror(backend.cache, None if memory is None else memory.buffer)
    settled = SettledModel(backend.model, mirror)
    return replace(backend, model=settled, mirror=mirror, close=mirror.close, watch=settled.watch)


def _check_processes(spec: BackendSpec) -> None:
    """Raises ModelError where layers that keep states cannot run, or a model without a head is of no use."""
    if spec.checkpoint.config.recurrence and spec.processes.count > 1:
        raise ModelError(f"{spec.checkpoint.name} has recurrent layers, which run in one process")
    many = spec.processes.stages > 1 or (spec.processes.tensor > 1 and spec.device != "cpu")
    if many and not spec.checkpoint.config.has_head:
        what = "stages and tensor parallel GPUs, which embed nothing"
        raise ModelError(f"{spec.checkpoint.name} has no output head, and so is not for {what}")


def draft_on(
    device: str, path: str, dtype: str, size: CacheSize, vocab_size: int, max_tokens: int, chunk_tokens: int
) -> DraftModel:
    """The model at ``path``, to draft up to ``max_tokens`` at once for the sequences in a cache of this size. Its own
    has room for all of them, if that takes no more memory, and for one in any case. Raises ConfigError when it has
    another vocabulary or may not draft, and as the others do."""
    checkpoint = open_checkpoint(path, size.max_model_len)
    if checkpoint.config.vocab_size != vocab_size:
        raise ConfigError(f"the draft model {path} has another vocabulary")
    if not max_tokens:
        raise ConfigError("a draft model needs speculative_tokens")
    if not checkpoint.config.has_head:
        raise ConfigError(f"the draft model {path} has no output head")
    if checkpoint.config.recurrence:
        raise ConfigError(f"the draft model {path} has recurrent layers, which take no token back")
    precision = resolve_precision(dtype, devices=(device,), stored=checkpoint.coding)
    layout = checkpoint.kv_layout(size.layout.block_tokens, precision.kv_dtype)
    max_model_len = min(size.max_model_len, checkpoint.config.max_model_len)
    one, draft = (-(-count // layout.block_tokens) for count in (max_model_len, max_tokens))
    as_many = min(size.num_blocks, size.num_bytes // layout.block_bytes)  # a page there may be no whole block
    num_blocks = max(as_many, one) + draft
    its_size = replace(
        size, layout=layout, groups=UNIFORM, num_blocks=num_blocks, max_model_len=max_model_len, num_places=0
    )
    backend = open_backend(BackendSpec(checkpoint, precision, its_size, device))
    return DraftModel(backend.model, backend.cache, max_tokens, max_model_len, chunk_tokens)


def on_cpu(spec: BackendSpec, memory: Mappable | None = None) -> Backend:
    """The cache lies in ``memory``, where it is given. With a context of several processes the tokens of prompts are
    cut over them, and they share the threads of this one. Raises ModelError."""
    checkpoint, precision, size = spec.checkpoint, spec.precision, spec.size
    model = _model(spec)
    cache = KVCache(size.layout, size.num_blocks, None if memory is None else memory.buffer, size.num_places)
    if memory is None:  # else whoever lent it sees to that
        prefault_in_background(cache.memory)
    num_ranks = spec.processes.context
    if num_ranks == 1:
        places = model.adapter_places if isinstance(model, CausalLM) and not precision.key_scales else None
        return Backend(model, cache, mirror=cache, adapters=places)
    if spec.adapters or precision.key_scales or spec.can_blend:
        raise ModelError("context parallelism goes without adapters, model.key_scales and blending")
    from mooncake.model.parallel.context_parallel import ContextParallelModel, Setup

    setup = Setup(
        size=num_ranks,
        model=str(checkpoint.path),
        max_model_len=checkpoint.config.max_model_len,
        positions=size.max_model_len,
        weights=precision.weights,
        kv_dtype=precision.kv_dtype,
        threads=max(num_threads() // num_ranks, 1),
    )
    cut = ContextParallelModel(model, setup, checkpoint)
    return Backend(cut, cache, cache, cut.close)


def on_gpu(spec: BackendSpec) -> Backend:
    """Decode steps are replayed as CUDA graphs, which are captured here. In Triton's interpreter (TRITON_INTERPRET=1)
    the same kernels run on the CPU, step by step. Raises ConfigError without this GPU, ModelError as ``load_model``."""
    checkpoint, precision, size, device = spec.checkpoint, spec.precision, spec.size, spec.device
    _check_gpus(checkpoint, device)
    if precision.weights.coding and checkpoint.config.num_experts:
        raise ModelError(f'{checkpoint.name} is a mixture, and experts on GPUs are values: model.weights="auto"')
    from mooncake.engine.cache.device_cache import DeviceCache
    from mooncake.kernels.gpu.triton_launch import INTERPRETED
    from mooncake.model.gpu.gpu_model import BUCKETS, GpuModel, fitting_into

    buckets = () if INTERPRETED or not checkpoint.config.has_head else BUCKETS
    whose = "gpu_memory_utilization (lower it)" if size.why else "kv_gb"
    with fitting_into(device, f"the weights and a cache by {whose}"):
        gpu = GpuModel(
            lambda kernels: _model(spec, kernels),
            max_blocks=-(-size.max_model_len // size.layout.block_tokens),
            dtype=TORCH_DTYPES[precision.weights.dtype],
            device=None if INTERPRETED else device,
            buckets=buckets,
            groups=size.groups,
        )
        cache = DeviceCache(size.layout, size.num_blocks, gpu.kernels.device, size.num_places)
        gpu.warm_up(cache.tensor, size.max_sequences, size.max_step_tokens)
        return Backend(gpu, cache, adapters=None if precision.key_scales else gpu.adapter_places)


def over_gpus(spec: BackendSpec, memory: Mappable | None = None, timeout_s: float = 0.0) -> Backend:
    """Tensor parallelism over GPUs of this machine from ``spec.device`` on, each with a process and its part of the
    cache; the mirror is in ``memory``, where it is given. ``timeout_s`` as for ``open_for_node``. Raises ConfigError
    where there are fewer GPUs or too small ones, ModelError when the model cannot be cut so."""
    checkpoint, precision, size, num_ranks = spec.checkpoint, spec.precision, spec.size, spec.processes.tensor
    if precision.weights.coding or precision.weights.codes:
        raise ModelError(
            'tensor parallelism over GPUs takes float32 or bfloat16 weights (model.weights="plain" dequantises stored '
            "codes)"
        )
    if precision.key_scales:
        raise ModelError("tensor parallelism takes no model.key_scales")
    _check_gpus(checkpoint, spec.device, num_ranks)
    from mooncake.engine.backends.gpu_ranks import Setup, TensorParallelGpuModel

    setup = Setup(
        size=num_ranks,
        model=str(checkpoint.path),
        max_model_len=size.max_model_len,
        weights=precision.weights,
        layout=size.layout,
        num_blocks=size.num_blocks,
        num_places=size.num_places,
        max_sequences=size.max_sequences,
        max_step_tokens=size.max_step_tokens,
        first_gpu=first_of(spec.device),
    )
    model = TensorParallelGpuModel(setup, memory, timeout_s)
    return Backend(model, model, model.mirror, model.close, model.watch)


def _check_gpus(checkpoint: Checkpoint, device: str, count: int = 1) -> None:
    """Raises ConfigError without Triton, or without so many GPUs from ``device`` on; ModelError for latent rows that
    are too wide, and too many wide query heads of a KV head."""
    interpreted = is_interpreted(device)
    from mooncake.kernels.gpu.attention import fits_a_tile
    from mooncake.kernels.gpu.latent import MOST_LATENT_DIM

    config = checkpoint.config
    if config.latent and config.head_dim > MOST_LATENT_DIM:
        raise ModelError(f"{checkpoint.name} keeps more of a token than the {MOST_LATENT_DIM} numbers that GPUs take")
    if not config.latent and not all(
        fits_a_tile(config.num_heads, *config.heads_of(layer)) for layer in config.kv_owners
    ):
        raise ModelError(f"{checkpoint.name} has more than 64 query heads of more than 128 numbers for one KV head")
    if interpreted:
        return
    check_gpus_here(device, count)
    if count > 1 and not is_nccl_available():
        raise ConfigError("tensor parallelism over GPUs needs a torch with NCCL")


def over_ranks(spec: BackendSpec, memory: Mappable | None = None) -> Backend:
    """Tensor parallelism over processes of this machine; the cache lies in ``memory``, where it is given, and is its
    own mirror. Raises ModelError when the model cannot be cut so."""
    from mooncake.model.parallel.tensor_parallel import TensorParallelModel

    precision, size, processes = spec.precision, spec.size, spec.processes
    if "w8a8" in (precision.weights.coding, precision.weights.codes):
        raise ModelError(
            "tensor parallelism takes no W8A8: each rank would quantise its part of the activations alone "
            '(model.weights="plain" dequantises stored codes)'
        )
    if precision.key_scales:
        raise ModelError("tensor parallelism takes no model.key_scales")
    with contextlib.ExitStack() as opened:
        shared = memory or opened.enter_context(contextlib.closing(SharedMemory.create(size.num_bytes)))
        model = TensorParallelModel(
            str(spec.checkpoint.path),
            processes.tensor,
            precision,
            shared,
            size.layout,
            size.num_blocks,
            spec.asked_context,
            processes.threads,
        )
    cache = KVCache(size.layout, size.num_blocks, shared.buffer, size.num_places)
    if memory is None:  # else whoever lent it sees to that
        prefault_in_background(cache.memory)
    return Backend(model, cache, mirror=cache, close=model.close, watch=model.watch)


def over_stages(spec: BackendSpec) -> Backend:
    """A pipeline of processes of this machine; the cache is its own mirror. Raises ModelError when the model cannot be
    cut so."""
    from mooncake.model.parallel.pipeline import PipelineModel

    precision, size, processes = spec.precision, spec.size, spec.processes
    if precision.key_scales:
        raise ModelError("pipeline stages do not take model.key_scales")
    memory = SharedMemory.create(size.num_bytes)
    try:
        model = PipelineModel(
            str(spec.checkpoint.path),
            precision,
            memory,
            size.layout,
            size.num_blocks,
            processes.stages,
            spec.asked_context,
            processes.threads,
            processes.cores,
        )
    finally:
        memory.close()
    cache = KVCache(size.layout, size.num_blocks, memory.bytes.data, size.num_places)
    return Backend(model, cache, mirror=cache, close=model.close, watch=model.watch)


def _model(spec: BackendSpec, kernels: Kernels | None = None) -> CausalLM | Decoder:
    precision = spec.precision
    return load_model(
        spec.checkpoint,
        precision.weights,
        spec.size.max_model_len,
        kernels,
        adapters=spec.adapters,
        key_scales=precision.key_scales,
        can_blend=spec.can_blend,
        keep_hidden=spec.size.layout.inputs_of,
    )
