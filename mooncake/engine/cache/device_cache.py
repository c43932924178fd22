"""A paged cache in GPU memory, and its mirror in host memory, which other nodes read and write.

Block *i* of the mirror stands for block *i* of the cache, so there is a single allocator. Bytes are copied between the
two only on request: computed blocks out, received blocks in. Several GPUs may share a mirror, each with some KV heads
of every block. It does not know whose blocks they are.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mooncake.engine.cache.kv_cache import HERE, Arrival, KVCache, own_memory
from mooncake.engine.contract import AsyncModel, CausalModel, HasVocabulary, HiddenStateModel, StartedStep
from mooncake.errors import ConfigError, MooncakeError, NodeUnavailable
from mooncake.kernels.gpu.kernels import copy_pages
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.model.gpu.device_sampler import Draws
from mooncake.model.pages import TORCH_DTYPES
from mooncake.types import KVLayout

_PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister: for every context, and with a device address


class DeviceCache:
    """``engine.Cache`` on a GPU. Blocks of preempted sequences are kept in pinned host memory."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, num_places: int = 0) -> None:
        dtype = TORCH_DTYPES[layout.dtype]
        row = layout.row_bytes // dtype.itemsize
        shape = (layout.num_layers, layout.num_kinds, layout.num_kv_heads, layout.block_tokens, row)
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_places = num_places
        self.tensor = torch.zeros((num_blocks, *shape), dtype=dtype, device=device)
        # Not torch's pinned memory, which is rounded up to a power of two.
        num_bytes = num_places * layout.block_bytes
        places = np.frombuffer(own_memory(num_bytes), np.uint8, num_bytes)
        self._places = torch.from_numpy(places).view(dtype).view(num_places, *shape)
        if num_places and device.type == "cuda":
            unpin = _pin(places, device, "preempted sequences: lower swap_gb")
            weakref.finalize(self, unpin).atexit = False  # the process and its GPU end together

    def copy_block(self, source: int, target: int) -> None:
        """Synchronous, because the time a copy takes decides whether the next one pays."""
        self._row(target).copy_(self._row(source))
        if self.tensor.is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def _row(self, number: int) -> torch.Tensor:
        return self.tensor[number] if number < self.num_blocks else self._places[number - self.num_blocks]


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several caches has of every block."""

    layout: KVLayout  # of the whole block
    heads: slice  # its KV heads, by their numbers there
    goes_out: bool = True  # False: another one has the same heads, and copies them out


class HostMirror:
    """The ``Mirror`` of a ``DeviceCache``. Copies in one direction run in order, concurrently with the computation
    and with the other direction. Any thread may request them."""

    def __init__(self, cache: DeviceCache, buffer: memoryview | None = None, share: Share | None = None) -> None:
        """Uses ``buffer`` or its own memory, pinned until ``close``; ``share`` None: the cache has whole blocks. Raises
        ConfigError when it cannot be pinned, or a head in it is no run of whole 8-byte words."""
        layout = cache.layout if share is None else share.layout
        host = KVCache(layout, cache.num_blocks, buffer)
        self.memory = host.memory
        # What is copied are runs: a layer of a block, or keys or values of some heads, which do not lie beside others.
        self._runs_a_layer = 1 if layout == cache.layout else layout.num_kinds
        self._runs_a_block = layout.num_layers * self._runs_a_layer
        own = host.tensor if share is None else host.tensor[:, :, :, share.heads]
        self._host, self._device = self._runs(own), self._runs(cache.tensor)
        if self._device[0].nbytes % 8:
            raise ConfigError("a GPU's part of a layer is no run of whole 8-byte words: make block.tokens even")
        self._goes_out = share is None or share.goes_out
        is_pinned = cache.tensor.is_cuda
        self._unpin = _pin(self.memory, cache.tensor.device, "the cache's mirror: lower kv_gb") if is_pinned else None
        self._out, self._in = (_Lane(cache.tensor.device, self._runs_a_block) for _ in range(2))
        # Compiled now: the first hand-off would wait for it. Block 0 comes back as it was.
        self._copy(self._in, self._host, self._device, [0], None, False).wait()
        self._copy(self._out, self._device, self._host, [0], None, True).wait()

    def to_host(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        """Ordered after what the calling thread has started on the device."""
        if not self._goes_out:
            return HERE
        return self._copy(self._out, self._device, self._host, block_ids, layer, True)

    def to_device(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        """Starts at once: between a block's reservation and this call, nothing on the device touches it."""
        return self._copy(self._in, self._host, self._device, block_ids, layer, False)

    def settle(self) -> None:
        """Return once what the calling thread has started on the device is done, and all copies out of it."""
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()
        self._out.settle()

    def failure(self) -> str:
        """``settle``, and what the GPU's fault is, after which it does nothing for this process any more; "": none."""
        try:
            self.settle()
        except RuntimeError as error:
            return str(error)
        return ""

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a GPU that has failed
            self._in.settle()
            self.settle()
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    def _runs(self, pages: torch.Tensor) -> torch.Tensor:
        """``pages`` ``[N, layers, K|V, Hkv, block_tokens, D]`` as ``[runs, ...]`` over the same memory."""
        leading = 2 if self._runs_a_layer == 1 else 3
        return pages.view(len(pages) * self._runs_a_block, *pages.shape[leading:])

    def _copy(
        self,
        lane: _Lane,
        source: torch.Tensor,
        target: torch.Tensor,
        block_ids: Sequence[int],
        layer: int | None,
        is_behind: bool,
    ) -> Arrival:
        if layer is None:
            return lane.copy(source, target, block_ids, self._runs_a_block, is_behind)
        first = layer * self._runs_a_layer
        return lane.copy(source[first:], target[first:], block_ids, self._runs_a_layer, is_behind)


def _pin(memory: npt.NDArray[np.uint8], device: torch.device, purpose: str) -> Callable[[], None]:
    """Let ``device`` copy to and from ``memory``, until the function that is returned is called. ConfigError: the
    system does not allow so much."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):  # else it would take memory of GPU 0
        error = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE_AND_MAPPED)
    if int(error):
        raise ConfigError(f"CUDA cannot pin {memory.nbytes / 1e9:.2f} GB of host memory for {purpose} ({error})")

    def unpin() -> None:
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(memory.ctypes.data)

    return unpin


class SettledModel:
    """A model whose forward pass leaves nothing running when it returns or raises, neither kernels nor copies of
    their results. So between two steps a block can be given to anybody, except those held by a started step that is
    running."""

    def __init__(self, model: CausalModel, mirror: HostMirror) -> None:
        self._model = model
        self._async_model = model if isinstance(model, AsyncModel) else None
        self._mirror = mirror
        self._tell: Callable[[MooncakeError], None] = lambda _: None

    def watch(self, tell: Callable[[MooncakeError], None]) -> None:
        """Call ``tell`` once a step finds that the GPU has failed: each later one would fail, too."""
        self._tell = tell

    @property
    def config(self) -> HasVocabulary:
        return self._model.config

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size if isinstance(self._model, HiddenStateModel) else 0

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        with self._settled_after_failure():
            logits = self._model.forward(batch, cache, hook)
            self._mirror.settle()
            return logits

    @property
    def max_async_sequences(self) -> int:
        return self._async_model.max_async_sequences if self._async_model is not None else 0

    def start(
        self, batch: ForwardBatch, cache: torch.Tensor, draws: Draws | None, newest: Sequence[int] | None = None
    ) -> StartedStep:
        """Nothing that such a step computes is copied out before it is done."""
        assert self._async_model is not None
        with self._settled_after_failure():
            return self._async_model.start(batch, cache, draws, newest)

    @contextlib.contextmanager
    def _settled_after_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if failure := self._mirror.failure():
                self._tell(NodeUnavailable(f"the GPU has failed: {failure.splitlines()[0]}"))
            raise


class _Lane:
    """Copies in one direction, on their own stream; in Triton's interpreter each is done when it returns."""

    def __init__(self, device: torch.device, runs_a_block: int) -> None:
        # With few programs, scheduled before the waiting ones of the computation.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._runs_a_block = runs_a_block
        self._asked: tuple[tuple[int, ...], int] = (), 0  # blocks, and how many runs of each
        self._runs = torch.empty(0, dtype=torch.int64, device=device)  # the same, on the device

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        block_ids: Sequence[int],
        count: int,
        is_behind: bool,
    ) -> Arrival:
        """Copy the first ``count`` runs of these blocks of ``source`` to the same places of ``target``; with
        ``is_behind``, after everything the calling thread has started on the device."""
        if not block_ids:
            return HERE
        with self._lock:
            if self._stream is None:
                copy_pages(source, target, *self._places(block_ids, count))
                return HERE
            device = self._stream.device
            computing = torch.cuda.current_stream(device)
            # Most threads' own GPU is the first: without the guard, leaving the stream would take some of its memory.
            with torch.cuda.device(device), torch.cuda.stream(self._stream):
                if is_behind:
                    self._stream.wait_stream(computing)
                copy_pages(source, target, *self._places(block_ids, count))
                return _Copied(self._stream)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _places(self, block_ids: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached, because consecutive layers ask for the same blocks."""
        if (tuple(block_ids), count) != self._asked:
            self._asked = tuple(block_ids), count
            firsts = np.asarray(block_ids, np.int64)[:, None] * self._runs_a_block
            runs = torch.from_numpy((firsts + np.arange(count)).ravel())
            if self._stream is not None:  # otherwise the host would wait for the device's earlier work
                runs = runs.pin_memory()
            self._runs = runs.to(self._runs.device, non_blocking=True)
        return self._runs, self._runs


class _Copied:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
