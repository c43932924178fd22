"""Adapters that are loaded while a cluster serves, as conductor and nodes tell each other of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mooncake.adapters import Adapter
from mooncake.rpc import cluster_pb2 as pb


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """One load of an adapter, by its ``number``: the same name may be loaded again, with other weights or the same. A
    later load has a larger number, even under a later conductor."""

    adapter: Adapter
    number: int
    error: str = ""  # why a node does not have it
    is_served: bool = field(default=False, compare=False)  # as last heard: requests may name it
    is_ended: bool = field(default=False, compare=False)  # likewise: they no longer may


def load_to_wire(load: AdapterLoad) -> pb.Adapter:
    adapter = load.adapter
    return pb.Adapter(
        name=adapter.name,
        path=str(adapter.path),
        digest=adapter.digest,
        alpha=adapter.alpha,
        rank_stabilised=adapter.is_rank_stabilised,
        invocation=adapter.invocation,
        number=load.number,
        error=load.error,
        served=load.is_served,
        ended=load.is_ended,
    )


def load_from_wire(message: pb.Adapter) -> AdapterLoad:
    adapter = Adapter(
        name=message.name,
        path=Path(message.path),
        digest=message.digest,
        alpha=message.alpha,
        is_rank_stabilised=message.rank_stabilised,
        invocation=tuple(message.invocation),
    )
    return AdapterLoad(adapter, message.number, message.error, message.served, message.ended)
