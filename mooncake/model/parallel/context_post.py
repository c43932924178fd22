"""Communication between the ranks of a step: ``context_attention.Post`` over torch.distributed (gloo), with bytes
counted.

Besides what attention sends, there are the first rank's signals, before each layer, whether the step goes on, and the
other ranks' answers at its end. Only a broken connection raises ``Broken``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mooncake.model.parallel.context_attention import Awaited

WAIT = timedelta(seconds=120)  # for a message within a step: longer than any attention computation
_SIGNAL, _LOGITS, _REPORT = 10, 11, 12  # kinds of messages besides those of attention


class Broken(Exception):
    """A rank is unreachable, or a message cannot arrive."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's part in a step."""

    sent_bytes: int  # for attention
    waited_s: float  # for messages that had not arrived when needed


@contextmanager
def breaking() -> Iterator[None]:
    """Turns torch's connection errors into ``Broken``."""
    try:
        yield
    except RuntimeError as error:
        raise Broken(str(error).partition(". This is")[0]) from None  # the rest of the message is for gloo's own users


class GroupPost:
    """For a process that has joined the ranks' group. Call ``begin`` before each step."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.begin()

    def begin(self) -> None:
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self._sent_bytes = 0
        self._waited_s = 0.0

    def report(self) -> RankReport:
        return RankReport(self._sent_bytes, self._waited_s)

    # For attention

    def send(self, values: torch.Tensor, to: int, kind: int) -> None:
        self._sent_bytes += values.nbytes
        self._send(values, to, kind)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, kind: int) -> Awaited:
        values = torch.empty(tuple(shape), dtype=dtype)
        with breaking():
            return _Arriving(dist.irecv(_as_bytes(values), source, tag=kind), values, self._wait)

    def settle(self) -> None:
        for work, _ in self._sending:
            self._wait(work)
        self._sending.clear()

    # Around layers and steps

    def signal(self, *, goes_on: bool) -> None:
        """From the first rank to all others."""
        for other in range(1, self.size):
            self._send(torch.tensor([goes_on], dtype=torch.uint8), other, _SIGNAL)
        self.settle()

    def await_signal(self) -> bool:
        """Wait, without a limit, for the signal whether the step goes on."""
        goes_on = torch.empty(1, dtype=torch.uint8)
        with breaking():
            dist.recv(goes_on, 0, tag=_SIGNAL)
        return bool(goes_on.item())

    def answer(self, logits: torch.Tensor) -> None:
        """Send to the first rank, at the end of a step."""
        report = torch.tensor([self._sent_bytes, round(self._waited_s * 1e6)])
        if len(logits):
            self._send(logits, 0, _LOGITS)
        self._send(report, 0, _REPORT)
        self.settle()

    def answer_of(self, other: int, num_rows: int, width: int) -> tuple[torch.Tensor, RankReport]:
        logits = torch.empty((0, width))
        if num_rows:
            logits = self.receive((num_rows, width), torch.float32, other, _LOGITS).wait()
        sent_bytes, waited_us = self.receive((2,), torch.int64, other, _REPORT).wait().tolist()
        return logits, RankReport(sent_bytes, waited_us / 1e6)

    def _send(self, values: torch.Tensor, to: int, kind: int) -> None:
        with breaking():
            work = dist.isend(_as_bytes(values), to, tag=kind)
        assert work is not None, "this process is part of the group"
        self._sending.append((work, values))

    def _wait(self, work: dist.Work) -> None:
        started_s = time.perf_counter()
        with breaking():
            work.wait(WAIT)
        self._waited_s += time.perf_counter() - started_s


class _Arriving:
    def __init__(self, work: dist.Work | None, values: torch.Tensor, wait: Callable[[dist.Work], None]) -> None:
        self._work, self._values, self._wait = work, values, wait

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._wait(self._work)
            self._work = None
        return self._values


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """gloo supports few types, so it gets bytes."""
    return values.view(-1).view(torch.uint8)
