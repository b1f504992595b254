"""Tiny random models of every family that a worker serves, as Diffusers saves them, and what stock draws with them."""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import PIL.Image
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    UNet2DConditionModel,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from bottega.engine.spec import ResolvedSpec
from bottega.miniature import WEIGHTS
from tests.samples.controlnets import stock_options
from tests.support.stock import said

_TEXT = 32
_SD: Mapping[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 4,
    "cross_attention_dim": _TEXT,
}
_SDXL: Mapping[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "cross_attention_dim": 2 * _TEXT,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": _TEXT + 6 * 8,
}
# Of the UNet; they differ as the families do.
_UNETS: Mapping[str, Mapping[str, Any]] = {
    "SD 1": _SD,
    "SD 2": {**_SD, "attention_head_dim": (2, 4), "use_linear_projection": True},
    "SDXL": _SDXL,
    # As SSD-1B and Segmind Vega: some layers have no transformer, and there may be no middle block.
    "SDXL pruned": {
        **_SDXL,
        "mid_block_type": None,
        "transformer_layers_per_block": (1, (1,)),
        "reverse_transformer_layers_per_block": ((2, 1), 1),
    },
    "SD 1 inpainting": {**_SD, "in_channels": 9},
    "SDXL inpainting": {**_SDXL, "in_channels": 9},
    "SD 1 LCM": {**_SD, "time_cond_proj_dim": 16},
    "SDXL LCM": {**_SDXL, "time_cond_proj_dim": 16},
    "SD 2 inpainting": {**_SD, "attention_head_dim": (2, 4), "use_linear_projection": True, "in_channels": 9},
}
FAMILIES = tuple(_UNETS)
"""All kinds of models."""
_INPAINTING = frozenset(family for family in FAMILIES if family.endswith("inpainting"))
_NOT_INPAINTING = frozenset(FAMILIES) - _INPAINTING
_OF_BOTH = ("inpainting", "LCM")
_ONE_ROW = frozenset(family for family in FAMILIES if family.endswith("LCM"))
WAYS: Mapping[str, frozenset[str]] = {
    "text to image": _NOT_INPAINTING,
    "image to image": _NOT_INPAINTING,
    "edit": frozenset(FAMILIES),
    "edit with masked blocks": _NOT_INPAINTING,
    "mixed batch": frozenset(FAMILIES),
    "LoRA": frozenset(FAMILIES),
    "two ControlNets on servers": frozenset(FAMILIES),
    "resume on another worker": frozenset(FAMILIES),
    "pair of workers": frozenset(FAMILIES) - _ONE_ROW,
    "cached start": _NOT_INPAINTING,
}
"""The ways of drawing, and which models draw so. Models for inpainting draw only edits, and where the network reads the
guidance scale there is one row, of which a pair has nothing to share."""


def family_table() -> str:
    """Return WAYS as a table in Markdown, with one column for models of one kind that are made of SD 1 or SDXL."""
    kinds = dict.fromkeys(family.split()[-1] if family.endswith(_OF_BOTH) else family for family in FAMILIES)
    lines = [["", *kinds], ["-"] * (1 + len(kinds))]
    for way, able in WAYS.items():
        marks = ["x" if all(family in able for family in FAMILIES if family.endswith(kind)) else "" for kind in kinds]
        lines.append([way, *marks])
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


SIZE = 32
"""Width and height of their pictures, in pixels."""


def reads_mask(family: str) -> bool:
    """Return whether models of this kind draw only edits."""
    return family in _INPAINTING


def is_sdxl(family: str) -> bool:
    """Return whether it is SDXL or made of it."""
    return family.startswith("SDXL")


@functools.cache
def family_model(family: str) -> Path:
    """Return the folder of a model, written once for this process and gone with it."""
    folder = tempfile.TemporaryDirectory(prefix="bottega-family-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / family.replace(" ", "-").lower()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(FAMILIES.index(family))
        _pipeline(family).save_pretrained(path, safe_serialization=True)
    return path


@functools.cache
def control_networks(family: str) -> Sequence[ControlNetModel]:
    """Return two random ControlNets for a family. They read neither a mask nor the guidance scale."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(77)
        unet = _unet({**_UNETS[family], "in_channels": 4, "time_cond_proj_dim": None, "mid_block_type": _MIDDLE})
        return [_controlnet(unet) for _ in range(2)]


class FamilyStock:
    """Stock Diffusers with the model of one family; `text` is its pipeline of the plain kind, or that of edits."""

    def __init__(self, family: str) -> None:
        self.family = family
        kind = "Inpaint" if reads_mask(family) else ""
        self.text = self._kind(kind).from_pretrained(family_model(family), use_safetensors=True, **self._extra)
        self.text.set_progress_bar_config(disable=True)

    def latent(
        self,
        spec: ResolvedSpec,
        *,
        image: PIL.Image.Image | None = None,
        mask: PIL.Image.Image | None = None,
        networks: Sequence[ControlNetModel] = (),
        control_images: Sequence[Tensor] = (),
        after_step: Callable[[int, Tensor], Tensor] = lambda _step, latent: latent,
        conditions: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Return the finished latent of a spec, [1, channels, height, width].

        Args:
            spec: The spec.
            image: Source of image-to-image.
            mask: Mask of an edit of `image`.
            networks: ControlNets of the spec.
            control_images: Their images.
            after_step: Called with the index of each step and the latent after it; returns that with which it goes on.
            conditions: Arguments with embeddings, which take the place of the prompts.
        """
        kind = ("ControlNet" if networks else "") + ("Inpaint" if mask else "Img2Img" if image else "")
        parts = dict(self.text.components) | {"scheduler": _sampler(spec, self.text.scheduler.config)}
        if networks:
            parts["controlnet"] = list(networks)
        config = {"force_zeros_for_empty_prompt": True} if is_sdxl(self.family) else {}
        pipeline = self._kind(kind)(**parts, **{k: v for k, v in self._extra.items() if k not in parts}, **config)
        pipeline.set_progress_bar_config(disable=True)
        options = {} if is_sdxl(self.family) or kind in ("", "ControlNet") else {"guidance_rescale": None}
        if not is_sdxl(self.family):
            options |= dict.fromkeys(("prompt_2", "negative_prompt_2"))
        asked = {name: value for name, value in said(spec).items() if name not in options}
        if conditions:
            asked = {name: value for name, value in asked.items() if "prompt" not in name} | dict(conditions)
        if networks:
            asked.pop("guidance_rescale", None)
            asked |= stock_options(spec.controlnets, control_images)
            if mask is not None:
                asked["control_image"] = asked.pop("image")
        if kind == "" or mask is not None or networks:
            asked |= {"width": spec.width, "height": spec.height}
        if image is not None:
            asked |= {"image": image, "strength": spec.strength}
        if mask is not None:
            asked["mask_image"] = mask

        def end(_: Any, step: int, __: Any, kept: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"latents": after_step(step, kept["latents"])}

        generator = torch.Generator("cpu").manual_seed(spec.seed)
        out = pipeline(**asked, generator=generator, output_type="latent", callback_on_step_end=end)
        latent: Tensor = out.images
        return latent

    @property
    def _extra(self) -> dict[str, Any]:
        if is_sdxl(self.family):
            return {"add_watermarker": False}
        return {"safety_checker": None, "requires_safety_checker": False}

    def _kind(self, what: str) -> Any:
        return getattr(diffusers, f"StableDiffusion{'XL' if is_sdxl(self.family) else ''}{what}Pipeline")


def _sampler(spec: ResolvedSpec, config: Any) -> Any:
    return spec.sampler.scheduler_class.from_config(config, **spec.sampler.overrides)


_MIDDLE = "UNetMidBlock2DCrossAttn"


def _pipeline(family: str) -> Any:
    tokenizers = [CLIPTokenizer.from_pretrained(WEIGHTS / name) for name in ("tokenizer", "tokenizer_2")]
    kind = "Inpaint" if reads_mask(family) else ""
    parts: dict[str, Any] = {
        "unet": _unet(_UNETS[family]),
        "vae": _vae(),
        "text_encoder": CLIPTextModel(_text_config(tokenizers[0], "quick_gelu")),
        "tokenizer": tokenizers[0],
        "scheduler": _scheduler(family),
    }
    if not is_sdxl(family):
        made = getattr(diffusers, f"StableDiffusion{kind}Pipeline")
        return made(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    second = CLIPTextModelWithProjection(_text_config(tokenizers[1], "gelu"))
    made = getattr(diffusers, f"StableDiffusionXL{kind}Pipeline")
    return made(**parts, text_encoder_2=second, tokenizer_2=tokenizers[1], add_watermarker=False)


def _unet(options: Mapping[str, Any]) -> Any:
    unet = UNet2DConditionModel(
        **{
            "sample_size": SIZE // 4,
            "in_channels": 4,
            "out_channels": 4,
            "layers_per_block": 1,
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            **options,
        }
    )
    # So that predictions have about unit variance.
    nn.init.normal_(unet.conv_out.weight, std=1 / (16 * 9 * 0.355) ** 0.5)
    return unet


def _controlnet(unet: UNet2DConditionModel) -> ControlNetModel:
    network = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32, 64))
    for convolution in (*network.controlnet_down_blocks, network.controlnet_mid_block):
        nn.init.normal_(convolution.weight, std=0.05)
    for module in network.controlnet_cond_embedding.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return network.eval()


def _vae() -> Any:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        norm_num_groups=8,
        sample_size=SIZE,
    )


def _text_config(tokenizer: CLIPTokenizer, activation: str) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_TEXT,
        intermediate_size=2 * _TEXT,
        projection_dim=_TEXT,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _scheduler(family: str) -> Any:
    # A random network removes no noise; taken as velocity, its output keeps latents at about unit variance.
    epsilon = family.startswith("SD 1") or family == "SD 2 inpainting"
    made = {"SD 1": PNDMScheduler, "SD 1 LCM": DDIMScheduler, "SD 1 inpainting": DDIMScheduler}.get(
        family, EulerDiscreteScheduler
    )
    return made.from_config(
        {
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "timestep_spacing": "leading",
            "steps_offset": 1,
            "prediction_type": "epsilon" if epsilon else "v_prediction",
            "clip_sample": False,
            "set_alpha_to_one": False,
            "skip_prk_steps": True,
        }
    )
