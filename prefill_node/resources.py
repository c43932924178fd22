"""What all jobs of a prefill node share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.client.store_client import StoreClient
from kvstore.transfer.engine import TransferEngine
from mooncake.engine.hosting.host import EngineHost
from mooncake.rpc.server import Channels
from prefill_node.blend_chunks import BlendChunks
from prefill_node.closings import Closings
from prefill_node.converted_prefix import SourceLayout
from prefill_node.kv_writer import KVWriter
from prefill_node.loader import Loader
from prefill_node.streamer import LayerStreamer
from prefill_node.variant_kv import Sender


@dataclass(frozen=True, slots=True)
class NodeResources:
    host: EngineHost
    transfer: TransferEngine
    channels: Channels
    closings: Closings
    streamer: LayerStreamer
    loader: Loader
    handoff_writer: KVWriter  # urgent: a request waits for these bytes
    pool_writer: KVWriter  # in the background
    store_at: Callable[[str], StoreClient]  # by control address
    source_layout: SourceLayout | None  # of another deployment's blocks in the pool, read if it has more of a prompt
    blend_chunks: BlendChunks | None  # if prompts are blended from chunks
    variant: Sender | None  # the variant of the model whose KV is reused
