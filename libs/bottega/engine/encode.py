"""Encodes prompts as conditions, and pictures as latent distributions.

It follows encode_prompt of Diffusers' pipelines, one prompt at a time. Results are plain tensors, which could be sent
over a link.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from diffusers.loaders import TextualInversionLoaderMixin
from torch import Tensor

from bottega.device.device import HostCopy
from bottega.device.pieces import run_pieces
from bottega.engine.spec import ResolvedSpec
from bottega.model.backbone import TIMESTEP_COND
from bottega.model.family import EncodedText, guidance_embedding
from bottega.model.model import Model
from bottega.model.rows import Embeds
from bottega.model.vae import encode_in_pieces

_TEXTUAL_INVERSION = TextualInversionLoaderMixin()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conditions:
    """The conditions of an image: the embeddings of its prompts."""

    conditional: Embeds
    unconditional: Embeds | None
    """The embeddings of the negative prompt; None without guidance."""
    summary: Tensor
    """One vector [features] of the prompt, by which similar prompts are found."""
    truncations: dict[str, str]
    """Text that was cut off because it did not fit into the tokenizer, by field name."""
    finite: HostCopy
    """One bool: whether the embeddings have neither NaN nor infinity."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentDistribution:
    """The output of the VAE for a picture. Each image of a job draws its own sample from it."""

    mean: Tensor
    """[1, channels, height, width] in the VAE's data type."""
    std: Tensor
    """In the same shape and type."""
    finite: HostCopy
    """One bool: whether both have neither NaN nor infinity."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources:
    """The picture that the images of a job start from, encoded."""

    image: LatentDistribution | None = None
    """Source of image-to-image or of an edit; None without one, and where a checkpoint has all that it gives."""
    mask: Tensor | None = None
    """Mask of an edit, [1, 1, height, width] in latent size."""
    masked_image: LatentDistribution | None = None
    """The picture with grey under the mask, for models that read it."""


def encode_all_prompts(model: Model, spec: ResolvedSpec) -> list[Conditions]:
    """Return the conditions of each image of a spec, in order. Images with the same prompt share them."""
    if not spec.prompts:
        return [encode_prompts(model, spec)] * spec.num_images
    encoded: dict[str, Conditions] = {}
    negative: Embeds | None = None
    for index, prompt in enumerate(spec.prompts):
        if prompt not in encoded:
            single = replace(spec, prompt=prompt, prompts=())
            encoded[prompt] = encode_prompts(model, single, field=f"prompts[{index}]", negative=negative)
            negative = encoded[prompt].unconditional
    return [encoded[prompt] for prompt in spec.prompts]


@torch.inference_mode()
def encode_prompts(
    model: Model, spec: ResolvedSpec, *, field: str = "prompt", negative: Embeds | None = None
) -> Conditions:
    """Return the conditions for the prompt of a spec, without an unconditional half if it has no guidance.

    Args:
        spec: Spec with one prompt.
        field: Name of the prompt's field, for `Conditions.truncations`.
        negative: The unconditional half, if it has already been encoded.
    """
    truncations: dict[str, str] = {}
    # As in Diffusers, an empty second prompt means the first one.
    pair = (spec.prompt, spec.prompt_2 or spec.prompt)
    names = (field, "prompt_2" if spec.prompt_2 else field)
    text = _encode(model, pair, names, truncations)
    conditional = _with_picture(model, spec, Embeds(prompt=text.prompt, added=text.added))
    unconditional = negative
    if spec.guided and not model.guidance_width and unconditional is None:
        if spec.negative_prompt is None and model.zeros_for_absent_negative:
            empty = Embeds(prompt=text.prompt, added=text.added).map(torch.zeros_like)
        else:
            words = spec.negative_prompt or ""
            names = ("negative_prompt", "negative_prompt_2" if spec.negative_prompt_2 else "negative_prompt")
            encoded = _encode(model, (words, spec.negative_prompt_2 or words), names, truncations)
            empty = Embeds(prompt=encoded.prompt, added=encoded.added)
        unconditional = _with_picture(model, spec, empty)
    tensors = [tensor for half in (conditional, unconditional) if half is not None for tensor in half.tensors.values()]
    return Conditions(
        conditional=conditional,
        unconditional=unconditional,
        summary=text.summary,
        truncations=truncations,
        finite=_all_finite(model, *tensors),
    )


def encode_image(model: Model, pixels: Tensor, *, mask: Tensor | None = None) -> LatentDistribution:
    """Return the latent distribution of a picture; see `encode_image_in_pieces`."""
    return run_pieces(encode_image_in_pieces(model, pixels, mask=mask))


@torch.inference_mode()
def encode_image_in_pieces(
    model: Model, pixels: Tensor, *, mask: Tensor | None = None
) -> Generator[None, None, LatentDistribution]:
    """Encode a picture, and yield after each layer, so that other work can run between them.

    Args:
        model: The model.
        pixels: uint8 [height, width, 3].
        mask: uint8 [height, width], 1 where the picture is grey.
    """
    # In Diffusers' memory layout, because sums in another layout have another order.
    image = pixels[None].permute(0, 3, 1, 2).to(torch.float32) / 255.0
    image = 2.0 * image - 1.0
    if mask is not None:
        image = image * (mask[None, None] < 1)
    image = model.runtime.to_device(image, model.dtype)
    distribution = yield from encode_in_pieces(model.vae, image)
    mean, std = distribution.mean, distribution.std
    return LatentDistribution(mean=mean, std=std, finite=_all_finite(model, mean, std))


def to_latent(model: Model, latent: Tensor) -> Tensor:
    """Convert a latent [1, channels, height, width] from the VAE's scale to the backbone's."""
    config = model.vae.config
    if config.latents_mean is None or config.latents_std is None:
        scaled: Tensor = config.scaling_factor * latent
        return scaled
    mean, std = (
        model.runtime.to_device(torch.tensor(values).view(1, -1, 1, 1), latent.dtype)
        for values in (config.latents_mean, config.latents_std)
    )
    normalised: Tensor = (latent - mean) * config.scaling_factor / std
    return normalised


def _all_finite(model: Model, *tensors: Tensor) -> HostCopy:
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()
    return model.runtime.to_host(finite)


def _with_picture(model: Model, spec: ResolvedSpec, embeds: Embeds) -> Embeds:
    """Add the conditions that depend on the picture, such as its size, and the guidance scale if it is one."""
    picture = dict(model.family.picture_conditions(spec.height, spec.width))
    if model.guidance_width:
        picture[TIMESTEP_COND] = guidance_embedding(spec.guidance_scale, model.guidance_width)
    added = {name: model.runtime.to_device(tensor, embeds.prompt.dtype) for name, tensor in picture.items()}
    return replace(embeds, added={**embeds.added, **added})


def _encode(model: Model, texts: tuple[str, str], fields: tuple[str, str], truncations: dict[str, str]) -> EncodedText:
    """Encode the first text, and the second one if the family has two text encoders.

    Args:
        model: The model.
        texts: The texts.
        fields: The field name of each text.
        truncations: Receives the text that did not fit, by field name.
    """
    outputs = []
    # Families with one text encoder have no second prompt.
    for text, tokenizer, encoder, field in zip(texts, model.tokenizers, model.text_encoders, fields, strict=False):
        # A word with several embeddings (textual inversion) becomes as many tokens.
        text = _TEXTUAL_INVERSION.maybe_convert_prompt(text, tokenizer)  # noqa: PLW2901
        length = tokenizer.model_max_length
        ids = tokenizer(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        whole = tokenizer(text, padding="longest", return_tensors="pt").input_ids
        if whole.shape[-1] > length:
            truncations[field] = tokenizer.decode(whole[0, length - 1 : -1])
        outputs.append(encoder(model.runtime.to_device(ids), output_hidden_states=True))
    return model.family.join(outputs)
