"""The conductor as one process: opens the model's tokenizer and configuration, and serves core and ingress.

It reads no weights (only their digest) and never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from conductor.api import DRAIN_S
from conductor.core import Core
from conductor.ingress.access import KeyInterceptor
from conductor.ingress.app import Ingress
from conductor.model_facts import longest_sequence, model_facts
from conductor.placement.calibration import read_calibration
from conductor.service import ClusterServicer
from mooncake.addresses import join_address
from mooncake.api_keys import ApiKeys
from mooncake.block_size import block_size_advice
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config
from mooncake.directory import Directory
from mooncake.errors import MooncakeError
from mooncake.rpc import cluster_pb2_grpc
from mooncake.rpc.server import RpcServer
from mooncake.text.template_source import template_source
from mooncake.tls import check_tls, server_credentials

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0


class ConductorNode:
    """``start`` raises ConfigError or ModelError in one sentence; ``stop`` ends whatever was started."""

    def __init__(self, config: Config, open_directory: Callable[[Config, str], Directory]) -> None:
        """``open_directory`` is called with the configuration and the KV fingerprint when the node starts."""
        self._config = config
        self._open_directory = open_directory
        self._core: Core | None = None
        self._server: RpcServer | None = None
        self._ingress: Ingress | None = None
        self.grpc_port = 0
        self.http_port = 0

    @property
    def control_address(self) -> str:
        return join_address(self._config.conductor.host, self.grpc_port)

    async def start(self) -> None:
        config = self._config
        check_tls(config.conductor)
        checkpoint = open_checkpoint(config.model.path, config.model.max_model_len)
        tokenizer = checkpoint.load_tokenizer(template_source(config.model.chat_template, "model.chat_template"))
        facts = model_facts(config, checkpoint)
        if advice := block_size_advice(checkpoint.config, config.block.tokens, config.precision().kv_dtype):
            log.warning("%s", advice)
        core = self._core = Core(config, facts, self._open_directory(config, facts.kv_fingerprint))
        if config.conductor.calibration:
            core.costs.start_from(read_calibration(Path(config.conductor.calibration)))
        cluster = ClusterServicer(core, config.model.name or checkpoint.name)
        server = self._server = RpcServer(KeyInterceptor(ApiKeys(config.conductor.api_keys)))
        server.add(cluster_pb2_grpc.add_ClusterServicer_to_server, cluster, "mooncake.v1.Cluster")
        ingress = self._ingress = Ingress(
            config,
            checkpoint,
            tokenizer,
            core.dispatcher,
            cluster.status,
            core.waiting_for,
            core.dispatcher.stats,
            capacity_tokens=longest_sequence(config, checkpoint, core.registry.most_pages),
            adapters=core.adapter_loader,
        )
        ingress.add_grpc(server)
        await core.start()
        credentials = server_credentials(config.conductor)
        self.grpc_port = await server.start(config.conductor.host, config.conductor.grpc_port, credentials)
        self.http_port = await ingress.start_http()
        log.info(
            "conductor of %s: gRPC on %s, %s on %s",
            config.model.name or checkpoint.name,
            self.control_address,
            config.conductor.http_scheme.upper(),
            join_address(config.conductor.host, self.http_port),
        )

    async def wait_fatal(self) -> MooncakeError:
        """Never returns: no failure is fatal to a conductor."""
        never: asyncio.Future[MooncakeError] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self) -> None:
        """Fail health checks, let requests in progress finish for up to ``DRAIN_S``, then close."""
        if self._server is not None:
            await self._server.set_serving(False)
        if self._core is not None:
            self._core.adapter_loader.close()
        if self._ingress is not None:
            await self._ingress.drain(DRAIN_S)
            await self._ingress.stop()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        if self._core is not None:
            await self._core.stop()
