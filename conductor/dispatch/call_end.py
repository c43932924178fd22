"""How a call to a node ended, and what that says of the node."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from mooncake import errors
from mooncake.errors import DeadlineExceeded, HandoffFailed, InternalError, MooncakeError, NodeUnavailable
from mooncake.rpc.errors import CODE_KEY, error_from_rpc


@dataclass(frozen=True, slots=True)
class CallEnded:
    """One side's call has ended. ``error`` is None on success; ``is_lost`` means that its node could not be reached."""

    error: MooncakeError | None = None
    is_lost: bool = False
    is_retryable: bool = True


def call_ended(failure: grpc.RpcError, peer: str, is_time_over: bool = False) -> CallEnded:
    """``is_time_over``: the request's own deadline explains a call that ran out of time."""
    error = error_from_rpc(failure, peer)
    has_code = isinstance(failure, grpc.aio.AioRpcError) and CODE_KEY in {
        str(key) for key, _ in failure.trailing_metadata() or ()
    }
    if isinstance(error, DeadlineExceeded):
        if is_time_over:
            return CallEnded(error, is_retryable=False)
        return CallEnded(HandoffFailed(f"{peer}: {error.message}"))
    if not has_code and isinstance(error, NodeUnavailable):
        return CallEnded(error, is_lost=True)
    if not has_code and isinstance(error, InternalError):
        return CallEnded(error)  # a crash in the node's handler, or a broken stream
    return CallEnded(error, is_retryable=isinstance(error, (errors.RetryElsewhere, errors.TryLater)))
