"""Encodes prompts as conditions, and pictures as latent distributions.

It follows encode_prompt of Diffusers' pipelines, one prompt at a time. Results are plain tensors, which could be sent
over a link.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bottega import rules
from bottega.device.device import HostCopy, run_pieces
from bottega.engine.events import CutText
from bottega.engine.prompt_chunks import (
    Chunk,
    Tokenizer,
    chat_chunk,
    emphasise,
    empty_chunk,
    plain_chunk,
    weighted_chunks,
)
from bottega.engine.spec import ResolvedSpec
from bottega.errors import Violation
from bottega.model.backbone import GUIDANCE, TIMESTEP_COND, guidance_embedding
from bottega.model.model import Model
from bottega.model.rows import Embeds
from bottega.model.text_encoders import EncodedText, JobTexts, TextCache
from bottega.model.vae import encode_in_pieces
from bottega.model.weights import NOWHERE
from bottega.planning import rows_per_image
from bottega.prompt_syntax import MalformedPrompt

_log = logging.getLogger(__name__)

# Pixels of all colour fields together: a dozen pictures of a small model, or three of SDXL, whose encoder is slow on a
# CPU. The map has five numbers for each colour, so that more pixels would not change it.
_PIXELS = 12 * 64 * 64
_MIN_PICTURES, _MAX_PICTURES = 3, 12
_MAX_SIDE = 128
# Patches of one colour on each side: coarse enough to be smooth for the VAE, fine enough to vary inside a picture.
_PATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conditions:
    """The conditions of an image: the embeddings of its prompts."""

    conditional: Embeds
    unconditional: Embeds | None
    """The embeddings of the negative prompt; None without guidance."""
    summary: Tensor
    """One vector [features] of the prompt, by which similar prompts are found."""
    truncations: Sequence[CutText]
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
    """Mask of an edit, [1, `Model.mask_channels`, height, width] in latent size: 64 channels for Flux Fill, else 1."""
    masked_image: LatentDistribution | None = None
    """The picture with grey under the mask, for models that read it."""


def encode_all_prompts(
    model: Model, spec: ResolvedSpec, *, tenant: str = "", changed: bool = False
) -> list[Conditions]:
    """Return the conditions of each image of a spec, in order. Images with the same prompt share them.

    Args:
        model: The model.
        spec: The spec.
        tenant: Whose prompts they are; see JobTexts.
        changed: Whether LoRAs or embeddings of the spec are in the text encoders or tokenizers now.
    """
    loras = [(lora.digest, lora.scale) for lora in spec.loras]
    embeddings = [(embedding.digest, embedding.token) for embedding in spec.embeddings]
    texts = JobTexts(cache=model.prompt_cache, tenant=tenant, changes=(*loras, *embeddings) if changed else ())
    if not spec.prompts:
        return [encode_prompts(model, spec, texts=texts)] * spec.num_images
    encoded: dict[str, Conditions] = {}
    for index, prompt in enumerate(spec.prompts):
        if prompt not in encoded:
            single = replace(spec, prompt=prompt, prompts=())
            encoded[prompt] = encode_prompts(model, single, field=f"prompts[{index}]", texts=texts)
    return [encoded[prompt] for prompt in spec.prompts]


def cfg_scale(model: Model, spec: ResolvedSpec) -> float:
    """Return the scale by which both halves of guidance are combined; at most 1 if only one half is computed."""
    if model.embeds_guidance:
        return spec.true_cfg_scale
    return spec.guidance_scale + 1.0 if model.family.guidance_from_zero else spec.guidance_scale


@torch.inference_mode()
def encode_prompts(
    model: Model, spec: ResolvedSpec, *, field: str = "prompt", texts: JobTexts | None = None
) -> Conditions:
    """Return the conditions for the prompt of a spec, without an unconditional half if it has no guidance.

    Both halves have equally many chunks.

    Args:
        model: The model.
        spec: Spec with one prompt.
        field: Name of the prompt's field, for `Conditions.truncations`.
        texts: Texts that are encoded already, which are used and added to; None encodes all.
    """
    texts = texts or JobTexts(cache=TextCache())
    # As in Diffusers, an empty second prompt means the first one. The third text encoder has no prompt of its own.
    words = (spec.prompt, spec.prompt_2 or spec.prompt, spec.prompt)
    prompts = _read(model, spec, words, (field, "prompt_2" if spec.prompt_2 else field, field))
    guided = rows_per_image(cfg_scale(model, spec)) > 1
    zeros = spec.negative_prompt is None and model.zeros_for_absent_negative
    negative_prompts = _read_negative(model, spec) if guided and not zeros else _Prompts()
    chunks = max(prompts.longest, negative_prompts.longest)
    text = _encode_once(model, prompts, chunks, spec.clip_skip, texts)
    conditional = _with_picture(model, spec, _embeds(model, text))
    unconditional = None
    if guided and zeros:
        unconditional = _with_picture(model, spec, _embeds(model, text).map(torch.zeros_like))
    elif guided:
        clip_skip = spec.clip_skip if spec.weighted else None
        negative = _encode_once(model, negative_prompts, chunks, clip_skip, texts)
        unconditional = _with_picture(model, spec, _embeds(model, negative))
    tensors = [tensor for half in (conditional, unconditional) if half is not None for tensor in half.tensors.values()]
    return Conditions(
        conditional=conditional,
        unconditional=unconditional,
        summary=text.summary,
        truncations=[*prompts.truncations, *negative_prompts.truncations],
        finite=all_finite(model, *tensors),
    )


@torch.inference_mode()
def sample_conditions(model: Model, spec: ResolvedSpec) -> Conditions:
    """Return conditions for a sample by which the engine is measured: noise if the text encoders are elsewhere."""
    if model.encodes:
        return encode_prompts(model, spec)
    states, outputs = list[Tensor](), list[Any]()
    encoders = zip(model.family.text_encoders, model.tokenizers, model.text_encoders, strict=True)
    for part, tokenizer, encoder in encoders:
        chunk, _ = _plain_chunk(model, spec, spec.prompt, part, tokenizer)
        made, output = _states(model, encoder, chunk, None)
        states.append(made)
        outputs.append(output)
    text = model.family.join(states, outputs, None).to(model.dtype)
    generator = torch.Generator("cpu").manual_seed(0)

    def noise(shaped: Tensor) -> Tensor:
        return model.runtime.to_device(torch.randn(shaped.shape, generator=generator), shaped.dtype)

    embeds = _with_picture(model, spec, _embeds(model, text).map(noise))
    return Conditions(
        conditional=embeds,
        unconditional=embeds if rows_per_image(cfg_scale(model, spec)) > 1 else None,
        summary=noise(text.summary),
        truncations=(),
        finite=all_finite(model, *embeds.tensors.values()),
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
    return LatentDistribution(mean=mean, std=std, finite=all_finite(model, mean, std))


def to_latent(model: Model, latent: Tensor) -> Tensor:
    """Convert a latent [1, channels, height, width] from the VAE's scale to the backbone's."""
    config = model.vae.config
    if config.latents_mean is None or config.latents_std is None:
        shifted = latent - config.shift_factor if config.shift_factor else latent
        scaled: Tensor = config.scaling_factor * shifted
        return scaled
    mean, std = (
        model.runtime.to_device(torch.tensor(values).view(1, -1, 1, 1), latent.dtype)
        for values in (config.latents_mean, config.latents_std)
    )
    normalised: Tensor = (latent - mean) * config.scaling_factor / std
    return normalised


def all_finite(model: Model, *tensors: Tensor) -> HostCopy:
    """Return whether tensors have neither NaN nor infinity, as one bool."""
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()
    return model.runtime.to_host(finite)


def _embeds(model: Model, text: EncodedText) -> Embeds:
    return Embeds(prompt=text.prompt, added=text.added, any_length=model.family.reads_chat)


def _with_picture(model: Model, spec: ResolvedSpec, embeds: Embeds) -> Embeds:
    """Add the conditions that depend on the picture, such as its size, and the guidance scale if it is one."""
    picture = dict(model.family.picture_conditions(spec.height, spec.width))
    if model.family.distilled_guidance:  # Either the network reads it, or only ControlNets do.
        picture[GUIDANCE] = torch.tensor([spec.guidance_scale])
    if model.guidance_width:
        picture[TIMESTEP_COND] = guidance_embedding(spec.guidance_scale, model.guidance_width)
    added = {name: model.runtime.to_device(tensor, embeds.prompt.dtype) for name, tensor in picture.items()}
    return replace(embeds, added={**embeds.added, **added})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """The prompts of one half of guidance, as their tokenizers read them."""

    chunks: Sequence[Sequence[Chunk]] = ()
    """Chunks for each text encoder."""
    truncations: Sequence[CutText] = ()
    max_sequence_length: int | None = None
    """See ResolvedSpec. A model without T5 has as many zeros in place of its states."""

    @property
    def longest(self) -> int:
        """Largest number of chunks for a text encoder."""
        return max(map(len, self.chunks), default=0)


def _read_negative(model: Model, spec: ResolvedSpec) -> _Prompts:
    words = spec.negative_prompt or ""
    fields = (
        "negative_prompt",
        "negative_prompt_2" if spec.negative_prompt_2 else "negative_prompt",
        "negative_prompt",
    )
    return _read(model, spec, (words, spec.negative_prompt_2 or words, words), fields)


def _read(model: Model, spec: ResolvedSpec, texts: Sequence[str], fields: Sequence[str]) -> _Prompts:
    """Divide the text of each text encoder into chunks.

    Args:
        model: The model.
        spec: Says how the texts are read.
        texts: Texts for up to three text encoders. A family may have fewer.
        fields: The field name of each text.
    """
    sources = list(zip(texts, model.tokenizers, strict=False))
    if spec.weighted:
        try:
            return _Prompts(chunks=[weighted_chunks(text, tokenizer) for text, tokenizer in sources])
        except MalformedPrompt as error:  # Checked before, but tokens of an add-on may have made it longer.
            rules.refuse([Violation(field=f"spec.{fields[0]}", description=str(error))])
    chunks: list[list[Chunk]] = []
    encoders_of: dict[tuple[str, str], list[str]] = {}
    for (text, tokenizer), field, part in zip(sources, fields, model.family.text_encoders, strict=False):
        chunk, lost = _plain_chunk(model, spec, text, part, tokenizer)
        chunks.append([chunk])
        if lost:
            encoders_of.setdefault((field, lost), []).append(part)
    cuts = [
        CutText(field=field, text=lost, encoders=tuple(encoders)) for (field, lost), encoders in encoders_of.items()
    ]
    return _Prompts(chunks=chunks, truncations=cuts, max_sequence_length=spec.max_sequence_length)


def _plain_chunk(model: Model, spec: ResolvedSpec, text: str, part: str, tokenizer: Tokenizer) -> tuple[Chunk, str]:
    """Return the only chunk of a plain prompt for a text encoder, and the text that did not fit."""
    tokens = model.family.prompt_tokens.get(part)
    read = chat_chunk if model.family.reads_chat else plain_chunk
    return read(text, tokenizer, tokens and (spec.max_sequence_length or tokens))


def _encode_once(model: Model, prompts: _Prompts, count: int, clip_skip: int | None, texts: JobTexts) -> EncodedText:
    """Return encoded prompts, to which empty chunks are added up to `count`, from `texts` if it has them."""
    read = tuple(tuple(chunks) for chunks in prompts.chunks)
    key = texts.key((read, prompts.max_sequence_length, count, clip_skip))
    text = texts.find(key)
    if text is None:
        text = _encode(model, prompts, count, clip_skip)
        texts.add(key, text)
    return text


def _encode(model: Model, prompts: _Prompts, count: int, clip_skip: int | None) -> EncodedText:
    """Encode prompts, to which empty chunks are added up to `count`, in the model's element type."""
    states, first_outputs = list[Tensor](), list[Any]()
    for own, tokenizer, encoder in zip(prompts.chunks, model.tokenizers, model.text_encoders, strict=True):
        chunks = [*own, *(empty_chunk(tokenizer) for _ in range(count - len(own)))]
        encoded: dict[Chunk, Tensor] = {}
        for chunk in dict.fromkeys(chunks):
            # The states of all layers are freed before the next chunk: a prompt may have 20 chunks.
            made, output = _states(model, encoder, chunk, clip_skip)
            encoded[chunk] = emphasise(made, chunk)
            if len(encoded) == 1:
                first_outputs.append(output)
        states.append(torch.cat([encoded[chunk] for chunk in chunks], dim=1))
    return model.family.join(states, first_outputs, prompts.max_sequence_length).to(model.dtype)


def _states(model: Model, encoder: Any, chunk: Chunk, clip_skip: int | None) -> tuple[Tensor, Any]:
    """Return the states of a chunk's tokens without padding, [1, tokens, features], and the encoder's output."""
    place = model.runtime.to_device if model.encodes else lambda values: values.to(NOWHERE)
    # A network without weights computes no values, but the library transformers reads the values of a mask.
    masks = {"attention_mask": place(torch.tensor([chunk.mask]).bool())} if chunk.mask and model.encodes else {}
    output = encoder(place(torch.tensor([chunk.ids])), **masks, output_hidden_states=True)
    states = model.family.states(encoder, output, clip_skip)
    if chunk.mask:  # All padding is at one end.
        first = chunk.mask.index(1)
        states = states[:, first : first + sum(chunk.mask)]
    return states, output


class LatentPreview:
    """A linear map from one model's latents to RGB, for small previews.

    Args:
        weights: [channels + 1, 3], to RGB in [0, 1]; the last row is the offset.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    @classmethod
    @torch.inference_mode()
    def fit(cls, model: Model) -> LatentPreview:
        """Fit the map by least squares to random colour fields and their latents.

        Previews are grey if the VAE encodes pictures to NaN or infinity, because text-to-image needs no encoder.
        """
        side = min(_MAX_SIDE, model.defaults.width, model.defaults.height)
        generator = torch.Generator("cpu").manual_seed(0)
        latents: list[Tensor] = []
        colours: list[Tensor] = []
        for _ in range(min(_MAX_PICTURES, max(_MIN_PICTURES, _PIXELS // side**2))):
            patches = torch.rand(1, 3, _PATCHES, _PATCHES, generator=generator)
            field = functional.interpolate(patches, size=(side, side), mode="bilinear")
            pixels = (field[0].permute(1, 2, 0) * 255).round().to(torch.uint8)
            latent = to_latent(model, encode_image(model, pixels).mean).float().cpu()
            latents.append(_columns(latent))
            colours.append(functional.interpolate(field, size=latent.shape[2:], mode="area")[0].flatten(1).T)
        inputs, wanted = torch.cat(latents), torch.cat(colours)
        if not bool(torch.isfinite(inputs).all()):
            _log.warning("the VAE encodes pictures to values that are not numbers; previews are grey")
            grey = torch.zeros(inputs.shape[1], 3)
            grey[-1] = 0.5
            return cls(grey)
        return cls(torch.linalg.lstsq(inputs, wanted).solution)

    def draw(self, latent: Tensor) -> Tensor:
        """Return a latent [1, channels, height, width] on the CPU as a small picture, uint8 [height, width, 3]."""
        height, width = latent.shape[2:]
        colours = _columns(latent.detach().float()) @ self._weights
        return (colours.clamp(0, 1) * 255).round().to(torch.uint8).reshape(height, width, 3)


def _columns(latent: Tensor) -> Tensor:
    """Return [1, channels, height, width] as [height * width, channels + 1]; the last column is 1."""
    flat = latent[0].flatten(1).T
    return torch.cat([flat, torch.ones(len(flat), 1)], dim=1)
