"""Verbs: a device, registered memory and reliable queue pairs, over pyverbs.

pyverbs never releases the GIL, so nothing here waits inside it: completions are polled; if there are none the
completion channel is armed, the queue polled once more, and the thread sleeps on the channel's file descriptor. This
module knows neither segments, blocks nor what the bytes mean.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.transfer.rdma.find import Verbs, VerbsUnavailable, find_port, gid_index, link_layer, pyverbs

_CHANNEL_LINK = "anon_inode:[infinibandevent]"

MAX_READS = 16  # RDMA reads in flight on one queue pair
_HOP_LIMIT = 64
_MOST_AT_ONCE = 64
_ACK_TIMEOUT = 14  # 4.096 µs · 2^14 = 67 ms per attempt: how long a lost acknowledgement stalls the queue pair
# An unresponsive peer is given up after half a second, or two: devices may wait four times that; soft RoCE for ever.
_RETRIES = 7
_RNR_TIMER = 12  # 0.64 ms between retries when the peer has no receive posted
_RNR_FOR_EVER = 7  # a peer that is slow to post receives is slow, not gone


class VerbsFailed(Exception):
    """A verb failed: memory cannot be registered, or a queue pair is broken."""


class Access(IntEnum):
    """Rights to registered memory, as bits."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    BIND_WINDOWS = 16


class Status(IntEnum):
    """How a work request ended, as far as we distinguish (``ibv_wc_status``)."""

    SUCCESS = 0
    FLUSHED = 5  # the queue pair was broken already
    REMOTE_ACCESS = 10  # the key does not (any more) allow access to these bytes
    NO_ANSWER = 12  # every retry went unacknowledged


class Completion(NamedTuple):
    tag: int  # as given to ``post_…``
    status: int  # a Status, or another of ``ibv_wc_status``
    is_received: bool  # a completed receive, otherwise a completed send
    has_immediate: bool
    nbytes: int  # received
    immediate: int


_ENDPOINT = struct.Struct("<4sBBHII16s")
_MAGIC = b"RDMA"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the other side needs to connect its queue pair to ours."""

    queue_pair: int
    packet_number: int
    gid: bytes
    lid: int  # 0 on Ethernet
    mtu: int  # ``ibv_mtu``: 1 for 256 bytes … 5 for 4096

    SIZE = _ENDPOINT.size

    def pack(self) -> bytes:
        return _ENDPOINT.pack(_MAGIC, _VERSION, self.mtu, self.lid, self.queue_pair, self.packet_number, self.gid)

    @classmethod
    def unpack(cls, data: bytes) -> Endpoint:
        """Raises ValueError for bytes that are not an endpoint of this version."""
        if len(data) != cls.SIZE:
            raise ValueError(f"an RDMA endpoint of {len(data)} bytes")
        magic, version, mtu, lid, queue_pair, packet_number, gid = _ENDPOINT.unpack(data)
        if magic != _MAGIC or version != _VERSION or not 1 <= mtu <= 5 or packet_number >= 1 << 24:
            raise ValueError("not an RDMA endpoint of this version")
        return cls(queue_pair, packet_number, gid, lid, mtu)


class Device:
    """An open device with one protection domain. Everything created from it is closed before it, or by it."""

    def __init__(self) -> None:
        """The first device with an active port. Raises VerbsUnavailable."""
        self.name, self.port = find_port()
        self.verbs = pyverbs()
        try:
            self._context = self.verbs.device.Context(name=self.name)
            attributes = self._context.query_device()
            port = self._context.query_port(self.port)
            self.is_ethernet = link_layer(self.name, self.port) == "Ethernet"
            self.gid_index = gid_index(self.name, self.port, self.is_ethernet)
            self.gid = bytes(_gid_bytes(self._context.query_gid(self.port, self.gid_index).gid))
            self.domain = self.verbs.pd.PD(self._context)
        except self.verbs.error as error:
            raise VerbsUnavailable(f"RDMA device {self.name} cannot be opened: {error}") from None
        enums = self.verbs.enums
        self.lid, self.mtu = port.lid, port.active_mtu
        self.max_work_requests = min(attributes.max_qp_wr, attributes.max_cqe)
        self.max_reads = min(MAX_READS, attributes.max_qp_rd_atom)
        self.has_windows = bool(attributes.device_cap_flags & enums.IBV_DEVICE_MEM_WINDOW_TYPE_2B)

    def register(self, address: int, nbytes: int, access: int) -> Registration:
        """Pins the memory while holding the GIL: keep pieces to some ten MiB. Raises VerbsFailed."""
        try:
            region = self.verbs.mr.MR(self.domain, nbytes, access, address=address)
        except self.verbs.error as error:
            raise VerbsFailed(
                f"{self.name} cannot register {nbytes / 1e6:.0f} MB ({error}); is the limit of locked memory too low?"
            ) from None
        return Registration(address, nbytes, region.lkey, region.rkey, region)

    def close(self) -> None:
        with contextlib.suppress(self.verbs.error):
            self._context.close()


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """Memory that the device may access until ``close``. ``rkey`` is for peers, as far as its access rights allow."""

    address: int
    nbytes: int
    lkey: int
    rkey: int
    region: Any

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it goes with its device at the latest
            self.region.close()


class Window:
    """The right of one queue pair's peer to write one range, until ``close``: a type 2 memory window."""

    def __init__(self, queue_pair: QueuePair, region: Registration, address: int, nbytes: int) -> None:
        """Posts the binding. Everything sent over ``queue_pair`` afterwards finds it bound. Raises VerbsFailed."""
        verbs = queue_pair.device.verbs
        try:
            self._window = verbs.mr.MW(queue_pair.device.domain, verbs.enums.IBV_MW_TYPE_2)
            info = verbs.mr.MWBindInfo(region.region, address, nbytes, Access.REMOTE_WRITE)
            self.rkey = queue_pair._post_binding(self._window, info)
        except verbs.error as error:
            raise VerbsFailed(f"{queue_pair.device.name} cannot open a memory window: {error}") from None

    def close(self) -> None:
        """After this returns the device accepts no write for it any more. Raises VerbsFailed when that is not
        certain."""
        try:
            self._window.close()
        except Exception as error:
            raise VerbsFailed(f"a memory window cannot be closed: {error}") from None


class QueuePair:
    """A reliable connection with one completion queue. One thread posts and polls; any thread may ``wake`` it."""

    def __init__(self, device: Device, send_depth: int, receive_depth: int) -> None:
        """Raises VerbsFailed."""
        self.device = device
        self.packet_number = secrets.randbits(24)
        verbs, enums = device.verbs, device.verbs.enums
        if send_depth + receive_depth > device.max_work_requests:
            raise VerbsFailed(f"{device.name} takes {device.max_work_requests} work requests, too few")
        self._undo = contextlib.ExitStack()
        self._armed = False
        self._unacknowledged = 0  # events
        try:
            with self._undo:
                self._channel, self._channel_fd = _open_channel(verbs, device._context)
                self._undo.callback(self._channel.close)
                self._queue = verbs.cq.CQ(device._context, send_depth + receive_depth, channel=self._channel)
                self._undo.callback(self._close_queue)
                depths = verbs.qp.QPCap(
                    max_send_wr=send_depth, max_recv_wr=receive_depth, max_send_sge=1, max_recv_sge=1
                )
                kind = verbs.qp.QPInitAttr(
                    qp_type=enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=depths, sq_sig_all=0
                )
                self._pair = verbs.qp.QP(device.domain, kind)
                self._undo.callback(self._pair.close)
                # pyverbs leaks what a work request allocates, so a queue pair creates one of each and reuses it.
                self._gather = verbs.wr.SGE(0, 0, 0)
                self._send = verbs.wr.SendWR(num_sge=1, sg=[self._gather], opcode=enums.IBV_WR_RDMA_WRITE)
                self._send.sg_list = self._gather
                self._undo = self._undo.pop_all()
        except (verbs.error, OSError) as error:
            raise VerbsFailed(f"{device.name} gives no queue pair: {error}") from None
        self._poll = select.poll()
        self._poll.register(self._channel_fd, select.POLLIN)
        self._write, self._read = enums.IBV_WR_RDMA_WRITE, enums.IBV_WR_RDMA_READ
        self._write_immediate, self._send_opcode = enums.IBV_WR_RDMA_WRITE_WITH_IMM, enums.IBV_WR_SEND
        self._signaled = enums.IBV_SEND_SIGNALED

    @property
    def endpoint(self) -> Endpoint:
        device = self.device
        return Endpoint(self._pair.qp_num, self.packet_number, device.gid, device.lid, device.mtu)

    def connect(self, peer: Endpoint, access: int) -> None:
        """``access``: the most the peer may do; keys narrow it down. Raises VerbsFailed."""
        device, verbs = self.device, self.device.verbs
        attributes = verbs.qp.QPAttr(port_num=device.port)
        attributes.qp_access_flags = access
        attributes.dest_qp_num = peer.queue_pair
        attributes.path_mtu = min(peer.mtu, device.mtu)
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = device.max_reads
        attributes.min_rnr_timer = _RNR_TIMER
        attributes.timeout = _ACK_TIMEOUT
        attributes.retry_cnt = _RETRIES
        attributes.rnr_retry = _RNR_FOR_EVER
        attributes.sq_psn = self.packet_number
        attributes.rq_psn = peer.packet_number
        try:
            route = verbs.addr.GlobalRoute(
                dgid=verbs.addr.GID(_gid_text(peer.gid)), sgid_index=device.gid_index, hop_limit=_HOP_LIMIT
            )
            attributes.ah_attr = verbs.addr.AHAttr(
                port_num=device.port, is_global=int(device.is_ethernet), dlid=peer.lid, gr=route
            )
            self._pair.to_rts(attributes)
        except verbs.error as error:
            raise VerbsFailed(f"{device.name} cannot connect to the peer's queue pair: {error}") from None

    def watch(self, fd: int) -> None:
        """``wait`` ends early when this file descriptor becomes readable or is closed by its peer."""
        self._poll.register(fd, select.POLLIN | select.POLLRDHUP)

    def post_write(self, tag: int, local: int, lkey: int, nbytes: int, remote: int, rkey: int, signal: bool) -> None:
        """Raises VerbsFailed, like the others. A completion arrives with ``signal``, or on failure."""
        self._post(self._write, tag, local, lkey, nbytes, remote, rkey, signal)

    def post_read(self, tag: int, local: int, lkey: int, nbytes: int, remote: int, rkey: int, signal: bool) -> None:
        self._post(self._read, tag, local, lkey, nbytes, remote, rkey, signal)

    def post_notice(self, tag: int, immediate: int) -> None:
        """A zero-byte write with 32 bits of immediate data: takes one receive of the peer, and needs no key. Only its
        failure is told."""
        self._send.imm_data = immediate
        self._post(self._write_immediate, tag, 0, 0, 0, 0, 0, signal=False)

    def post_message(self, tag: int, memory: Registration, nbytes: int) -> None:
        self._post(self._send_opcode, tag, memory.address, memory.lkey, nbytes, 0, 0, signal=True)

    def post_receive(self, tag: int, memory: Registration) -> None:
        wr = self.device.verbs.wr
        gather = wr.SGE(memory.address, memory.nbytes, memory.lkey)
        request = wr.RecvWR(wr_id=tag, num_sge=1, sg=[gather])
        try:
            self._pair.post_recv(request)
        except self.device.verbs.error as error:
            raise VerbsFailed(f"a receive was not taken: {error}") from None
        finally:
            request.close()
            gather.close()

    def completions(self) -> list[Completion]:
        """Completions since the last call, or some of them. Never blocks."""
        try:
            _, found = self._queue.poll(_MOST_AT_ONCE)
        except self.device.verbs.error as error:
            raise VerbsFailed(f"the completion queue cannot be polled: {error}") from None
        return [_completion(entry) for entry in found] if found else []

    def wait(self, timeout_s: float | None) -> list[Completion]:
        """The same, but sleeps while there are none. May be empty: after the timeout, when a watched file is
        readable, or when what woke it had been seen before."""
        if (found := self.completions()) or (timeout_s is not None and timeout_s <= 0):
            return found
        if not self._armed:
            self._arm()
            if found := self.completions():  # it arrived between polling and arming
                return found
        timeout_ms = None if timeout_s is None else max(1, int(timeout_s * 1e3))
        if any(fd == self._channel_fd for fd, _ in self._poll.poll(timeout_ms)):
            self._take_event()
            self._arm()  # before polling: a completion it misses will wake the next wait
        return self.completions()

    def _arm(self) -> None:
        try:
            self._queue.req_notify()
        except self.device.verbs.error as error:
            raise VerbsFailed(f"the completion queue cannot be armed: {error}") from None
        self._armed = True

    def _take_event(self) -> None:
        """Consume the event that arming produced."""
        try:
            self._channel.get_cq_event(self._queue)
        except self.device.verbs.error as error:
            raise VerbsFailed(f"the completion channel is broken: {error}") from None
        self._unacknowledged += 1
        self._armed = False

    def _close_queue(self) -> None:
        """An unacknowledged event would block closing the queue for ever."""
        if self._unacknowledged:
            self._queue.ack_events(self._unacknowledged)
        self._queue.close()

    def close(self) -> None:
        """After this returns the device neither reads nor writes memory for it. Idempotent."""
        with contextlib.suppress(self.device.verbs.error):
            self._undo.close()

    def _post(
        self, opcode: int, tag: int, local: int, lkey: int, nbytes: int, remote: int, rkey: int, signal: bool
    ) -> None:
        gather, send = self._gather, self._send
        gather.addr, gather.lkey, gather.length = local, lkey, nbytes
        send.wr_id, send.opcode, send.num_sge = tag, opcode, 1 if nbytes else 0
        send.send_flags = self._signaled if signal else 0
        send.set_wr_rdma(rkey, remote)
        try:
            self._pair.post_send(send)
        except self.device.verbs.error as error:
            raise VerbsFailed(f"the queue pair takes no work: {error}") from None

    def _post_binding(self, window: Any, info: Any) -> int:
        """Returns the key by which the peer knows the window."""
        verbs = self.device.verbs
        request = verbs.wr.SendWR(opcode=verbs.enums.IBV_WR_BIND_MW, send_flags=0)
        try:
            request.set_bind_wr(window, info)
            self._pair.post_send(request)
            return int(request.rkey)
        finally:
            request.close()


def _completion(entry: Any) -> Completion:
    is_received = entry.opcode >= 128  # IBV_WC_RECV and all later codes
    return Completion(
        entry.wr_id, entry.status, is_received, is_received and bool(entry.wc_flags & 2), entry.byte_len, entry.imm_data
    )


def _gid_bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _gid_text(gid: bytes) -> str:
    digits = gid.hex()
    return ":".join(digits[start : start + 4] for start in range(0, 32, 4))


_opening = threading.Lock()  # to attribute new file descriptors


def _open_channel(verbs: Verbs, context: Any) -> tuple[Any, int]:
    """A completion channel and its file descriptor, which pyverbs 44 does not expose: it is the newly opened one."""
    with _opening:
        before = _channel_fds()
        channel = verbs.cq.CompChannel(context)
        fd = getattr(channel, "fd", None)
        found = [fd] if isinstance(fd, int) else sorted(_channel_fds() - before)
    if len(found) != 1:
        channel.close()
        raise OSError("the completion channel cannot be told from others")
    os.set_blocking(found[0], False)
    return channel, found[0]


def _channel_fds() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(path.readlink()) == _CHANNEL_LINK:
                found.add(int(path.name))
    return found
