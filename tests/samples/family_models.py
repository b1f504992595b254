"""Tiny random models of every family that a worker serves, as Diffusers saves them, and what stock draws with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import diffusers
import PIL.Image
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from bottega.engine.spec import ResolvedSpec
from bottega.miniature import WEIGHTS
from bottega.model.schedulers import SamplerKind
from tests.samples.controlnets import stock_options
from tests.samples.flux_controlnets import FLUX_SHAPE, flux_controlnet
from tests.samples.sd3_controlnets import SD3_CONTROLNETS, SD3_SHAPE, added_residuals, sd3_controlnet
from tests.support.shared_folders import written_once
from tests.support.stock import Reference, pixels_of, said

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
_T5_WIDTH: int = SD3_SHAPE["joint_attention_dim"]
_CHANNELS: int = SD3_SHAPE["in_channels"]
# The sizes of pictures in tokens between which the schedules of SD 3.5 and Flux dev change.
_SHIFTS: Mapping[str, Any] = {"use_dynamic_shifting": True, "base_image_seq_len": 8, "max_image_seq_len": 64}
# Of the transformer. The models differ as SD3 without T5, SD3 medium and SD3.5 do.
_TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "SD 3": {},
    "SD 3.5": {"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
    "SD 3 no T5": {},
}
# Of Flux's transformer. Fill reads the mask, in as many channels as a latent's element has pixels, and a masked image.
_FLUX: Mapping[str, Mapping[str, Any]] = {
    "Flux dev": {"guidance_embeds": True},
    "Flux schnell": {},
    "Flux Fill": {"guidance_embeds": True, "in_channels": 4 * (2 * _CHANNELS + 4**2), "out_channels": 4 * _CHANNELS},
}
Z_IMAGE = "Z-Image"
FAMILIES = (*_UNETS, *_TRANSFORMERS, *_FLUX, Z_IMAGE)
"""All kinds of models."""
FLOWS = frozenset((*_TRANSFORMERS, *_FLUX, Z_IMAGE))
"""Kinds of models that were trained with flow matching, and are transformers."""
_INPAINTING = frozenset(family for family in FAMILIES if family.endswith(("inpainting", "Fill")))
_NOT_INPAINTING = frozenset(FAMILIES) - _INPAINTING
_OF_BOTH = ("inpainting", "LCM")
_UNET_KINDS = frozenset(_UNETS)
_ONE_ROW = frozenset(family for family in FAMILIES if family.endswith(("LCM", "Fill")))
# Without masked blocks.
_NEW = frozenset((*_FLUX, Z_IMAGE))
WAYS: Mapping[str, frozenset[str]] = {
    "text to image": _NOT_INPAINTING,
    "image to image": _NOT_INPAINTING,
    "edit": frozenset(FAMILIES),
    "edit with masked blocks": (_NOT_INPAINTING | {"Flux Fill"}) - {Z_IMAGE},
    "mixed batch": frozenset(FAMILIES),
    "mixed sizes": FLOWS,
    "LoRA": frozenset(FAMILIES),
    "two ControlNets on servers": frozenset(FAMILIES) - {"Flux Fill", Z_IMAGE},
    "resume on another worker": frozenset(FAMILIES),
    "pair of workers": frozenset(FAMILIES) - _ONE_ROW,
    "cached start": _NOT_INPAINTING,
}
"""The ways of drawing, and which models draw so. Models for inpainting draw only edits, and where the network reads the
guidance scale there is one row, of which a pair has nothing to share."""


def _kind(family: str) -> str:
    """Return the column of a model in the table: one for those that read a mask, LCM, SD 3, and Flux but for Fill."""
    if family in _TRANSFORMERS:
        return "SD 3"
    if family in _FLUX:
        return family if family in _INPAINTING else "Flux"
    return family.rsplit(maxsplit=1)[-1] if family.endswith(_OF_BOTH) else family


def family_table() -> str:
    """Return WAYS as a table in Markdown."""
    kinds = dict.fromkeys(map(_kind, FAMILIES))
    lines = [["", *kinds], ["-"] * (1 + len(kinds))]
    for way, able in WAYS.items():
        marks = ["x" if all(family in able for family in FAMILIES if _kind(family) == kind) else "" for kind in kinds]
        lines.append([way, *marks])
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


SIZE = 32
"""Width and height of their pictures, in pixels."""


def reads_mask(family: str) -> bool:
    """Return whether models of this kind draw only edits."""
    return family in _INPAINTING


def sampler_of(family: str) -> SamplerKind:
    """Return a sampler with which a model can draw: Euler's, or that of flow matching."""
    return SamplerKind.FLOW_MATCH_EULER if family in FLOWS else SamplerKind.EULER


def takes_true_cfg(family: str) -> bool:
    """Return whether a model embeds its guidance scale, and takes a `true_cfg_scale` beside it."""
    return family in _FLUX and family not in _INPAINTING


def is_sdxl(family: str) -> bool:
    """Return whether it is SDXL or made of it."""
    return family.startswith("SDXL")


@functools.cache
def family_model(family: str) -> Path:
    """Return the folder of a model."""
    name = family.replace(" ", "-").lower()

    def write(folder: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(FAMILIES.index(family))
            _pipeline(family).save_pretrained(folder / name, safe_serialization=True)

    return written_once(f"family-{name}", write) / name


@functools.cache
def control_networks(family: str) -> Sequence[Any]:
    """Return two random ControlNets for a family. They read no mask, and only those of Flux dev the guidance scale."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(77)
        if family in _TRANSFORMERS:
            return [sd3_controlnet(**SD3_CONTROLNETS[family]) for _ in range(2)]
        if family in _FLUX:
            return [flux_controlnet(guidance_embeds=family == "Flux dev") for _ in range(2)]
        unet = _unet({**_UNETS[family], "in_channels": 4, "time_cond_proj_dim": None, "mid_block_type": _MIDDLE})
        return [_controlnet(unet) for _ in range(2)]


class FamilyStock:
    """Stock Diffusers with the model of one family; `text` is its pipeline of the plain kind, or that of edits."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32) -> None:
        self.family = family
        kind, options = "Inpaint" if reads_mask(family) else "", {"use_safetensors": True, "dtype": dtype}
        self.text = self._kind(kind).from_pretrained(family_model(family), **options, **self._extra)
        self.text.set_progress_bar_config(disable=True)

    def reference(
        self,
        spec: ResolvedSpec,
        *,
        image: PIL.Image.Image | None = None,
        mask: PIL.Image.Image | None = None,
        networks: Sequence[Any] = (),
        control_images: Sequence[Tensor] = (),
        after_step: Callable[[int, Tensor], Tensor] = lambda _step, latent: latent,
        conditions: Mapping[str, Tensor] = MappingProxyType({}),
        by_hand: bool = False,
    ) -> Reference:
        """Return the finished latent of a spec, and its picture.

        Diffusers has no pipeline that draws from a picture, or with dynamic shifts, with ControlNets for SD 3. Its
        plain pipelines then get the residuals of its ControlNets.

        Args:
            spec: The spec.
            image: Source of image-to-image.
            mask: Mask of an edit of `image`.
            networks: ControlNets of the spec.
            control_images: Their images.
            after_step: Called with the index of each step and the latent after it; returns that with which it goes on.
            conditions: Arguments with embeddings, which take the place of the prompts.
            by_hand: Whether ControlNets for SD 3 are used so although Diffusers has a pipeline for them.
        """
        if networks and self.family in _TRANSFORMERS and (by_hand or image is not None or self.family == "SD 3.5"):
            with added_residuals(self.text, spec, networks, control_images):
                return self.reference(spec, image=image, mask=mask, after_step=after_step)
        kind = ("ControlNet" if networks else "") + ("Inpaint" if mask else "Img2Img" if image else "")
        parts = dict(self.text.components) | {"scheduler": _sampler(spec, self.text.scheduler.config)}
        if networks:
            parts["controlnet"] = list(networks) if len(networks) > 1 else networks[0]
        config = {"force_zeros_for_empty_prompt": True} if is_sdxl(self.family) else {}
        made = self._kind(kind)
        # Not all pipelines of Flux take the parts of an IP-Adapter.
        parts = {name: part for name, part in parts.items() if name in inspect.signature(made).parameters}
        pipeline = made(**parts, **{k: v for k, v in self._extra.items() if k not in parts}, **config)
        pipeline.set_progress_bar_config(disable=True)
        asked = self._said(spec, kind)
        if conditions:
            asked = {name: value for name, value in asked.items() if "prompt" not in name} | dict(conditions)
        if networks:
            asked.pop("guidance_rescale", None)
            asked |= self._controls(spec, control_images, edits=mask is not None)
        if kind == "" or mask is not None or networks or self.family in _NEW:
            asked |= {"width": spec.width, "height": spec.height}
        if image is not None:
            asked |= {"image": image, "strength": spec.strength}
        if mask is not None:
            asked["mask_image"] = mask

        latents = list[Tensor]()

        def end(_: Any, step: int, __: Any, kept: dict[str, Tensor]) -> dict[str, Tensor]:
            latents.append(after_step(step, self._unpacked(kept["latents"], spec)))
            return {"latents": self._packed(latents[-1])}

        generator = torch.Generator("cpu").manual_seed(spec.seed)
        # Diffusers draws the latents of control images for SD 3 with its global generator; ours are their mean.
        mean = patch.object(DiagonalGaussianDistribution, "sample", DiagonalGaussianDistribution.mode)
        with mean if networks and self.family in _TRANSFORMERS else nullcontext():
            out = pipeline(**asked, generator=generator, callback_on_step_end=end)
        return Reference(latent=latents[-1], pixels=pixels_of(out.images[0]))

    def latent(self, spec: ResolvedSpec, **options: Any) -> Tensor:
        """Return the finished latent of a spec, [1, channels, height, width]. The options are those of `reference`."""
        return self.reference(spec, **options).latent

    def _controls(self, spec: ResolvedSpec, images: Sequence[Tensor], *, edits: bool) -> dict[str, Any]:
        """Return what a spec says of its ControlNets, as arguments of the family's pipelines."""
        options = stock_options(spec.controlnets, images)
        if edits or self.family in FLOWS:
            options["control_image"] = options.pop("image")
        if self.family in FLOWS:
            del options["guess_mode"]
        if self.family in _FLUX:
            modes = [control.control_mode for control in spec.controlnets]
            options["control_mode"] = modes if len(modes) > 1 else modes[0]
        return options

    def _said(self, spec: ResolvedSpec, kind: str) -> dict[str, Any]:
        """Return what a spec says of the drawing, as arguments of the family's pipeline of a kind."""
        rescales = is_sdxl(self.family) or (kind in ("", "ControlNet") and self.family not in FLOWS)
        missing: set[str] = set() if rescales else {"guidance_rescale"}
        if self.family in _UNETS and not is_sdxl(self.family):
            missing |= {"prompt_2", "negative_prompt_2"}
        more: dict[str, Any] = {}
        if self.family == Z_IMAGE:
            missing |= {"clip_skip", "prompt_2", "negative_prompt_2"}
            more = {"cfg_normalization": spec.cfg_normalization, "cfg_truncation": spec.cfg_truncation}
        if self.family in _FLUX:
            one_row = reads_mask(self.family) or kind in ("ControlNetImg2Img", "ControlNetInpaint")
            missing |= {"clip_skip", *(("negative_prompt", "negative_prompt_2") if one_row else ())}
            own = 256 if self.family == "Flux schnell" else 512
            more = {"max_sequence_length": spec.max_sequence_length or own}
            if not one_row:
                more["true_cfg_scale"] = spec.true_cfg_scale
        return {name: value for name, value in said(spec).items() if name not in missing} | more

    def _unpacked(self, latent: Tensor, spec: ResolvedSpec) -> Tensor:
        """Return the latent of a callback as [1, channels, height, width], whatever the pipeline's layout is."""
        if self.family not in _FLUX:
            return latent
        unpacked: Tensor = FluxPipeline._unpack_latents(latent, spec.height, spec.width, self.text.vae_scale_factor)
        return unpacked

    def _packed(self, latent: Tensor) -> Tensor:
        if self.family not in _FLUX:
            return latent
        packed: Tensor = FluxPipeline._pack_latents(latent, *latent.shape)
        return packed

    @property
    def _extra(self) -> dict[str, Any]:
        if self.family in _NEW:
            return {}
        if self.family in FLOWS:
            return dict.fromkeys(("text_encoder_3", "tokenizer_3")) if "no T5" in self.family else {}
        if is_sdxl(self.family):
            return {"add_watermarker": False}
        return {"safety_checker": None, "requires_safety_checker": False}

    def _kind(self, what: str) -> Any:
        if self.family in _FLUX:
            return FluxFillPipeline if reads_mask(self.family) else getattr(diffusers, f"Flux{what}Pipeline")
        if self.family == Z_IMAGE:
            return getattr(diffusers, f"ZImage{what}Pipeline")
        series = "3" if self.family in FLOWS else "XL" if is_sdxl(self.family) else ""
        return getattr(diffusers, f"StableDiffusion{series}{what}Pipeline")


def _sampler(spec: ResolvedSpec, config: Any) -> Any:
    return spec.sampler.scheduler_class.from_config(config, **spec.sampler.overrides)


_MIDDLE = "UNetMidBlock2DCrossAttn"


def _pipeline(family: str) -> Any:
    tokenizers = [CLIPTokenizer.from_pretrained(WEIGHTS / name) for name in ("tokenizer", "tokenizer_2")]
    if family in _TRANSFORMERS:
        return _sd3_pipeline(family, tokenizers)
    if family in _FLUX:
        return _flux_pipeline(family, tokenizers[0])
    if family == Z_IMAGE:
        return _z_image_pipeline()
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


def _sd3_pipeline(family: str, tokenizers: Sequence[CLIPTokenizer]) -> StableDiffusion3Pipeline:
    transformer = SD3Transformer2DModel(**{**SD3_SHAPE, "num_layers": 3, **_TRANSFORMERS[family]})
    encoders = [
        CLIPTextModelWithProjection(_text_config(tokenizer, activation))
        for tokenizer, activation in zip(tokenizers, ("quick_gelu", "gelu"), strict=True)
    ]
    third = None if "no T5" in family else _t5()
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, **(_SHIFTS if family == "SD 3.5" else {})),
        vae=_wide_vae(),
        text_encoder=encoders[0],
        tokenizer=tokenizers[0],
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=third and third[0],
        tokenizer_3=third and third[1],
    )


def _flux_pipeline(family: str, tokenizer: CLIPTokenizer) -> FluxPipeline | FluxFillPipeline:
    transformer = FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        **{**FLUX_SHAPE, **_FLUX[family]},
    )
    encoder, second = _t5()
    made = FluxFillPipeline if reads_mask(family) else FluxPipeline
    return made(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**({} if family == "Flux schnell" else _SHIFTS)),
        vae=_wide_vae(),
        text_encoder=CLIPTextModel(_text_config(tokenizer, "quick_gelu")),
        tokenizer=tokenizer,
        text_encoder_2=encoder,
        tokenizer_2=second,
    )


def _z_image_pipeline() -> ZImagePipeline:
    transformer = ZImageTransformer2DModel(
        in_channels=_CHANNELS,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=_TEXT,
        axes_dims=[4, 2, 2],
        axes_lens=[1024, 64, 64],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        nn.init.normal_(token)
    tokenizer = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=_TEXT,
        intermediate_size=2 * _TEXT,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return ZImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_wide_vae(),
        text_encoder=Qwen3Model(config),
        tokenizer=tokenizer,
    )


_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>{% endif %}{% endif %}"
)


def chat_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer of Qwen's kind that knows bytes, one pair of letters and the marks of a chat."""
    letters = sorted(ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate((*letters, "ar"))}
    marks = ["<|im_start|>", "<|im_end|>"]
    return Qwen2Tokenizer(vocab=vocab, merges=[("a", "r")], extra_special_tokens=marks, chat_template=_CHAT)


def _wide_vae() -> AutoencoderKL:
    """Return a VAE as transformers have it."""
    return _vae(
        latent_channels=_CHANNELS,
        shift_factor=0.06,
        scaling_factor=1.5,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _t5() -> tuple[T5EncoderModel, T5Tokenizer]:
    tokenizer = t5_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer) + 2,
        d_model=_T5_WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config), tokenizer


def t5_tokenizer() -> T5Tokenizer:
    """Return a tokenizer of T5's kind that knows letters."""
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *letters], extra_ids=0)


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


def _vae(**options: Any) -> Any:
    return AutoencoderKL(
        **options,
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
