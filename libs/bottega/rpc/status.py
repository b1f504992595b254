"""Translates the error tree to the wire and back: statuses with google.rpc details, and JobError.

It does not know which service raises, or which client calls.
"""

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

# Statuses travel in HTTP/2 trailers, of which a peer takes 8 KiB by default. All violations of a request with as many
# adapters as it may have are 4 KiB.
_MAX_MESSAGE_CHARACTERS = 1000
_VIOLATIONS_BYTES = 5 << 10
# Of one violation beside its texts.
_VIOLATION_BYTES = 8


class _Failure(Protocol):
    """What both kinds of RpcError, blocking and asyncio, offer."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterator[tuple[str, str | bytes]] | None: ...


def to_grpc_status(error: BottegaError) -> grpc.Status:
    """The status for `context.abort_with_status`: ErrorInfo, BadRequest and RetryInfo as far as they apply."""
    status = status_pb2.Status(code=int(error.code), message=_clip(error.message))
    status.details.extend(_packed(detail) for detail in _details(error))
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> BottegaError:
    """The typed error for a call that failed: by its reason, and without one by its code.

    What no service of ours has said is gRPC's: it is a note to the error, and its message is ours.
    """
    failure = cast(_Failure, error)
    code = Code(failure.code().value[0])
    status = _status_of(failure)
    try:
        details = _unpack_details(status) if status is not None else None
    except message.DecodeError:  # what claims to be our details, and is not
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
    """Whether a service of ours refused the call; else the call never reached one, or lost it."""
    return _status_of(cast(_Failure, error)) is not None


def to_job_error(error: BottegaError) -> JobError:
    """The same facts as a message, for jobs that outlive a call."""
    return JobError(
        code=int(error.code),
        reason=error.reason,
        message=_clip(error.message),
        metadata=error.metadata,
        violations=[error_pb2.Violation(field=v.field, description=v.description) for v in error.violations],
        retry_after_s=error.retry_after_s,
    )


def from_job_error(job_error: JobError) -> BottegaError:
    """The typed error that `to_job_error` was given."""
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
    """A JobError as messages of links carry it."""
    return json_format.MessageToJson(to_job_error(error), indent=None).encode()


def job_error_from_json(packed: bytes) -> JobError:
    """What `job_error_to_json` has made. Raises ValueError for anything else."""
    try:
        return json_format.Parse(packed, JobError())
    except json_format.ParseError as problem:
        raise ValueError(f"a refusal that cannot be read: {problem}") from None


def _of_grpc(code: Code, said: str) -> BottegaError:
    if said.startswith(_TOO_MANY_CALLS):
        limit = {"limit": "max_calls"}
        made: BottegaError = errors.QueueFull(_WORDS_TOO_MANY, metadata=limit, retry_after_s=_RETRY_S)
    else:
        made = _class_for("", code)(_WORDS.get(code, f"the call failed: {code.name}"))
    if said:
        made.add_note(said)
    return made


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
    """As many as there is room for; then one more that says how many were left out."""
    room = _VIOLATIONS_BYTES
    for index, violation in enumerate(violations):
        text = _clip(violation.description)
        room -= len(violation.field.encode()) + len(text.encode()) + _VIOLATION_BYTES
        if room < 0:
            more = len(violations) - index - 1
            yield Violation(field=violation.field, description=f"is wrong too, and {more} more are left out here")
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
    """What may be waited: a service that is not ours may say anything."""
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Details:
    """The details of a status. retry_after_s: None where it says nothing of trying again."""

    info: error_details_pb2.ErrorInfo
    bad_request: error_details_pb2.BadRequest
    retry_after_s: float | None


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
    # A kind of one of them that somebody has for himself has its reason from it, and is never meant here.
    fixed = [kind for kind in _tree(BottegaError) if "reason" in vars(kind)]
    classes = {ErrorReason.Name(kind.reason).removeprefix("ERROR_REASON_"): kind for kind in fixed}
    del classes["UNSPECIFIED"]
    return classes


def _tree(root: type[BottegaError]) -> Iterator[type[BottegaError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


# For statuses that gRPC itself made, or that a service of another version did.
_CLASS_BY_CODE: dict[Code, type[BottegaError]] = {
    Code.CANCELLED: errors.JobCancelled,
    Code.INVALID_ARGUMENT: errors.InvalidRequest,
    Code.DEADLINE_EXCEEDED: errors.DeadlinePassed,
    Code.NOT_FOUND: errors.JobNotFound,
    Code.RESOURCE_EXHAUSTED: errors.TooLarge,
    Code.UNIMPLEMENTED: errors.MethodNotServed,
    Code.UNAVAILABLE: errors.Unavailable,
}

# What gRPC says when more calls come than it may serve at all, which is beyond what a service itself refuses.
_TOO_MANY_CALLS = "Concurrent RPC limit"
_WORDS_TOO_MANY = "as many calls are served as can be; ask again"
_RETRY_S = 1.0

_WORDS: dict[Code, str] = {
    Code.CANCELLED: "the call was cut off",
    Code.DEADLINE_EXCEEDED: "no answer came in time",
    Code.RESOURCE_EXHAUSTED: "a message of the call is larger than its receiver takes",
    Code.UNIMPLEMENTED: "the service has no such method: it is another one, or of another version",
    Code.UNAVAILABLE: "the service cannot be reached",
}
