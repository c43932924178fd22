"""``mooncake serve``: a cluster on this machine until Ctrl-C, with the next commands to copy."""

from __future__ import annotations

import asyncio
import contextlib
import time
from importlib.metadata import version

from rich.markup import escape

from mooncake.app.console import err, out
from mooncake.app.local import LocalCluster
from mooncake.app.role_main import unless_stopped
from mooncake.config import Config
from mooncake.errors import Cancelled


async def serve(config: Config, restart: bool, log_level: str) -> None:
    """Run until SIGINT or SIGTERM, then drain. Raises MooncakeError when the cluster cannot start or go on."""
    cluster = LocalCluster(config, restart=restart, log_level=log_level, tell=_tell, tell_log=_tell_log)
    _announce(cluster)
    with contextlib.suppress(Cancelled):
        await unless_stopped(_live(cluster), at_once=cluster.kill)
    out.print("stopped")


async def _live(cluster: LocalCluster) -> None:
    start_s = time.monotonic()
    async with cluster:
        out.print(f"[bold green]ready[/] after {time.monotonic() - start_s:.1f} s")
        _tell_next(cluster)
        try:
            raise await cluster.wait_fatal()
        except asyncio.CancelledError:
            out.print("\nstopping; running requests may finish (Ctrl-C again stops at once)")
            raise


def _announce(cluster: LocalCluster) -> None:
    config = cluster.config
    nodes = f"{config.cluster.prefill} prefill, {config.cluster.decode} decode, {config.cluster.store} store"
    out.print(f"[bold]mooncake {version('mooncake-cluster')}[/]  {escape(config.model.path)}  {nodes}")
    out.print(f"  OpenAI   {cluster.http_url}/v1", soft_wrap=True)
    out.print(f"  gRPC     {cluster.grpc_address}", soft_wrap=True)
    out.print(f"  metrics  {cluster.http_url}/metrics", soft_wrap=True)


def _tell_next(cluster: LocalCluster) -> None:
    conductor = cluster.config.conductor
    plain = (conductor.host, conductor.grpc_port) == ("127.0.0.1", 50051)
    address = "" if plain else f" --address {cluster.grpc_address}"
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    out.print("\nNow, in another terminal:")
    for line in (
        f'mooncake generate{address} "Why is the sky blue?"',
        f"mooncake chat{address}",
        f"mooncake status{address}",
        f"curl {cluster.http_url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
    ):
        out.print(f"  {escape(line)}", soft_wrap=True)
    out.print("\nCtrl-C stops the cluster.")


def _tell(sentence: str) -> None:
    out.print(f"  [dim]{escape(sentence)}[/]", soft_wrap=True)


def _tell_log(line: str) -> None:
    err.print(line, markup=False, soft_wrap=True)
