"""Converts errors to gRPC statuses with google.rpc details and back, and to JobError messages and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import grpc
from google.protobuf import any_pb2, duration_pb2, json_format, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # generated without types
from grpc_status import rpc_status

from bottega import errors
from bottega.errors import BottegaError, Code, Violation
from bottega.v1 import error_pb2
from bottega.v1.error_pb2 import ErrorReason, JobError

DETAILS_KEY = "grpc-status-details-bin"

# Statuses travel in HTTP/2 trailers, of which a peer accepts 8 KiB by default. The violations of a request with all its
# adapters wrong take 4 KiB.
_MAX_MESSAGE_CHARACTERS = 1000
_VIOLATIONS_BYTES = 5 << 10
# Bytes of a violation besides its texts.
_VIOLATION_BYTES = 8


class _Failure(Protocol):
    """The methods that the blocking and the asyncio RpcError share."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterator[tuple[str, str | bytes]] | None: ...


def to_grpc_status(error: BottegaError) -> grpc.Status:
    """Convert an error to a status for `context.abort_with_status`, with the google.rpc details that apply."""
    status = status_pb2.Status(code=int(error.code), message=_clip(error.message))
    status.details.extend(_packed(detail) for detail in _details(error))
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> BottegaError:
    """Convert the error of a failed call to a BottegaError, by its reason, or by its code if it has no reason.

    A status that no service of the suite sent is gRPC's own: the error gets Bottega's text, and gRPC's text as a note.
    """
    failure = cast(_Failure, error)
    code = Code(failure.code().value[0])
    status = _status_of(failure)
    try:
        details = _unpack_details(status) if status is not None else None
    except message.DecodeError:  # they are not our details
        details = None
    if status is None or details is None:
        return _of_grpc(code, failure.details() or "")
    info = details.info
    return _class_for(info.reason if info.domain == errors.DOMAIN else "", code)(
        status.message,
        metadata=dict(info.metadata),
        retry_after_s=details.retry_after_s,
        violations=[Violation(field=v.field, description=v.description) for v in details.bad_request.field_violations],
    )


def was_answered(error: grpc.RpcError) -> bool:
    """Return whether a service of the suite refused the call. Else it reached none, or the connection broke."""
    return _status_of(cast(_Failure, error)) is not None


def to_job_error(error: BottegaError) -> JobError:
    """Convert an error to a message, for jobs that outlive a call."""
    return JobError(
        code=int(error.code),
        reason=error.reason,
        message=_clip(error.message),
        metadata=error.metadata,
        violations=[error_pb2.Violation(field=v.field, description=v.description) for v in error.violations],
        retry_after_s=error.retry_after_s,
    )


def from_job_error(job_error: JobError) -> BottegaError:
    """Convert a message from `to_job_error` back to an error."""
    known = job_error.reason in ErrorReason.values()
    reason = ErrorReason.Name(job_error.reason).removeprefix("ERROR_REASON_") if known else ""
    code = Code(job_error.code) if job_error.code in set(Code) else Code.UNKNOWN
    return _class_for(reason, code)(
        job_error.message,
        metadata=dict(job_error.metadata),
        retry_after_s=_wait_s(job_error.retry_after_s) if job_error.HasField("retry_after_s") else None,
        violations=[Violation(field=v.field, description=v.description) for v in job_error.violations],
    )


def job_error_to_json(error: BottegaError) -> bytes:
    """Convert an error to JSON, in which form messages of tensor links contain it."""
    return json_format.MessageToJson(to_job_error(error), indent=None).encode()


def job_error_from_json(packed: bytes) -> JobError:
    """Parse the JSON from `job_error_to_json`. Raises ValueError for other data."""
    try:
        return json_format.Parse(packed, JobError())
    except json_format.ParseError as problem:
        raise ValueError(f"the peer's error cannot be read: {problem}") from None


def _of_grpc(code: Code, text: str) -> BottegaError:
    if text.startswith(_TOO_MANY_CALLS):
        limit = {"limit": "max_calls"}
        error: BottegaError = errors.QueueFull(_TOO_MANY_CALLS_MESSAGE, metadata=limit, retry_after_s=_RETRY_S)
    else:
        error = _class_for("", code)(_MESSAGES.get(code, f"the call failed: {code.name}"))
    if text:
        error.add_note(text)
    return error


def _details(error: BottegaError) -> Iterator[message.Message]:
    yield error_details_pb2.ErrorInfo(reason=error.reason_name, domain=errors.DOMAIN, metadata=error.metadata)
    if error.violations:
        yield error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
                for v in _bounded(error.violations)
            ]
        )
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def _bounded(violations: Sequence[Violation]) -> Iterator[Violation]:
    """Yield violations while there is space, and then one that says how many were omitted."""
    room = _VIOLATIONS_BYTES
    for index, violation in enumerate(violations):
        text = _clip(violation.description)
        room -= len(violation.field.encode()) + len(text.encode()) + _VIOLATION_BYTES
        if room < 0:
            more = len(violations) - index - 1
            yield Violation(
                field=violation.field, description=f"is invalid, too; {more} more violations are not listed"
            )
            return
        yield Violation(field=violation.field, description=text)


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else text[: _MAX_MESSAGE_CHARACTERS - 1] + "…"


def _status_of(failure: _Failure) -> status_pb2.Status | None:
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except message.DecodeError:
                return None
    return None


def _wait_s(seconds: float) -> float | None:
    """Return a valid waiting time, or None, because a foreign service may send anything."""
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Details:
    """The google.rpc details of a status."""

    info: error_details_pb2.ErrorInfo
    bad_request: error_details_pb2.BadRequest
    retry_after_s: float | None
    """Seconds after which to retry; None if the status has no RetryInfo."""


def _unpack_details(status: status_pb2.Status) -> _Details:
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad_request)
        if detail.Unpack(retry):
            retry_after_s = _wait_s(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
    return _Details(info=info, bad_request=bad_request, retry_after_s=retry_after_s)


def _class_for(reason: str, code: Code) -> type[BottegaError]:
    return _classes_by_reason().get(reason) or _CLASS_BY_CODE.get(code, errors.InternalError)


@functools.cache
def _classes_by_reason() -> dict[str, type[BottegaError]]:
    # A private subclass elsewhere inherits its reason, and must not be chosen here.
    fixed = [kind for kind in _tree(BottegaError) if "reason" in vars(kind)]
    classes = {ErrorReason.Name(kind.reason).removeprefix("ERROR_REASON_"): kind for kind in fixed}
    del classes["UNSPECIFIED"]
    return classes


def _tree(root: type[BottegaError]) -> Iterator[type[BottegaError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


# For statuses of gRPC itself, or of a service of another version.
_CLASS_BY_CODE: dict[Code, type[BottegaError]] = {
    Code.CANCELLED: errors.JobCancelled,
    Code.INVALID_ARGUMENT: errors.InvalidRequest,
    Code.DEADLINE_EXCEEDED: errors.DeadlinePassed,
    Code.NOT_FOUND: errors.JobNotFound,
    Code.RESOURCE_EXHAUSTED: errors.TooLarge,
    Code.UNIMPLEMENTED: errors.MethodNotServed,
    Code.UNAVAILABLE: errors.Unavailable,
}

# Beginning of gRPC's text when it refuses a call because of its own limit, before the service sees the call.
_TOO_MANY_CALLS = "Concurrent RPC limit"
_TOO_MANY_CALLS_MESSAGE = "the server serves its maximum number of calls; retry"
_RETRY_S = 1.0

_MESSAGES: dict[Code, str] = {
    Code.CANCELLED: "the call was cancelled or its connection was lost",
    Code.DEADLINE_EXCEEDED: "no answer came in time",
    Code.RESOURCE_EXHAUSTED: "a message of the call is larger than its receiver accepts",
    Code.UNIMPLEMENTED: "the service has no such method: it is another service, or another version",
    Code.UNAVAILABLE: "the service cannot be reached",
}
