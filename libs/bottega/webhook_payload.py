"""The payload of webhooks, which the gateway writes and /openapi.json describes. It has no prompts and no pictures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class _Payload(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class WebhookError(_Payload):
    """Why a job did not complete."""

    reason: str
    message: str


class WebhookImage(_Payload):
    """An image of a completed job."""

    index: int
    seed: int
    width: int
    height: int
    format: str
    size_bytes: int
    digest: str
    url: str
    """Where to fetch it, with a key of the job's tenant; a path if the operator has not set `webhooks.public_url`."""


class WebhookJob(_Payload):
    """The job that ended."""

    job_id: str
    request_id: str
    state: Literal["completed", "failed", "cancelled"]
    created_at: Time | None
    started_at: Time | None
    ended_at: Time | None
    error: WebhookError | None
    images: list[WebhookImage]


class WebhookPayload(_Payload):
    """The end of a job. The header webhook-id is the same each time that it is delivered."""

    type: Literal["job.completed", "job.failed", "job.cancelled"]
    timestamp: Time | None
    """When the job ended."""
    data: WebhookJob
