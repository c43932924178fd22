"""What the two nodes of an attempt say, merged into one stream of tokens without gap or repeat.

Pure: messages in, deltas out. It knows neither calls nor nodes nor the client; it moves the hand-off's state.
"""

from __future__ import annotations

from conductor.api import Delta
from conductor.lifecycle import HandoffState, Lifecycle
from mooncake.errors import HandoffFailed, InternalError, MooncakeError
from mooncake.rpc import decode_pb2, prefill_pb2
from mooncake.rpc.convert import report_from_wire, sampled_from_wire
from mooncake.types import FinishReason, PrefillReport, SampledToken


class Merger:
    """Two streams in, one without gap or repeat out. Pure.

    ``handoff`` is None when the first token is the whole answer; then ``stop_ids`` tell why it ended.
    """

    def __init__(self, expected_index: int, handoff: Lifecycle[HandoffState] | None, stop_ids: frozenset[int]) -> None:
        self._expected = expected_index
        self._stop_ids = stop_ids
        self._finish: FinishReason | None = None
        self._prefill_is_over = False
        self.handoff = handoff
        self.report: PrefillReport | None = None

    @property
    def waits_for_report(self) -> bool:
        return self._finish is not None and self.report is None

    @property
    def waits_for_commit(self) -> bool:
        return self.handoff is not None and self.handoff.state is HandoffState.STREAMING

    def prefill_said(self, message: prefill_pb2.PrefillResponse) -> Delta | None:
        """Raises InternalError when an index is missing."""
        if message.HasField("report"):
            self.report = report_from_wire(message.report)
            self._committed()
            return self._last(()) if self._finish is not None else None
        if not message.HasField("first_token"):
            return None
        if self.handoff is not None and self.handoff.state is HandoffState.RESERVED:
            self.handoff.move(HandoffState.STREAMING)
        new = self._new([sampled_from_wire(message.first_token)])
        if self.handoff is None and new:
            self._finish = FinishReason.STOP if new[0].token_id in self._stop_ids else FinishReason.LENGTH
            if self.report is not None:
                return self._last(new)
        return Delta(new) if new else None

    def decode_said(self, message: decode_pb2.DecodeResponse) -> Delta | None:
        """Raises InternalError when an index is missing or a finish reason is unknown."""
        self._committed()
        new = self._new([sampled_from_wire(token) for token in message.tokens])
        if message.finish_reason:
            self._finish = _finish_reason(message.finish_reason)
            if self.report is not None or self._prefill_is_over:
                return self._last(new)
        return Delta(new) if new else None

    def prefill_ended(self, error: MooncakeError | None) -> Delta | None:
        """The prefill node says no more. That only matters while the answer still depends on it."""
        self._prefill_is_over = True
        if self._finish is not None:
            return self._last(()) if self.report is None else None
        if self.handoff is not None and self.handoff.state is HandoffState.COMMITTED:
            return None
        raise error or HandoffFailed("the prefill node ended its call without a report")

    def decode_ended(self, error: MooncakeError | None) -> None:
        if self._finish is None:
            raise error or HandoffFailed("the decode node ended its call without a finish reason")

    def report_is_late(self) -> Delta | None:
        return self._last(()) if self.waits_for_report else None

    def _committed(self) -> None:
        if self.handoff is not None and not self.handoff.has_ended:
            self.handoff.move(HandoffState.COMMITTED)

    def _last(self, tokens: tuple[SampledToken, ...]) -> Delta:
        return Delta(tokens, self._finish)

    def _new(self, tokens: list[SampledToken]) -> tuple[SampledToken, ...]:
        """Those not seen yet. Both nodes may tell the first token."""
        new = []
        for token in tokens:
            if token.index < self._expected:
                continue
            if token.index > self._expected:
                raise InternalError(f"token {self._expected} is missing: got {token.index}")
            new.append(token)
            self._expected += 1
        return tuple(new)


def _finish_reason(text: str) -> FinishReason:
    try:
        return FinishReason(text)
    except ValueError:
        raise InternalError(f"a decode node gave the finish reason {text!r}") from None
