"""Loads and unloads adapters while the cluster serves: has every node load one, and waits for all of them.

What nodes should have travels with the answers to their heartbeats (``service``), so this sends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from conductor.control.adapters import AdapterCatalogue, missing_nodes
from conductor.registry import Registry
from mooncake.adapters import CONFIG_FILE, Adapter, adapter_folder, open_adapter
from mooncake.errors import DeadlineExceeded, InvalidRequest, ModelError, NodeUnavailable, NotFound, shown
from mooncake.types import Role

log = logging.getLogger(__name__)

MAX_NAME_CHARS, MAX_PATH_CHARS = 256, 4096


class AdapterLoader:
    """Implements ``conductor.api.AdapterLoading``."""

    def __init__(
        self,
        catalogue: AdapterCatalogue,
        registry: Registry,
        waiting_for: Callable[[], Sequence[Role]],
        nodes_change: Callable[[float], Awaitable[bool]],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``waiting_for``: roles without a live node. ``nodes_change(until)`` returns once something about the nodes
        has changed, or False at that time."""
        self._catalogue = catalogue
        self._registry = registry
        self._waiting_for = waiting_for
        self._nodes_change = nodes_change
        self._timeout_s = timeout_s
        self._clock = clock
        self._is_closing = False
        self._waits: set[asyncio.Timeout] = set()

    @property
    def served(self) -> Mapping[str, Adapter]:
        """See ``conductor.api.AdapterLoading``."""
        return self._catalogue.served

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """See ``conductor.api.AdapterLoading``."""
        until = self._clock() + self._timeout_s
        _check_texts(name, path)
        self._catalogue.check(name, in_place)
        if roles := self._waiting_for():
            raise NodeUnavailable(f"the cluster has no {' and no '.join(roles)} node to load an adapter")
        adapter = await asyncio.to_thread(_opened, name, path)
        load = self._catalogue.begin(adapter, in_place, time.time_ns())
        try:
            while missing := (*self._waiting_for(), *missing_nodes(load, self._registry.nodes())):
                if not await self._change(until):
                    what = f"the adapter {shown(name)} was not loaded within {self._timeout_s:g} s"
                    raise DeadlineExceeded(f"{what}: it is missing on {', '.join(missing)}")
            self._catalogue.serve(load)
        finally:
            self._catalogue.give_up(load)
        log.info("the adapter %s is served, from %s", name, adapter.path)

    def close(self) -> None:
        """End the loads that wait for nodes with NodeUnavailable."""
        self._is_closing = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    async def _change(self, until: float) -> bool:
        """``nodes_change``, until ``close``."""
        wait = asyncio.timeout(0.0 if self._is_closing else None)
        try:
            async with wait:
                self._waits.add(wait)
                return await self._nodes_change(until)
        except TimeoutError:
            raise NodeUnavailable("the server is shutting down") from None
        finally:
            self._waits.discard(wait)

    def finish(self) -> None:
        """Serve what an earlier conductor began to load and every node has by now. What a node cannot load is given
        up, and stays what it was before."""
        for load in self._catalogue.unfinished():
            name = load.adapter.name
            try:
                if self._waiting_for() or missing_nodes(load, self._registry.nodes()):
                    continue
            except InvalidRequest as error:
                self._catalogue.give_up(load)
                log.warning("the adapter %s, which an earlier conductor began to load, failed: %s", name, error.message)
            else:
                self._catalogue.serve(load)
                log.info("the adapter %s is served, from %s: its load is finished", name, load.adapter.path)

    def unload(self, name: str) -> None:
        """See ``conductor.api.AdapterLoading``."""
        if not name:
            raise InvalidRequest("lora_name says which adapter to unload", "lora_name")
        self._catalogue.unload(name)
        log.info("the adapter %s is unloaded", name)


def _check_texts(name: str, path: str) -> None:
    if not (name and path):
        raise InvalidRequest("both lora_name and lora_path are needed", "lora_name" if not name else "lora_path")
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(f"lora_name is up to {MAX_NAME_CHARS} printable characters", "lora_name")
    if len(path) > MAX_PATH_CHARS or not path.isprintable():
        raise InvalidRequest(f"lora_path is up to {MAX_PATH_CHARS} printable characters", "lora_path")


def _opened(name: str, path: str) -> Adapter:
    """Raises NotFound where there is none, and InvalidRequest for a broken one."""
    folder = adapter_folder(path).absolute()  # nodes may run in other folders
    try:
        if not (folder / CONFIG_FILE).is_file():
            raise NotFound(f"no adapter is found in {folder}: there is no {CONFIG_FILE}")
        return open_adapter(name, str(folder))
    except ModelError as error:
        raise InvalidRequest(error.message, "lora_path") from None
    except OSError as error:
        raise InvalidRequest(f"lora_path cannot be read: {error.strerror}", "lora_path") from None
