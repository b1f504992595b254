"""Model families: everything that differs between the kinds of models that a worker serves.

A family is data and a few functions. Its networks are Diffusers' own, and the rest of the suite reads what it needs
from the family of the loaded model. `bottega.model_files.families` recognises the family of a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor
from torch.nn import functional
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from bottega.model_files.family_names import SDXL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedText:
    """A text as the text encoders of a family encode it."""

    prompt: Tensor
    """[tokens, features]."""
    added: Mapping[str, Tensor]
    """Further conditions; see `Embeds.added`."""
    summary: Tensor
    """One vector for the whole text, by which similar prompts are found, [features]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A kind of models."""

    name: str
    """Name in messages, such as `SDXL`."""
    pipeline: Any
    """Diffusers' text-to-image pipeline, which assembles the parts."""
    left_out: Mapping[str, Any]
    """Arguments of the pipeline that leave out parts which the suite does not use."""
    text_encoders: Mapping[str, Any]
    """Classes of the text encoders by the name of their part, in the order in which prompts are encoded.

    The part of each one's tokenizer has the same name, with `tokenizer` in place of `text_encoder`.
    """
    join: Callable[[Sequence[Any]], EncodedText]
    """Makes one text of the outputs of all text encoders, with their hidden states."""
    picture_conditions: Callable[[int, int], Mapping[str, Tensor]]
    """Returns the conditions that depend on the picture's height and width, in pixels, as float32 tensors."""
    guidance_scale: float
    """Default of the text-to-image pipeline."""
    edit_guidance_scale: float
    """Default of the inpainting pipeline without ControlNets."""
    strength: float
    """Default of the image-to-image pipeline without ControlNets."""
    edit_strength: float
    """Default of the inpainting pipelines."""
    num_inference_steps: int = 50
    """Default of all pipelines."""
    vae_overrides: Mapping[str, Any]
    """Values for fields of the VAE's configuration that the family's pipelines do not read."""

    @property
    def tokenizers(self) -> Sequence[str]:
        """Parts of the tokenizers, in the order of the text encoders."""
        return [part.replace("text_encoder", "tokenizer") for part in self.text_encoders]


def guidance_embedding(guidance_scale: float, width: int) -> Tensor:
    """Return the condition of UNets that take the guidance scale as an input, [width], in float32.

    Source: get_guidance_scale_embedding of Diffusers' pipelines.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
    angles = (torch.tensor(guidance_scale - 1) * 1000.0) * frequencies
    return functional.pad(torch.cat([torch.sin(angles), torch.cos(angles)]), (0, width % 2))


def _join_sdxl(outputs: Sequence[Any]) -> EncodedText:
    """Join both encoders' penultimate states, and add the second one's pooled output."""
    dtype, pooled = outputs[1].text_embeds.dtype, outputs[1].text_embeds[0]
    states = torch.concat([output.hidden_states[-2] for output in outputs], dim=-1)
    return EncodedText(prompt=states[0].to(dtype), added={"text_embeds": pooled}, summary=pooled)


def _sdxl_sizes(height: int, width: int) -> dict[str, Tensor]:
    """Return original size, crop and target size."""
    return {"time_ids": torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32)}


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        SDXL: ModelFamily(
            name=SDXL,
            pipeline=StableDiffusionXLPipeline,
            # Only IP-Adapters use the image encoder, and only the watermark changes pictures.
            left_out={"add_watermarker": False, "image_encoder": None, "feature_extractor": None},
            text_encoders={"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection},
            join=_join_sdxl,
            picture_conditions=_sdxl_sizes,
            guidance_scale=5.0,
            # The pipelines with ControlNets all have the one above.
            edit_guidance_scale=7.5,
            strength=0.3,
            edit_strength=0.9999,
            vae_overrides={},
        ),
    }
)
"""The families by their names in reports on model folders."""
