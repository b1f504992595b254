"""The gateway's permissions for a job's cached latents, the decisions of earlier attempts, and the key of its latents.

Two jobs must share the key for one to start from latents of the other. It covers everything about a job except for its
prompt, its seeds, the number of its pictures and their encoding. Jobs with properties that the key cannot describe have
none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bottega import kinds, rules
from bottega.addons.cache.starts import ENTRY_PATTERN, parse_start
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ControlSpec, ResolvedSpec
from bottega.errors import InvalidRequest, Violation
from bottega.model.schedulers import SamplerKind
from bottega.v1.cache_pb2 import CacheDecision, CacheOrder, CacheStart
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, FIDELITY_FAST, Fidelity

_FIELD = f"addons[{kinds.CACHE}]"
PIN_FIELD = f"{_FIELD}.pin"
_DECISION_FIELD = f"decisions[{kinds.CACHE}]"
_MAX_NAME_CHARACTERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """The use that a job may make of cached latents: start from them, be recorded, or start from a certain one."""

    read: bool = False
    record: bool = False
    tenant: str = ""
    job: str = ""
    """ID that is the same for all attempts at the job; see `CacheQuestion.job`."""
    fidelity: Fidelity.ValueType = FIDELITY_BALANCED
    pin: CacheStart | None = None
    """The cached latent from which the only picture must start, because the request names it; None otherwise."""


def read_order(order: EngineOrder) -> StartOrder | None:
    """Return the order's part about cached latents; None without one. Raise InvalidRequest with all violations."""
    if kinds.CACHE not in order.addons:
        return None
    try:
        message = CacheOrder.FromString(order.addons[kinds.CACHE])
    except DecodeError:
        raise InvalidRequest(f"{_FIELD} is not a CacheOrder") from None
    violations = []
    for name, value in (("tenant", message.tenant), ("job", message.job)):
        if len(value) > _MAX_NAME_CHARACTERS:
            rule = f"must be at most {_MAX_NAME_CHARACTERS} characters"
            violations.append(Violation(field=f"{_FIELD}.{name}", description=rule))
    pin = None
    if message.pin:
        try:
            entry, step = parse_start(message.pin)
        except ValueError as error:
            violations.append(Violation(field=PIN_FIELD, description=str(error)))
        else:
            pin = CacheStart(entry=entry, step=step)
            if order.spec.num_images > 1 or not _is_start(pin, order.spec):
                rule = "must be for one picture, after one of its steps"
                violations.append(Violation(field=PIN_FIELD, description=rule))
    rules.refuse(violations)
    # A job that is exact, or does not say, never starts from a similar picture.
    approximates = message.fidelity in (FIDELITY_BALANCED, FIDELITY_FAST)
    return StartOrder(
        read=message.read and approximates,
        record=message.record,
        tenant=message.tenant,
        job=message.job,
        fidelity=message.fidelity,
        pin=pin,
    )


def read_decision(data: bytes, spec: ResolvedSpec) -> list[CacheStart | None]:
    """Return the latent from which each picture starts; None for pictures that start from noise.

    Raises:
        InvalidRequest: No attempt at the spec can have decided this.
    """
    try:
        starts = CacheDecision.FromString(data).starts
    except DecodeError:
        raise InvalidRequest(f"{_DECISION_FIELD} is not a CacheDecision") from None
    if len(starts) > spec.num_images or not all(_is_start(start, spec) for start in starts if start.entry):
        rule = "must name cached latents after steps of the spec, for its pictures"
        rules.refuse([Violation(field=f"{_DECISION_FIELD}.starts", description=rule)])
    missing = spec.num_images - len(starts)
    return [start if start.entry else None for start in starts] + [None] * missing


def _is_start(start: CacheStart, spec: ResolvedSpec) -> bool:
    in_range = 0 < start.step < spec.num_inference_steps and 0 <= start.made_steps <= start.step
    return in_range and bool(ENTRY_PATTERN.fullmatch(start.entry))


def has_key(spec: ResolvedSpec) -> bool:
    """Return whether a job may exchange latents with others at all.

    It may not if it starts from a picture, has several prompts, a second prompt or a weighted one, which the embedding
    does not represent, lists its own timesteps or sigmas, for which no profile was measured, uses ControlNets of
    unknown versions, or measures similarities from step to step. PNDM counts on earlier steps of its schedule, and
    cannot begin with a later one.
    """
    return (
        spec.sampler is not SamplerKind.PNDM
        and spec.strength is None
        and not spec.prompts
        and not spec.prompt_2
        and not spec.weighted
        and spec.schedule.steps is None
        and not spec.loras_measured
        and all(control.digest and not control.measured for control in spec.controlnets)
    )


def start_key(spec: ResolvedSpec, *, model_hash: str, dtype: str, tenant: str) -> str:
    """Return the key of a job, 64 hex digits.

    Args:
        spec: Spec of the job.
        model_hash: Digest of weights and configuration, hex.
        dtype: Element type of the model.
        tenant: Tenant of the job, whose latents other tenants do not use.
    """
    facts = {
        "model_hash": model_hash,
        "dtype": dtype,
        "tenant": tenant,
        "width": spec.width,
        "height": spec.height,
        "sampler": spec.sampler.name,
        "use_karras_sigmas": spec.use_karras_sigmas,
        "schedule": dataclasses.astuple(spec.schedule),
        "num_inference_steps": spec.num_inference_steps,
        "guidance_scale": float(spec.guidance_scale),
        "guidance_rescale": float(spec.guidance_rescale),
        # None and "" condition differently.
        "negative_prompt": spec.negative_prompt,
        "negative_prompt_2": spec.negative_prompt_2,
        "clip_skip": spec.clip_skip,
        "loras": sorted((lora.digest, float(lora.scale)) for lora in spec.loras),
        "controlnets": [_control(control) for control in spec.controlnets],
    }
    if spec.true_cfg_scale > 1.0:
        facts["true_cfg_scale"] = float(spec.true_cfg_scale)
    if spec.cfg_normalization > 0.0:
        facts["cfg_normalization"] = float(spec.cfg_normalization)
    if spec.cfg_truncation < 1.0:
        facts["cfg_truncation"] = float(spec.cfg_truncation)
    if spec.embeddings:  # Keys of other requests stay as they are on the disk.
        facts["embeddings"] = [embedding.digest for embedding in spec.embeddings]
    if spec.max_sequence_length is not None:
        facts["max_sequence_length"] = spec.max_sequence_length
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _control(control: ControlSpec) -> list[str | float | bool | None]:
    return [
        control.digest,
        control.image_digest,
        float(control.controlnet_conditioning_scale),
        float(control.control_guidance_start),
        float(control.control_guidance_end),
        control.guess_mode,
        control.control_mode,
    ]
