"""The rules that a request must meet. All violations of a request are found at once."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from google.protobuf.timestamp_pb2 import Timestamp

from bottega import rules
from bottega.adapter_rules import NO_CONTROLNETS
from bottega.addons.interface.gateway_addon import AddOn, RequiredModel, Resolution
from bottega.addons.interface.views import Access
from bottega.codec import ImageSize, MaskOrder
from bottega.errors import (
    AddressRefused,
    BadImage,
    BottegaError,
    FieldNotServed,
    InvalidRequest,
    ModelNotFound,
    Violation,
)
from bottega.fair_order import Share
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.specs import choice_of, input_images, latent_scale, strength_of
from bottega.outside_rules import OutsideRules
from bottega.rpc.security.tenant_file import WEBHOOK_EVENTS
from bottega.schedules import (
    AS_CONFIGURED,
    check_sampler_schedule,
    check_schedule,
    karras_of,
    keeps_steps,
    schedule_of,
    steps_of,
)
from bottega.v1 import image_pb2
from bottega.v1.fleet_pb2 import MaskTokens
from bottega.v1.generation_pb2 import PROMPT_SYNTAX_WEIGHTED, GenerationSpec, MaskUse
from bottega.v1.image_pb2 import Priority, Webhook

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Upper bound on a page token of ListAdapters, which has a kind, a name and a hash.
_MAX_TOKEN_CHARACTERS = 512
# Upper bound on the number of states in the filter of ListJobs.
_MAX_STATES = 16
# Fields that must be valid to know the size at which a mask is read.
_OF_DRAWN_SIZE = frozenset({"spec.width", "spec.height", "spec.padding_mask_crop"})
# The range of a Timestamp, by its own definition.
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799

# image, mask_image and as many ControlNets as a request may have.
_MAX_INPUT_IMAGES = 2 + rules.MAX_ADAPTERS


def check_request_id(request_id: str) -> Iterator[Violation]:
    """Yield the violations of an idempotency key; an empty one is allowed."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        yield _violation("request_id", "must be at most 128 characters of [A-Za-z0-9._:-]", spec=False)


def check_ids(field: str, *ids: str) -> Iterator[Violation]:
    """Yield a violation if an ID of something stored has a NUL byte, which PostgreSQL cannot even look up."""
    if any("\0" in one for one in ids):
        yield _violation(field, "must not contain a NUL byte", spec=False)


def check_deadline(deadline_s: float | None) -> Iterator[Violation]:
    """Yield the violations of the caller's deadline."""
    if deadline_s is not None and not 0 < deadline_s < math.inf:
        yield _violation("deadline_s", "must be a number of seconds above 0", spec=False)


def check_priority(priority: Priority.ValueType) -> Iterator[Violation]:
    """Yield the violations of a priority."""
    if priority not in Priority.values():
        yield _violation("priority", "must be PRIORITY_LOW, PRIORITY_NORMAL or PRIORITY_HIGH", spec=False)


def check_webhook(webhook: bytes, allowed: OutsideRules, *, signed: bool) -> Iterator[Violation]:
    """Yield the violations of a request's webhook; an empty one is allowed.

    Args:
        webhook: The serialized Webhook.
        allowed: The hosts that may be called.
        signed: Whether the tenant has a secret to sign with.
    """
    if not webhook:
        return
    wanted = Webhook.FromString(webhook)
    if not allowed.allows_any:
        yield _violation("webhook", "no host may be called; an operator lists some: webhooks.hosts", spec=False)
        return
    if not signed:
        rule = "your tenant has no secret to sign with; an operator makes one: bottega tenants webhook"
        yield _violation("webhook", rule, spec=False)
    try:
        allowed.check(wanted.url)
    except AddressRefused as error:
        yield _violation("webhook.url", error.message, spec=False)
    if len(set(wanted.events)) != len(wanted.events) or not set(wanted.events) <= set(WEBHOOK_EVENTS):
        yield _violation("webhook.events", f"must be of {', '.join(WEBHOOK_EVENTS)}, each once", spec=False)


def check_spec(spec: GenerationSpec, addons: Sequence[AddOn], *, max_image_bytes: int) -> Iterator[Violation]:
    """Yield the violations of a spec that do not depend on the model."""
    yield from rules.check_texts(spec)
    yield from rules.check_prompts(spec)
    yield from rules.check_model_name(spec)
    yield from rules.check_ranges(spec)
    yield from rules.check_techniques(spec)
    yield from check_schedule(spec)
    yield from rules.check_edit(spec)
    for path, image in islice(input_images(spec), _MAX_INPUT_IMAGES):
        yield from _check_encoded(path, image, max_image_bytes)
    if spec.HasField("strength") and not spec.HasField("image"):
        yield _violation("strength", "needs image")
    for addon in addons:
        yield from addon.check(spec)


def find_model(
    spec: GenerationSpec, resolutions: Sequence[Resolution], fleet: Fleet, addons: Sequence[AddOn], access: Access
) -> image_pb2.Model | BottegaError | None:
    """Return the model of a request, or the error if no such model is served.

    The spec names the model, or an add-on requires it, or it is the only one served. Return None if an add-on that has
    not been resolved yet may still require one.
    """
    if spec.HasField("model"):
        return _found_model(fleet, spec.model, None, access)
    if not resolutions and any(addon.model_field and getattr(spec, addon.model_field) for addon in addons):
        with contextlib.suppress(BottegaError):
            return fleet.resolve(None, access)
        return None
    required = next(filter(None, (resolution.required_model for resolution in resolutions)), None)
    return _found_model(fleet, required.name if required else None, required, access)


def _found_model(
    fleet: Fleet, name: str | None, required: RequiredModel | None, access: Access
) -> image_pb2.Model | BottegaError:
    try:
        return fleet.resolve(name, access)
    except ModelNotFound as error:
        return _not_served(required, error) if required else error.with_traceback(None)
    except BottegaError as error:
        # Drop the traceback: its frames would keep the request, which may be large, alive with the error.
        return error.with_traceback(None)


def _not_served(required: RequiredModel, error: ModelNotFound) -> ModelNotFound:
    served = error.metadata["served"].replace(",", ", ") or "none"
    text = f"{required.needed_by} was made for the base model {required.name}, which no worker serves; served: {served}"
    return ModelNotFound(text, metadata=error.metadata)


def check_model(spec: GenerationSpec, model: image_pb2.Model, addons: Sequence[AddOn]) -> Iterator[Violation]:
    """Yield the violations of a spec that depend on the model."""
    yield from _check_size(spec, model)
    if model.plain_prompts_only and spec.prompt_syntax == PROMPT_SYNTAX_WEIGHTED:
        yield _violation("prompt_syntax", "must be plain: this model reads no weighted prompts")
    if model.edits_only and not spec.HasField("mask_image"):
        yield _violation("mask_image", "must be set: this is an inpainting model, which only edits pictures")
    yield from rules.check_true_cfg(
        spec.true_cfg_scale, taken=model.takes_true_cfg, has_negative=spec.HasField("negative_prompt")
    )
    if not model.guidance_from_zero:
        truncation = spec.cfg_truncation if spec.HasField("cfg_truncation") else 1.0
        yield from rules.refuse_cfg_bounds(spec.cfg_normalization, truncation)
    for name in ("prompt_2", "negative_prompt_2"):
        if model.one_text_encoder and getattr(spec, name):
            yield _violation(name, "must be empty: this model has one text encoder")
    if model.HasField("max_clip_skip") and model.max_clip_skip < spec.clip_skip <= rules.MAX_CLIP_SKIP:
        yield _violation("clip_skip", rules.clip_skip_rule(model.max_clip_skip))
    if model.max_sequence_length < spec.max_sequence_length <= rules.MAX_SEQUENCE_LENGTH:
        yield _violation("max_sequence_length", rules.sequence_rule(model.max_sequence_length))
    sampler, choice = spec.sampler or model.default_sampler, choice_of(spec, model)
    yield from rules.check_sigmas(spec, sampler)
    karras = karras_of(spec, choice is not None and choice.use_karras_sigmas)
    steps, strength = steps_of(spec, model.default_steps), strength_of(spec, model)
    kept = keeps_steps(spec, model.strength_keeps_steps)
    yield from check_sampler_schedule(spec, sampler, karras, strength if kept else None)
    yield from _check_choice(spec, model, steps)
    if spec.controlnets and model.strength_keeps_steps and spec.HasField("image") and not spec.HasField("mask_image"):
        yield _violation("controlnets", NO_CONTROLNETS)
    skipping = None if kept else strength
    if skipping is not None:
        yield from rules.check_steps_left(steps, skipping, flows=rules.is_flow_matching(sampler))
    for addon in addons:
        yield from addon.check_steps(spec, steps=steps, strength=skipping)


def _check_size(spec: GenerationSpec, model: image_pb2.Model) -> Iterator[Violation]:
    multiple = max(1, model.size_multiple)
    for name, side in (("width", spec.width), ("height", spec.height)):
        if spec.HasField(name) and 0 < side <= rules.MAX_SIDE and side % multiple:  # type: ignore[arg-type]
            yield _violation(name, f"must be a multiple of {multiple} with this model")
    width = spec.width if spec.HasField("width") else model.default_width
    height = spec.height if spec.HasField("height") else model.default_height
    if (
        0 < width <= rules.MAX_SIDE
        and 0 < height <= rules.MAX_SIDE
        and model.max_pixels
        and width * height > model.max_pixels
    ):
        rule = f"width x height is {width * height} pixels; this model takes at most {model.max_pixels}"
        yield _violation("width", rule)
    for name, side in (("width", width), ("height", height)):
        if 0 < model.max_side < side <= rules.MAX_SIDE:
            yield _violation(name, f"must be at most {model.max_side} with this model")


def check_served(spec: GenerationSpec, model: image_pb2.Model) -> None:
    """Raise FieldNotServed for an edit by a model that edits no pictures."""
    if model.edits_refused_because and spec.HasField("mask_image"):
        raise FieldNotServed(model.edits_refused_because, metadata={"field": "mask_image"})


def _check_choice(spec: GenerationSpec, model: image_pb2.Model, steps: int) -> Iterator[Violation]:
    """Yield a violation if the model's scheduler configuration forbids the sampler, its sigmas or the step count."""
    choice = choice_of(spec, model)
    if choice is None or schedule_of(spec) != AS_CONFIGURED:
        return  # The workers list no other schedules; the one that draws the request tries it.
    if not choice.refused_because:
        if steps in choice.refused_steps:
            yield _violation("num_inference_steps", choice.refused_steps[steps])
        return
    others = [other for other in model.sampler_choices if other.sampler == choice.sampler and not other.refused_because]
    # If the sampler works with the other value of use_karras_sigmas, report that field instead of the sampler.
    name = "use_karras_sigmas" if others and spec.HasField("use_karras_sigmas") else "sampler"
    yield _violation(name, f"is refused by this model's scheduler configuration: {choice.refused_because}")


def check_page(request: image_pb2.ListJobsRequest) -> Iterator[Violation]:
    """Yield the violations of ListJobs' page size and filters. The token is checked elsewhere."""
    if not 0 <= request.page_size <= rules.MAX_PAGE:
        yield _violation("page_size", f"must be from 1 to {rules.MAX_PAGE}, or 0 for the default", spec=False)
    known = set(image_pb2.JobState.values()) - {image_pb2.JOB_STATE_UNSPECIFIED}
    if len(request.states) > _MAX_STATES or any(state not in known for state in request.states):
        yield _violation("states", f"must be known job states, at most {_MAX_STATES} of them", spec=False)
    for name in ("created_after", "created_before"):
        yield from _moment(name, getattr(request, name))


def check_adapters_page(request: image_pb2.ListAdaptersRequest) -> Iterator[Violation]:
    """Yield the violations in the paging and the filter of ListAdapters."""
    if request.kind not in image_pb2.AdapterKind.values():
        yield _violation("kind", "must be ADAPTER_KIND_CONTROLNET or ADAPTER_KIND_LORA, or 0 for both", spec=False)
    if not 0 <= request.page_size <= rules.MAX_PAGE:
        yield _violation("page_size", f"must be from 1 to {rules.MAX_PAGE}, or 0 for {rules.MAX_PAGE}", spec=False)
    if len(request.page_token) > _MAX_TOKEN_CHARACTERS:
        yield _violation("page_token", "must be the next_page_token of an earlier answer", spec=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenImages:
    """The sizes and the mask that were found by decoding the images of a request."""

    size: ImageSize | None = None
    """Size of the input image in pixels; None if the request has no image."""
    mask: MaskUse = field(default_factory=MaskUse)
    """The masked region; see MaskUse."""


class ImageInspector(Protocol):
    """Decodes images in another process. The codec pool and the tests implement it."""

    async def inspect(self, image: bytes, *, share: Share) -> ImageSize:
        """Decode an image completely and return its size. Raises BadImage."""

    async def inspect_mask(self, mask: bytes, order: MaskOrder, *, share: Share) -> MaskUse:
        """Decode the mask of an edit and return the masked region. Raises BadImage, also if the mask is empty."""


async def check_images(
    spec: GenerationSpec,
    found: Sequence[Violation],
    inspector: ImageInspector,
    *,
    max_pixels: int,
    model: image_pb2.Model | None,
    share: Share,
    tokens: MaskTokens | None = None,
) -> SeenImages:
    """Decode every input image, and raise its violations together with those in `found`.

    Args:
        spec: Spec of the request.
        found: Violations in the rest of the request.
        inspector: Decodes the images.
        max_pixels: Upper bound on the pixels of one image.
        model: The model that draws, or None if unknown: then masks are not decoded, since their size is unknown.
        share: The tenant that sent the request, and its weight when tenants compete for the decoders.
        tokens: How masks become tokens in the model's network; None if it does not compute masked blocks.
    """
    known = {violation.field for violation in found}
    inspection = _Inspection(inspector, max_pixels, share)
    try:
        for path, image in islice(input_images(spec), _MAX_INPUT_IMAGES):
            if path not in known:
                order = _mask_order(spec, known, inspection, model, tokens) if path == "spec.mask_image" else None
                await inspection.look_at(path, image, order)
    except BottegaError:
        rules.refuse(found)
        raise
    rules.refuse([*found, *inspection.bad], kind=InvalidRequest if found else BadImage)
    return SeenImages(size=inspection.sizes.get("spec.image"), mask=inspection.mask)


class _Inspection:
    """Decodes the images of one request and collects the results.

    Attributes:
        sizes: Sizes of the valid images, by the path of their field.
        mask: The masked region; empty if there is no mask.
        bad: Violations of the invalid images.
    """

    def __init__(self, inspector: ImageInspector, max_pixels: int, share: Share) -> None:
        self._inspector = inspector
        self._share = share
        self._max_pixels = max_pixels
        self.sizes: dict[str, ImageSize] = {}
        self.mask = MaskUse()
        self.bad: list[Violation] = []

    async def look_at(self, path: str, image: bytes, order: MaskOrder | None) -> None:
        """Decode one image. `order` says how to read a mask. Raises BottegaError if the codec fails."""
        try:
            if order is None:
                size = await self._inspector.inspect(image, share=self._share)
            else:
                self.mask = await self._inspector.inspect_mask(image, order, share=self._share)
                size = ImageSize(width=self.mask.width, height=self.mask.height)
        except BadImage as error:
            self.bad.append(Violation(field=path, description=error.message))
            return
        if size.width * size.height <= self._max_pixels:
            self.sizes[path] = size
            return
        rule = f"is {size.width}x{size.height} pixels; at most {self._max_pixels} pixels are allowed"
        self.bad.append(Violation(field=path, description=rule))


def _mask_order(
    spec: GenerationSpec,
    known: Set[str],
    inspection: _Inspection,
    model: image_pb2.Model | None,
    tokens: MaskTokens | None,
) -> MaskOrder | None:
    """Return how to read the mask of a spec, or None if other violations leave the size of the edit unknown."""
    image_size = inspection.sizes.get("spec.image")
    cropped = spec.HasField("padding_mask_crop")
    if model is None or known & _OF_DRAWN_SIZE or (cropped and image_size is None):
        return None
    return MaskOrder(
        width=spec.width if spec.HasField("width") else model.default_width,
        height=spec.height if spec.HasField("height") else model.default_height,
        latent_scale=latent_scale(model),
        alpha=spec.mask_alpha,
        padding=spec.padding_mask_crop if cropped else None,
        image_size=image_size if cropped else None,
        token=tokens.token_elements if tokens is not None else 0,
        margin=tokens.margin_tokens if tokens is not None else 0,
    )


def _moment(name: str, stamp: Timestamp) -> Iterator[Violation]:
    if not _FIRST_S <= stamp.seconds <= _LAST_S:
        yield _violation(name, "seconds must be in the years 1 to 9999", spec=False)
    elif not 0 <= stamp.nanos < 1_000_000_000:
        yield _violation(name, "nanos must be 0 to 999999999", spec=False)


def _check_encoded(path: str, image: bytes, max_bytes: int) -> Iterator[Violation]:
    if not image:
        yield Violation(field=path, description="is empty; send a PNG, JPEG or WebP")
    elif len(image) > max_bytes:
        yield Violation(field=path, description=f"is {len(image)} bytes; at most {max_bytes} bytes are allowed")


def _violation(name: str, description: str, *, spec: bool = True) -> Violation:
    return Violation(field=f"spec.{name}" if spec else name, description=description)
