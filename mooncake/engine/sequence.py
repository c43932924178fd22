"""One request inside an engine: its tokens, its blocks, its state, and when it ends.

It knows nothing of torch, other sequences or the block pool: the scheduler gives it blocks, the engine appends tokens.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mooncake.engine.cache.sequence_blocks import NEVER, SequenceBlocks
from mooncake.engine.reused_kv import ReusedKV
from mooncake.errors import ContextTooLong, InternalError, InvalidRequest, MooncakeError, NotFinite
from mooncake.hashing import Chain
from mooncake.pooling import Pooling
from mooncake.repetition import Repetitions
from mooncake.sampling import SamplingParams
from mooncake.types import BlockKey, FinishReason, TokenIds, TokenLogprob

if TYPE_CHECKING:
    from mooncake.engine.cache.swap import Swapped
    from mooncake.engine.decoding.speculation import DraftMemory


class SequenceState(StrEnum):
    WAITING = "waiting"  # has no blocks
    RESERVED = "reserved"  # has blocks that another engine is filling
    RUNNING = "running"  # has blocks and is part of the next steps
    HELD = "held"  # complete; its blocks are kept until ``Engine.abort``
    FINISHED = "finished"  # has no blocks and never will


_S = SequenceState

SCHEDULABLE = frozenset({_S.WAITING, _S.RUNNING})  # in the scheduler's queues

TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.RESERVED, _S.FINISHED}),
    _S.RESERVED: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.HELD, _S.FINISHED}),
    _S.HELD: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Tokens ``0 ≤ i < num_computed`` have their KV in ``blocks``; the rest is still to be computed. Layers with a
    sliding window keep only what the next tokens see.

    It is created with the prompt (``num_prompt`` tokens) and what was generated before a retry. ``max_model_len``
    limits prompt plus answer (tokens); ``num_to_sample`` ends the sequence in this engine after that many new tokens.
    Raises InvalidRequest, ContextTooLong.
    """

    # The request

    request_id: str
    given_tokens: InitVar[TokenIds]
    num_prompt: int
    sampling: SamplingParams
    chain: Chain  # names its blocks
    _: KW_ONLY
    eos_ids: InitVar[tuple[int, ...]]
    max_model_len: InitVar[int]
    num_to_sample: InitVar[int | None] = None
    hold_blocks: bool = False  # keep them at the end, until ``Engine.abort``
    priority: int = 0  # lower ones run first
    keep_window_of: int = NEVER  # layers with a window also keep what this token sees, until whoever reads it has it
    adapter: int = -1  # index in the model's list; -1: none. It acts from token ``chain.start`` on
    adapter_held: object = None  # while something refers to this, the model keeps that adapter
    pooling: Pooling | None = None  # in place of an answer its hidden states are wanted, pooled so
    is_prefill_only: bool = field(init=False)  # another engine decodes it
    edits_logits: bool = field(init=False)
    is_plain: bool = field(init=False)  # its next token is the most likely one, and nothing else is wanted
    stop_ids: frozenset[int] = field(init=False)
    _repetitions: Repetitions | None = field(init=False)

    # Its tokens, prompt and answer

    num_tokens: int = field(init=False)
    last_token: int = field(init=False)
    prompt_logprobs: list[TokenLogprob] | None = field(init=False)  # of all tokens but the first
    _buffer: TokenIds = field(init=False)
    _full_length: int = field(init=False)  # tokens of prompt and answer at which it ends here

    # Its progress

    state: SequenceState = field(default=SequenceState.WAITING, init=False)
    arrival: int = field(default=0, init=False)  # order of arrival in this engine
    num_computed: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # found in this engine's own cache when first admitted
    num_preemptions: int = field(default=0, init=False)
    hidden_sum: npt.NDArray[np.float64] | None = field(default=None, init=False)  # of its first tokens, for their mean,
    num_summed: int = field(default=0, init=False)  # and how many these are: after a preemption more than are computed

    # Its KV

    block_keys: list[BlockKey] = field(default_factory=list, init=False)  # of the full blocks
    blocks: SequenceBlocks = field(default_factory=SequenceBlocks, init=False)
    reused: ReusedKV = field(default_factory=ReusedKV)
    swapped: Swapped | None = field(default=None, init=False)  # where its blocks are while it is preempted

    # The answers to one prompt, or the beams of one search, are forks of one sequence

    root_id: str = field(init=False)  # of the request
    choice: int = field(default=0, init=False)  # which of the answers this is
    is_beam: bool = field(init=False)
    has_forked: bool = field(init=False)  # the other answers are sequences of their own
    is_parked: bool = field(default=False, init=False)  # computed, and waiting for its search's other beams

    # State kept here by others: the sampler, and what proposes draft tokens

    packed_sampling: bytes = field(default=b"", init=False)  # sampling parameters as the C++ sampler reads them
    sampler_state: object = field(default=None, init=False)
    failure: MooncakeError | None = field(default=None, init=False)  # why no next token can be sampled: it ends
    draft_memory: DraftMemory | None = field(default=None, init=False)

    def __post_init__(
        self, given_tokens: TokenIds, eos_ids: tuple[int, ...], max_model_len: int, num_to_sample: int | None
    ) -> None:
        sampling, num_prompt, num_tokens = self.sampling, self.num_prompt, len(given_tokens)
        if not 1 <= num_prompt <= num_tokens:
            raise InvalidRequest(f"a prompt of {num_prompt} tokens in {num_tokens} tokens is not possible", "prompt")
        if num_tokens - num_prompt >= sampling.max_tokens:
            raise InvalidRequest("the answer is complete already", "max_tokens")
        if num_to_sample is not None and num_to_sample < 1:
            raise InvalidRequest("num_to_sample must be at least 1", "num_to_sample")
        if self.chain.start >= num_prompt:
            raise InvalidRequest("an adapter must begin to act within the prompt", "adapter_start")
        self.is_prefill_only = num_to_sample is not None
        self.edits_logits = sampling.edits_logits
        looping = sampling.repetition_detection
        self._repetitions = None if looping is None else Repetitions(looping, given_tokens[num_prompt:])
        self.is_plain = sampling.is_greedy and not self.edits_logits and sampling.logprobs is None
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else set(eos_ids))

        self.num_tokens = num_tokens
        self.last_token = int(given_tokens[-1])
        scores_prompt = sampling.prompt_logprobs is not None and num_tokens == num_prompt
        self.prompt_logprobs = [] if scores_prompt else None
        self._full_length = num_prompt + sampling.max_tokens
        if num_to_sample is not None:
            self._full_length = min(self._full_length, num_tokens + num_to_sample)
        self.limit_length(max_model_len)
        self._buffer = np.empty(min(self._full_length, 2 * num_tokens + 64), np.uint32)
        self._buffer[:num_tokens] = given_tokens

        self.root_id = self.request_id
        self.is_beam = sampling.beam_search is not None
        self.has_forked = sampling.num_answers == 1 or self.is_beam

    def __repr__(self) -> str:
        return f"<Sequence {self.request_id} {self.state} {self.num_computed}/{self.num_tokens} tokens>"

    @property
    def tokens(self) -> TokenIds:
        """All tokens so far, prompt and answer. A view: copy it to keep it."""
        return self._buffer[: self.num_tokens]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed, for which every token must be."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def computes_all(self) -> bool:
        """Whether every token of its prompt must be computed, whatever is cached."""
        return self.is_scoring or self.pooling is Pooling.MEAN

    @property
    def num_shareable(self) -> int:
        """Leading computed tokens with exact KV, which others may find by key."""
        num_exact = self.reused.num_exact
        return self.num_computed if num_exact is None else min(self.num_computed, num_exact)

    @property
    def num_left(self) -> int:
        """How many more tokens it can get in this engine."""
        return self._full_length - self.num_tokens

    @property
    def max_new_tokens(self) -> int:
        """The longest answer possible here (tokens)."""
        return self._full_length - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token is still to be computed."""
        return self.num_computed == self.num_tokens - 1

    @property
    def has_begun(self) -> bool:
        """Whether it has run in this engine, or is a fork of one that has."""
        return self.num_preemptions > 0 or self.request_id != self.root_id

    @property
    def is_below_min_tokens(self) -> bool:
        """Whether ``min_tokens`` forbids ending the answer with the next token."""
        return self.num_tokens - self.num_prompt < self.sampling.min_tokens

    def limit_length(self, max_model_len: int) -> None:
        """Raises ContextTooLong when not even one token can follow, if one is to."""
        if self.num_tokens + (self.pooling is None) > max_model_len:
            allowed = f"max_model_len and kv_gb allow {max_model_len}"
            raise ContextTooLong(f"{self.num_tokens} tokens leave no room for an answer: {allowed}", "prompt")
        self._full_length = min(self._full_length, max_model_len)

    def move(self, state: SequenceState) -> None:
        """Raises InternalError for a move that is not in the table; nothing changes then."""
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"sequence {self.request_id} cannot go from {self.state} to {state}")
        self.state = state

    def write_draft(self, draft: list[int]) -> None:
        """Write draft tokens after its tokens, without making them part of these."""
        end = self.num_tokens + len(draft)
        if end > len(self._buffer):
            self._grow_to(2 * end + 64)
        self._buffer[self.num_tokens : end] = draft

    def fail_not_finite(self) -> None:
        """The model's logits after its tokens are not finite: it ends here."""
        self.failure = NotFinite("the model's logits are not finite")

    def token_slice(self, first: int, end: int) -> TokenIds:
        """Tokens ``first ≤ i < end``, including draft tokens after them. A view."""
        return self._buffer[first:end]

    def append(self, token_id: int) -> FinishReason | None:
        """Add a generated token. Returns why the sequence ends with it, if it does."""
        place = self.num_tokens
        if place == len(self._buffer):
            self._grow_to(2 * place + 64)
        self._buffer[place] = self.last_token = token_id
        self.num_tokens = place + 1
        if token_id in self.stop_ids and place >= self.num_prompt + self.sampling.min_tokens:
            return FinishReason.STOP
        if self._repetitions is not None and self._loops(self._repetitions):
            return FinishReason.REPETITION
        return FinishReason.LENGTH if place + 1 >= self._full_length else None

    def _loops(self, repetitions: Repetitions) -> bool:
        repetitions.add_last(self.tokens[self.num_prompt :])
        return repetitions.are_enough and not self.is_below_min_tokens

    def fork_answer(self, choice: int) -> Sequence:
        """Another answer to the same prompt, from the tokens so far; it has no blocks yet."""
        child = self._fork(f"{self.root_id}#{choice}", self.tokens, self.sampling.for_answer(choice))
        child.choice = choice
        return child

    def fork_beam(self, number: int, token_id: int) -> Sequence:
        """Another beam: the tokens so far, and ``token_id``; it has no blocks yet."""
        tokens = np.append(self.tokens, np.uint32(token_id))
        return self._fork(f"{self.root_id}@{number}", tokens, self.sampling)

    def _fork(self, name: str, tokens: TokenIds, sampling: SamplingParams) -> Sequence:
        child = Sequence(
            name,
            tokens,
            self.num_prompt,
            sampling,
            self.chain,
            eos_ids=tuple(self.stop_ids),
            max_model_len=self._full_length,
            priority=self.priority,
            adapter=self.adapter,
            adapter_held=self.adapter_held,
        )
        child.root_id, child.failure = self.root_id, self.failure
        child.reused.num_exact = self.reused.num_exact
        child.reused.copied_from = self.reused.copied_from
        child.prompt_logprobs = None  # the first answer's are enough
        return child

    def extend_keys(self, block_tokens: int) -> None:
        """Bring ``block_keys`` up to date with the tokens."""
        if (len(self.block_keys) + 1) * block_tokens <= self.num_tokens:
            self.chain.extend(self.block_keys, self.tokens, block_tokens)

    def _grow_to(self, size: int) -> None:
        grown = np.empty(size, np.uint32)
        grown[: self.num_tokens] = self._buffer[: self.num_tokens]
        self._buffer = grown
