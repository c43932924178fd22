"""What APIs with typed events (Responses, Anthropic's Messages) share on the way out: one answer, streamed or whole.

A writer words the pieces of an answer as events. This module does not know what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from starlette.requests import Request

from conductor.ingress.answers import Job, Piece
from conductor.ingress.http.event_stream import EventStream
from conductor.ingress.http.request import unless_gone
from conductor.ingress.pipeline import Pipeline


class TypedEvent(Protocol):
    """A msgspec struct; ``type`` names the server-sent event, too."""

    @property
    def type(self) -> str: ...


class EventWriter(Protocol):
    def take(self, piece: Piece) -> Sequence[TypedEvent]:
        """The events that this piece makes. None before the answer has content: an error until then still has its own
        HTTP status."""
        ...


async def stream_events(pipeline: Pipeline, job: Job, writer: EventWriter, stream: EventStream) -> None:
    """Send each event as soon as it is known. Raises like ``Pipeline.run``."""

    async def tell(number: int, piece: Piece) -> None:
        for event in writer.take(piece):
            await stream.event(msgspec.json.encode(event), event.type)

    await pipeline.run([job], tell)


async def write_whole(pipeline: Pipeline, job: Job, writer: EventWriter, request: Request) -> None:
    """Return when the writer has the whole answer. Raises like ``Pipeline.run``, and ClientGone."""

    async def take(number: int, piece: Piece) -> None:
        writer.take(piece)

    await unless_gone(request.receive, pipeline.run([job], take))
