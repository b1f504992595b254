"""Model families: everything that differs between the kinds of models that a worker serves.

A family is data and a few functions. Its networks are Diffusers' own, and the rest of the suite reads what it needs
from the family of the loaded model. `bottega.model_files.families` recognises the family of a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    FluxPipeline,
    FluxTransformer2DModel,
    LatentConsistencyModelPipeline,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from torch import Tensor
from torch.nn import functional
from transformers import CLIPTextModel, CLIPTextModelWithProjection, Qwen3Model, T5EncoderModel

from bottega.model.backbone import POOLED
from bottega.model.schedulers import Sigmas
from bottega.model.text_encoders import EncodedText
from bottega.model_files.families import LCM_PIPELINE
from bottega.model_files.family_names import FLUX, SD3, SD15, SD21, SDXL, TITLES, TRANSFORMER, UNET, Z_IMAGE
from bottega.model_files.report import ModelReport

# Tokens of a prompt that T5 reads by default in StableDiffusion3Pipeline, and the maximum for T5 and Qwen3.
_T5_TOKENS, _MAX_T5_TOKENS = 256, 512
# Fields of a VAE's configuration that only some pipelines read.
_NO_STATISTICS: Mapping[str, Any] = {"force_upcast": False, "latents_mean": None, "latents_std": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A kind of models."""

    name: str
    """Name in messages, such as `SDXL`."""
    pipeline: Any
    """Diffusers' text-to-image pipeline, which assembles the parts."""
    left_out: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline that leave out parts which the suite does not use."""
    networks: Mapping[str, Any] = field(default_factory=lambda: {UNET: UNet2DConditionModel, "vae": AutoencoderKL})
    """Classes of the denoising network and the VAE by the name of their part, in the order in which they are loaded."""
    text_encoders: Mapping[str, Any]
    """Classes of the text encoders by the name of their part, in the order in which prompts are encoded.

    The part of each one's tokenizer has the same name, with `tokenizer` in place of `text_encoder`.
    """
    states: Callable[[Any, Any, int | None], Tensor]
    """Returns the states by which a text encoder conditions pictures, [1, tokens, features].

    Its arguments are the encoder, its output with hidden states, and `ResolvedSpec.clip_skip`.
    """
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens that a text encoder reads, by its part, where it is not `model_max_length` of the tokenizer.

    `ResolvedSpec.max_sequence_length` replaces it.
    """
    max_sequence_length: int = 0
    """The largest `ResolvedSpec.max_sequence_length`; 0 if the family's pipelines do not have the argument."""
    reads_chat: bool = False
    """Whether the text encoder reads each prompt as a chat message, without padding it to a common length."""
    weighs_words: bool = True
    """Whether weighted prompts are served."""
    takes_embeddings: bool = True
    """Whether textual inversion embeddings are served."""
    takes_controlnets: bool = True
    """Whether ControlNets are served."""
    draws_control_latents: bool = False
    """Whether a request samples each control image's latent, before its own latent. If not, it uses the mean.

    StableDiffusion3ControlNetPipeline samples these latents without a seed, so its pictures differ each time.
    """
    halves_share_residuals: bool = False
    """Whether ControlNets compute only conditional rows, whose residuals unconditional rows use, too."""
    states_from_end: int
    """Place of these states among all hidden states, counted from the end, with a `clip_skip` of 0; 1 is the last.

    0 if no `clip_skip` is served, because CLIP's pooled output alone counts.
    """
    join: Callable[[Sequence[Tensor], Sequence[Any], int | None], EncodedText]
    """Makes one text of the states of all text encoders, and of their outputs for the first chunk of the prompt.

    Its last argument is `ResolvedSpec.max_sequence_length`.
    """
    picture_conditions: Callable[[int, int], Mapping[str, Tensor]] = lambda _height, _width: {}
    """Returns the conditions that depend on the picture's height and width, in pixels, as float32 tensors."""
    guidance_scale: float
    """Default of the text-to-image pipeline. Diffusers' Flux has another one for image-to-image, 7."""
    edit_guidance_scale: float
    """Default of the inpainting pipeline without ControlNets."""
    strength: float
    """Default of the image-to-image pipeline without ControlNets."""
    edit_strength: float
    """Default of the inpainting pipelines."""
    edit_controlnet_scale: float
    """Default scale of ControlNets in the inpainting pipeline."""
    num_inference_steps: int = 50
    """Default of all requests: that of the text-to-image pipeline.

    Diffusers' other pipelines have the same default; those of Stable Diffusion 3 for image-to-image and inpainting have
    50 instead of 28.
    """
    distilled_guidance: bool = False
    """Whether the models were distilled to need no unconditional row; `guidance_scale` is then an input of the network.

    Some of them have no such input and ignore the scale.
    """
    guidance_from_zero: bool = False
    """Whether guidance is off at a scale of 0, not of 1.

    The pipelines then compute conditional + scale * (conditional - unconditional).
    """
    takes_true_cfg: bool = False
    """Whether the pipelines of such models have `true_cfg_scale`, with which a second row is drawn nevertheless."""
    float32_latents: bool = False
    """Whether the pipelines keep latents in float32 between steps, even if the network uses half precision."""
    sigmas: Sigmas | None = None
    """The sigmas that the pipelines pass to the scheduler; None if the scheduler computes its own."""
    strength_keeps_steps: bool = False
    """Whether image-to-image makes all steps, from a noise level that the strength sets, instead of the last ones."""
    vae_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values for fields of the VAE's configuration that the family's pipelines do not read."""
    scheduler_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace fields of a scheduler's configuration, as the family's `pipeline` does.

    Fields that the scheduler's class does not have are skipped. Edits and ControlNets draw with the same scheduler, as
    Diffusers' other pipelines do that get the components of this one.
    """

    @property
    def tokenizers(self) -> Sequence[str]:
        """Parts of the tokenizers, in the order of the text encoders."""
        return [part.replace("text_encoder", "tokenizer") for part in self.text_encoders]


def _penultimate_states(_encoder: Any, output: Any, clip_skip: int | None) -> Tensor:
    """Return the states before the last layer, or before further ones."""
    states: Tensor = output.hidden_states[-2 - (clip_skip or 0)]
    return states


def _join_sdxl(states: Sequence[Tensor], outputs: Sequence[Any], _tokens: int | None) -> EncodedText:
    """Join both encoders' states, and add the second one's pooled output."""
    dtype, pooled = outputs[1].text_embeds.dtype, outputs[1].text_embeds[0]
    joined = torch.concat(list(states), dim=-1)
    return EncodedText(prompt=joined[0].to(dtype), added={"text_embeds": pooled}, summary=pooled)


def _sdxl_sizes(height: int, width: int) -> dict[str, Tensor]:
    """Return original size, crop and target size."""
    return {"time_ids": torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32)}


def _last_states(encoder: Any, output: Any, clip_skip: int | None) -> Tensor:
    """Return the states after the last layer, or before further ones, with the encoder's last norm applied."""
    states: Tensor
    if clip_skip is None:
        states = output.last_hidden_state
    else:
        states = encoder.final_layer_norm(output.hidden_states[-1 - clip_skip])
    return states


def _join_single(states: Sequence[Tensor], outputs: Sequence[Any], _tokens: int | None) -> EncodedText:
    """Return the states of the only encoder, and its pooled output as the summary."""
    return EncodedText(prompt=states[0][0], added={}, summary=outputs[0].pooler_output[0])


def _sd3_states(encoder: Any, output: Any, clip_skip: int | None) -> Tensor:
    """Return the last states of T5, and those before the last layer of CLIP's encoders, or before further ones."""
    if isinstance(encoder, T5EncoderModel):
        states: Tensor = output[0]
        return states
    return _penultimate_states(encoder, output, clip_skip)


def _join_sd3(states: Sequence[Tensor], outputs: Sequence[Any], tokens: int | None, *, width: int) -> EncodedText:
    """Append T5's tokens to those of both CLIP encoders, whose states are padded to T5's width.

    Args:
        states: Of the two CLIP encoders and, unless the model has none, of T5.
        outputs: Outputs of the encoders.
        tokens: Tokens of T5 if the model has none; None for the default.
        width: Features of a token.
    """
    dtype = states[0].dtype
    clip = torch.cat([states[0], states[1].to(dtype)], dim=-1)
    clip = functional.pad(clip, (0, width - clip.shape[-1]))
    t5 = states[2] if len(states) > 2 else clip.new_zeros((1, tokens or _T5_TOKENS, width))
    pooled = torch.cat([outputs[0].text_embeds[0], outputs[1].text_embeds[0]], dim=-1)
    return EncodedText(prompt=torch.cat([clip, t5], dim=1)[0], added={POOLED: pooled}, summary=pooled)


def _flux_states(_encoder: Any, output: Any, _clip_skip: int | None) -> Tensor:
    """Return the last states. Only T5's are read."""
    states: Tensor = output[0]
    return states


def _join_flux(states: Sequence[Tensor], outputs: Sequence[Any], _tokens: int | None) -> EncodedText:
    """Return T5's states, and add CLIP's pooled output."""
    pooled = outputs[0].pooler_output[0]
    # One number wider, because thresholds of similarity that were measured with other models are chosen by the width.
    return EncodedText(prompt=states[1][0], added={POOLED: pooled}, summary=functional.pad(pooled, (0, 1)))


def _join_z_image(states: Sequence[Tensor], _outputs: Sequence[Any], _tokens: int | None) -> EncodedText:
    """Return Qwen3's states. The last token's state is the summary, because that token attends to all others."""
    return EncodedText(prompt=states[0][0], added={}, summary=states[0][0, -1])


def _stable_diffusion(name: str) -> ModelFamily:
    return ModelFamily(
        name=name,
        pipeline=StableDiffusionPipeline,
        # Only IP-Adapters use the image encoder. The suite does not run the filter of finished pictures.
        left_out={
            "safety_checker": None,
            "requires_safety_checker": False,
            "image_encoder": None,
            "feature_extractor": None,
        },
        text_encoders={"text_encoder": CLIPTextModel},
        states=_last_states,
        states_from_end=1,
        join=_join_single,
        guidance_scale=7.5,
        edit_guidance_scale=7.5,
        strength=0.8,
        edit_strength=1.0,
        edit_controlnet_scale=0.5,
        vae_overrides=_NO_STATISTICS,
        scheduler_overrides={"steps_offset": 1, "clip_sample": False},
    )


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        SD15: _stable_diffusion(TITLES[SD15]),
        SD21: _stable_diffusion(TITLES[SD21]),
        SDXL: ModelFamily(
            name=TITLES[SDXL],
            pipeline=StableDiffusionXLPipeline,
            # Only IP-Adapters use the image encoder, and only the watermark changes pictures.
            left_out={"add_watermarker": False, "image_encoder": None, "feature_extractor": None},
            text_encoders={"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection},
            states=_penultimate_states,
            states_from_end=2,
            join=_join_sdxl,
            picture_conditions=_sdxl_sizes,
            guidance_scale=5.0,
            # The pipelines with ControlNets all have the one above.
            edit_guidance_scale=7.5,
            strength=0.3,
            edit_strength=0.9999,
            edit_controlnet_scale=1.0,
        ),
        SD3: ModelFamily(
            name=TITLES[SD3],
            pipeline=StableDiffusion3Pipeline,
            # Only IP-Adapters use the image encoder.
            left_out={"image_encoder": None, "feature_extractor": None},
            networks={TRANSFORMER: SD3Transformer2DModel, "vae": AutoencoderKL},
            text_encoders={
                "text_encoder": CLIPTextModelWithProjection,
                "text_encoder_2": CLIPTextModelWithProjection,
                "text_encoder_3": T5EncoderModel,
            },
            states=_sd3_states,
            prompt_tokens={"text_encoder_3": _T5_TOKENS},
            max_sequence_length=_MAX_T5_TOKENS,
            weighs_words=False,
            takes_embeddings=False,
            states_from_end=2,
            join=partial(_join_sd3, width=4096),
            guidance_scale=7.0,
            edit_guidance_scale=7.0,
            strength=0.6,
            edit_strength=0.6,
            edit_controlnet_scale=1.0,
            num_inference_steps=28,
            vae_overrides=_NO_STATISTICS,
        ),
        FLUX: ModelFamily(
            name=TITLES[FLUX],
            pipeline=FluxPipeline,
            # Only IP-Adapters use the image encoder.
            left_out={"image_encoder": None, "feature_extractor": None},
            networks={TRANSFORMER: FluxTransformer2DModel, "vae": AutoencoderKL},
            text_encoders={"text_encoder": CLIPTextModel, "text_encoder_2": T5EncoderModel},
            states=_flux_states,
            prompt_tokens={"text_encoder_2": _MAX_T5_TOKENS},
            max_sequence_length=_MAX_T5_TOKENS,
            weighs_words=False,
            takes_embeddings=False,
            draws_control_latents=True,
            halves_share_residuals=True,
            states_from_end=0,
            join=_join_flux,
            guidance_scale=3.5,
            edit_guidance_scale=7.0,
            strength=0.6,
            edit_strength=0.6,
            edit_controlnet_scale=1.0,
            num_inference_steps=28,
            distilled_guidance=True,
            takes_true_cfg=True,
            sigmas=lambda steps: np.linspace(1.0, 1.0 / steps, steps).tolist(),
            vae_overrides=_NO_STATISTICS,
        ),
        Z_IMAGE: ModelFamily(
            name=TITLES[Z_IMAGE],
            pipeline=ZImagePipeline,
            networks={TRANSFORMER: ZImageTransformer2DModel, "vae": AutoencoderKL},
            text_encoders={"text_encoder": Qwen3Model},
            states=_penultimate_states,
            prompt_tokens={"text_encoder": _MAX_T5_TOKENS},
            max_sequence_length=_MAX_T5_TOKENS,
            reads_chat=True,
            weighs_words=False,
            takes_embeddings=False,
            takes_controlnets=False,
            states_from_end=0,
            join=_join_z_image,
            guidance_scale=5.0,
            edit_guidance_scale=5.0,
            strength=0.6,
            edit_strength=1.0,
            edit_controlnet_scale=0.75,
            guidance_from_zero=True,
            float32_latents=True,
            sigmas=get_default_z_image_sigmas,
            vae_overrides=_NO_STATISTICS,
        ),
    }
)
"""The families by their names in reports on model folders."""


def family_of(report: ModelReport) -> ModelFamily:
    """Return the family of a model that can be served, with the defaults of its own pipeline."""
    family = FAMILIES[report.family]
    if report.family == SD3:
        width: Any = report.denoiser.config.get("joint_attention_dim", 4096)
        encoders = {part: kind for part, kind in family.text_encoders.items() if part in report.parts}
        return replace(family, text_encoders=encoders, join=partial(_join_sd3, width=width))
    if report.family == FLUX:
        return _flux_of(family, report.denoiser.config, report.parts["scheduler"].config)
    if report.pipeline_class == LCM_PIPELINE:
        return replace(
            family,
            pipeline=LatentConsistencyModelPipeline,
            guidance_scale=8.5,
            edit_guidance_scale=8.5,
            num_inference_steps=4,
            scheduler_overrides={},
            strength_keeps_steps=True,
        )
    return family


def _flux_of(family: ModelFamily, transformer: Mapping[str, Any], scheduler: Mapping[str, Any]) -> ModelFamily:
    """Return Flux.1 with the defaults of dev, schnell or Fill.

    Source: FluxFillPipeline, and the model card of black-forest-labs/FLUX.1-schnell: 4 steps, no guidance, 256 tokens.
    """
    if transformer.get("out_channels") not in (None, transformer.get("in_channels", 64)):
        # The Fill pipeline has no true_cfg_scale, and no variant with ControlNets.
        return replace(
            family,
            takes_controlnets=False,
            guidance_scale=30.0,
            edit_guidance_scale=30.0,
            edit_strength=1.0,
            num_inference_steps=50,
            takes_true_cfg=False,
        )
    if transformer.get("guidance_embeds"):
        return family
    family = replace(family, guidance_scale=0.0, edit_guidance_scale=0.0)
    if scheduler.get("use_dynamic_shifting"):
        return family  # Made from dev, with as many steps.
    return replace(family, num_inference_steps=4, prompt_tokens={"text_encoder_2": 256})
