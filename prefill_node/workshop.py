"""What all jobs of a prefill node share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.client import StoreClient
from kvstore.transfer.engine import TransferEngine
from mooncake.engine.host import EngineHost
from mooncake.rpc.server import Channels
from prefill_node.chunks import ChunkDesk
from prefill_node.foreign import ForeignLayout
from prefill_node.inherit import Sender
from prefill_node.loader import Loader
from prefill_node.outbox import Outbox
from prefill_node.streamer import LayerStreamer


@dataclass(frozen=True, slots=True)
class Workshop:
    node_id: str
    host: EngineHost
    transfer: TransferEngine
    channels: Channels
    streamer: LayerStreamer
    loader: Loader
    handoffs: Outbox  # urgent: a request waits for these bytes
    stores: Outbox  # in the background
    store_at: Callable[[str], StoreClient]  # by control address
    foreign: ForeignLayout | None  # another deployment's blocks in the pool, read if it has more of a prompt
    chunks: ChunkDesk | None  # if prompts are blended from chunks
    sender: Sender | None  # the variant whose KV is inherited
