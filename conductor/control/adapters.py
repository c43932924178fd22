"""Which adapters nodes should have beside the configured ones, and which of them requests may name.

Pure. A load begins, is served once every node has it, and ends when it is unloaded or replaced: then no new request can
name it, and nodes keep it until the last one that uses it has ended. Nodes are told which loads are served and which
end, so that the next conductor knows what they mean. ``adapter_loader`` acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from conductor.registry import Node, NodeState
from mooncake.adapter_loads import AdapterLoad
from mooncake.adapters import Adapter
from mooncake.errors import InvalidRequest, NotFound, shown
from mooncake.types import Role

ENDED_KEPT = 4096  # numbers of ended loads, and names that callers decided about, that are remembered


class LoadState(StrEnum):
    LOADING = "loading"
    UNFINISHED = "unfinished"  # an earlier conductor began it, and may not have seen its end
    SERVED = "served"
    ENDING = "ending"


@dataclass(slots=True)
class _Wanted:
    load: AdapterLoad
    state: LoadState


class AdapterCatalogue:
    """One owner."""

    def __init__(self, taken: Iterable[str], most: int = 0) -> None:
        """``taken`` are the names of the model and of its configured adapters; ``most`` may be loaded beside them."""
        self._taken = frozenset(taken)
        self._most = most
        self._wanted: dict[int, _Wanted] = {}  # by number
        self._served: dict[str, Adapter] = {}
        self._ended: dict[int, None] = {}  # the latest numbers, in order
        # Names that were loaded or unloaded here, likewise: what an earlier conductor knew of them is over, whatever
        # its numbers. This host's clock may have been set back since; or a node that was away has an older load.
        self._decided: dict[str, None] = {}

    @property
    def served(self) -> Mapping[str, Adapter]:
        """Those that requests may name, by name. It changes with them."""
        return MappingProxyType(self._served)

    def wanted(self) -> list[AdapterLoad]:
        """What every node that computes should have."""
        served, ended = LoadState.SERVED, LoadState.ENDING
        return [
            replace(each.load, is_served=each.state is served, is_ended=each.state is ended)
            for each in self._wanted.values()
        ]

    def loaded(self) -> list[AdapterLoad]:
        """Those of them that requests may name."""
        return [wanted.load for wanted in self._in(LoadState.SERVED)]

    def unfinished(self) -> list[AdapterLoad]:
        """Those to serve once every node has them, and to give up when one cannot."""
        return [wanted.load for wanted in self._in(LoadState.UNFINISHED)]

    def may_be_used(self, digest: str) -> bool:
        """Whether requests may need a load of it. Not while it is loading: whoever asks for those weights then means a
        configured adapter, which every node has."""
        return any(each.load.adapter.digest == digest for each in self._in(LoadState.SERVED, LoadState.ENDING))

    def check(self, name: str, in_place: bool) -> None:
        """Whether a load may begin. Raises InvalidRequest."""
        if not self._most:
            what = "adapters are not loaded while this cluster serves: conductor.max_loaded_adapters is 0"
            raise InvalidRequest(what)
        if name in self._taken:
            what = f"the name {shown(name)} is taken, by the model or one of model.adapters, which stay as they are"
            raise InvalidRequest(what, "lora_name")
        if any(each.load.adapter.name == name for each in self._in(LoadState.LOADING)):
            raise InvalidRequest(f"the adapter {shown(name)} is being loaded", "lora_name")
        if name in self._served and not in_place:
            what = f"the adapter {shown(name)} has already been loaded; load_inplace replaces it"
            raise InvalidRequest(what, "lora_name")
        names = {each.load.adapter.name for each in self._in(LoadState.LOADING, LoadState.SERVED)}
        if len(names | {name}) > self._most:
            what = f"{len(names)} adapters are loaded, the most that conductor.max_loaded_adapters allows: unload one"
            raise InvalidRequest(what, "lora_name")

    def begin(self, adapter: Adapter, in_place: bool, now_ns: int) -> AdapterLoad:
        """Nodes should load it. ``now_ns`` is the time of day: numbers grow from one conductor to the next. Raises
        like ``check``."""
        self.check(adapter.name, in_place)
        load = AdapterLoad(adapter, max([now_ns, *(number + 1 for number in (*self._wanted, *self._ended))]))
        self._wanted[load.number] = _Wanted(load, LoadState.LOADING)
        return load

    def serve(self, load: AdapterLoad) -> None:
        """Nodes have it: requests may name it, instead of what they meant by its name before."""
        name, known = load.adapter.name, self._wanted.get(load.number)
        if name in self._served:
            self._unload(name)
        if known is not None and known.state is LoadState.LOADING:
            self._decide(name)
        for each in self._in(LoadState.UNFINISHED):
            if each.load.adapter.name == name and each.load.number < load.number:
                self._end(each.load.number)
        self._wanted[load.number] = _Wanted(load, LoadState.SERVED)
        self._served[name] = load.adapter

    def give_up(self, load: AdapterLoad) -> None:
        """Nodes should not have it after all. No effect once it is served."""
        wanted = self._wanted.get(load.number)
        if wanted is not None and wanted.state is LoadState.LOADING:
            self._end(load.number)
        elif wanted is not None and wanted.state is LoadState.UNFINISHED:
            del self._wanted[load.number]  # not for good: a node may still say that it was served

    def unload(self, name: str) -> None:
        """No new request can name it. Raises InvalidRequest, and NotFound when it is not served."""
        if name in self._taken:
            raise InvalidRequest(f"{shown(name)} was not loaded while the cluster served, so it stays", "lora_name")
        if name not in self._served:
            raise NotFound(f"the adapter {shown(name)} cannot be found")
        self._unload(name)
        self._decide(name)

    def _unload(self, name: str) -> None:
        del self._served[name]
        for each in self._in(LoadState.SERVED):
            if each.load.adapter.name == name:
                each.state = LoadState.ENDING

    def drop_unused(self, is_used: Callable[[str], bool]) -> None:
        """Let nodes drop those that end; ``is_used`` says whether a request still needs a digest, which another load
        may keep there."""
        kept = {each.load.adapter.digest for each in self._in(LoadState.SERVED)}
        for each in self._in(LoadState.ENDING):
            digest = each.load.adapter.digest
            if digest in kept or not is_used(digest):
                self._end(each.load.number)

    def adopt(self, loads: Iterable[AdapterLoad]) -> None:
        """A node that registers has these from an earlier conductor, which may have been this one: the latest of each
        name, without those that have ended here or there. Those that were served are served; the others are
        ``unfinished``."""
        for load in loads:
            if load.is_ended:
                self._adopt_end(load)
            elif self._may_adopt(load):
                if load.is_served:
                    self.serve(load)
                else:
                    self._wanted[load.number] = _Wanted(load, LoadState.UNFINISHED)

    def _may_adopt(self, load: AdapterLoad) -> bool:
        name, known = load.adapter.name, self._wanted.get(load.number)
        is_over = load.number in self._ended or (known is not None and known.state is not LoadState.UNFINISHED)
        if load.error or is_over or not self._most or name in self._taken or name in self._decided:
            return False
        others = [each for each in self._wanted.values() if each.load.adapter.name == name and each is not known]
        if load.is_served:  # what is served goes before what an earlier conductor may not have finished
            others = [each for each in others if each.state is not LoadState.UNFINISHED]
        return all(each.load.number < load.number for each in others)

    def _adopt_end(self, load: AdapterLoad) -> None:
        """A node has heard of the load's end; another one may not have, and may have said that the load is served."""
        known = self._wanted.get(load.number)
        if known is None or known.state is LoadState.UNFINISHED:
            self._end(load.number)
        elif known.state is LoadState.SERVED:
            self._unload(load.adapter.name)

    def _in(self, *states: LoadState) -> list[_Wanted]:
        return [wanted for wanted in self._wanted.values() if wanted.state in states]

    def _decide(self, name: str) -> None:
        for each in self._in(LoadState.UNFINISHED):
            if each.load.adapter.name == name:
                self._end(each.load.number)
        self._decided[name] = None
        while len(self._decided) > ENDED_KEPT:
            del self._decided[next(iter(self._decided))]

    def _end(self, number: int) -> None:
        self._wanted.pop(number, None)
        self._ended[number] = None
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]


def missing_nodes(load: AdapterLoad, nodes: Iterable[Node]) -> list[str]:
    """Ids of the nodes that compute and are still to load it; those that leave need not. Raises InvalidRequest when one
    of them cannot."""
    missing = []
    for node in nodes:
        if node.info.role is Role.STORE or node.state is NodeState.DRAINING:
            continue
        tried = next((each for each in node.adapters if each.number == load.number), None)
        if tried is None:
            missing.append(node.info.node_id)
        elif tried.error:
            raise InvalidRequest(f"{node.info.role} node {node.info.node_id}: {tried.error}", "lora_path")
    return missing
