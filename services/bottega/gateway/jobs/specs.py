"""Reads and completes a GenerationSpec: images, rows and steps, latent, result key, and defaults for empty fields.

A result key says which requests ask for the same image: it is a digest of everything that determines an image. Names
are not part of it: models, LoRAs, ControlNet weights and input images count by their hashes. Everything else in a
complete spec counts, even if it changes no pixel: at worst an image is drawn again. A request that measures something
has no key, because its caller wants the measurement.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence

from google.protobuf.message import Message

from bottega.addons.interface.gateway_addon import Resolution
from bottega.planning import Pace, Shape, rows_per_image
from bottega.planning import steps_to_run as steps_with
from bottega.rules import computes_part, is_flow_matching, takes_karras_sigmas
from bottega.schedules import karras_of, keeps_steps, steps_of
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import FIDELITY_EXACT, GenerationSpec, Provenance

# Version of these rules; keys of other versions never match. 3: images that earlier versions called exact may not be.
_KEY_VERSION = 3
# Data type in which shared forward passes change only the last bits.
_FLOAT32 = "float32"
# Fields that hold encoded images, in a spec and in the messages in it.
_IMAGES = frozenset({"image", "mask_image"})
# Characters kept of each text of a cancelled job: a line or two in a list. With full texts, up to 64 KiB a
# job, only a few thousand cancelled jobs could be remembered.
KEPT_CHARACTERS = 200
_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
_CUT = "…"


def steps_to_run(spec: GenerationSpec, *, keeps_steps: bool = False) -> int:
    """Return the number of denoising steps of one image of a complete spec.

    Args:
        spec: The spec.
        keeps_steps: See `bottega.schedules.keeps_steps`.
    """
    skips = spec.HasField("strength") and not keeps_steps
    return steps_with(spec.num_inference_steps, spec.strength if skips else None, flows=is_flow_matching(spec.sampler))


def rows(spec: GenerationSpec) -> int:
    """Return the number of batch rows that a complete spec adds to a forward pass. A guided image has two."""
    scale = spec.true_cfg_scale if spec.HasField("true_cfg_scale") else spec.guidance_scale
    if spec.HasField("cfg_truncation"):
        scale += 1.0  # With Z-Image, guidance is off at a scale of 0, not 1.
    return spec.num_images * rows_per_image(scale)


def latent_shape(spec: GenerationSpec, model: image_pb2.Model) -> Shape:
    """Return the height and width of the latent, in latent elements."""
    factor = latent_scale(model)
    return spec.height // factor, spec.width // factor


def latent_scale(model: image_pb2.Model) -> int:
    """Return how many pixels one element of the latent covers in each direction."""
    return max(1, model.vae_scale_factor or model.size_multiple)


def input_images(spec: GenerationSpec) -> Iterator[tuple[str, bytes]]:
    """Yield every input image with the path of its field."""
    for name in ("image", "mask_image"):
        if spec.HasField(name):
            yield f"spec.{name}", getattr(spec, name)
    for index, net in enumerate(spec.controlnets):
        yield f"spec.controlnets[{index}].image", net.image


def has_images(spec: GenerationSpec) -> bool:
    """Return whether a spec has input images."""
    return spec.HasField("image") or spec.HasField("mask_image") or bool(spec.controlnets)


def without_images(spec: GenerationSpec) -> GenerationSpec:
    """Return a copy of `spec` without its input images, for responses and for the provenance.

    The fields are copied one by one, because an image that is copied and then cleared stays in the memory of the copy.
    """
    bare = GenerationSpec()
    _copy_fields(spec, bare)
    return bare


def with_short_texts(spec: GenerationSpec) -> GenerationSpec:
    """Return the spec to keep for a cancelled job: `spec` itself, or a copy in which long texts are shortened."""
    long = [name for name in _TEXTS if _shortened(getattr(spec, name)) != getattr(spec, name)]
    prompts = [_shortened(prompt) for prompt in spec.prompts]
    if not long and prompts == spec.prompts:
        return spec
    kept = GenerationSpec()
    kept.CopyFrom(spec)
    for name in long:
        setattr(kept, name, _shortened(getattr(spec, name)))
    kept.prompts[:] = prompts
    return kept


def _shortened(text: str) -> str:
    return text if len(text) <= KEPT_CHARACTERS + len(_CUT) else text[:KEPT_CHARACTERS] + _CUT


def _copy_fields(source: Message, target: Message) -> None:
    for field in source.DESCRIPTOR.fields:
        if field.name in _IMAGES or (field.has_presence and not source.HasField(field.name)):
            continue
        value = getattr(source, field.name)
        if field.is_repeated:
            if field.message_type is None:
                getattr(target, field.name).extend(value)
                continue
            for element in value:
                _copy_fields(element, getattr(target, field.name).add())
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def result_key(outline: GenerationSpec, *, model_hash: str, dtype: str, versions: Sequence[str], tenant: str) -> str:
    """Return the result key of a request, 64 hex digits; "" if a hash that the image depends on is unknown.

    Args:
        outline: Complete spec in which the SHA-256 of each input image, in hex, replaces the image.
        model_hash: Hash of the model.
        dtype: Data type of the model.
        versions: Hashes of the weights of its ControlNets, in the order of the spec.
        tenant: The tenant that sent the request.
    """
    digests = [*versions, *(lora.digest for lora in outline.loras), *(net.image for net in outline.controlnets)]
    known = len(versions) == len(outline.controlnets) and all((model_hash, dtype, *digests))
    if not known or _measures(outline):
        return ""
    named = GenerationSpec()
    named.CopyFrom(outline)
    named.model = model_hash
    for lora in named.loras:
        lora.name, lora.denoiser_only = "", False  # which the digest says
    for net, version in zip(named.controlnets, versions, strict=True):
        net.name = version
    _forget_switches(named, dtype)
    facts = json.dumps([_KEY_VERSION, tenant, dtype]).encode()
    return hashlib.sha256(facts + b"\n" + named.SerializeToString(deterministic=True)).hexdigest()


def key_of_result(bare: GenerationSpec, provenance: Provenance, *, tenant: str) -> str:
    """Return the `result_key` of the requests that a completed job's images may answer; "" if there are none.

    An EXACT request is answered only by exact images. If it allows shared forward passes itself, images that are
    inexact only because of them in half precision answer it too.

    Args:
        bare: The job's complete spec without input images. If it has keep_unmasked, there was a mask.
        provenance: The job's provenance.
        tenant: The job's tenant.
    """
    if bare.fidelity == FIDELITY_EXACT and not (provenance.exact or _rounded_as_allowed(bare, provenance)):
        return ""
    if len(provenance.controlnets) != len(bare.controlnets) or bare.HasField("keep_unmasked") != bool(
        provenance.mask.digest
    ):
        return ""
    outline = GenerationSpec()
    outline.CopyFrom(bare)
    if provenance.image_digest:
        outline.image = provenance.image_digest.encode()
    if provenance.mask.digest:
        outline.mask_image = provenance.mask.digest.encode()
    for net, use in zip(outline.controlnets, provenance.controlnets, strict=True):
        net.image = use.image_digest.encode()
    versions = [use.digest for use in provenance.controlnets]
    return result_key(
        outline, model_hash=provenance.model_hash, dtype=provenance.dtype, versions=versions, tenant=tenant
    )


def _measures(spec: GenerationSpec) -> bool:
    return any(lora.measure_similarity for lora in spec.loras) or any(
        net.measure_similarity for net in spec.controlnets
    )


def _rounded_as_allowed(bare: GenerationSpec, provenance: Provenance) -> bool:
    """Return whether the images are inexact only because of shared forward passes in half precision, and may be."""
    shares = not bare.techniques.HasField("shared_turns") or bare.techniques.shared_turns
    return provenance.shared_in_half_precision and shares


def _forget_switches(spec: GenerationSpec, dtype: str) -> None:
    """Clear the switches that do not change the image: those for stored results, and in float32 for shared passes."""
    if spec.HasField("techniques"):
        spec.techniques.ClearField("identical_results")
        if dtype == _FLOAT32:
            spec.techniques.ClearField("shared_turns")
        if not spec.techniques.ListFields():
            spec.ClearField("techniques")


# Drawn seeds are short enough to be read out, and leave room for the other images.
_DRAWN_SEED_BITS = 32
# The defaults of Diffusers' pipelines of SDXL for image-to-image, image-to-image with ControlNets, and inpainting.
_STRENGTH = 0.3
_CONTROLLED_STRENGTH = 0.8
_MASKED_STRENGTH = 0.9999
_MASK_FEATHER = 8
_QUALITY = 90
_NO_TRUE_CFG = 1.0
_NO_TRUNCATION = 1.0


def complete(
    spec: GenerationSpec,
    model: image_pb2.Model,
    resolutions: Sequence[Resolution] = (),
) -> GenerationSpec:
    """Return a copy of a valid spec with every default filled in, and with a random seed if it has none.

    Args:
        spec: The spec.
        model: The model that draws it.
        resolutions: The resolved names of its LoRAs, ControlNets and other add-ons.
    """
    full = _copied(spec)
    # Only a caller that gave a seed, and asks for no approximation, wants to see the same picture again.
    exact = spec.HasField("seed") and not computes_part(spec)
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
    # A complete spec has it where the guidance scale is embedded; see `rows`.
    full.ClearField("true_cfg_scale")
    if model.embeds_guidance:
        full.true_cfg_scale = spec.true_cfg_scale if spec.HasField("true_cfg_scale") else _NO_TRUE_CFG
    for name in ("cfg_normalization", "cfg_truncation"):
        full.ClearField(name)
    if model.guidance_from_zero:
        full.cfg_normalization = spec.cfg_normalization
        full.cfg_truncation = spec.cfg_truncation if spec.HasField("cfg_truncation") else _NO_TRUNCATION
    strength = strength_of(spec, model)
    if strength is not None:
        full.strength = strength


def _guidance_scale(spec: GenerationSpec, model: image_pb2.Model) -> float:
    plain_edit = spec.HasField("mask_image") and not spec.controlnets
    if plain_edit and model.HasField("default_edit_guidance_scale"):
        return model.default_edit_guidance_scale
    return model.default_guidance_scale
