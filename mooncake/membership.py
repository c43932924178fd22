"""A node's membership in the cluster: it registers with the conductor, sends heartbeats, and announces when it drains.

It knows only the Cluster service: measurements and load come from the node through ``report``. The conductor may start
later, restart or vanish; the node keeps running, and registers again when it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine

import grpc

from mooncake.api_keys import bearer
from mooncake.config import Config
from mooncake.errors import (
    ConfigError,
    DeadlineExceeded,
    MooncakeError,
    NodeIdTaken,
    NodeUnavailable,
    StaleEpoch,
    Unauthenticated,
)
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc.cluster_pb2_grpc import ClusterStub
from mooncake.rpc.errors import error_from_rpc, handshake_trouble
from mooncake.rpc.server import Channels
from mooncake.tls import tls_of
from mooncake.vital import vital

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 1.0
SAMPLES_KEPT = 256  # of each kind: sent again to a restarted conductor
RPC_TIMEOUT_S = 2.0
HEARTBEAT_TIMEOUT_S = 5.0  # a busy conductor answers late, and does not hear what was given up
_IDLE_POLL_S = 0.02


async def check_settings(config: Config, info: pb.NodeInfo) -> None:
    """Ask the conductor whether it would refuse this node, before the node spends minutes on loading its model.

    Raises ConfigError when the settings differ from the cluster's, NodeIdTaken when a live process has the node's id,
    Unauthenticated for another API key. A conductor that does not answer says nothing: it decides when the node joins.
    """
    address, metadata = config.conductor_address, bearer(config.conductor.api_key)
    channels = Channels(tls=tls_of(config))
    try:
        await ClusterStub(channels.get(address)).Check(
            pb.CheckRequest(node=info), timeout=RPC_TIMEOUT_S, metadata=metadata
        )
    except grpc.RpcError as failure:
        error = error_from_rpc(failure, f"conductor {address}")
        if isinstance(error, (ConfigError, NodeIdTaken, Unauthenticated)):
            raise error from None
        log.debug("%s loads its model unasked: %s", info.node_id, error)
    finally:
        await channels.close()


class Membership:
    """``report`` is called on the event loop before each message and returns load, transports and the samples since
    the previous call (at first, those of the warm-up). This class adds the node's identity."""

    def __init__(
        self,
        config: Config,
        info: pb.NodeInfo,
        report: Callable[[], pb.HeartbeatRequest],
        on_answer: Callable[[pb.HeartbeatResponse], None] = lambda answer: None,
    ) -> None:
        """``on_answer`` is called with each answer of the conductor that knows this node: what it wants. Raises
        ConfigError when the conductor has a certificate and the configuration does not say how to reach it."""
        self._on_answer = on_answer
        self.draining = False  # sent with every heartbeat: this node accepts nothing new
        self._address = config.conductor_address
        self._interval_s = config.conductor.heartbeat_interval_s
        self._metadata = bearer(config.conductor.api_key)
        self._info = info
        self._report = report
        self._channels = Channels(tls=tls_of(config))
        self._stub = ClusterStub(self._channels.get(self._address))
        self._recent = RecentSamples()
        self._conductor = 0  # incarnation of the conductor that knows us; 0: none
        self.is_registered = False  # a conductor knows this node
        self._replaced: asyncio.Future[MooncakeError] = asyncio.get_running_loop().create_future()
        self._said_waiting = False
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Try once, and continue in the background if the conductor is not there yet.

        Raises ConfigError when the conductor refuses this node, Unauthenticated when it requires another API key,
        NodeIdTaken when a live process has the node's id, and StaleEpoch when one has taken it since.
        """
        await self._try_register()
        self._task = vital(self._run(), "membership")

    async def wait_replaced(self) -> MooncakeError:
        """Return the error once another process has this node's id, so that the cluster does not accept this one."""
        return await asyncio.shield(self._replaced)

    async def drain(self, is_idle: Callable[[], bool], patience_s: float) -> bool:
        """Announce that nothing new is accepted, and return once ``is_idle``; False when that takes longer than
        ``patience_s``, or no conductor knows this node, so that nobody would stop sending work."""
        self.draining = True
        if not self.is_registered:
            return is_idle()
        with contextlib.suppress(MooncakeError):
            await self.announce()
        drained_by = time.monotonic() + patience_s
        while not is_idle():
            if time.monotonic() >= drained_by:
                return False
            await asyncio.sleep(_IDLE_POLL_S)
        return True

    async def stop(self) -> None:
        """Announce the drain (best effort, within a second), and send nothing from then on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.is_registered:
            self.is_registered = False
            with contextlib.suppress(MooncakeError):
                await self._send_heartbeat(draining=True, timeout_s=min(1.0, RPC_TIMEOUT_S))
        await self._channels.close()

    async def announce(self) -> None:
        """Send a heartbeat now: something has changed that the conductor should know soon."""
        if self.is_registered:
            await self._heartbeat(RPC_TIMEOUT_S)

    def report_soon(self) -> None:
        """Send the next heartbeat without waiting for its time; never two at once, so answers come in order."""
        self._has_news.set()

    async def change(self, info: pb.NodeInfo) -> None:
        """Register under the same name with another role and incarnation. Raises like ``start``."""
        self.is_registered = False
        self._info, self.draining = info, False
        await self._try_register()

    async def _run(self) -> None:
        backoff_s, said = 0.1, ""
        while True:
            incarnation = self._info.incarnation
            try:
                if self.is_registered:
                    await self._heartbeat()
                else:
                    await self._try_register()
            except (StaleEpoch, NodeIdTaken) as error:
                if incarnation != self._info.incarnation:
                    continue  # it is this node that has replaced it, by ``change``
                log.error("%s leaves the cluster: %s", self._info.node_id, error)
                self.is_registered = False
                self._replaced.set_result(error)
                return
            except (ConfigError, Unauthenticated) as error:
                if error.message != said:
                    log.error("%s", error)
                said = error.message
            except Exception:
                # `report` is the node's code: a bug there must not stop the heartbeats for good
                log.exception("heartbeat of %s failed", self._info.node_id)
            backoff_s = 0.1 if self.is_registered else min(2 * backoff_s, MAX_BACKOFF_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s if self.is_registered else backoff_s):
                    await self._has_news.wait()
            self._has_news.clear()

    async def _try_register(self) -> None:
        report = self._report()
        self._recent.add(report.samples)
        request = pb.RegisterRequest(node=self._info, samples=self._recent.all(), adapters=report.adapters)
        try:
            response = await self._stub.Register(request, timeout=RPC_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, f"conductor {self._address}")
            if not isinstance(error, (NodeUnavailable, DeadlineExceeded)):
                raise error from None
            if not self._said_waiting:
                log.info("%s waits for the conductor at %s", self._info.node_id, self._address)
                if handshake_trouble(failure):  # waiting does not help
                    log.error("%s", error)
                self._said_waiting = True
            return
        self._conductor = response.conductor_incarnation
        self._interval_s = response.heartbeat_interval_s or self._interval_s
        self._said_waiting = False
        self.is_registered = True
        log.info("%s is registered with the conductor at %s", self._info.node_id, self._address)
        await self._heartbeat()  # registering carries no load

    async def _heartbeat(self, timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        try:
            response = await self._send_heartbeat(draining=self.draining, timeout_s=timeout_s)
        except (NodeUnavailable, DeadlineExceeded) as error:
            if not self._said_waiting:
                log.warning("%s cannot reach the conductor: %s", self._info.node_id, error)
                self._said_waiting = True
            return
        self._said_waiting = False
        if not response.known or response.conductor_incarnation != self._conductor:
            self.is_registered = False
            await self._try_register()
        else:
            self._on_answer(response)

    async def _send_heartbeat(self, *, draining: bool, timeout_s: float) -> pb.HeartbeatResponse:
        request = self._report()
        self._recent.add(request.samples)
        request.node_id = self._info.node_id
        request.incarnation = self._info.incarnation
        request.draining = request.draining or draining
        try:
            response: pb.HeartbeatResponse = await self._stub.Heartbeat(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as failure:
            raise error_from_rpc(failure, f"conductor {self._address}") from None
        return response


async def first_end(*ends: Coroutine[object, object, MooncakeError]) -> MooncakeError:
    """The first error after which a node cannot continue."""
    waits = [asyncio.ensure_future(end) for end in ends]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for wait in waits:
            wait.cancel()


class RecentSamples:
    """The latest samples of each kind."""

    def __init__(self) -> None:
        self._prefill: deque[pb.PrefillSample] = deque(maxlen=SAMPLES_KEPT)
        self._decode: deque[pb.DecodeSample] = deque(maxlen=SAMPLES_KEPT)
        self._transfer: deque[pb.TransferSample] = deque(maxlen=SAMPLES_KEPT)

    def add(self, samples: pb.CostSamples) -> None:
        self._prefill.extend(samples.prefill)
        self._decode.extend(samples.decode)
        self._transfer.extend(samples.transfer)

    def all(self) -> pb.CostSamples:
        return pb.CostSamples(prefill=self._prefill, decode=self._decode, transfer=self._transfer)
