"""One request inside an engine: its tokens, its blocks, where it stands, and when it ends.

It must not know about torch, other sequences or the block pool: the scheduler gives it blocks, the engine appends
tokens.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from mooncake.errors import ContextTooLong, InternalError, InvalidRequest, MooncakeError
from mooncake.guides import GuideState
from mooncake.hashing import extend_chain
from mooncake.types import BlockKey, FinishReason, SamplingParams, TokenIds, TokenLogprob

if TYPE_CHECKING:
    from mooncake.engine.speculation import DraftMemory


class SequenceState(StrEnum):
    WAITING = "waiting"  # has no blocks
    RESERVED = "reserved"  # has blocks that another engine is filling
    RUNNING = "running"  # has blocks and is part of the next steps
    HELD = "held"  # is complete; its blocks are kept until ``release``
    FINISHED = "finished"  # has no blocks and never will


_S = SequenceState

ALLOWED: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.RESERVED, _S.FINISHED}),
    _S.RESERVED: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.HELD, _S.FINISHED}),
    _S.HELD: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}


class Sequence:
    """Tokens ``0 ≤ i < num_computed`` have their KV in the blocks of ``block_table``; the rest is still to compute."""

    __slots__ = (
        "_buffer",
        "_full_length",
        "adapter",
        "admitted_s",
        "arrival",
        "block_keys",
        "block_table",
        "chain_seed",
        "choice",
        "draft_memory",
        "draw",
        "edits_logits",
        "external_blocks",
        "failure",
        "first_step_s",
        "guide_state",
        "has_forked",
        "hold_blocks",
        "is_beam",
        "is_first_leg",
        "is_loading",
        "is_parked",
        "is_plain",
        "last_token",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_sealed",
        "num_swapped",
        "num_tokens",
        "num_writable",
        "priority",
        "prompt_logprobs",
        "request_id",
        "root_id",
        "row",
        "sampler_memory",
        "sampling",
        "state",
        "stop_ids",
        "swapped",
    )

    def __init__(
        self,
        request_id: str,
        tokens: TokenIds,
        num_prompt: int,
        sampling: SamplingParams,
        chain_seed: bytes,
        *,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        num_to_sample: int | None = None,
        external_blocks: int = 0,
        hold_blocks: bool = False,
        priority: int = 0,
        adapter: int = -1,
    ) -> None:
        """``tokens`` are the prompt (``num_prompt`` of them) and what was generated before a retry.

        ``max_model_len`` bounds prompt plus answer (tokens); ``num_to_sample`` ends the sequence's stay in this engine
        after so many new tokens; ``external_blocks`` leading blocks can be loaded from elsewhere at admission;
        ``hold_blocks`` keeps the blocks at the end until they are released; who has a lower ``priority`` runs first;
        ``adapter`` is a place in the model's list of them (-1: none), and ``chain_seed`` must be that adapter's own.
        Raises InvalidRequest, ContextTooLong.
        """
        num_tokens = len(tokens)
        if not 1 <= num_prompt <= num_tokens:
            raise InvalidRequest(f"a prompt of {num_prompt} tokens in {num_tokens} tokens is not possible", "prompt")
        if num_tokens - num_prompt >= sampling.max_tokens:
            raise InvalidRequest("the answer is complete already", "max_tokens")
        if num_to_sample is not None and num_to_sample < 1:
            raise InvalidRequest("num_to_sample must be at least 1", "num_to_sample")
        if external_blocks < 0:
            raise InvalidRequest("external_blocks must not be negative", "external_blocks")
        self.request_id = request_id
        self.root_id = request_id  # of the request that asked for several answers
        self.choice = 0  # which of them this is
        self.is_beam = sampling.beam_search is not None
        self.has_forked = sampling.num_answers == 1 or self.is_beam  # the others run on their own
        scores_prompt = sampling.prompt_logprobs is not None and num_tokens == num_prompt
        self.prompt_logprobs: list[TokenLogprob] | None = [] if scores_prompt else None  # of its tokens but the first
        self.is_first_leg = num_to_sample is not None  # another engine goes on with it
        self.is_parked = False  # computed to its end, and waits for the other beams of its search
        self.num_prompt = num_prompt
        self.sampling = sampling
        self.edits_logits = bool(  # whether the request adds anything to the model's opinion
            sampling.logit_bias
            or sampling.needs_history
            or sampling.min_tokens
            or sampling.guide
            or sampling.allowed_token_ids
            or sampling.bad_words
        )
        self.is_plain = (  # whether the model's most likely token is all that it asks for
            sampling.is_greedy and not self.edits_logits and sampling.logprobs is None
        )
        self.chain_seed = chain_seed
        self.external_blocks = external_blocks
        self.hold_blocks = hold_blocks
        self.priority = priority
        self.adapter = adapter
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else set(eos_ids))
        self.num_tokens = num_tokens
        self._full_length = num_prompt + sampling.max_tokens  # tokens, at which it ends in this engine
        if num_to_sample is not None:
            self._full_length = min(self._full_length, num_tokens + num_to_sample)
        self.limit_length(max_model_len)
        self._buffer = np.empty(min(self._full_length, 2 * num_tokens + 64), np.uint32)
        self._buffer[:num_tokens] = tokens
        self.last_token = int(tokens[-1])
        self.num_computed = 0
        self.block_keys: list[BlockKey] = []  # of the full blocks
        self.block_table: list[int] = []
        self.num_writable = 0  # leading tokens of which the next may be written without asking whose its block is
        self.num_sealed = 0  # blocks
        self.swapped: list[int] = []  # where its blocks wait while it has none; their KV is of ``num_swapped`` tokens
        self.num_swapped = 0
        self.is_loading = False  # blocks of the table are still on their way from elsewhere
        self.state = SequenceState.WAITING
        self.arrival = 0  # order of arrival in this engine
        self.row = -1  # in the scheduler's array of block tables
        self.sampler_memory: object = None  # of the sampler alone
        self.draw = b""  # likewise
        self.guide_state: GuideState | None = None  # likewise
        self.failure: MooncakeError | None = None  # why the sampler could not draw its next token: it ends
        self.draft_memory: DraftMemory | None = None  # of speculation alone

        self.num_cached_tokens = 0  # found in this engine's own cache when first admitted
        self.num_preemptions = 0
        self.admitted_s = 0.0  # monotonic, as the next one; 0 until it happens
        self.first_step_s = 0.0

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
        """Whether log-probabilities of its prompt are still to compute, for which every token has to be."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def num_left(self) -> int:
        """How many tokens can still follow here."""
        return self._full_length - self.num_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token is still to compute."""
        return self.num_computed == self.num_tokens - 1

    @property
    def must_go_on(self) -> bool:
        """Whether ``min_tokens`` forbids the next token to end the answer."""
        return self.num_tokens - self.num_prompt < self.sampling.min_tokens

    def limit_length(self, max_model_len: int) -> None:
        """Raises ContextTooLong when not even one token can follow."""
        if self.num_tokens >= max_model_len:
            raise ContextTooLong(f"{self.num_tokens} tokens leave no room for an answer in {max_model_len}", "prompt")
        self._full_length = min(self._full_length, max_model_len)

    def move(self, state: SequenceState) -> None:
        """Raises InternalError for a move that the table does not allow; nothing changes then."""
        if state not in ALLOWED[self.state]:
            raise InternalError(f"sequence {self.request_id} cannot go from {self.state} to {state}")
        self.state = state

    def write_draft(self, draft: list[int]) -> None:
        """Guesses behind its tokens, of which they are no part."""
        end = self.num_tokens + len(draft)
        if end > len(self._buffer):
            self._grow_to(2 * end + 64)
        self._buffer[self.num_tokens : end] = draft

    def window(self, first: int, end: int) -> TokenIds:
        """Tokens ``first ≤ i < end``, guesses behind them included. A view."""
        return self._buffer[first:end]

    def _grow_to(self, size: int) -> None:
        grown = np.empty(size, np.uint32)
        grown[: self.num_tokens] = self._buffer[: self.num_tokens]
        self._buffer = grown

    def append(self, token_id: int) -> FinishReason | None:
        """Add a generated token; why the sequence ends with it, if it does."""
        place = self.num_tokens
        if place == len(self._buffer):
            self._grow_to(2 * place + 64)
        self._buffer[place] = self.last_token = token_id
        self.num_tokens = place + 1
        if token_id in self.stop_ids and place >= self.num_prompt + self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if place + 1 >= self._full_length else None

    def spawn(self, choice: int) -> Sequence:
        """Another answer to the same prompt, from the tokens so far; it has no blocks yet."""
        child = Sequence(
            f"{self.root_id}#{choice}",
            self.tokens,
            self.num_prompt,
            self.sampling.for_answer(choice),
            self.chain_seed,
            eos_ids=tuple(self.stop_ids),
            max_model_len=self._full_length,
            priority=self.priority,
            adapter=self.adapter,
        )
        child.root_id, child.choice = self.root_id, choice
        child.prompt_logprobs = None  # those of the first answer are enough
        child.admitted_s, child.first_step_s = self.admitted_s, self.first_step_s
        return child

    def branch(self, number: int, token_id: int) -> Sequence:
        """Another beam: the tokens so far, and ``token_id``; it has no blocks yet."""
        child = Sequence(
            f"{self.root_id}@{number}",
            np.append(self.tokens, np.uint32(token_id)),
            self.num_prompt,
            self.sampling,
            self.chain_seed,
            eos_ids=tuple(self.stop_ids),
            max_model_len=self._full_length,
            priority=self.priority,
            adapter=self.adapter,
        )
        child.root_id = self.root_id
        child.prompt_logprobs = None
        child.admitted_s, child.first_step_s = self.admitted_s, self.first_step_s
        return child

    @property
    def max_new_tokens(self) -> int:
        """How long its answer can get here (tokens)."""
        return self._full_length - self.num_prompt

    def extend_keys(self, block_tokens: int) -> None:
        """Bring ``block_keys`` up to date with the tokens."""
        known = len(self.block_keys)
        if (known + 1) * block_tokens <= self.num_tokens:
            parent = self.block_keys[-1] if known else self.chain_seed
            self.block_keys += extend_chain(parent, self.tokens[known * block_tokens :], block_tokens)
