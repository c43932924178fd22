"""``mooncake serve``: a cluster on this machine until Ctrl-C; it prints commands to try next."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from shlex import quote

from rich.markup import escape

from conductor.api import DRAIN_S
from mooncake.api_keys import API_KEY_ENV
from mooncake.app.cluster.local import LocalCluster
from mooncake.app.cluster.ray_cluster import RayCluster
from mooncake.app.cluster.ray_head import is_loopback
from mooncake.app.cluster.role_main import unless_stopped
from mooncake.app.console import err, out
from mooncake.config import Config, load_config
from mooncake.errors import Cancelled, MooncakeError
from mooncake.tls import tls_of


async def serve(config: Config, restart: bool, log_level: str) -> None:
    """Run until SIGINT or SIGTERM, then drain. Raises MooncakeError when the cluster cannot start or go on."""
    cluster = LocalCluster(config, restart=restart, log_level=log_level, tell=_tell, tell_log=_tell_log)
    _announce(cluster.config)
    with contextlib.suppress(Cancelled):
        await unless_stopped(_live(cluster, cluster.wait_fatal), at_once=cluster.kill)
    _say("stopped")


async def serve_on_ray(config: Config, log_level: str, ray_address: str = "") -> None:
    """The same with the nodes as Ray actors, which Ray restarts when they die."""
    cluster = RayCluster(config, ray_address=ray_address, log_level=log_level, tell=_tell)
    _announce(cluster.config)
    with contextlib.suppress(Cancelled):
        await unless_stopped(_live(cluster, cluster.watch), at_once=cluster.kill)
    _say("stopped")


async def _live(cluster: LocalCluster | RayCluster, end: Callable[[], Awaitable[MooncakeError]]) -> None:
    start_s = time.monotonic()
    async with cluster:
        _say(f"[bold green]ready[/] after {time.monotonic() - start_s:.1f} s")
        _tell_addresses(cluster.http_url, cluster.grpc_address)
        _tell_next(cluster.http_url, cluster.grpc_address, cluster.config)
        try:
            raise await end()
        except asyncio.CancelledError:
            _say(f"\nstopping; requests under way have {DRAIN_S:g} s to finish (Ctrl-C again stops at once)")
            raise


def _announce(config: Config) -> None:
    cluster = config.cluster
    engines = f"{cluster.coupled} coupled" if cluster.coupled else f"{cluster.prefill} prefill, {cluster.decode} decode"
    nodes = f"{engines}, {cluster.store} store"
    _say(f"[bold]mooncake {version('mooncake-cluster')}[/]  {escape(config.model.path)}  {nodes}")
    if not is_loopback(config.conductor.host) and not config.conductor.api_keys:
        _tell(f"no authentication: anyone who can reach {config.conductor.host} can use this cluster and join it")


def _tell_addresses(http_url: str, grpc_address: str) -> None:
    _say(f"  OpenAI   {http_url}/v1")
    _say(f"  gRPC     {grpc_address}")
    _say(f"  status   {http_url}/")
    _say(f"  metrics  {http_url}/metrics")


def _tell_next(http_url: str, grpc_address: str, config: Config) -> None:
    needs_key, tls = bool(config.conductor.api_keys), tls_of(config)
    exports = [f"export {API_KEY_ENV}=…  # one of the keys"] if needs_key else []
    exports += [f"export {name}={quote(value)}" for name, value in (tls.environment() if tls else {}).items() if value]
    address = "" if grpc_address == load_config().conductor_address else f" --address {grpc_address}"
    body = (
        '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}'  # or it may ramble on
    )
    ca = f" --cacert {quote(tls.ca_certs)}" if tls else ""
    key = f' -H "authorization: Bearer ${API_KEY_ENV}"' if needs_key else ""
    _say("\nNow, in another terminal:")
    for line in (
        *exports,
        f'mooncake generate{address} "Why is the sky blue?"',
        f"mooncake chat{address}",
        f"mooncake status{address}",
        f"curl {http_url}/v1/chat/completions{ca}{key} -H 'content-type: application/json' -d '{body}'",
    ):
        _say(f"  {escape(line)}")
    _say("\nCtrl-C stops the cluster.")


def _tell(sentence: str) -> None:
    _say(f"  [dim]{escape(sentence)}[/]")


def _tell_log(line: str) -> None:
    with contextlib.suppress(OSError):
        err.print(line, markup=False, soft_wrap=True)


def _say(markup: str) -> None:
    """Print; errors are ignored, so that the cluster keeps running, and stops in order, without a terminal."""
    with contextlib.suppress(OSError):
        out.print(markup, soft_wrap=True)
