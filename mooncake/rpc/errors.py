"""The error tree over gRPC: one status and a machine-readable code out, the same class back in."""

from __future__ import annotations

import re

import grpc

from mooncake import errors
from mooncake.errors import MooncakeError

CODE_KEY = "mooncake-code"
PARAM_KEY = "mooncake-param"
PUSHBACK_KEY = "grpc-retry-pushback-ms"  # gRPC's own name: retrying clients honour it


def _leaves(cls: type[MooncakeError]) -> list[type[MooncakeError]]:
    return [cls] + [leaf for child in cls.__subclasses__() for leaf in _leaves(child)]


# The first class with a code stands for it: a parent comes before children that inherit its code.
_BY_CODE: dict[str, type[MooncakeError]] = {}
for _cls in _leaves(MooncakeError):
    _BY_CODE.setdefault(_cls.code, _cls)

_BY_STATUS: dict[grpc.StatusCode, type[MooncakeError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.NodeUnavailable,
    grpc.StatusCode.UNIMPLEMENTED: errors.NodeUnavailable,  # its port has become another process's
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.ABORTED: errors.StaleEpoch,
    grpc.StatusCode.INTERNAL: errors.InternalError,
}
# Where a group shares its code with the one leaf that is actually raised, the leaf stands for it.
_BY_CODE.update({_cls.code: _cls for _cls in _BY_STATUS.values()})


def status_of(error: MooncakeError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_status]


def trailing_metadata(error: MooncakeError) -> tuple[tuple[str, str], ...]:
    metadata = [(CODE_KEY, error.code)]
    if isinstance(error, errors.InvalidRequest) and error.param:
        metadata.append((PARAM_KEY, error.param))
    if isinstance(error, errors.Overloaded):
        metadata.append((PUSHBACK_KEY, str(max(1, round(error.retry_after_s * 1000)))))
    return tuple(metadata)


# gRPC's messages about connections that are never established, and what they mean.
_HANDSHAKES = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "certificate has expired": "its certificate has expired",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by anyone who is trusted here",
    "Hostname Verification Check failed": "its certificate has another name than the one that was called",
    "Expected SETTINGS frame": "it does not speak gRPC: is this the port for HTTP?",
    "Socket closed": "it hangs up: it may want TLS (commands: MOONCAKE_SSL_CA_CERTS), want to see a certificate, or "
    "have too many connections",
}


def handshake_trouble(error: grpc.RpcError) -> str:
    """Why a reachable peer cannot be talked to; "" for other errors."""
    if not isinstance(error, (grpc.aio.AioRpcError, grpc.Call)):
        return ""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "another service answers there, or another version of this one"
    details = error.details()
    if not (details or "").startswith("failed to connect"):
        return ""
    return next((meaning for sign, meaning in _HANDSHAKES.items() if sign in str(details)), "")


_NOT_GRPC = "Received http2 header with status"  # such as a proxy's
_CANCELLED_HERE = "Locally cancelled by application!"


def error_from_rpc(error: grpc.RpcError, peer: str = "") -> MooncakeError:
    """The MooncakeError that the other side raised, or the one that fits a transport failure."""
    if not isinstance(error, (grpc.aio.AioRpcError, grpc.Call)):  # of an asynchronous or a blocking stub
        return errors.NodeUnavailable(f"{peer or 'peer'}: {error}")
    metadata = {str(key): str(value) for key, value in (error.trailing_metadata() or ())}
    if CODE_KEY in metadata:
        cls = _BY_CODE.get(metadata[CODE_KEY]) or _BY_STATUS.get(error.code(), errors.InternalError)
        message = error.details() or str(error.code())
    else:
        details = error.details() or str(error.code())
        reason = details if details.startswith(_NOT_GRPC) else handshake_trouble(error) or details
        cls, message = _transport_failure(error.code(), reason)
        message = f"{peer}: {message}" if peer else message
    return _made(cls, message, metadata.get(PUSHBACK_KEY, ""), metadata.get(PARAM_KEY))


def _transport_failure(code: grpc.StatusCode, message: str) -> tuple[type[MooncakeError], str]:
    """What fits an error that no server of ours has raised, and what to say of it."""
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:  # gRPC: "Stream removed (…)"
            message = "no answer came in the time that the call allows"
        case grpc.StatusCode.CANCELLED if message != _CANCELLED_HERE:
            return errors.NodeUnavailable, "it has cut the call off, and probably stops"
    if message.startswith(_NOT_GRPC):
        message = f"who answers there does not speak gRPC ({message})"
    return _BY_STATUS.get(code, errors.InternalError), message


def _made(cls: type[MooncakeError], message: str, pushback_ms: str, param: str | None) -> MooncakeError:
    if issubclass(cls, errors.Overloaded):
        return cls(message, _retry_after_s(pushback_ms))
    if issubclass(cls, errors.InvalidRequest):
        return cls(message, param)
    return cls(message)


def _retry_after_s(pushback: str) -> float:
    """What a peer says in milliseconds, or a second if that is no number that we would say."""
    return int(pushback) / 1000 if re.fullmatch("[0-9]{1,9}", pushback) else 1.0


def parts_of_error(error: MooncakeError) -> bytes:
    """An error in a non-gRPC wire form: code, parameter, retry time and message, one per line."""
    metadata = dict(trailing_metadata(error))
    parts = (error.code, metadata.get(PARAM_KEY, ""), metadata.get(PUSHBACK_KEY, ""), error.message)
    return "\n".join(part.replace("\n", " ") for part in parts).encode()


def error_from_parts(data: bytes) -> MooncakeError:
    """The error that the other side raised."""
    code, param, pushback, message = ([*data.decode(errors="replace").split("\n", 3), "", "", ""])[:4]
    return _made(_BY_CODE.get(code, errors.InternalError), message, pushback, param or None)
