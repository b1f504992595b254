"""The keyword arguments of a request, and their conversion to and from a GenerationSpec message.

The arguments are named as in Diffusers' pipelines. The gateway, which knows the model, checks their ranges.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast, get_args

from bottega.client.types.inputs import (
    ControlNet,
    ImageSource,
    LoraLike,
    MaskSource,
    add_controlnets,
    add_loras,
    controlnet_from,
    lora_from,
    set_image,
    set_mask,
)
from bottega.client.types.messages import describe, set_field
from bottega.client.types.picture import FORMATS, Format
from bottega.errors import InvalidRequest, Violation
from bottega.rules import LAST_SIGMAS, SPACINGS, FinalSigmasTypeName, SamplerName, TimestepSpacingName, refuse
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import Fidelity, GenerationSpec, PromptSyntax, Sampler

FidelityName = Literal["exact", "balanced", "fast"]
PromptSyntaxName = Literal["plain", "weighted"]

SAMPLERS: dict[SamplerName, Sampler.ValueType] = {
    name: Sampler.Value(f"SAMPLER_{name.upper()}") for name in get_args(SamplerName)
}
FIDELITIES: dict[FidelityName, Fidelity.ValueType] = {
    "exact": generation_pb2.FIDELITY_EXACT,
    "balanced": generation_pb2.FIDELITY_BALANCED,
    "fast": generation_pb2.FIDELITY_FAST,
}
PROMPT_SYNTAXES: dict[PromptSyntaxName, PromptSyntax.ValueType] = {
    "plain": generation_pb2.PROMPT_SYNTAX_PLAIN,
    "weighted": generation_pb2.PROMPT_SYNTAX_WEIGHTED,
}


class EditOptions(TypedDict, total=False):
    """Keyword arguments of edits. All are optional; an absent one, or None, takes the default.

    Attributes:
        model: Name of the model, as models() lists it; by default the only one that is served.
        prompt_2: Prompt of the second text encoder; by default the first prompt.
        negative_prompt: Prompt of what not to draw. Absent and "" differ, as in Diffusers.
        negative_prompt_2: Negative prompt of the second text encoder; by default the first negative prompt.
        prompt_syntax: "plain" or "weighted": how prompts and negative prompts are read. Plain, the default, is as in
            Diffusers. Weighted is as in AUTOMATIC1111's web UI, with (word:1.3), [word] and BREAK, and is not cut at 75
            tokens.
        clip_skip: Number of last layers of the text encoders to skip, as in Diffusers; the web UI counts one more.
        max_sequence_length: Number of tokens that T5 or Qwen3 reads, 1 to 512, for models that have such an encoder.
            The default is 512, and 256 with Stable Diffusion 3 and Flux.1 schnell.
        num_inference_steps: Denoising steps, 1 to 200.
        guidance_scale: 0 to 50. Guidance is off at 1 or less; with Z-Image it is off at 0, as in Diffusers. Edits
            without ControlNets may have another default (models()).
        guidance_rescale: 0 to 1.
        true_cfg_scale: Classifier-free guidance with the negative prompt in models of Flux.1, which embed the guidance
            scale, 0 to 50. By default it is off, as at 1 or less, and negative prompts count for nothing.
        cfg_normalization: Largest norm of a guided prediction relative to the norm of the conditional prediction, 0 to
            50; a longer prediction is shortened. Only with Z-Image. The default, 0, sets no limit.
        cfg_truncation: Progress from noise (0) to the picture (1) after which guidance is off. Only with Z-Image. The
            default, 1, never stops guidance.
        width: Width in pixels, a multiple of the model's size_multiple. A source is resized to it.
        height: Height in pixels, likewise.
        seed: Seed of the first picture; picture i is drawn like a single one with seed + i.
        sampler: One of SamplerName, such as "euler" or "dpmpp_2m".
        use_karras_sigmas: Whether to use Karras sigmas, with "euler", "flow_match_euler", "lms", "deis", "unipc",
            "heun", and the "dpmpp" and "kdpm2" samplers; by default as in the model's scheduler configuration.
        use_exponential_sigmas: Whether to use exponential sigmas, with the same samplers. One that is true replaces the
            sigmas of the model's scheduler configuration; of the three, at most one is.
        use_beta_sigmas: Whether to use beta sigmas, likewise.
        timestep_spacing: "leading", "trailing" or "linspace"; by default as in the model's scheduler configuration.
        final_sigmas_type: "zero" or "sigma_min": the noise level after the last step; by default likewise.
        timesteps: Timestep of each step, falling, as in Diffusers' pipelines; they set num_inference_steps.
        sigmas: Noise level before each step and after the last one, falling, likewise.
        strength: Share of the source that is redrawn, above 0 to 1. The default depends on the model, as in Diffusers:
            .6 with Stable Diffusion 3, Flux.1 and Z-Image, .3 with SDXL, .8 with others and with ControlNets; with a
            mask .6 with Stable Diffusion 3 and Flux.1, .9999 with SDXL and 1 with others and Flux.1 Fill.
        mask_alpha: Whether the mask's transparency says what is redrawn, instead of its white.
        padding_mask_crop: Draw only the mask and this many pixels of the source around it, at width x height, and put
            it back, so that the picture has the source's own size. By default the whole source is drawn.
        keep_unmasked: Whether to restore the source's own pixels outside the mask, which the model changes a little; by
            default yes. False gives the picture of Diffusers; with Stable Diffusion 3 only its latents, because
            Diffusers' inpainting decodes them without the VAE's shift, and Bottega with it.
        mask_feather: Pixels around the mask over which drawn pixels fade into the source's own, 0 to 256; by default 8.
        controlnets: ControlNets to draw with, at most 8; their residuals are summed.
        lora: LoRAs to draw with, at most 8, such as [("outline", 0.8)]; they are summed. Without a model, the request
            goes to the one that they were made for.
        bounded_lora_loading: Whether steps may be made before the LoRAs are at the worker, which is approximate; by
            default the fidelity decides.
        stale_residuals: Whether steps may use the ControlNets' residuals of the step before, which is approximate; by
            default the fidelity decides.
        latent_parallelism: Whether a second worker may compute rows of the request, which is exact in float32; by
            default yes.
        shared_turns: Whether steps may share forward passes with other requests, and be split over passes and workers,
            which changes the rounding of half precision (not of float32); by default yes, unless the fidelity is given
            as "exact".
        step_caching: Whether steps may reuse blocks of earlier ones while these change little, which is approximate,
            with fidelity "fast" and models that are transformers; by default no.
        masked_blocks: Whether an edit may compute only the masked part, and reuse what earlier edits of the same source
            recorded, which is approximate; by default the fidelity decides.
        approximate_cache: Whether pictures may start from a cached latent of a similar prompt, which is approximate; by
            default the fidelity decides. False also keeps this request's own latents out of the cache.
        cache_entry: Cached latent that the only picture starts from, "ENTRY@STEP", as a provenance names it. With the
            same seed it draws that picture again, as long as the cache has the latent.
        recording: Recording that an edit used, in the parameters of a provenance. Requests with it are refused: leave
            it out to draw another edit with the other arguments.
        identical_results: Whether the stored result of an identical request may be returned, which is exact; by default
            as the gateway is configured.
        format: "png", "jpeg" or "webp".
        quality: Quality of JPEG and WebP, 1 to 100.
        metadata: Whether the picture's file contains its parameters; by default yes. Without them, `bottega generate
            --like` and other tools cannot read how it was drawn.
        fidelity: "exact", "balanced" or "fast": how much may be approximated. The default is exact for a request with a
            seed, else balanced.
    """

    model: str | None
    prompt_2: str | None
    negative_prompt: str | None
    negative_prompt_2: str | None
    prompt_syntax: PromptSyntaxName | None
    clip_skip: int | None
    max_sequence_length: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    guidance_rescale: float | None
    true_cfg_scale: float | None
    cfg_normalization: float | None
    cfg_truncation: float | None
    width: int | None
    height: int | None
    seed: int | None
    sampler: SamplerName | None
    use_karras_sigmas: bool | None
    use_exponential_sigmas: bool | None
    use_beta_sigmas: bool | None
    timestep_spacing: TimestepSpacingName | None
    final_sigmas_type: FinalSigmasTypeName | None
    timesteps: Sequence[int] | None
    sigmas: Sequence[float] | None
    strength: float | None
    mask_alpha: bool
    padding_mask_crop: int | None
    keep_unmasked: bool | None
    mask_feather: int | None
    controlnets: Sequence[ControlNet] | None
    lora: Sequence[LoraLike] | None
    bounded_lora_loading: bool | None
    stale_residuals: bool | None
    latent_parallelism: bool | None
    shared_turns: bool | None
    step_caching: bool | None
    masked_blocks: bool | None
    approximate_cache: bool | None
    cache_entry: str | None
    recording: str | None
    identical_results: bool | None
    format: Format | None
    quality: int | None
    metadata: bool | None
    fidelity: FidelityName | None


class GenerationOptions(EditOptions, total=False):
    """Keyword arguments of requests: those of EditOptions, and the source.

    Attributes:
        image: Source of image-to-image or of an edit: encoded bytes, a path, a Pillow image or a Picture.
        mask_image: Part of the source that is redrawn, which makes the request an edit: white in an image of any size,
            given as the source is, or a Box, an Ellipse or a list of these.
        keep_for_editing: Whether to keep the latents of all steps with the job, so that even the first edit of its
            pictures may compute only the masked part. Not with mask_image.
    """

    image: ImageSource | None
    mask_image: MaskSource | None
    keep_for_editing: bool


_NAMED: dict[str, Mapping[Any, int]] = {
    "sampler": SAMPLERS,
    "fidelity": FIDELITIES,
    "format": FORMATS,
    "prompt_syntax": PROMPT_SYNTAXES,
    "timestep_spacing": SPACINGS,
    "final_sigmas_type": LAST_SIGMAS,
}
_OPTIONS = tuple(GenerationOptions.__annotations__)
# All arguments of client.generate() and similar methods, to suggest one for a misspelt name.
_ARGUMENTS = (*_OPTIONS, "num_images", "timeout_s", "deadline_s", "request_id", "priority", "preview")
OTHER_NAMES = {
    "steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "guidance": "guidance_scale",
    "true_cfg": "true_cfg_scale",
    "negative": "negative_prompt",
    "scheduler": "sampler",
    "karras": "use_karras_sigmas",
    "spacing": "timestep_spacing",
    "denoising_strength": "strength",
    "mask": "mask_image",
    "loras": "lora",
    "control": "controlnets",
    "controlnet": "controlnets",
    "generator": "seed",
    "num_images_per_prompt": "num_images",
    "n": "num_images",
    "timeout": "timeout_s",
    "deadline": "deadline_s",
    "output_type": "format",
}
"""Arguments by other tools' names for them, which are too different to be found by their spelling."""
# Fields of the contract's Techniques that have an argument.
_TECHNIQUES = (
    "bounded_lora_loading",
    "stale_residuals",
    "latent_parallelism",
    "shared_turns",
    "step_caching",
    "masked_blocks",
    "approximate_cache",
    "cache_entry",
    "recording",
    "identical_results",
)
# Fields of a spec that are not an argument of the same name.
_LEFT_OUT = frozenset({"prompt", "prompts", "num_images", "image", "mask_image", "loras", "techniques"})


def spec_from(prompt: str | Sequence[str], options: GenerationOptions, *, num_images: int = 1) -> GenerationSpec:
    """Return the spec of a request. Images that are paths are read.

    Raises InvalidRequest that names every argument that cannot be sent.
    """
    spec = GenerationSpec()
    broken = [_unknown(name) for name in sorted(options.keys() - set(_OPTIONS))]
    several = isinstance(prompt, list | tuple)
    broken.extend(set_field(spec, "prompts" if several else "prompt", prompt))
    if several and not prompt:
        broken.append(Violation(field="prompt", description="must be a text, or a list of at least one text"))
    if num_images != 1:
        broken.extend(set_field(spec, "num_images", num_images))
    for name in _OPTIONS:
        if (value := options.get(name)) is not None:
            broken.extend(_add(spec, name, value))
    refuse(broken)
    return spec


def options_from(spec: GenerationSpec) -> GenerationOptions:
    """Return the keyword arguments of a spec, except for the prompt, the number of images and all input images.

    Raises InvalidRequest if the spec has a value that no argument can express, such as a later version's sampler.
    """
    values = {field.name: value for field, value in spec.ListFields() if field.name not in _LEFT_OUT}
    values |= {field.name: value for field, value in spec.techniques.ListFields()}
    if unknown := sorted(values.keys() - set(_OPTIONS)):
        raise InvalidRequest(f"the client has no argument for {', '.join(unknown)}")
    for name in values.keys() & _NAMED.keys():
        values[name] = _name_of(name, values[name])
    values |= {name: tuple(values[name]) for name in values.keys() & {"timesteps", "sigmas"}}
    if spec.controlnets:
        values["controlnets"] = tuple(map(controlnet_from, spec.controlnets))
    if spec.loras:
        values["lora"] = tuple(map(lora_from, spec.loras))
    return cast("GenerationOptions", values)


def _unknown(name: str) -> Violation:
    """Return the violation of an unknown keyword argument, with the argument that was probably meant."""
    near = nearest_name(name, _ARGUMENTS)
    meant = f"; did you mean {near}?" if near else ""
    return Violation(field=name, description=f"there is no such argument{meant}")


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return the known argument that a caller probably meant by another name; "" if none is similar."""
    other = OTHER_NAMES.get(name, "")
    return other if other in known else next(iter(difflib.get_close_matches(name, known, n=1)), "")


def _name_of(argument: str, number: int) -> str:
    for name, known in _NAMED[argument].items():
        if known == number:
            return str(name)
    raise InvalidRequest(f"{argument}: {number} is unknown to this version, which has {', '.join(_NAMED[argument])}")


def _add(spec: GenerationSpec, name: str, value: object) -> Iterator[Violation]:
    if name == "controlnets":
        yield from add_controlnets(spec, value)
    elif name == "lora":
        yield from add_loras(spec, value)
    elif name == "image":
        yield from set_image(spec, value)
    elif name == "mask_image":  # the order of the options sets the image first
        yield from set_mask(spec, value)
    elif name not in _NAMED:
        yield from set_field(spec.techniques if name in _TECHNIQUES else spec, name, value)
    elif isinstance(value, str) and value in _NAMED[name]:
        setattr(spec, name, _NAMED[name][value])
    else:
        rule = f"must be one of {', '.join(_NAMED[name])}; got {describe(value)}"
        yield Violation(field=name, description=rule)
