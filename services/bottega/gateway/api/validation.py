"""Which requests are refused: the rules of the contract. All violations of a request are found at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from google.protobuf.timestamp_pb2 import Timestamp

from bottega import rules
from bottega.codec import ImageSize
from bottega.errors import BadImage, BottegaError, FieldNotServed, InvalidRequest, Violation
from bottega.gateway.addons.addon import AddOn
from bottega.gateway.api.defaults import STRENGTH
from bottega.gateway.jobs.specs import input_images
from bottega.rules import (
    MAX_ADAPTERS,
    MAX_JOBS_PAGE,
    MAX_SIDE,
    check_model_name,
    check_ranges,
    check_sigmas,
    check_steps_left,
    check_techniques,
    check_texts,
)
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Of one ListJobs.
_MAX_STATES = 16
# What a Timestamp may say, by its own definition.
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799

# image, mask_image and as many ControlNets as a request may have.
_MAX_INPUT_IMAGES = 2 + MAX_ADAPTERS

# Other techniques are designed and not served yet, and neither is mask_image.
_SERVED_TECHNIQUES = frozenset(
    {
        "approximate_cache",
        "bounded_lora_loading",
        "cache_entry",
        "identical_results",
        "latent_parallelism",
        "stale_residuals",
    }
)


def check_request_id(request_id: str) -> Iterator[Violation]:
    """What is wrong with an idempotency key; an empty one is none."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        yield _violation("request_id", "must be at most 128 characters of [A-Za-z0-9._:-]", spec=False)


def check_deadline(deadline_s: float | None) -> Iterator[Violation]:
    """What is wrong with a deadline that the caller gave."""
    if deadline_s is not None and not 0 < deadline_s < math.inf:
        yield _violation("deadline_s", "must be a number of seconds above 0", spec=False)


def check_spec(spec: GenerationSpec, addons: Sequence[AddOn], *, max_image_bytes: int) -> Iterator[Violation]:
    """What is wrong with a spec whatever the model."""
    yield from check_texts(spec)
    yield from check_model_name(spec)
    yield from check_ranges(spec)
    yield from check_techniques(spec)
    for path, image in islice(input_images(spec), _MAX_INPUT_IMAGES):
        yield from _check_encoded(path, image, max_image_bytes)
    for name in ("strength", "mask_image"):
        if spec.HasField(name) and not spec.HasField("image"):
            yield _violation(name, "needs image")
    for addon in addons:
        yield from addon.check(spec)


def check_model(spec: GenerationSpec, model: image_pb2.Model, addons: Sequence[AddOn]) -> Iterator[Violation]:
    """What is wrong with a spec because of the model that shall draw it."""
    multiple = max(1, model.size_multiple)
    for name, side in (("width", spec.width), ("height", spec.height)):
        if spec.HasField(name) and 0 < side <= MAX_SIDE and side % multiple:  # type: ignore[arg-type]
            yield _violation(name, f"must be a multiple of {multiple} with this model")
    width = spec.width if spec.HasField("width") else model.default_width
    height = spec.height if spec.HasField("height") else model.default_height
    if 0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and model.max_pixels and width * height > model.max_pixels:
        rule = f"width x height is {width * height} pixels; this model takes at most {model.max_pixels}"
        yield _violation("width", rule)
    yield from check_sigmas(spec, spec.sampler or model.default_sampler)
    steps = spec.num_inference_steps if spec.HasField("num_inference_steps") else model.default_steps
    strength = (spec.strength if spec.HasField("strength") else STRENGTH) if spec.HasField("image") else None
    if strength is not None:
        yield from check_steps_left(steps, strength)
    for addon in addons:
        yield from addon.check_steps(spec, steps=steps, strength=strength)


def refuse_unserved(spec: GenerationSpec) -> None:
    """Raises FieldNotServed for a spec that uses what a later version will serve. After everything else."""
    used = ["mask_image"] if spec.HasField("mask_image") else []
    if {field.name for field, _ in spec.techniques.ListFields()} - _SERVED_TECHNIQUES:
        used.append("techniques")
    if used:
        fields = ",".join(f"spec.{name}" for name in used)
        raise FieldNotServed(f"not served yet: {', '.join(used)}", metadata={"field": fields})


def check_page(request: image_pb2.ListJobsRequest) -> Iterator[Violation]:
    """What is wrong with the paging and the filters of ListJobs, its token aside."""
    if not 0 <= request.page_size <= MAX_JOBS_PAGE:
        yield _violation("page_size", f"must be 1 to {MAX_JOBS_PAGE}, or 0 for the default", spec=False)
    known = set(image_pb2.JobState.values()) - {image_pb2.JOB_STATE_UNSPECIFIED}
    if len(request.states) > _MAX_STATES or any(state not in known for state in request.states):
        yield _violation("states", f"must be known states, at most {_MAX_STATES}", spec=False)
    for name in ("created_after", "created_before"):
        yield from _moment(name, getattr(request, name))


class ImageInspector(Protocol):
    """Decodes images, in another process."""

    async def inspect(self, image: bytes) -> ImageSize:
        """Decodes it completely and returns its size. Raises BadImage."""


async def check_images(
    spec: GenerationSpec, found: Sequence[Violation], inspector: ImageInspector, *, max_pixels: int
) -> None:
    """Decodes every input image that can be one. Raises what is wrong with them beside `found`."""
    known = {violation.field for violation in found}
    bad: list[Violation] = []
    try:
        for path, image in islice(input_images(spec), _MAX_INPUT_IMAGES):
            if path not in known:
                bad.extend(await _check_pixels(path, image, inspector, max_pixels))
    except BottegaError:
        rules.refuse(found)
        raise
    rules.refuse([*found, *bad], kind=InvalidRequest if found else BadImage)


async def _check_pixels(path: str, image: bytes, inspector: ImageInspector, max_pixels: int) -> list[Violation]:
    try:
        size = await inspector.inspect(image)
    except BadImage as error:
        return [Violation(field=path, description=error.message)]
    if size.width * size.height <= max_pixels:
        return []
    rule = f"is {size.width}x{size.height} pixels; at most {max_pixels} in all"
    return [Violation(field=path, description=rule)]


def _moment(name: str, stamp: Timestamp) -> Iterator[Violation]:
    if not _FIRST_S <= stamp.seconds <= _LAST_S:
        yield _violation(name, "seconds must be those of a year from 1 to 9999", spec=False)
    elif not 0 <= stamp.nanos < 1_000_000_000:
        yield _violation(name, "nanos must be 0 to 999999999", spec=False)


def _check_encoded(path: str, image: bytes, max_bytes: int) -> Iterator[Violation]:
    if not image:
        yield Violation(field=path, description="is empty; a PNG, JPEG or WebP is wanted")
    elif len(image) > max_bytes:
        yield Violation(field=path, description=f"is {len(image)} bytes; at most {max_bytes}")


def _violation(name: str, description: str, *, spec: bool = True) -> Violation:
    return Violation(field=f"spec.{name}" if spec else name, description=description)
