"""Converts errors to answers in the form of OpenAI's API."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from bottega.errors import (
    BottegaError,
    Code,
    DeadlineUnmeetable,
    FieldNotServed,
    InternalError,
    InvalidRequest,
    TooLarge,
    Unavailable,
)

CLIENT_LEFT = 499
"""Status of a request whose client left before its answer, as nginx has it."""

_STATUSES: Mapping[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.FAILED_PRECONDITION: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: CLIENT_LEFT,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
# Names in the HTTP API of fields that the contract or the SDK calls otherwise; all other ones are below `bottega`.
_PUBLIC_FIELDS: Mapping[str, str] = {
    "num_images": "n",
    "width": "size",
    "height": "size",
    "format": "output_format",
    "quality": "output_compression",
    "mask_image": "mask",
    "lora": "bottega.loras",
    "request_id": "Idempotency-Key",
}
_SAME_FIELDS = frozenset(
    {
        "created_after",
        "created_before",
        "image",
        "index",
        "job_id",
        "model",
        "page_size",
        "page_token",
        "prompt",
        "states",
        "webhook",
    }
)


class FieldsRefused(InvalidRequest):
    """The error of a request that is refused without a call to the gateway.

    Its violations have the HTTP API's names of fields.
    """


def status_of(error: BottegaError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, TooLarge):
        return 413
    if isinstance(error, FieldNotServed):
        return 400
    return _STATUSES.get(error.code, 500)


def error_object(error: BottegaError) -> dict[str, object]:
    """Return the value of `error` in an answer: OpenAI's fields, and all violations and facts under `bottega`."""
    name = str if isinstance(error, FieldsRefused) else public_field
    violations = [
        {"field": name(violation.field), "description": violation.description} for violation in error.violations
    ]
    reason = error.reason_name if error.reason else error.code.name
    bottega: dict[str, object] = {"reason": reason, "violations": violations, "metadata": error.metadata}
    if (retry_after_s := _retry_after_s(error)) is not None:
        bottega["retry_after_s"] = retry_after_s
    status = status_of(error)
    return {
        "message": _message(error, violations),
        "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": violations[0]["field"] if violations else None,
        "code": reason.lower(),
        "bottega": bottega,
    }


def error_response(error: BottegaError) -> Response:
    """Return the answer to a request that failed with this error."""
    status = status_of(error)
    # Otherwise OpenAI's clients repeat requests that get 409 or 5xx, whether that can help or not.
    retry_after_s = _retry_after_s(error)
    helps = retry_after_s is not None or error.code is Code.UNAVAILABLE
    headers = {"x-should-retry": "true" if helps else "false"}
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return _json({"error": error_object(error)}, status=status, headers=headers)


def refusal(status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer to a request that is refused without a call to the gateway."""
    error = {
        "message": message,
        "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": None,
        "code": code,
    }
    return _json({"error": error}, status=status, headers={"x-should-retry": "false", **(headers or {})})


async def on_bottega_error(_: Request, error: Exception) -> Response:
    """Answer a request that failed with a BottegaError."""
    return error_response(error if isinstance(error, BottegaError) else InternalError("the service failed"))


async def on_http_error(_: Request, error: Exception) -> Response:
    """Answer a request whose path or method is unknown, or whose body cannot be read."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "the service failed"
    headers = error.headers if isinstance(error, HTTPException) else None
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "bad_request")
    return refusal(
        status,
        f"{detail}: /openapi.json lists the routes" if status in (404, 405) else detail,
        code=code,
        headers=headers,
    )


async def on_failure(_: Request, error: Exception) -> Response:
    """Answer a request that failed with a bug, which is logged with its traceback."""
    del error
    return error_response(InternalError("the service failed; its log has details"))


def public_field(path: str) -> str:
    """Return the path that a field of the contract, or an argument of the SDK, has in the HTTP API."""
    path = path.removeprefix("spec.").removeprefix("techniques.")
    head = re.split(r"[.\[]", path, maxsplit=1)[0]
    if head in _PUBLIC_FIELDS:
        return _PUBLIC_FIELDS[head] + path[len(head) :]
    return path if head in _SAME_FIELDS else f"bottega.{path}"


def _json(value: object, *, status: int, headers: Mapping[str, str]) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), status, headers, media_type="application/json")


def _message(error: BottegaError, violations: list[dict[str, str]]) -> str:
    if isinstance(error, Unavailable) and not error.reason:
        return "the service is away; retry"  # the SDK's text has the gateway's address, and advice for an operator
    if not violations:
        return error.message
    return "; ".join(f"{violation['field']}: {violation['description']}" for violation in violations)


def _retry_after_s(error: BottegaError) -> float | None:
    if error.retry_after_s is not None:
        return error.retry_after_s
    if isinstance(error, DeadlineUnmeetable):
        try:
            return float(error.metadata["estimate_s"])
        except (KeyError, ValueError):
            return None
    return None
