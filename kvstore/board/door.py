"""Hands a store's board to clients on its host: an abstract unix socket that sends files and then stays silent.

A client that connects gets the board (to read), a mailbox (to write), its writer id and the segment, and keeps the
connection open: its end tells either side that the other is gone. This module does not know what a board contains.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import secrets
import socket
import struct
from collections.abc import Callable

from kvstore.board.board import Board
from kvstore.board.library import GREETING, WRITER_ID_BYTES

log = logging.getLogger(__name__)

MAX_CLIENTS = 512
ACCEPT_AGAIN_S = 0.5  # after running out of file descriptors: a client that is not let in asks over the wire
TELL_EVERY_S = 10.0


class BoardDoor:
    """Everything on the store's event loop."""

    def __init__(
        self,
        board: Board,
        opened: Callable[[str, Callable[[int, int], bool]], object],
        gone: Callable[[str], object],
    ) -> None:
        """``opened`` and ``gone`` are called with a client's writer id, which is never reused. ``opened`` also gets
        the function that offers this client a slot to fill (``Board.give``)."""
        self._board = board
        self._opened, self._gone = opened, gone
        self._clients: dict[socket.socket, tuple[int, str]] = {}  # by connection: mailbox number, writer id
        self._listener: socket.socket | None = None
        self._again: asyncio.TimerHandle | None = None
        self._told_at = -math.inf
        self.path = ""

    def open(self) -> None:
        """Raises OSError."""
        path = f"@mooncake-board-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind("\0" + path[1:])
            listener.listen(64)
        except OSError:
            listener.close()
            raise
        self._listener, self.path = listener, path
        self._listen(listener)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for client in list(self._clients):
            self._leave(client)

    def _listen(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # whoever came has gone
            return
        except OSError as error:
            self._rest(listener, error)
            return
        client.setblocking(False)
        if len(self._clients) >= MAX_CLIENTS or not _is_same_user(client):
            client.close()
            return
        self._welcome(client)

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """The connection stays acceptable: without a pause we would be called again at once, and for ever."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._again = loop.call_later(ACCEPT_AGAIN_S, self._listen, listener)
        if loop.time() - self._told_at >= TELL_EVERY_S:
            log.warning("the board's door cannot accept a connection: %s", error)
            self._told_at = loop.time()

    def _welcome(self, client: socket.socket) -> None:
        try:
            number, files = self._board.add_mailbox()
        except OSError as error:
            log.warning("no mailbox for one more client: %s", error)
            client.close()
            return
        writer_id = f"near{secrets.token_hex(WRITER_ID_BYTES // 2 - 2)}"
        self._clients[client] = (number, writer_id)
        self._opened(writer_id, functools.partial(self._board.give, number))
        asyncio.get_running_loop().add_reader(client, self._leave, client)  # it sends nothing, so readable means closed
        try:
            socket.send_fds(client, [GREETING + writer_id.encode()], files)
        except OSError:
            self._leave(client)

    def _leave(self, client: socket.socket) -> None:
        number, writer_id = self._clients.pop(client, (-1, ""))
        if not writer_id:
            return
        asyncio.get_running_loop().remove_reader(client)
        client.close()
        self._board.drop_mailbox(number)
        self._gone(writer_id)


def _is_same_user(sock: socket.socket) -> bool:
    """Whether the peer of a unix socket runs as our user or as root."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid) in (os.geteuid(), 0)
