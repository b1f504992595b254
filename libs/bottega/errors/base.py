"""The root of all errors, its status codes, and the two errors that are about no subject."""

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
    """One field that broke a rule: its path as in google.rpc.BadRequest, and what would be right."""

    field: str
    description: str


class BottegaError(Exception):
    """The root. A subclass fixes its `code` and `reason`.

    message: for people; names what to do where something can be done.
    metadata: facts for programs; they travel in ErrorInfo.
    retry_after_s: seconds after which a retry may help, or None when none does.
    violations: only of InvalidRequest and its kind.
    """

    code: ClassVar[Code] = Code.UNKNOWN
    reason: ClassVar[ErrorReason.ValueType] = error_pb2.ERROR_REASON_UNSPECIFIED

    def __init_subclass__(cls, *, code: Code | None = None, reason: ErrorReason.ValueType | None = None) -> None:
        """code, reason: absent are those of its parent. Without its own reason no class comes off the wire."""
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
        """The reason as ErrorInfo carries it: without the enum's prefix."""
        return ErrorReason.Name(self.reason).removeprefix("ERROR_REASON_")


class InternalError(BottegaError, code=Code.INTERNAL, reason=error_pb2.ERROR_REASON_INTERNAL):
    """A fault of the suite; the log says more under the same request_id."""


class ConfigError(BottegaError, code=Code.FAILED_PRECONDITION):
    """A configuration that cannot be used, or what it names. Never on the wire."""

    exit_status: ClassVar[int] = 2
    """Status of a process that ends with it. Supervisors do not start it again, as it would end with it again."""


class ServicesMissing(ConfigError):
    """The SDK was installed without the services, which what was asked for needs."""
