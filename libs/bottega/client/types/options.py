"""The keyword arguments of a request, and how they become the contract's GenerationSpec and come back.

The names are those of Diffusers' pipelines. Knows the contract's messages, not the network; ranges are
checked by the gateway, which knows the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from bottega.client.types.control import ControlNet, add_controlnets, controlnet_from
from bottega.client.types.image_source import ImageSource, set_image
from bottega.client.types.lora import LoraLike, add_loras, lora_from
from bottega.client.types.mask import MaskSource, set_mask
from bottega.client.types.messages import describe, set_field
from bottega.client.types.picture import FORMATS, Format
from bottega.errors import InvalidRequest, Violation
from bottega.rules import refuse
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import Fidelity, GenerationSpec, Sampler

SamplerName = Literal["euler", "euler_ancestral", "ddim", "dpmpp_2m"]
FidelityName = Literal["exact", "balanced", "fast"]

SAMPLERS: dict[SamplerName, Sampler.ValueType] = {
    "euler": generation_pb2.SAMPLER_EULER,
    "euler_ancestral": generation_pb2.SAMPLER_EULER_ANCESTRAL,
    "ddim": generation_pb2.SAMPLER_DDIM,
    "dpmpp_2m": generation_pb2.SAMPLER_DPMPP_2M,
}
FIDELITIES: dict[FidelityName, Fidelity.ValueType] = {
    "exact": generation_pb2.FIDELITY_EXACT,
    "balanced": generation_pb2.FIDELITY_BALANCED,
    "fast": generation_pb2.FIDELITY_FAST,
}


class EditOptions(TypedDict, total=False):
    """How to draw. Everything is optional; what is absent takes the model's default.

    negative_prompt: what not to draw; absent and "" differ, as in Diffusers.
    prompt_2, negative_prompt_2: for the second text encoder; absent uses the first one's.
    num_inference_steps: 1 to 200.
    guidance_scale: 0 to 50; at most 1 switches guidance off. An edit without ControlNets may have a default of its own,
        as in Diffusers (models()).
    guidance_rescale: 0 to 1.
    width, height: pixels, multiples of the model's size_multiple; a source is resized to them.
    seed: of the first image; image i is drawn as a single one with seed + i.
    sampler: "euler", "euler_ancestral", "ddim" or "dpmpp_2m".
    use_karras_sigmas: with "euler" and "dpmpp_2m"; absent is as the model's scheduler configuration has it.
    strength: how much of the source is redrawn, above 0 to 1; absent is .3, with ControlNets .8 and with a mask .9999,
        as in Diffusers.
    mask_alpha: the mask's transparency says what is redrawn, instead of its white.
    padding_mask_crop: draw only the part of the source around the mask, with so many pixels around it, at width x
        height, and put it back: the picture has the source's own size. Absent draws the whole source.
    keep_unmasked: whether the source's own pixels are put back outside the mask, which the model would change a
        little; absent is yes. No gives the picture that Diffusers gives.
    mask_feather: pixels outside the mask over which the drawn ones fade into the source's own, 0 to 256; absent is 8.
    controlnets: ControlNets to draw with, at most 8; their residuals are summed.
    lora: LoRAs to draw with, at most 8, such as [("outline", 0.8)]; they are summed. Without a model, the request goes
        to the one that they were made for.
    bounded_lora_loading: whether steps may be made before the LoRAs are at the worker, which is approximate; absent
        leaves it to the fidelity.
    stale_residuals: whether steps may go on with the ControlNets' residuals of the step before, which is approximate;
        absent leaves it to the fidelity.
    latent_parallelism: whether another worker may compute rows of the request, which is exact; absent is yes.
    masked_blocks: whether an edit may compute the masked part alone, and take the rest from what earlier edits of the
        same source have recorded, which is approximate; absent leaves it to the fidelity.
    approximate_cache: whether pictures may start from the latent of an earlier one whose prompt is similar, which is
        approximate; absent leaves it to the fidelity. False also keeps this request's own latents out of the cache.
    cache_entry: the cached latent that the only picture starts from, "ENTRY@STEP" as a provenance names it: with the
        same seed it draws that picture again, as long as the cache has it.
    recording: what an edit took from others, as the parameters of a provenance name it. No edit with it is drawn: leave
        it out for another edit with the other arguments.
    identical_results: whether the stored result of an identical request may be the answer, which is exact; absent is as
        the gateway is configured.
    format: "png", "jpeg" or "webp".
    quality: of JPEG and WebP, 1 to 100.
    fidelity: "exact", "balanced" or "fast": how far approximate techniques may go; absent is exact for a request with a
        seed, else balanced.
    model: name of the model, as models() lists it.
    """

    model: str | None
    prompt_2: str | None
    negative_prompt: str | None
    negative_prompt_2: str | None
    num_inference_steps: int | None
    guidance_scale: float | None
    guidance_rescale: float | None
    width: int | None
    height: int | None
    seed: int | None
    sampler: SamplerName | None
    use_karras_sigmas: bool | None
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
    masked_blocks: bool | None
    approximate_cache: bool | None
    cache_entry: str | None
    recording: str | None
    identical_results: bool | None
    format: Format | None
    quality: int | None
    fidelity: FidelityName | None


class GenerationOptions(EditOptions, total=False):
    """How to draw, and from what: also the keyword arguments that EditOptions lists.

    image: source of image-to-image, or of an edit: encoded bytes, a path, a Pillow image or a Picture.
    mask_image: what of the source is redrawn, which makes an edit of it: white in an image of any size, given as the
        source is, or in a Box, an Ellipse or a list of those.
    keep_for_editing: keep the latents of all steps with the job, so that even the first edit of its pictures computes
        the masked part alone where it may. Not with mask_image.
    """

    image: ImageSource | None
    mask_image: MaskSource | None
    keep_for_editing: bool


_NAMED: dict[str, Mapping[Any, int]] = {"sampler": SAMPLERS, "fidelity": FIDELITIES, "format": FORMATS}
_OPTIONS = tuple(GenerationOptions.__annotations__)
# Of client.generate() and the like, where a misspelt one may stand.
_ARGUMENTS = (*_OPTIONS, "num_images", "timeout_s", "deadline_s", "request_id", "priority", "preview")
# What other tools call them, too far from our names to be found by their letters.
_OTHER_NAMES = {
    "steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "guidance": "guidance_scale",
    "negative": "negative_prompt",
    "scheduler": "sampler",
    "karras": "use_karras_sigmas",
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
# Of the contract's Techniques, those that have an argument.
_TECHNIQUES = (
    "bounded_lora_loading",
    "stale_residuals",
    "latent_parallelism",
    "masked_blocks",
    "approximate_cache",
    "cache_entry",
    "recording",
    "identical_results",
)
# Of a spec, what becomes of no argument, or of several.
_LEFT_OUT = frozenset({"prompt", "prompts", "num_images", "image", "mask_image", "loras", "techniques"})


def spec_from(prompt: str | Sequence[str], options: GenerationOptions, *, num_images: int = 1) -> GenerationSpec:
    """Return the request as the contract carries it. Reads the images that are paths.

    Raises InvalidRequest, listing every argument that cannot be sent.
    """
    spec = GenerationSpec()
    broken = [_unknown(name) for name in sorted(options.keys() - set(_OPTIONS))]
    several = isinstance(prompt, list | tuple)
    broken.extend(set_field(spec, "prompts" if several else "prompt", prompt))
    if several and not prompt:
        broken.append(Violation(field="prompt", description="must be a text, or a list of at least one"))
    if num_images != 1:
        broken.extend(set_field(spec, "num_images", num_images))
    for name in _OPTIONS:
        if (value := options.get(name)) is not None:
            broken.extend(_add(spec, name, value))
    refuse(broken)
    return spec


def options_from(spec: GenerationSpec) -> GenerationOptions:
    """The keyword arguments that make `spec`, without its prompt, number of images, source, mask and control images.

    Raises InvalidRequest when the spec uses something that no keyword argument says, such as a later version's sampler.
    """
    said = {field.name: value for field, value in spec.ListFields() if field.name not in _LEFT_OUT}
    said |= {field.name: value for field, value in spec.techniques.ListFields()}
    if beyond := sorted(said.keys() - set(_OPTIONS)):
        raise InvalidRequest(f"the client has no argument for {', '.join(beyond)}")
    for name in said.keys() & _NAMED.keys():
        said[name] = _name_of(name, said[name])
    if spec.controlnets:
        said["controlnets"] = tuple(map(controlnet_from, spec.controlnets))
    if spec.loras:
        said["lora"] = tuple(map(lora_from, spec.loras))
    return cast("GenerationOptions", said)


def _unknown(name: str) -> Violation:
    """Return what is said of a keyword that there is not, with the one that was probably meant."""
    near = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, _ARGUMENTS, n=1)), None)
    meant = f"; did you mean {near}?" if near else ""
    return Violation(field=name, description=f"there is no such argument{meant}")


def _name_of(argument: str, number: int) -> str:
    for name, known in _NAMED[argument].items():
        if known == number:
            return str(name)
    raise InvalidRequest(f"{argument}: {number} is none that this version knows ({', '.join(_NAMED[argument])} are)")


def _add(spec: GenerationSpec, name: str, value: object) -> Iterator[Violation]:
    if name == "controlnets":
        yield from add_controlnets(spec, value)
    elif name == "lora":
        yield from add_loras(spec, value)
    elif name == "image":
        yield from set_image(spec, value)
    elif name == "mask_image":  # after the image, by the order of the options
        yield from set_mask(spec, value)
    elif name not in _NAMED:
        yield from set_field(spec.techniques if name in _TECHNIQUES else spec, name, value)
    elif isinstance(value, str) and value in _NAMED[name]:
        setattr(spec, name, _NAMED[name][value])
    else:
        rule = f"must be one of {', '.join(_NAMED[name])}; got {describe(value)}"
        yield Violation(field=name, description=rule)
