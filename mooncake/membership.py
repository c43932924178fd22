"""One node's side of belonging to the cluster: it registers with the conductor, heartbeats, and says when it drains.

It knows the Cluster service and nothing else: what a node measures and how loaded it is comes from the node through
``report``. The conductor may come later, restart or vanish; the node goes on, and registers again when it can.
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
    NodeUnavailable,
    StaleEpoch,
    Unauthenticated,
)
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc.cluster_pb2_grpc import ClusterStub
from mooncake.rpc.errors import error_from_rpc, handshake_trouble
from mooncake.rpc.server import Channels
from mooncake.tls import tls_of

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 1.0
SAMPLES_KEPT = 256  # of each kind: told again to a conductor that starts anew
RPC_TIMEOUT_S = 2.0
_IDLE_POLL_S = 0.02


class Membership:
    """``report`` is called on the event loop before each message and returns load, transports and the samples measured
    since the call before (those of the first call are the warm-up's). This class fills in who is speaking."""

    def __init__(
        self,
        config: Config,
        info: pb.NodeInfo,
        report: Callable[[], pb.HeartbeatRequest],
        on_wanted_role: Callable[[str], None] = lambda role: None,
    ) -> None:
        """``on_wanted_role`` is told, again and again, the role that the conductor wants this node to have. Raises
        ConfigError when the conductor has a certificate and the configuration does not say how to reach it."""
        self._on_wanted_role = on_wanted_role
        self.draining = False  # told with every heartbeat: this node takes nothing new
        self._address = config.conductor_address
        self._interval_s = config.conductor.heartbeat_interval_s
        self._metadata = bearer(config.conductor.api_key)
        self._info = info
        self._report = report
        self._channels = Channels(tls=tls_of(config))
        self._stub = ClusterStub(self._channels.get(self._address))
        self._recent = RecentSamples()
        self._conductor = 0  # incarnation of the conductor that knows us; 0: none does
        self._registered = asyncio.Event()
        self._replaced: asyncio.Future[StaleEpoch] = asyncio.get_running_loop().create_future()
        self._said_waiting = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_registered(self) -> bool:
        return self._registered.is_set()

    async def start(self) -> None:
        """Try once, and go on in the background when the conductor is not there yet.

        Raises ConfigError when the conductor refuses this node, Unauthenticated when it wants another API key, and
        StaleEpoch when another process took the node's id.
        """
        await self._try_register()
        self._task = asyncio.create_task(self._run(), name="membership")

    async def wait_registered(self) -> None:
        """Return once a conductor knows this node."""
        await self._registered.wait()

    async def wait_replaced(self) -> StaleEpoch:
        """Return the error once another process has taken this node's id: the cluster will not have this one back."""
        return await asyncio.shield(self._replaced)

    async def drain(self, is_idle: Callable[[], bool], patience_s: float) -> bool:
        """Take nothing new, heartbeat on, and return once ``is_idle``; False when it is not within ``patience_s``, or
        when no conductor knows this node, so that nobody would spare it."""
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
        """Say that this node drains (best effort, within a second), and be silent from then on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.is_registered:
            self._registered.clear()
            with contextlib.suppress(MooncakeError):
                await self._send_heartbeat(draining=True, timeout_s=min(1.0, RPC_TIMEOUT_S))
        await self._channels.close()

    async def announce(self) -> None:
        """Heartbeat now: something that the conductor should not learn late has changed."""
        if self.is_registered:
            await self._heartbeat()

    async def change(self, info: pb.NodeInfo) -> None:
        """Register as another node of the same name: another role, another incarnation. Errors as of ``start``."""
        self._registered.clear()
        self._info, self.draining = info, False
        await self._try_register()

    async def _run(self) -> None:
        backoff_s, said = 0.1, ""
        while True:
            try:
                if self.is_registered:
                    await self._heartbeat()
                else:
                    await self._try_register()
            except StaleEpoch as error:
                log.error("%s leaves the cluster: %s", self._info.node_id, error)
                self._registered.clear()
                self._replaced.set_result(error)
                return
            except (ConfigError, Unauthenticated) as error:
                if error.message != said:
                    log.error("%s", error)
                said = error.message
            except Exception:
                # `report` is the node's code: a bug there must not silence the heartbeat for good
                log.exception("heartbeat of %s failed", self._info.node_id)
            backoff_s = 0.1 if self.is_registered else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(self._interval_s if self.is_registered else backoff_s)

    async def _try_register(self) -> None:
        self._recent.add(self._report().samples)
        request = pb.RegisterRequest(node=self._info, samples=self._recent.all())
        try:
            response = await self._stub.Register(request, timeout=RPC_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, f"conductor {self._address}")
            if not isinstance(error, (NodeUnavailable, DeadlineExceeded)):
                raise error from None
            if not self._said_waiting:
                log.info("%s waits for the conductor at %s", self._info.node_id, self._address)
                if handshake_trouble(failure):  # which no waiting mends
                    log.error("%s", error)
                self._said_waiting = True
            return
        self._conductor = response.conductor_incarnation
        self._interval_s = response.heartbeat_interval_s or self._interval_s
        self._said_waiting = False
        self._registered.set()
        log.info("%s is registered with the conductor at %s", self._info.node_id, self._address)
        await self._heartbeat()  # registering carries no load

    async def _heartbeat(self) -> None:
        try:
            response = await self._send_heartbeat(draining=self.draining, timeout_s=RPC_TIMEOUT_S)
        except (NodeUnavailable, DeadlineExceeded) as error:
            if not self._said_waiting:
                log.warning("%s cannot reach the conductor: %s", self._info.node_id, error)
                self._said_waiting = True
            return
        self._said_waiting = False
        if not response.known or response.conductor_incarnation != self._conductor:
            self._registered.clear()
            await self._try_register()
        elif response.wanted_role:
            self._on_wanted_role(response.wanted_role)

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
    """Whichever comes first of the errors that a node cannot go on after."""
    waits = [asyncio.ensure_future(end) for end in ends]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for wait in waits:
            wait.cancel()


class RecentSamples:
    """The last samples of each kind."""

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
