"""The models of answers, which describe them in /openapi.json; a test checks that real answers have these forms."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from bottega.client.types.jobs import JobState, Priority

Facts = dict[str, JsonValue]


class Answer(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ErrorObject(Answer):
    """An error in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str
    bottega: Facts | None = None
    """Reason, all violations, facts, and the seconds after which to retry."""


class ErrorAnswer(Answer):
    """The answer to a request that failed."""

    error: ErrorObject


class ModelAnswer(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    bottega: Facts
    """Sizes, defaults and workers of the model."""


class ModelsAnswer(Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelAnswer]


class AdapterAnswer(Answer):
    """A LoRA, a textual inversion embedding or a ControlNet that requests may name."""

    id: str
    object: Literal["lora", "controlnet"]
    digest: str
    """Hash of the weights, hex."""
    models: list[str]
    """Names of the served models that it can be used with."""
    trigger_words: list[str]
    """Words that invoke a LoRA's style when they are in the prompt."""
    control_modes: int
    """Number of control modes of a ControlNet, which are numbered from 0; 0 if it is not a union."""


class AdaptersAnswer(Answer):
    """The LoRAs or the ControlNets that requests may name."""

    object: Literal["list"]
    data: list[AdapterAnswer]


class MemberAnswer(Answer):
    """A service of the suite."""

    name: str
    kind: str
    """Kind of service, such as worker or loras."""
    address: str
    version: str
    device: str
    models: list[str]
    joined_s: float
    """Seconds since the service joined."""
    heard_s: float
    """Seconds since its newest report."""
    starting: str | None
    """What the service does while it starts; null once it is ready."""
    draining: bool
    running: int
    """Number of attempts at pictures that a worker runs."""
    steps_left: int
    """Remaining denoising steps of these attempts."""
    memory_bytes: int
    hosted: list[Facts]
    """LoRAs, ControlNets and the like that the service hosts, each with its readiness."""
    completed: int
    failed: int
    left_out: list[Facts]
    """What the service found and does not host, with the reasons."""


class FleetAnswer(Answer):
    """The services of the suite, the gateways first."""

    object: Literal["fleet"]
    queued: int
    longest_wait_s: float
    scheduler: str
    """Name of the gateway that gives jobs to workers; empty if there is only one gateway."""
    data: list[MemberAnswer]


class PictureFacts(Answer):
    """The facts about a picture."""

    index: int
    seed: int
    width: int
    height: int
    digest: str
    """SHA-256 of the encoded picture, hex."""


class PictureAnswer(Answer):
    """A picture, in base64 or as a URL that expires."""

    b64_json: str | None = None
    url: str | None = None
    bottega: PictureFacts


class TokenDetails(Answer):
    """Estimated tokens by kind."""

    text_tokens: int
    image_tokens: int


class TokenUsage(Answer):
    """Estimated tokens: 4 characters of the prompt, or 32 x 32 pixels, count as one."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int


class Drawn(Answer):
    """The job that drew pictures."""

    job_id: str
    provenance: Facts
    """How the pictures were drawn: all parameters, with the seed, and what was used."""


class PicturesAnswer(Answer):
    """Pictures."""

    created: int
    background: Literal["opaque"]
    output_format: Literal["png", "jpeg", "webp"]
    quality: str
    size: str
    data: list[PictureAnswer]
    usage: TokenUsage
    bottega: Drawn


class JobPicture(Answer):
    """A picture of a job."""

    index: int
    url: str
    """Path of the picture."""


class JobWebhook(Answer):
    """A receiver that hears of the end of a job."""

    url: str
    events: list[str]


class JobAnswer(Answer):
    """A job, and how it stands."""

    id: str
    object: Literal["job"]
    status: JobState
    request_id: str | None
    priority: Priority
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    steps_done: int
    steps_total: int
    images: list[JobPicture]
    webhook: JobWebhook | None
    parameters: Facts
    provenance: Facts | None
    error: ErrorObject | None


class JobsAnswer(Answer):
    """A page of jobs."""

    object: Literal["list"]
    data: list[JobAnswer]
    next_page_token: str
    """Token of the next page; empty on the last one."""


class TraceAnswer(Answer):
    """The timeline of a job: spans of time in all services."""

    object: Literal["job.trace"]
    job_id: str
    spans: list[Facts]
    dropped: int
