"""The root of all errors with its status codes, and the errors of faults and configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from bottega.v1 import error_pb2
from bottega.v1.error_pb2 import ErrorReason

DOMAIN = "bottega"


class Code(IntEnum):
    """A copy of google.rpc.Code, so that the error classes need not import gRPC."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A field of a request that breaks a rule."""

    field: str
    """Path of the field, as in google.rpc.BadRequest."""
    description: str
    """The rule, and what would be right."""


class BottegaError(Exception):
    """The root of all errors. A subclass fixes its `code` and `reason`.

    Args:
        message: Text for people. It says what to do where something can be done.
        metadata: Facts for programs, which travel in ErrorInfo.
        retry_after_s: Seconds after which a retry may help; None if none will.
        violations: Fields that break rules. Only InvalidRequest and its subclasses have any.
    """

    code: ClassVar[Code] = Code.UNKNOWN
    reason: ClassVar[ErrorReason.ValueType] = error_pb2.ERROR_REASON_UNSPECIFIED

    def __init_subclass__(cls, *, code: Code | None = None, reason: ErrorReason.ValueType | None = None) -> None:
        """Set the code and the reason; those that are not given are the parent's.

        A client can only raise classes that have a reason of their own.
        """
        super().__init_subclass__()
        if code is not None:
            cls.code = code
        if reason is not None:
            cls.reason = reason

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)

    @property
    def reason_name(self) -> str:
        """Return the reason as ErrorInfo carries it: without the enum's prefix."""
        return ErrorReason.Name(self.reason).removeprefix("ERROR_REASON_")


class InternalError(BottegaError, code=Code.INTERNAL, reason=error_pb2.ERROR_REASON_INTERNAL):
    """A fault in the suite; the log says more under the same request_id."""


class ConfigError(BottegaError, code=Code.FAILED_PRECONDITION):
    """A configuration, or something that it names, cannot be used. Never on the wire."""

    exit_status: ClassVar[int] = 2
    """Exit status of a process that ends with this error. Supervisors do not restart it: it would fail again."""


class ServicesMissing(ConfigError):
    """The SDK was installed without the services, which a command needs."""
