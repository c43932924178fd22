"""Embeddings as ``LLM`` and ``AsyncLLM`` give them: parameters, results, and a text that is being embedded. The names
are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mooncake.llm_absent import OF_POOLING, form_says_counterparts
from mooncake.pooling import PoolingSettings, check_dimensions, cosine, paired

if TYPE_CHECKING:
    from mooncake.engine.contract import StepOutput
    from mooncake.engine.sequence import Sequence


@form_says_counterparts(OF_POOLING)
@dataclass(frozen=True, slots=True)
class PoolingParams:
    """``dimensions`` of each vector, its first ones (None: all); ``normalize`` to length 1 (None: as the model
    says)."""

    dimensions: int | None = None
    normalize: bool | None = None

    def settings(self, of_model: PoolingSettings) -> PoolingSettings:
        return of_model if self.normalize is None else PoolingSettings(of_model.kind, self.normalize)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result for one text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int  # whose KV was cached
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """How near two texts are: the cosine of their embeddings."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # of both, one behind the other
    num_cached_tokens: int
    finished: bool = True


class EmbeddingDraft:
    """A text while it is embedded."""

    def __init__(self, sequence: Sequence, settings: PoolingSettings, dimensions: int | None, hidden_size: int) -> None:
        """Raises InvalidRequest for more ``dimensions`` than ``hidden_size``."""
        check_dimensions(dimensions, hidden_size)
        self.sequence = sequence
        self._settings, self._dimensions = settings, dimensions
        self._embedding: list[float] | None = None

    @property
    def is_complete(self) -> bool:
        return self._embedding is not None

    def take(self, output: StepOutput) -> bool:
        """Returns whether it is complete."""
        if output.pooled is not None:
            self._embedding = self._settings.embedding(output.pooled, self._dimensions).tolist()
        return self.is_complete

    def result(self) -> EmbeddingRequestOutput:
        """Once it is complete."""
        assert self._embedding is not None
        sequence = self.sequence
        prompt: list[int] = sequence.tokens.tolist()
        embedded = EmbeddingOutput(self._embedding)
        return EmbeddingRequestOutput(sequence.request_id, embedded, prompt, sequence.num_cached_tokens)


def scores_of(
    firsts: list[EmbeddingRequestOutput], seconds: list[EmbeddingRequestOutput]
) -> list[ScoringRequestOutput]:
    """Of each pair. Raises like ``paired``."""
    return [_score(*pair) for pair in paired(firsts, seconds, "data_1")]


def _score(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    vectors = (np.array(each.outputs.embedding, np.float32) for each in (first, second))
    return ScoringRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(cosine(*vectors)),
        first.prompt_token_ids + second.prompt_token_ids,
        first.num_cached_tokens + second.num_cached_tokens,
    )
