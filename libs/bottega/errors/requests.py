"""What is wrong with a request itself: its fields, its size, its method, its request_id."""

from __future__ import annotations

from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class InvalidRequest(BottegaError, code=Code.INVALID_ARGUMENT, reason=error_pb2.ERROR_REASON_INVALID_REQUEST):
    """A field breaks a rule; `violations` lists all of them."""


class BadImage(InvalidRequest, reason=error_pb2.ERROR_REASON_BAD_IMAGE):
    """An input image cannot be decoded, or is beyond the limits."""


class FieldNotServed(BottegaError, code=Code.UNIMPLEMENTED, reason=error_pb2.ERROR_REASON_FIELD_NOT_SERVED):
    """A field is designed but not served yet; metadata["field"] names it, several with commas between."""


class MethodNotServed(BottegaError, code=Code.UNIMPLEMENTED, reason=error_pb2.ERROR_REASON_METHOD_NOT_SERVED):
    """The service has no such method: it is another one, or of another version."""


class RequestIdReused(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_REQUEST_ID_REUSED):
    """The request_id was used for another request."""


class TooLarge(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_TOO_LARGE):
    """The request cannot fit; metadata names the limit."""


class ModelNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_MODEL_NOT_FOUND):
    """No such model; metadata["served"] lists those that are."""
