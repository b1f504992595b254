"""Converts the message that starts an attempt to an EngineOrder, the engine's request type."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Literal

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from bottega import kinds
from bottega.adapter_rules import mode_number
from bottega.addons.controlnets.engine.provider import ControlHosts, read_hosts
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ControlSpec, EditSpec, EmbeddingSpec, LoraSpec, ResolvedSpec
from bottega.fair_order import Share
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.model_files.control_layout import base_layout
from bottega.schedules import karras_of, keeps_steps, schedule_of
from bottega.v1 import engine_pb2, generation_pb2, tensor_pb2
from bottega.v1.worker_pb2 import AttemptId, AttemptKept

_log = logging.getLogger(__name__)

# The engine's key of an attempt: job and number.
Key = tuple[str, int]

# Fields that are passed on only if present: absence has a meaning, or stands for the default of ResolvedSpec.
_OPTIONAL = frozenset(
    {
        "prompt_2",
        "negative_prompt",
        "negative_prompt_2",
        "guidance_scale",
        "guidance_rescale",
        "true_cfg_scale",
        "cfg_normalization",
        "cfg_truncation",
        "seed",
        "num_images",
        "strength",
        "clip_skip",
        "max_sequence_length",
    }
)

_OPTIONAL_OF_CONTROL = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")

# Samplers of the API, and the engine's.
SAMPLERS = {generation_pb2.Sampler.Value(f"SAMPLER_{kind.name}"): kind for kind in SamplerKind}


def key_of(attempt: AttemptId) -> Key:
    """Return the engine's key of an attempt."""
    return attempt.job_id, attempt.number


def attempt_of(key: object) -> AttemptId:
    """Return the attempt that an engine's key identifies."""
    assert isinstance(key, tuple), "key_of made every key"
    return AttemptId(job_id=key[0], number=key[1])


def order_of(start: engine_pb2.EngineStart, model: Model) -> EngineOrder:
    """Convert the message that starts an attempt. If the spec names no sampler, use the model's default."""
    request = start.request
    return EngineOrder(
        key=key_of(request.attempt),
        spec=_spec(start, model),
        image=_tensor(start.image) if start.HasField("image") else None,
        mask=_tensor(start.mask) if start.HasField("mask") else None,
        control_images=tuple(_tensor(image.pixels) for image in start.control_images),
        kept=_kept(request.kept),
        addons=dict(request.addons),
        latent_parallelism=_may_be_lent(request.spec),
        shared_turns=_may_share_turns(request.spec, model),
        decisions=dict(request.decisions.by_kind),
        checkpoint=request.checkpoint,
        preview=request.preview,
        share=Share(tenant=request.share.tenant, weight=request.share.weight) if request.HasField("share") else Share(),
    )


def _kept(data: bytes) -> dict[str, bytes]:
    """Parse the kept data of the input image, by kind of add-on. If it cannot be read, return {}: it is not used."""
    try:
        return dict(AttemptKept.FromString(data).by_kind)
    except DecodeError:
        _log.warning("the kept data of an image cannot be read; it is not used")
        return {}


def _spec(start: engine_pb2.EngineStart, model: Model) -> ResolvedSpec:
    """Convert the spec to the engine's type. The gateway has already filled in the defaults."""
    spec = start.request.spec
    sampler = SAMPLERS.get(spec.sampler, model.defaults.sampler)
    own = model.samplers.default_choice(sampler)
    strength = spec.strength if keeps_steps(spec, model.family.strength_keeps_steps) else None
    present = {field.name: value for field, value in spec.ListFields() if field.name in _OPTIONAL}
    return ResolvedSpec(
        prompt=spec.prompt,
        prompts=tuple(spec.prompts),
        weighted=spec.prompt_syntax == generation_pb2.PROMPT_SYNTAX_WEIGHTED,
        num_inference_steps=spec.num_inference_steps,
        width=spec.width,
        height=spec.height,
        sampler=sampler,
        use_karras_sigmas=karras_of(spec, own.karras),
        schedule=schedule_of(spec, strength),
        controlnets=tuple(_controls(start, base_layout(model.backbone.network.config, model.latent_scale).base)),
        stale_residuals=_may_approximate(spec, "stale_residuals"),
        loras=tuple(_lora(lora) for lora in spec.loras if not lora.token),
        embeddings=tuple(
            EmbeddingSpec(name=lora.name, digest=lora.digest, token=lora.token) for lora in spec.loras if lora.token
        ),
        edit=_edit(start) if start.HasField("mask") else None,
        keep_for_editing=spec.keep_for_editing,
        step_caching=spec.techniques.step_caching,
        **present,
    )


def _edit(start: engine_pb2.EngineStart) -> EditSpec:
    spec = start.request.spec
    return EditSpec(
        mask_digest=start.mask_digest,
        image_digest=start.image_digest,
        mask_alpha=spec.mask_alpha,
        padding_mask_crop=spec.padding_mask_crop if spec.HasField("padding_mask_crop") else None,
        masked_blocks=_may_approximate(spec, "masked_blocks"),
        any_prompt=spec.techniques.masked_blocks or spec.fidelity == generation_pb2.FIDELITY_FAST,
    )


def _controls(start: engine_pb2.EngineStart, base: str) -> Iterator[ControlSpec]:
    """Yield the ControlNets, each with its digest, because checkpoints depend on the version.

    Args:
        start: The message.
        base: Name of the model's layout, which decides the numbers of control modes.
    """
    addons = start.request.addons
    hosts = read_hosts(addons[kinds.CONTROLNET]) if kinds.CONTROLNET in addons else ()
    for net, image, host in itertools.zip_longest(start.request.spec.controlnets, start.control_images, hosts):
        if net is not None and image is not None:
            yield _control(net, image.digest, (host or ControlHosts()).digest, base)


def _control(net: generation_pb2.ControlNet, image_digest: str, digest: str, base: str) -> ControlSpec:
    present = {name: getattr(net, name) for name in _OPTIONAL_OF_CONTROL if net.HasField(name)}  # type: ignore[arg-type]
    return ControlSpec(
        name=net.name,
        image_digest=image_digest,
        digest=digest,
        guess_mode=net.guess_mode,
        control_mode=mode_number(net.control_mode, base),
        measured=net.measure_similarity,
        **present,
    )


def _lora(lora: generation_pb2.Lora) -> LoraSpec:
    return LoraSpec(
        name=lora.name,
        digest=lora.digest,
        scale=lora.scale,
        from_step=lora.from_step if lora.HasField("from_step") else None,
        bound=lora.max_step,
        measured=lora.measure_similarity,
        denoiser_only=lora.denoiser_only,
    )


def _may_approximate(
    spec: generation_pb2.GenerationSpec, technique: Literal["stale_residuals", "masked_blocks"]
) -> bool:
    """Return whether a technique may be used. If the request does not say so, its fidelity decides."""
    if spec.techniques.HasField(technique):
        return bool(getattr(spec.techniques, technique))
    return spec.fidelity in (generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST)


def _may_be_lent(spec: generation_pb2.GenerationSpec) -> bool:
    """Return whether the other worker of a pair may compute rows. Only the request itself can forbid it."""
    return spec.techniques.latent_parallelism if spec.techniques.HasField("latent_parallelism") else True


def _may_share_turns(spec: generation_pb2.GenerationSpec, model: Model) -> bool:
    """Return whether steps may share a forward pass with other requests or be split. In float32 that is exact."""
    refused = spec.techniques.HasField("shared_turns") and not spec.techniques.shared_turns
    return not refused or model.dtype == torch.float32


def _tensor(message: tensor_pb2.Tensor) -> Tensor:
    return torch.frombuffer(bytearray(message.data), dtype=torch.uint8).reshape(tuple(message.shape))
