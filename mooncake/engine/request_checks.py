"""Validation of requests: what could break a step is refused when a sequence, or its first tokens, arrive."""

from __future__ import annotations

from mooncake.engine.decoding.beam_search import handed_candidates
from mooncake.engine.sequence import Sequence, SequenceState
from mooncake.errors import InternalError, InvalidRequest
from mooncake.guides import Guides
from mooncake.types import SampledToken


class RequestChecks:
    """The limits of one model in one engine."""

    def __init__(
        self, vocab_size: int, max_model_len: int, guides: Guides | None, can_pool: bool, has_head: bool
    ) -> None:
        """``can_pool``: whether the model gives hidden states; ``has_head``: whether it gives logits."""
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._guides = guides
        self._can_pool = can_pool
        self._has_head = has_head

    def check(self, sequence: Sequence) -> None:
        """Also limits its length to the context. Raises InvalidRequest, ContextTooLong."""
        if sequence.state is not SequenceState.WAITING:
            raise InternalError(f"sequence {sequence.request_id} is {sequence.state} already")
        if int(sequence.tokens.max()) >= self._vocab_size:
            raise InvalidRequest(f"a token id is not below the vocabulary's size, {self._vocab_size}", "prompt")
        for name, token_ids in sequence.sampling.named_tokens():
            if any(not 0 <= token_id < self._vocab_size for token_id in token_ids):
                raise InvalidRequest(f"{name} names a token that is not below {self._vocab_size}", name)
        if sequence.pooling is None and not self._has_head:
            raise InvalidRequest("this model has no output head: it embeds texts, and generates none", "model")
        if sequence.pooling is not None and not self._can_pool:
            raise InvalidRequest(
                "pipeline stages, and tensor parallel GPUs, give no hidden states to embed with", "input"
            )
        if sequence.sampling.guide is not None:
            if self._guides is None:
                raise InvalidRequest("this engine cannot guide answers", "guide")
            self._guides.compile(sequence.sampling.guide)
        sequence.limit_length(self._max_model_len)

    def check_first_tokens(self, sequence: Sequence, tokens: list[SampledToken]) -> None:
        """Raises InvalidRequest when its answers cannot begin with these tokens."""
        expected = 1 if sequence.has_forked else sequence.sampling.num_answers
        if len(tokens) != expected:
            raise InvalidRequest(f"{len(tokens)} first tokens came for {expected} answers to {sequence.root_id}")
        for token in tokens:
            token_ids = [token.token_id, *(candidate.token_id for candidate in handed_candidates(token))]
            if token.index != sequence.num_generated or not all(0 <= i < self._vocab_size for i in token_ids):
                raise InvalidRequest(f"token {token.index} is not the next one of request {sequence.root_id}")
        if sequence.is_beam and not handed_candidates(tokens[0]):
            raise InvalidRequest(f"no candidates came for the beams of request {sequence.root_id}")
