"""What every API does to embed texts: whether the model can, what is asked of the core, and vectors of what it gives.

It knows no wire formats. A text is a prompt without an answer: a prefill node computes it and pools its hidden states;
here dimensions are cut away, and the length becomes 1.
"""

from __future__ import annotations

from typing import NamedTuple

from conductor.ingress.answers import Piece
from conductor.ingress.served_model import ServedModel
from mooncake.errors import InternalError, InvalidRequest
from mooncake.pooling import PoolingSettings, Vector, check_dimensions
from mooncake.sampling import SamplingParams
from mooncake.types import Usage

NO_ANSWER = SamplingParams(max_tokens=1, temperature=0.0)  # a token's time is what placement may count with


class Embedded(NamedTuple):
    vector: Vector
    usage: Usage


def pooling_of(model: ServedModel, dimensions: int | None = None) -> PoolingSettings:
    """How the model embeds texts, of which ``dimensions`` are wanted (None: all). Raises InvalidRequest."""
    if isinstance(model.pooling, str):
        raise InvalidRequest(f"this model does not embed texts here: {model.pooling}", "model")
    check_dimensions(dimensions, model.hidden_size)
    return model.pooling


class Vectors:
    """Of one call's jobs, as they come."""

    def __init__(self, settings: PoolingSettings, dimensions: int | None = None) -> None:
        self.settings, self._dimensions = settings, dimensions
        self._found: dict[int, Embedded] = {}

    async def take(self, number: int, piece: Piece) -> None:
        """As ``pipeline.Emit``."""
        if piece.pooled is not None and piece.outcome is not None:
            vector = self.settings.embedding(piece.pooled, self._dimensions)
            self._found[number] = Embedded(vector, piece.outcome.usage)

    def of(self, count: int) -> list[Embedded]:
        """All, in order. Raises InternalError if one has not come."""
        if len(self._found) < count:
            raise InternalError("an input has ended without a vector")
        return [self._found[number] for number in range(count)]
