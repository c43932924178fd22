"""A paged cache in GPU memory, and its mirror in host memory, which other nodes read and write.

Block *i* of the mirror stands for block *i* of the cache, so there is a single allocator. Bytes are copied between the
two only on request: computed blocks out, received blocks in. It does not know whose blocks they are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from mooncake.engine.contract import CausalModel, HasVocabulary, StartedStep, StartingModel
from mooncake.engine.kv_cache import HERE, Arrival, KVCache
from mooncake.errors import ConfigError
from mooncake.kernels.gpu import copy_pages
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.model.device_sampler import Draws
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
        self._places = torch.empty((num_places, *shape), dtype=dtype, pin_memory=device.type == "cuda")

    def copy_block(self, source: int, target: int) -> None:
        """Synchronous, because the time a copy takes decides whether the next one pays."""
        self._row(target).copy_(self._row(source))
        if self.tensor.is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def _row(self, number: int) -> torch.Tensor:
        return self.tensor[number] if number < self.num_blocks else self._places[number - self.num_blocks]


class HostMirror:
    """The ``Mirror`` of a ``DeviceCache``. Copies in one direction run in order, concurrently with the computation
    and with the other direction. Any thread may request them."""

    def __init__(self, cache: DeviceCache, buffer: memoryview | None = None) -> None:
        """Uses ``buffer`` or its own memory, pinned until ``close``. Raises ConfigError when it cannot be pinned."""
        host = KVCache(cache.layout, cache.num_blocks, buffer)
        self.memory = host.memory
        self._host, self._device = host.tensor, cache.tensor
        self._is_pinned = cache.tensor.is_cuda
        if self._is_pinned:
            self._pin()
        self._out, self._in = (_Lane(cache.tensor.device) for _ in range(2))

    def to_host(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        """Ordered after what the calling thread has started on the device."""
        return self._out.copy(self._device, self._host, block_ids, layer, True)

    def to_device(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        """Starts at once: between a block's reservation and this call, nothing on the device touches it."""
        return self._in.copy(self._host, self._device, block_ids, layer, False)

    def settle(self) -> None:
        """Return once what the calling thread has started on the device is done, and all copies out of it."""
        if self._is_pinned:
            torch.cuda.current_stream(self._device.device).synchronize()
        self._out.settle()

    def close(self) -> None:
        self._in.settle()
        self.settle()
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)  # type: ignore[no-untyped-call]

    def _pin(self) -> None:
        size = self.memory.nbytes
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(self.memory.ctypes.data, size, _PORTABLE_AND_MAPPED)
        if int(error):
            raise ConfigError(
                f"CUDA cannot pin {size / 1e9:.2f} GB of host memory for the cache's mirror ({error}): lower kv_gb"
            )


class SettledModel:
    """A model whose forward pass leaves nothing running when it returns or raises, neither kernels nor copies of
    their results. So between two steps a block can be given to anybody, except those held by a started step that is
    running."""

    def __init__(self, model: CausalModel, mirror: HostMirror) -> None:
        self._model = model
        self._starting = model if isinstance(model, StartingModel) else None
        self._mirror = mirror

    @property
    def config(self) -> HasVocabulary:
        return self._model.config

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        try:
            return self._model.forward(batch, cache, hook)
        finally:
            self._mirror.settle()

    @property
    def most_started(self) -> int:
        return self._starting.most_started if self._starting is not None else 0

    def start(
        self, batch: ForwardBatch, cache: torch.Tensor, draws: Draws | None, newest: Sequence[int] | None = None
    ) -> StartedStep:
        """Nothing that such a step computes is copied out before it is done."""
        assert self._starting is not None
        try:
            return self._starting.start(batch, cache, draws, newest)
        except BaseException:
            self._mirror.settle()
            raise


class _Lane:
    """Copies in one direction, on their own stream; in Triton's interpreter each is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        # With few programs, scheduled before the waiting ones of the computation.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._block_ids: tuple[int, ...] = ()
        self._pages = torch.empty(0, dtype=torch.int64, device=device)  # the same, on the device

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        block_ids: Sequence[int],
        layer: int | None,
        is_behind: bool,
    ) -> Arrival:
        """Copy these blocks of ``source``, or one layer of them, to the same places of ``target``; with
        ``is_behind``, after everything the calling thread has started on the device."""
        if not block_ids:
            return HERE
        if layer is not None:
            source, target = source[:, layer], target[:, layer]
        with self._lock:
            if self._stream is None:
                copy_pages(source, target, *self._page_lists(block_ids))
                return HERE
            computing = torch.cuda.current_stream(self._stream.device)
            with torch.cuda.stream(self._stream):
                if is_behind:
                    self._stream.wait_stream(computing)
                copy_pages(source, target, *self._page_lists(block_ids))
                return _Copied(self._stream)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _page_lists(self, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached, because consecutive layers ask for the same blocks."""
        if tuple(block_ids) != self._block_ids:
            self._block_ids = tuple(block_ids)
            pages = torch.tensor(self._block_ids)
            if self._stream is not None:  # otherwise the host would wait for the device's earlier work
                pages = pages.pin_memory()
            self._pages = pages.to(self._pages.device, non_blocking=True)
        return self._pages, self._pages


class _Copied:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
