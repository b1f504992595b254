"""Who may call."""

from __future__ import annotations

from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class Unauthenticated(BottegaError, code=Code.UNAUTHENTICATED, reason=error_pb2.ERROR_REASON_UNAUTHENTICATED):
    """The service asks who calls, and the call does not say so, or shows a key that is none of its own."""


class Forbidden(BottegaError, code=Code.PERMISSION_DENIED, reason=error_pb2.ERROR_REASON_FORBIDDEN):
    """Who calls is known, and may not do that."""


class QuotaExceeded(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_QUOTA_EXCEEDED):
    """The caller's tenant has as much as it may have; metadata["quota"] names what of."""
