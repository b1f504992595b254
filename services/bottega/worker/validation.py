"""Checks of the requests that a worker receives.

The caller need not be a gateway that has checked everything. `Worker` checks whether it serves the model. The engine
checks what depends on the model, such as its limits and which multiple its sizes must be.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from bottega import kinds, rules
from bottega.codec.structure import MAX_IMAGE_BYTES
from bottega.errors import InvalidRequest, Violation
from bottega.rpc.security.grants import LEAST_WEIGHT, MOST_WEIGHT
from bottega.v1 import worker_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.worker.attempt_inputs import AttemptInputs
from bottega.worker.attempts import AttemptKey

# Fields that the gateway fills in, and that must be present here.
_FILLED_IN = ("num_inference_steps", "guidance_scale", "width", "height", "seed", "num_images")

# Upper bound on job IDs, which the gateway creates, and request IDs, which it checks.
_MAX_ID_CHARACTERS = 128
_MAX_TENANT_CHARACTERS = 128
_MAX_ADDONS = 16
_MAX_ADDON_BYTES = 256 << 10


def read_attempt(raw: bytes) -> tuple[worker_pb2.RunAttemptRequest, AttemptInputs]:
    """Parse and check a serialized RunAttemptRequest. Return it without its large inputs, and those separately.

    Raises:
        InvalidRequest: The request breaks rules; the error names all violations.
    """
    try:
        request = worker_pb2.RunAttemptRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequest("the request is not a RunAttemptRequest") from None
    rules.refuse(
        [
            *_check_attempt(request.attempt),
            *_check_spec(request.spec),
            *_check_call(request),
            *_check_controls(request),
            *_check_kept(request),
            *_check_loras(request),
            *_check_addons(request),
            *_check_share(request),
        ]
    )
    if not request.HasField("share"):
        request.share.weight = 1.0
    inputs = AttemptInputs.take_from(request)
    # A message keeps the memory of its cleared fields for as long as it lives; its copy has none of it.
    return worker_pb2.RunAttemptRequest.FromString(request.SerializeToString()), inputs


def checked_key(attempt: worker_pb2.AttemptId) -> AttemptKey:
    """Return the key of an attempt. Raises InvalidRequest if the message has none."""
    rules.refuse(list(_check_attempt(attempt)))
    return AttemptKey.of(attempt)


def _check_attempt(attempt: worker_pb2.AttemptId) -> Iterator[Violation]:
    if not 0 < len(attempt.job_id) <= _MAX_ID_CHARACTERS:
        yield Violation(field="attempt.job_id", description=f"must be 1 to {_MAX_ID_CHARACTERS} characters")
    if attempt.number < 1:
        yield Violation(field="attempt.number", description="must be at least 1")


def _check_spec(spec: GenerationSpec) -> Iterator[Violation]:
    for name in _FILLED_IN:
        if not spec.HasField(name):  # type: ignore[arg-type]
            yield Violation(field=f"spec.{name}", description="must be filled in")
    yield from rules.check_texts(spec)
    yield from rules.check_prompts(spec)
    yield from rules.check_model_name(spec)
    yield from rules.check_ranges(spec)
    if spec.sampler:  # an absent sampler stands for the model's default, which is not known here
        yield from rules.check_sigmas(spec, spec.sampler)
    yield from rules.check_techniques(spec)
    if spec.techniques.HasField("recording"):
        rule = "must be absent: recordings are not kept as they were at the time of an earlier edit"
        yield Violation(field="spec.techniques.recording", description=rule)
    yield from rules.check_controlnets(spec)
    yield from rules.check_loras(spec)
    strength = spec.strength if spec.HasField("strength") else None
    yield from rules.check_lora_steps(spec, spec.num_inference_steps, strength)
    if spec.HasField("image") and not 0 < len(spec.image) <= MAX_IMAGE_BYTES:
        yield Violation(field="spec.image", description=f"must be 1 to {MAX_IMAGE_BYTES} bytes")
    yield from rules.check_edit(spec)
    if spec.HasField("mask_image"):
        if not 0 < len(spec.mask_image) <= MAX_IMAGE_BYTES:
            yield Violation(field="spec.mask_image", description=f"must be 1 to {MAX_IMAGE_BYTES} bytes")
        if not spec.HasField("keep_unmasked"):
            yield Violation(field="spec.keep_unmasked", description="must be set if mask_image is set")
        elif spec.keep_unmasked and not spec.HasField("mask_feather"):
            yield Violation(field="spec.mask_feather", description="must be set if keep_unmasked is true")
    if spec.HasField("strength") != spec.HasField("image"):
        yield Violation(field="spec.strength", description="must be set if image is set, and absent otherwise")
    elif spec.HasField("strength"):
        yield from rules.check_steps_left(spec.num_inference_steps, spec.strength)


def _check_controls(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    for index, net in enumerate(request.spec.controlnets):
        if not 0 < len(net.image) <= MAX_IMAGE_BYTES:
            rule = f"must be 1 to {MAX_IMAGE_BYTES} bytes"
            yield Violation(field=f"spec.controlnets[{index}].image", description=rule)


def _check_kept(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    if len(request.kept) > rules.MAX_KEPT_BYTES:
        rule = f"must be at most {rules.MAX_KEPT_BYTES} bytes"
        yield Violation(field="kept", description=rule)
    elif request.kept and not request.spec.HasField("mask_image"):
        yield Violation(field="kept", description="must be empty without spec.mask_image")


def _check_loras(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    for index, lora in enumerate(request.spec.loras):
        for name in ("scale", "digest", "max_step"):
            if not lora.HasField(name):
                yield Violation(field=f"spec.loras[{index}].{name}", description="must be filled in")


def _check_addons(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    """Yield violations of the bounds on add-ons' data. The engine's add-ons check its content."""
    for name, messages in (("addons", request.addons), ("decisions.by_kind", request.decisions.by_kind)):
        if len(messages) > _MAX_ADDONS or not all(map(kinds.is_kind, messages)):
            yield Violation(field=name, description=f"must have at most {_MAX_ADDONS} entries, by kind of service")
        if any(len(message) > _MAX_ADDON_BYTES for message in messages.values()):
            yield Violation(field=name, description=f"must have at most {_MAX_ADDON_BYTES} bytes each")


def _check_share(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    if not request.HasField("share"):
        return
    if len(request.share.tenant) > _MAX_TENANT_CHARACTERS:
        yield Violation(field="share.tenant", description=f"must be at most {_MAX_TENANT_CHARACTERS} characters")
    # Written so that NaN breaks the rule.
    if not LEAST_WEIGHT <= request.share.weight <= MOST_WEIGHT:
        yield Violation(field="share.weight", description=f"must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")


def _check_call(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    if len(request.request_id) > _MAX_ID_CHARACTERS:
        yield Violation(field="request_id", description=f"must be at most {_MAX_ID_CHARACTERS} characters")
    # Written so that NaN breaks the rule.
    if request.HasField("deadline_s") and not request.deadline_s >= 0:
        yield Violation(field="deadline_s", description="must not be negative")
