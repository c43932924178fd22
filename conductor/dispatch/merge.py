"""Merges the messages of an attempt's two nodes into one stream of tokens without gaps or repeats.

Pure: messages in, deltas out. It knows neither calls nor nodes nor the client; it moves the hand-off's state. A node
may be broken, or of another version: nothing that it says reaches the client unless it can be part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.api import Delta
from conductor.dispatch.lifecycle import HandoffPhase, Lifecycle
from mooncake.errors import BrokenPeer, HandoffFailed, MooncakeError, OutOfMemory, shown
from mooncake.rpc import decode_pb2, prefill_pb2
from mooncake.rpc.convert import UnreadScores, ms_from_wire, report_from_wire, sampled_from_wire, vector_from_wire
from mooncake.types import FinishReason, PrefillReport, SampledToken

_UNBOUNDED = 1 << 32

_REASONS = {reason.value: reason for reason in FinishReason if reason is not FinishReason.ABORT}  # that nodes give


class Merger:
    """Two streams of messages in; for each answer, one of tokens without gaps or repeats out.

    ``expected`` is the index of each answer's next token, ``end`` the index that none reaches; token ids are below
    ``vocab_size``. ``handoff`` is None when the prefill node gives whole answers. Without ``passes_first_token`` the
    prefill node's tokens are not passed on (beams are chosen at the end). ``wants_prompt_logprobs``: the client asked
    for them and has not received them yet. ``wants_pooled``: hidden states, and no tokens.
    """

    def __init__(
        self,
        expected: Sequence[int],
        handoff: Lifecycle[HandoffPhase] | None,
        passes_first_token: bool = True,
        wants_prompt_logprobs: bool = False,
        wants_pooled: bool = False,
        end: int = _UNBOUNDED,
        vocab_size: int = _UNBOUNDED,
    ) -> None:
        self._next_index = list(expected)
        self._start = tuple(expected)
        self._told_by_prefill, self._told_by_decode = list(expected), list(expected)
        self._first_ids: dict[int, int] = {}  # by choice, for both nodes tell them
        self._end = end
        self._vocab_size = vocab_size
        self._passes_first_token = passes_first_token
        self.wants_prompt_logprobs = wants_prompt_logprobs
        self._wants_pooled = wants_pooled
        self._open = set(range(len(expected)))
        self._unwanted: set[int] = set()
        self._withheld: Delta | None = None  # the last delta, held until the report arrives
        self._prefill_is_over = False
        self.is_prefilled = False  # the prompt is computed and a token exists
        self.handoff = handoff
        self.report: PrefillReport | None = None
        self.early_report: PrefillReport | None = None  # of what was known before the first token
        self.decode_ms = 0.0  # as the decode node measured the longest answer
        self.preemptions = 0

    @property
    def waits_for_report(self) -> bool:
        return self._withheld is not None

    @property
    def waits_for_commit(self) -> bool:
        return self.handoff is not None and self.handoff.state is HandoffPhase.STREAMING

    def end_choice(self, choice: int) -> None:
        """The client needs no more of this answer."""
        self._open.discard(choice)
        self._unwanted.add(choice)

    def is_unwanted(self, choice: int) -> bool:
        return choice in self._unwanted

    def on_prefill_message(self, message: prefill_pb2.PrefillResponse) -> Delta | None:
        """Raises OutOfMemory for an empty message, BrokenPeer for one that makes no sense."""
        if message.HasField("report"):
            self.report = report_from_wire(message.report)
            self._commit()
            return self.release()
        if message.HasField("early_report"):
            self.early_report = report_from_wire(message.early_report)
            return None
        if message.HasField("pooled"):
            return self._pooled(message.pooled)
        if message.HasField("prompt_logprobs") and self.wants_prompt_logprobs:
            self.wants_prompt_logprobs = False
            return Delta(prompt_logprobs=UnreadScores(message.prompt_logprobs))
        if not message.HasField("first_token"):
            if message.WhichOneof("event") is None:
                raise _empty("prefill")
            return None
        tokens = [sampled_from_wire(message.first_token)]
        self._check(self._told_by_prefill, message.choice, tokens, message.finish_reason)
        self.is_prefilled = True
        if self.handoff is None:
            return self._delta(message.choice, tokens, message.finish_reason)
        if self.handoff.state is HandoffPhase.RESERVED:
            self.handoff.move(HandoffPhase.STREAMING)
        return self._delta(message.choice, tokens, "") if self._passes_first_token else None

    def _pooled(self, data: bytes) -> Delta | None:
        if not self._wants_pooled:
            raise BrokenPeer("there are hidden states that nobody asked for")
        vector = vector_from_wire(data)
        self.is_prefilled = True
        if not self._open:
            return None
        self._open.clear()
        return Delta(finish_reason=FinishReason.STOP, pooled=vector)

    def on_decode_message(self, message: decode_pb2.DecodeResponse) -> Delta | None:
        """Raises like ``on_prefill_message``."""
        choice, finish_reason = message.choice, message.finish_reason  # each reading of a field costs
        tokens = list(map(sampled_from_wire, message.tokens))
        if not tokens and not finish_reason:
            raise _empty("decode")
        self._check(self._told_by_decode, choice, tokens, finish_reason)
        self._commit()
        if finish_reason and choice in self._open:
            self.decode_ms = max(self.decode_ms, ms_from_wire(message.decode_ms))
            self.preemptions = max(self.preemptions, message.preemptions)
        return self._delta(choice, tokens, finish_reason)

    def _check(self, told: list[int], choice: int, tokens: list[SampledToken], finish_reason: str) -> None:
        """``told``: how many tokens of each answer this node has told. Raises BrokenPeer unless each node tells an
        answer's tokens in order, as tokens of the model, and no more than were asked for, and then how it ended."""
        if self._wants_pooled:
            raise BrokenPeer("there is a token where hidden states were asked for")
        if choice >= len(told):
            raise BrokenPeer(f"there is no answer {choice}")
        for due, token in enumerate(tokens, told[choice]):
            if token.index != due:
                raise BrokenPeer(f"token {due} is missing: got {token.index}")
            if token.token_id >= self._vocab_size:
                raise BrokenPeer(f"token {due} is {token.token_id}, which the model does not have")
            if token.logprob and any(token_id >= self._vocab_size for token_id, _ in token.logprob.top):
                raise BrokenPeer(f"alternatives to token {due} are tokens that the model does not have")
        num_told = told[choice] + len(tokens)
        if num_told > self._end:
            raise BrokenPeer(f"there are {num_told} tokens where at most {self._end} were asked for")
        if finish_reason and finish_reason not in _REASONS:
            raise BrokenPeer(f"no answer ends with the finish reason {shown(finish_reason)}")
        if finish_reason and num_told == self._start[choice]:
            raise BrokenPeer("an answer has ended without a token")
        told[choice] = num_told

    def _delta(self, choice: int, tokens: list[SampledToken], finish_reason: str) -> Delta | None:
        if choice not in self._open:  # it has ended: the other node's first token may come later
            return None
        new = self._new_tokens(choice, tokens)
        if finish_reason:
            return self._finish(choice, _REASONS[finish_reason], new)
        return Delta(new, choice=choice) if new else None

    def on_prefill_end(self, error: MooncakeError | None) -> Delta | None:
        """The prefill node's call has ended. That only matters while the answers still depend on it."""
        self._prefill_is_over = True
        if not self._open:
            return self.release()
        if self.handoff is not None and self.handoff.state is HandoffPhase.COMMITTED:
            return None
        raise error or HandoffFailed("the prefill node ended its call without a report")

    def on_decode_end(self, error: MooncakeError | None) -> None:
        if self._open:
            raise error or HandoffFailed("the decode node ended its call without a finish reason")

    def release(self) -> Delta | None:
        """The withheld delta, if there is one: the report has arrived, or comes too late."""
        delta, self._withheld = self._withheld, None
        return delta

    def _commit(self) -> None:
        self.is_prefilled = True
        if self.handoff is not None and not self.handoff.has_ended:
            self.handoff.move(HandoffPhase.COMMITTED)

    def _finish(self, choice: int, reason: FinishReason, new: tuple[SampledToken, ...]) -> Delta | None:
        """The very last delta waits for the prefill node's report."""
        self._open.discard(choice)
        if self._open or self.report is not None or self._prefill_is_over:
            return Delta(new, reason, choice=choice)
        self._withheld = Delta((), reason, choice=choice)
        return Delta(new, choice=choice) if new else None

    def _new_tokens(self, choice: int, tokens: list[SampledToken]) -> tuple[SampledToken, ...]:
        """Tokens not seen yet. Both nodes may send the first token. Raises HandoffFailed when they do not agree on
        it."""
        if tokens and tokens[0].index == self._start[choice]:
            first_id = self._first_ids.setdefault(choice, tokens[0].token_id)
            if first_id != tokens[0].token_id:
                raise HandoffFailed("the two nodes do not agree on the answer's first token")
        new = tuple(token for token in tokens if token.index >= self._next_index[choice])
        self._next_index[choice] += len(new)
        return new


def _empty(role: str) -> OutOfMemory:
    """gRPC sends an empty message where it has no memory for the bytes of one, and goes on."""
    return OutOfMemory(f"the {role} node sent an empty message: it may have run out of memory")
