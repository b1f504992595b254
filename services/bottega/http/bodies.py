"""The bodies of requests that draw: their models, which also describe them in /openapi.json, and their meaning.

The models check types and names. The gateway, which knows the model, checks everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from bottega.client.types.inputs import ControlNet, Lora
from bottega.client.types.jobs import Priority
from bottega.client.types.options import OTHER_NAMES, FidelityName, GenerationOptions, PromptSyntaxName, nearest_name
from bottega.errors import Violation
from bottega.http.errors import FieldsRefused
from bottega.http.input_images import InputImage
from bottega.rules import MAX_ADAPTERS, MAX_STEPS, FinalSigmasTypeName, SamplerName, TimestepSpacingName, refuse

BodyT = TypeVar("BodyT", bound=BaseModel)

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.ASCII)
_MOST_NAMED = 32
# Errors beyond this number are only counted: each that is listed takes about a KiB.
_MOST_LISTED = 256
# A value takes some hundred bytes in memory, and at least 2 in JSON.
_MOST_VALUES = 1 << 15
# Characters of an unknown field's name that are compared with the known ones.
_MOST_COMPARED = 64


class Body(BaseModel):
    """A part of a request's body. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class LoraBody(Body):
    """A LoRA, or a textual inversion embedding, to draw with.

    An embedding is used where the prompt has its token. It takes a name and a digest alone.
    """

    name: str
    """Name of the LoRA or embedding."""
    scale: float = 1.0
    """Strength; 1 for an embedding."""
    from_step: int | None = None
    """First step that uses it, as a provenance has it."""
    digest: str | None = None
    """Hash of its weights, as a provenance has it."""
    max_step: int | None = None
    """Latest first step that uses it."""
    measure_similarity: bool = False
    """Whether to measure how much the LoRA changes the picture."""


class ControlNetBody(Body):
    """A ControlNet to draw with."""

    name: str
    """Name of the ControlNet."""
    image: InputImage
    """Control image."""
    controlnet_conditioning_scale: float | None = None
    """Strength."""
    control_guidance_start: float = 0.0
    """Fraction of the steps at which it begins to act."""
    control_guidance_end: float = 1.0
    """Fraction of the steps at which it stops acting."""
    guess_mode: bool = False
    """Whether it steers only the conditional prediction of guidance."""
    measure_similarity: bool = False
    """Whether to measure how similar its residuals of adjacent steps are."""
    control_mode: str | int | None = None
    """What the image shows, such as openpose or depth, or the number of that; only for a union."""


class BottegaBody(Body):
    """Bottega's own parameters. Those without a description here are arguments of the SDK, which documents them."""

    prompt_2: str | None = None
    negative_prompt: str | None = None
    negative_prompt_2: str | None = None
    prompt_syntax: PromptSyntaxName | None = None
    clip_skip: int | None = None
    max_sequence_length: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_rescale: float | None = None
    true_cfg_scale: float | None = None
    cfg_normalization: float | None = None
    cfg_truncation: float | None = None
    seed: int | None = None
    sampler: SamplerName | None = None
    use_karras_sigmas: bool | None = None
    use_exponential_sigmas: bool | None = None
    use_beta_sigmas: bool | None = None
    timestep_spacing: TimestepSpacingName | None = None
    final_sigmas_type: FinalSigmasTypeName | None = None
    timesteps: Annotated[list[int], Field(max_length=MAX_STEPS)] | None = None
    sigmas: Annotated[list[float], Field(max_length=MAX_STEPS + 1)] | None = None
    strength: float | None = None
    padding_mask_crop: int | None = None
    keep_unmasked: bool | None = None
    mask_feather: int | None = None
    keep_for_editing: bool | None = None
    bounded_lora_loading: bool | None = None
    stale_residuals: bool | None = None
    latent_parallelism: bool | None = None
    shared_turns: bool | None = None
    step_caching: bool | None = None
    masked_blocks: bool | None = None
    approximate_cache: bool | None = None
    cache_entry: str | None = None
    recording: str | None = None
    identical_results: bool | None = None
    metadata: bool | None = None
    fidelity: FidelityName | None = None
    loras: Annotated[list[LoraBody], Field(max_length=MAX_ADAPTERS)] | None = None
    """LoRAs to draw with; they are summed."""
    controlnets: Annotated[list[ControlNetBody], Field(max_length=MAX_ADAPTERS)] | None = None
    """ControlNets to draw with; their residuals are summed."""
    deadline_s: float | None = None
    """Seconds after which the pictures are of no use: a request that cannot be done by then is refused at once."""
    priority: Literal["low", "normal", "high"] = "normal"
    """Urgency among the caller's own requests."""


Quality = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"]
_FIDELITIES: Mapping[Quality, FidelityName] = {
    "low": "fast",
    "high": "exact",
    "xhigh": "exact",
    "max": "exact",
    "hd": "exact",
}


class PictureBody(Body):
    """The fields of all requests that draw."""

    prompt: str
    """What to draw."""
    model: str | None = None
    """Name of the model, as /v1/models lists it; by default the only one that is served."""
    n: int | None = None
    """Number of pictures, 1 to 8."""
    size: str | None = None
    """WIDTHxHEIGHT in pixels, or auto for the model's own size."""
    quality: Quality | None = None
    """low allows approximations (fidelity fast), high none (fidelity exact); otherwise the model's defaults count."""
    output_format: Literal["png", "jpeg", "webp"] | None = None
    """Format of the pictures; png by default."""
    output_compression: int | None = None
    """Quality of jpeg and webp, 1 to 100."""
    user: str | None = None
    """Accepted for OpenAI's clients, and not used."""
    safety_identifier: str | None = None
    """Accepted for OpenAI's clients, and not used."""
    bottega: BottegaBody | None = None
    """Bottega's own parameters."""


class WebhookBody(Body):
    """A receiver that hears of the end of a job, by a POST that is signed after Standard Webhooks."""

    url: str
    """URL of the receiver, whose host the operator allows."""
    events: list[Literal["job.completed", "job.failed", "job.cancelled"]] = Field(default_factory=list, max_length=3)
    """Types of events to announce; empty for all."""


class JobBody(PictureBody):
    """A job to start."""

    webhook: WebhookBody | None = None
    """Where to announce the job's end, in place of the tenant's own webhook."""
    image: InputImage | None = None
    """Source of image-to-image or of an edit."""
    mask: InputImage | None = None
    """Mask of an edit: transparent pixels are redrawn."""


class GenerationBody(PictureBody):
    """A request for pictures."""

    response_format: Literal["b64_json", "url"] | None = None
    """How the pictures come: in the answer, or as URLs that expire."""
    stream: bool | None = None
    """Whether to answer with a stream of events."""
    partial_images: int | None = None
    """Number of previews in the stream, 0 to 3."""
    background: Literal["auto", "opaque", "transparent"] | None = None
    """Pictures are opaque."""
    moderation: Literal["auto", "low"] | None = None
    """Accepted for OpenAI's clients, and not used: nothing is moderated."""
    style: Literal["vivid", "natural"] | None = None
    """vivid, OpenAI's default, changes nothing; natural is refused: describe the style in the prompt."""


class EditBody(GenerationBody):
    """A request for edits; `image` and `mask` are parts of the form with files."""

    input_fidelity: Literal["low", "high"] | None = None
    """Refused: set bottega.strength."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A drawing that a request asks for, as arguments of the SDK."""

    prompt: str
    num_images: int
    options: GenerationOptions
    deadline_s: float | None
    priority: Priority


def drawing_of(body: PictureBody, *, image: bytes | None = None, mask: bytes | None = None) -> Drawing:
    """Return what a body asks for. Raise InvalidRequest that names every field that cannot be served.

    Args:
        image: Source of image-to-image or of an edit, encoded.
        mask: Mask of an edit, encoded; its transparent pixels are redrawn.
    """
    own = body.bottega or BottegaBody()
    refuse(list(_unserved(body)), FieldsRefused)
    options: dict[str, object] = {
        name: value
        for name, value in own
        if value is not None and name not in ("loras", "controlnets", "deadline_s", "priority")
    }
    options |= {
        **_size_of(body.size),
        "model": body.model,
        "format": body.output_format,
        "quality": body.output_compression if body.output_format in ("jpeg", "webp") else None,
        "fidelity": own.fidelity or (_FIDELITIES.get(body.quality) if body.quality else None),
        "image": image,
        "mask_image": mask,
        "mask_alpha": True if mask is not None else None,
        "lora": [Lora(**dict(lora)) for lora in own.loras or ()] or None,
        "controlnets": [ControlNet(**dict(net)) for net in own.controlnets or ()] or None,
    }
    return Drawing(
        prompt=body.prompt,
        num_images=1 if body.n is None else body.n,
        options=cast("GenerationOptions", options),
        deadline_s=own.deadline_s,
        priority=Priority(own.priority),
    )


def _size_of(size: str | None) -> Mapping[str, int]:
    """Return the width and height in a size; empty for the model's own."""
    found = _SIZE.fullmatch(size or "")
    return {"width": int(found[1]), "height": int(found[2])} if found else {}


def _unserved(body: PictureBody) -> Iterator[Violation]:
    if body.size not in (None, "auto") and not _SIZE.fullmatch(body.size or ""):
        yield Violation(field="size", description="must be auto or WIDTHxHEIGHT, such as 512x512")
    if body.output_compression not in (None, 100) and body.output_format not in ("jpeg", "webp"):
        rule = "is for output_format jpeg and webp; png is lossless"
        yield Violation(field="output_compression", description=rule)
    if not isinstance(body, GenerationBody):
        return
    if body.background == "transparent":
        rule = "cannot be transparent: the models draw opaque pictures; leave it out, or give auto or opaque"
        yield Violation(field="background", description=rule)
    if body.style not in (None, "vivid"):
        yield Violation(field="style", description="is not served: describe the style in the prompt")
    if body.partial_images and not body.stream:
        yield Violation(field="partial_images", description="needs stream: true")
    if not 0 <= (body.partial_images or 0) <= 3:
        yield Violation(field="partial_images", description="must be 0 to 3")
    if body.stream and body.response_format == "url":
        yield Violation(field="response_format", description="must be b64_json with stream: true")
    if isinstance(body, EditBody) and body.input_fidelity is not None:
        rule = "is not served: bottega.strength sets how much of the image is redrawn"
        yield Violation(field="input_fidelity", description=rule)


def parse_json(kind: type[BodyT], data: bytes) -> BodyT:
    """Parse a body of JSON. Raise InvalidRequest that names every field that breaks a rule."""
    _check_size("body", data)
    try:
        return kind.model_validate_json(data, strict=True)
    except ValidationError as error:
        refuse(list(_violations(kind, error)), FieldsRefused)
        raise


def parse_fields(kind: type[BodyT], fields: Mapping[str, object]) -> BodyT:
    """Parse the fields of a form or of a query, whose values are texts. Raise InvalidRequest as parse_json does."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        refuse(list(_violations(kind, error)), FieldsRefused)
        raise


def parse_edit(fields: Mapping[str, object]) -> EditBody:
    """Parse the fields of a form, of which `bottega` may be in JSON. Raise InvalidRequest as parse_json does."""
    own = fields.get("bottega")
    if not isinstance(own, str):
        return parse_fields(EditBody, fields)
    _check_size("bottega", own.encode())
    try:
        given = from_json(own)
    except ValueError:
        refuse([Violation(field="bottega", description="must be an object in JSON")], FieldsRefused)
        raise
    return parse_fields(EditBody, {**fields, "bottega": given})


def _check_size(name: str, data: bytes) -> None:
    """Raise InvalidRequest if JSON may have too many values. Images in base64 have neither commas nor brackets."""
    if sum(data.count(mark) for mark in (b",", b"{", b"[")) > _MOST_VALUES:
        rule = f"has more than {_MOST_VALUES} commas and opening brackets"
        refuse([Violation(field=name, description=rule)], FieldsRefused)


def _violations(kind: type[BaseModel], error: ValidationError) -> Iterator[Violation]:
    count = error.error_count()
    found = error.errors(include_url=False, include_input=False) if count <= _MOST_LISTED else []
    for item in found[:_MOST_NAMED]:
        path, name = _path(item["loc"]), str(item["loc"][-1] if item["loc"] else "")
        if item["type"] == "extra_forbidden":
            yield Violation(field=path, description=_unknown(kind, item["loc"], name))
        else:
            yield Violation(field=path or "body", description=_rule(item["msg"]))
    if not found:
        yield Violation(field="body", description=f"breaks {count} rules")
    elif count > _MOST_NAMED:
        yield Violation(field="body", description=f"breaks {count - _MOST_NAMED} rules more")


def _path(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")[:200]


def _rule(message: str) -> str:
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    return message.replace("List should have", "must have").replace(" after validation", "")


def _unknown(kind: type[BaseModel], location: tuple[int | str, ...], name: str) -> str:
    name = name[:_MOST_COMPARED]
    model = _model_at(kind, location[:-1])
    near = nearest_name(name, [*model.model_fields])
    if "bottega" in model.model_fields and (not near or OTHER_NAMES.get(name) in BottegaBody.model_fields):
        own = nearest_name(name, [*BottegaBody.model_fields])
        near = f"bottega.{own}" if own else near
    return f"there is no such field; did you mean {near}?" if near else "there is no such field"


def _model_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    for part in location:
        if isinstance(part, str) and part in kind.model_fields:
            kind = next(_models_in(kind.model_fields[part].annotation), kind)
    return kind


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
