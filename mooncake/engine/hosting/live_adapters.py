"""The adapters of a node's engine, which come and go while it computes: a place in the model is used again once no
sequence refers to what was there."""

from __future__ import annotations

import asyncio
import contextlib

from mooncake.adapters import Adapter, AdapterTable, LoadedAdapter
from mooncake.engine.backends.backend import Backend, prepare_adapter
from mooncake.engine.loop import EngineThread
from mooncake.model_config import ModelConfig


class LiveAdapters:
    """Made on the event loop that calls it. ``table`` has those that the model was opened with."""

    def __init__(self, table: AdapterTable, backend: Backend, thread: EngineThread, model: ModelConfig) -> None:
        self._table = table
        self._backend = backend
        self._thread = thread
        self._model = model
        self._loop = asyncio.get_running_loop()

    def get(self, digest: str) -> LoadedAdapter | None:
        """None for no adapter (""). Raises NotFound when it is not here."""
        return self._table.get(digest)

    def has_adapter(self, digest: str) -> bool:
        return digest in self._table

    async def load_adapter(self, adapter: Adapter) -> None:
        """For sequences from now on. Raises ModelError for one that does not fit the model, or a model that takes
        none, and NodeUnavailable when the engine ends."""
        prepared = await asyncio.to_thread(prepare_adapter, self._backend, adapter, self._model)
        place = self._table.take_place()
        await asyncio.wrap_future(self._thread.call(lambda _: self._put(place, prepared)))
        self._table.add(adapter, place)

    def drop_adapter(self, digest: str) -> None:
        """For no sequence from now on; those that have it keep it."""
        self._table.remove(digest, self._free_place)

    def _free_place(self, place: int) -> None:
        """Called on any thread, even in the middle of other work there, so it only leaves a message."""

        def free() -> None:
            self._thread.call(lambda _: self._put(place, None))
            self._table.freed(place)

        with contextlib.suppress(RuntimeError):  # the event loop is closed: the node ends
            self._loop.call_soon_threadsafe(free)

    def _put(self, place: int, prepared: object | None) -> None:
        """On the engine's thread."""
        assert self._backend.adapters is not None
        self._backend.adapters.put(place, prepared)
