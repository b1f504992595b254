"""Defaults: fills in the fields that a request left empty, so that its spec describes the picture completely."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from bottega.addons.interface.gateway_addon import AddOn, Resolution
from bottega.gateway.jobs.specs import steps_to_run
from bottega.planning import Pace
from bottega.rules import takes_karras_sigmas
from bottega.schedules import karras_of, keeps_steps, steps_of
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import GenerationSpec

# Drawn seeds are short enough to be read out, and leave room for the other images.
_DRAWN_SEED_BITS = 32
# The defaults of Diffusers' pipelines of SDXL for image-to-image, image-to-image with ControlNets, and inpainting.
_STRENGTH = 0.3
_CONTROLLED_STRENGTH = 0.8
_MASKED_STRENGTH = 0.9999
_MASK_FEATHER = 8
_QUALITY = 90


def complete(
    spec: GenerationSpec,
    model: image_pb2.Model,
    resolutions: Sequence[Resolution] = (),
    addons: Sequence[AddOn] = (),
) -> GenerationSpec:
    """Return a copy of a valid spec with every default filled in, and with a random seed if it has none.

    Args:
        spec: The spec.
        model: The model that draws it.
        resolutions: The resolved names of its LoRAs, ControlNets and other add-ons.
        addons: All add-ons. If one of them may compute only a part of the picture, a request with a seed does not
            default to fidelity EXACT.
    """
    full = _copied(spec)
    # Only a caller that gave a seed, and asks for no approximation, wants to see the same picture again.
    exact = spec.HasField("seed") and not any(addon.computes_part(spec) for addon in addons)
    full.fidelity = spec.fidelity or (generation_pb2.FIDELITY_EXACT if exact else generation_pb2.FIDELITY_BALANCED)
    if spec.fidelity == generation_pb2.FIDELITY_EXACT and not spec.techniques.HasField("shared_turns"):
        full.techniques.shared_turns = False
    if not spec.HasField("seed"):
        full.seed = secrets.randbits(_DRAWN_SEED_BITS)
    full.model = model.name
    full.sampler = spec.sampler or model.default_sampler
    choice = choice_of(spec, model)
    if choice is not None and takes_karras_sigmas(choice.sampler):
        full.use_karras_sigmas = karras_of(spec, choice.use_karras_sigmas)
    full.prompt_syntax = spec.prompt_syntax or generation_pb2.PROMPT_SYNTAX_PLAIN
    full.format = spec.format or generation_pb2.IMAGE_FORMAT_PNG
    full.width = spec.width if spec.HasField("width") else model.default_width
    full.height = spec.height if spec.HasField("height") else model.default_height
    full.num_images = len(full.prompts) or (spec.num_images if spec.HasField("num_images") else 1)
    full.quality = spec.quality if spec.HasField("quality") else _QUALITY
    _complete_denoising(full, spec, model)
    _complete_edit(full, model)
    steps = steps_to_run(full, keeps_steps=keeps_steps(full, model.strength_keeps_steps))
    for resolution in resolutions:
        resolution.complete(full, steps)
    return full


def as_before(spec: GenerationSpec, drawn: GenerationSpec) -> GenerationSpec:
    """Complete a spec with the seed and the defaults that its first job used.

    Args:
        spec: The request, with its input images.
        drawn: The complete spec of the first job, without input images.
    """
    full = GenerationSpec()
    full.CopyFrom(drawn)
    for name in ("image", "mask_image"):
        if spec.HasField(name):
            setattr(full, name, getattr(spec, name))
    for net, sent in zip(full.controlnets, spec.controlnets, strict=True):
        net.image = sent.image
    return full


def _copied(spec: GenerationSpec) -> GenerationSpec:
    """Return a copy whose `prompt` is the first of `prompts`. A single entry of `prompts` is moved to `prompt`."""
    full = GenerationSpec()
    full.CopyFrom(spec)
    if spec.prompts:
        full.prompt = spec.prompts[0]
    if len(spec.prompts) == 1:
        full.ClearField("prompts")
    return full


def choice_of(spec: GenerationSpec, model: image_pb2.Model) -> image_pb2.SamplerChoice | None:
    """Return the sampler configuration that a spec selects; None if the model's workers do not list their samplers."""
    sampler = spec.sampler or model.default_sampler
    for choice in model.sampler_choices:
        matches = choice.is_default
        if spec.HasField("use_karras_sigmas") and takes_karras_sigmas(sampler):
            matches = choice.use_karras_sigmas == spec.use_karras_sigmas
        if choice.sampler == sampler and matches:
            return choice
    return None


def evaluations_per_step(full: GenerationSpec, model: image_pb2.Model) -> float:
    """Return how often the sampler of a complete spec evaluates the network in a step, on average over a picture."""
    choice = choice_of(full, model)
    if choice is None or not choice.evaluations_per_step:
        return 1.0
    steps = max(1, steps_to_run(full, keeps_steps=keeps_steps(full, model.strength_keeps_steps)))
    pace = Pace(per_step=choice.evaluations_per_step, extra=choice.extra_evaluations)
    return pace.evaluations(steps) / steps


def strength_of(spec: GenerationSpec, model: image_pb2.Model) -> float | None:
    """Return the strength of a spec with an input image, or the default strength; None without an input image."""
    if not spec.HasField("image"):
        return None
    if spec.HasField("strength"):
        return spec.strength
    if spec.HasField("mask_image"):
        return model.default_edit_strength if model.HasField("default_edit_strength") else _MASKED_STRENGTH
    if spec.controlnets:
        return _CONTROLLED_STRENGTH
    return model.default_strength if model.HasField("default_strength") else _STRENGTH


def _complete_edit(full: GenerationSpec, model: image_pb2.Model) -> None:
    if not full.HasField("mask_image"):
        return
    for net in full.controlnets if model.HasField("default_edit_controlnet_scale") else ():
        if not net.HasField("controlnet_conditioning_scale"):
            net.controlnet_conditioning_scale = model.default_edit_controlnet_scale
    if not full.HasField("keep_unmasked"):
        full.keep_unmasked = True
    if full.keep_unmasked and not full.HasField("mask_feather"):
        full.mask_feather = _MASK_FEATHER


def _complete_denoising(full: GenerationSpec, spec: GenerationSpec, model: image_pb2.Model) -> None:
    full.num_inference_steps = steps_of(spec, model.default_steps)
    full.guidance_scale = spec.guidance_scale if spec.HasField("guidance_scale") else _guidance_scale(spec, model)
    full.guidance_rescale = spec.guidance_rescale
    strength = strength_of(spec, model)
    if strength is not None:
        full.strength = strength


def _guidance_scale(spec: GenerationSpec, model: image_pb2.Model) -> float:
    plain_edit = spec.HasField("mask_image") and not spec.controlnets
    if plain_edit and model.HasField("default_edit_guidance_scale"):
        return model.default_edit_guidance_scale
    return model.default_guidance_scale
