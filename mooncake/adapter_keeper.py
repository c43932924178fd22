"""Keeps the adapters of a node's engine as the conductor wants them, beside those of the configuration.

The conductor repeats what it wants in its answer to every heartbeat, and each heartbeat says what is there: a node that
was restarted, or joins later, or missed an answer gets the same in the end. Adapters are loaded one at a time, while
the engine goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from mooncake.adapter_loads import AdapterLoad
from mooncake.adapters import Adapter, open_adapter
from mooncake.errors import ModelError, MooncakeError
from mooncake.vital import vital

log = logging.getLogger(__name__)


class AdapterHost(Protocol):
    """What has them in an engine (``mooncake.engine.hosting.live_adapters``)."""

    def has_adapter(self, digest: str) -> bool: ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Raises ModelError, and what a lack of memory raises."""
        ...

    def drop_adapter(self, digest: str) -> None: ...


class AdapterKeeper:
    """One event loop. ``on_change`` is called when there is something new to report."""

    def __init__(self, host: AdapterHost, on_change: Callable[[], None]) -> None:
        self._host = host
        self._on_change = on_change
        self._wanted: dict[int, AdapterLoad] = {}  # by number
        self._tried: dict[int, AdapterLoad] = {}  # of those: the ones that are here, or failed with an error
        self._loaded: set[str] = set()  # digests that the host has because of this
        self._task: asyncio.Task[None] | None = None

    def report(self) -> list[AdapterLoad]:
        """What is here of what is wanted, and what cannot be loaded, with its error."""
        return list(self._tried.values())

    def want(self, loads: Iterable[AdapterLoad]) -> None:
        """These, and no others. Each is tried once: a failed one stays so until it is no longer wanted."""
        self._wanted = {load.number: load for load in loads}
        tried, self._tried = self._tried, {}
        for number in tried.keys() & self._wanted.keys():
            self._tried[number] = replace(self._wanted[number], error=tried[number].error)
        if self._task is None or self._task.done():
            self._drop_unwanted()
            if self._wanted.keys() - self._tried.keys():
                self._task = vital(self._load_all(), "load adapters")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _load_all(self) -> None:
        while to_load := self._wanted.keys() - self._tried.keys():
            load = self._wanted[min(to_load)]
            error = await self._load(load.adapter)
            if load.number in self._wanted:
                self._tried[load.number] = replace(load, error=error)
            self._drop_unwanted()
            self._on_change()

    async def _load(self, wanted: Adapter) -> str:
        """Returns why it is not here, or "" when it is."""
        if self._host.has_adapter(wanted.digest):  # of the configuration, or under another name
            return ""
        try:
            found = await asyncio.to_thread(open_adapter, wanted.name, str(wanted.path))
            if found.digest != wanted.digest:
                raise ModelError(f"the adapter {wanted.name}: {wanted.path} has other weights on this node")
            await self._host.load_adapter(found)
        except Exception as error:  # also of memory, whose kind depends on the device
            known = isinstance(error, MooncakeError)
            text = (
                str(error) if known else f"the adapter {wanted.name}: {type(error).__name__}: {error}".splitlines()[0]
            )
            log.error("%s", text, exc_info=None if known else error)
            return text
        self._loaded.add(wanted.digest)
        log.info("the adapter %s is loaded from %s", wanted.name, wanted.path)
        return ""

    def _drop_unwanted(self) -> None:
        for digest in self._loaded - {load.adapter.digest for load in self._wanted.values()}:
            self._loaded.discard(digest)
            self._host.drop_adapter(digest)
