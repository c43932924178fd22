"""The one error tree of the project, ordered by what the caller can do about it.

    MooncakeError
    ├── CallerError                 fix your request
    │   ├── Unauthenticated         no API key, or a wrong one
    │   ├── InvalidRequest          a value is malformed or out of range
    │   │   └── ContextTooLong      the prompt and the answer do not fit the model
    │   ├── NotFound                no such model, node or block
    │   └── NodeIdTaken             a live process has this node's id
    ├── RetryElsewhere              another node may well succeed
    │   ├── NodeUnavailable         a peer is gone, unreachable or draining
    │   ├── OutOfMemory             this process has no memory left for it
    │   ├── HandoffFailed           a hand-off ended failed or expired
    │   ├── NotFinite               a model's logits are not finite, perhaps because of corrupt KV
    │   ├── BrokenPeer              what a peer says makes no sense
    │   ├── StaleEpoch              this writer or role has been replaced
    │   └── KVLoadFailed            stored KV could not be read; recompute it
    │       ├── LeaseExpired        the read lease ran out before the read ended
    │       └── ChecksumMismatch    bytes differ from what was sealed
    ├── TryLater                    nothing is wrong, there is no room now
    │   ├── Overloaded              refused early; carries a retry time
    │   └── OutOfBlocks             a pool or a cache has no block to give
    ├── DeadlineExceeded            the caller's own time ran out
    ├── Cancelled                   the caller went away
    └── InternalError               our bug, or a broken installation
        ├── ConfigError             a configuration file or flag is wrong
        └── ModelError              model files are missing, broken or unsupported

Each class names its gRPC status and HTTP status, so that boundaries map errors in one place and nowhere else. Foreign
exceptions (grpc, OSError, torch) are turned into one of these where they enter our code.
"""

from __future__ import annotations

import errno
from typing import ClassVar

_MAX_SHOWN_CHARS = 64
_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "bad_alloc")  # in texts of RuntimeErrors


def shown(value: object) -> str:
    """``value`` as text for an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS // 2]}… ({len(text)} characters)"


class MooncakeError(Exception):
    """Base of every error raised on purpose. ``message`` is one sentence that a person can act on."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class CallerError(MooncakeError):
    """The request itself is wrong; sending it again changes nothing."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    code = "invalid_request"


class InvalidRequest(CallerError, ValueError):
    """A value is malformed or out of range. ``param`` names the offending field, if one field is to blame. (A
    ValueError too: it is what Python's callers catch.)"""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """Prompt plus requested answer exceed the model's context."""

    code = "context_length_exceeded"


class Unauthenticated(CallerError):
    """No API key, or a wrong one."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    code = "invalid_api_key"


class NotFound(CallerError):
    """No such model, node or block."""

    grpc_status = "NOT_FOUND"
    http_status = 404
    code = "not_found"


class NodeIdTaken(CallerError):
    """Another process, which is alive, is part of the cluster under this node's id."""

    grpc_status = "ALREADY_EXISTS"
    http_status = 409
    code = "node_id_taken"


class RetryElsewhere(MooncakeError):
    """This attempt failed for a reason that may not apply to another node."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    code = "unavailable"


class NodeUnavailable(RetryElsewhere):
    """A peer is gone, unreachable or draining."""


class OutOfMemory(RetryElsewhere):
    """A process has no memory left for it; another may have."""

    code = "out_of_memory"


class HandoffFailed(RetryElsewhere):
    """A hand-off from prefill to decode ended failed or expired."""

    code = "handoff_failed"


class NotFinite(RetryElsewhere):
    """A model's logits are not finite. Cached KV may be the cause, so it is discarded; if the model is, every attempt
    fails."""

    grpc_status = "INTERNAL"
    http_status = 500
    code = "not_finite"


class BrokenPeer(RetryElsewhere):
    """What a peer says makes no sense: it is broken, or another version of this program."""

    grpc_status = "INTERNAL"
    http_status = 502
    code = "broken_peer"


class StaleEpoch(RetryElsewhere):
    """The caller acts for an epoch or incarnation that has been replaced."""

    grpc_status = "ABORTED"
    code = "stale_epoch"


class KVLoadFailed(RetryElsewhere):
    """Stored KV could not be read. Clients never see this: it is recomputed.

    ``request_ids`` names the sequences of an engine's step that need it.
    """

    code = "kv_load_failed"

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class LeaseExpired(KVLoadFailed):
    """A read lease ran out before the read was complete."""


class ChecksumMismatch(KVLoadFailed):
    """Bytes read differ from the bytes that were sealed."""

    grpc_status = "DATA_LOSS"
    code = "checksum_mismatch"


class TryLater(MooncakeError):
    """There is no room now."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    code = "overloaded"


class Overloaded(TryLater):
    """Refused early, before anything was spent. ``retry_after_s`` says when it may work (seconds)."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfBlocks(TryLater):
    """A pool or a cache has no block to give."""

    code = "out_of_blocks"


class DeadlineExceeded(MooncakeError):
    """The caller's own time ran out."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    code = "deadline_exceeded"


class Cancelled(MooncakeError):
    """The caller went away or asked to stop."""

    grpc_status = "CANCELLED"
    http_status = 499
    code = "cancelled"


class InternalError(MooncakeError):
    """Our bug, or a broken installation."""


class ConfigError(InternalError):
    """A configuration file or flag is wrong."""

    grpc_status = "FAILED_PRECONDITION"
    code = "config_error"


class ModelError(InternalError):
    """Model files are missing, broken or of an architecture that is not supported."""

    code = "model_error"


def lacks_memory(error: BaseException) -> bool:
    """Whether a foreign error came for lack of memory, of the host or of a device. Torch says so in its text alone, and
    Python in no word where not even the error could be made."""
    if isinstance(error, SystemError):
        return "without exception set" in str(error)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in _OF_MEMORY)
    return isinstance(error, MemoryError)


def as_ours(error: BaseException, what: str) -> MooncakeError:
    """A foreign error of ``what``: OutOfMemory, or our bug. One of ours is itself."""
    if isinstance(error, MooncakeError):
        return error
    if lacks_memory(error):
        return OutOfMemory(f"{what}: no memory is left ({error!r})")
    return InternalError(f"{what}: {error!r}")
