"""The transformer's stage: a small model of SD3's topology learns the flow from latents to noise from captions.

It shares the VAE and the text encoders of the model with the UNet, which stay as they are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from bottega.model_files.presets import PRESET_FILE, Preset, preset_text
from load.miniature.training.controlnet import ControlNetStage
from load.miniature.training.corpus import Corpus, Latents, draw_corpus
from load.miniature.training.descent import Descent, DescentStage, Learner
from load.miniature.training.noise import Lessons, NoisyLatents
from load.miniature.training.parts import Parts, networks_of

# 3.6 M parameters, of which a third are modulations. Blocks are many rather than wide: places and bindings take depth.
_CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 6,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 128,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 128,
    "pos_embed_max_size": 24,  # pictures of up to 192 pixels a side
    "qk_norm": "rms_norm",
}
_CONTROLNET_BLOCKS = 2
# Zeros that Diffusers appends to the tokens of a prompt where a model has no T5.
_T5_TOKENS = 256
# Of the scheduler, whose times are shares of noise (sigma, 0 to 1) times this.
_TIMES = 1000.0
# Of the normal distribution of log(sigma / (1 - sigma)) in training (SD3, Esser et al. 2024, section 3.1). Shapes are
# learned last, and decided at half of the noise and less.
_NOISE_MEAN, _NOISE_DEVIATION = 0.0, 1.2
# With more of it, shapes grow holes and spikes.
_GUIDANCE = 2.0
_MEASURED_PICTURES = 64
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DitRecipe:
    """Settings of the training."""

    rows: int = 64
    rate: float = 1e-3
    empty_share: float = 0.1
    """Share of rows without a prompt, for guidance."""
    decay: float = 0.999
    seed: int = 0
    compiled: bool = False
    """Whether PyTorch compiles the transformer."""


class FlowLessons(Lessons):
    """Lessons for a transformer, which predicts the flow: noise minus latents."""

    foreground_weight: ClassVar[float] = 4.0

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents) -> None:
        super().__init__(parts, corpus, latents)
        # With the elements around things, where spikes grow.
        self._foreground = torch.nn.functional.max_pool2d(self._foreground, 3, stride=1, padding=1)

    def draw(self, count: int, generator: torch.Generator) -> NoisyLatents:
        device, config = self._parts.device, self._parts["vae"].config
        rows = torch.randint(len(self._corpus), (count,), generator=generator)
        clean = (self._latents.sample(rows, generator) - config.shift_factor) * config.scaling_factor
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.sigmoid(_NOISE_MEAN + _NOISE_DEVIATION * torch.randn(count, generator=generator))
        share = sigma[:, None, None, None]
        noisy = (1 - share) * clean + share * noise
        times = (_TIMES * sigma).to(device)
        return NoisyLatents(rows=rows, noisy=noisy.to(device), target=(noise - clean).to(device), times=times)

    @torch.no_grad()
    def told(self, captions: list[str], kept: torch.Tensor) -> dict[str, Any]:
        """Return the transformer's inputs of each row, as SD3's pipeline does, but with one zero for those of T5.

        `JointAttention` lets it stand for all of them.
        """
        prompts = [caption if keep else "" for caption, keep in zip(captions, kept.tolist(), strict=True)]
        ids = self._parts.tokens(prompts)
        outputs = [self._parts[name](ids, output_hidden_states=True) for name in ("text_encoder", "text_encoder_2")]
        context = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return {
            "encoder_hidden_states": torch.nn.functional.pad(context, (0, 0, 0, 1)),
            "pooled_projections": torch.cat([output.text_embeds for output in outputs], dim=-1),
        }


class DitStage(DescentStage):
    """The stage of the transformer."""

    draw_options = MappingProxyType({"max_sequence_length": 1, "guidance_scale": _GUIDANCE})

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, recipe: DitRecipe) -> None:
        self._recipe = recipe
        for network in parts.networks.values():
            network.requires_grad_(False).eval()
        self._transformer = parts["transformer"].requires_grad_(True).train()
        self._transformer.set_attn_processor(JointAttention())
        self._forward = torch.compile(self._transformer) if recipe.compiled else self._transformer
        learner = Learner(parameters=list(self._transformer.parameters()), rate=recipe.rate)
        super().__init__("dit", Descent([learner], decay=recipe.decay, seed=recipe.seed, betas=(0.9, 0.99)))
        self._lessons = FlowLessons(parts, corpus, latents)

    def _weights(self) -> dict[str, Any]:
        return {"transformer": self._transformer.state_dict()}

    def _load_weights(self, state: dict[str, Any]) -> None:
        self._transformer.load_state_dict(state["transformer"])

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        recipe = self._recipe
        return self._lessons.captioned_loss(self._forward, recipe.rows, generator, rng, empty_share=recipe.empty_share)


class DitControlNetStage(ControlNetStage):
    """The stage of one kind of ControlNet for the transformer. It reads the control image through the VAE."""

    def _fresh(self) -> Any:
        return fresh_dit_controlnet(self._denoiser)

    def _attention(self) -> Any:
        return JointAttention()

    def _make_lessons(self, corpus: Corpus, latents: Latents) -> Lessons:
        return FlowLessons(self._parts, corpus, latents)

    def _guess(self, batch: NoisyLatents, told: dict[str, Any], controls: torch.Tensor) -> torch.Tensor:
        vae = self._parts["vae"]
        with torch.no_grad():
            seen = vae.encode(2.0 * controls - 1.0).latent_dist.mean * vae.config.scaling_factor
        # As the pipeline does for ControlNets whose configuration has force_zeros_for_pooled_projection.
        own = {**told, "pooled_projections": torch.zeros_like(told["pooled_projections"])}
        inputs = {"timestep": batch.times, "return_dict": False}
        (residuals,) = self._net(batch.noisy, controlnet_cond=seen, **own, **inputs)
        predicted = self._denoiser(batch.noisy, block_controlnet_hidden_states=residuals, **told, **inputs)
        guess: torch.Tensor = predicted[0]
        return guess


def fresh_dit_controlnet(transformer: Any) -> SD3ControlNetModel:
    """Return a ControlNet that begins as the transformer's first blocks and changes nothing yet."""
    config = {**transformer.config, "num_layers": _CONTROLNET_BLOCKS, "extra_conditioning_channels": 0}
    net = SD3ControlNetModel.from_config(config).to(transformer.device)
    net.load_state_dict(transformer.state_dict(), strict=False)  # it lacks blocks, and has layers of its own
    return net


class JointAttention:
    """An attention processor of Diffusers for SD3's blocks, to which the last token of the text counts `repeats` times.

    Equal tokens without positions stay equal through all blocks, so that one computes what all of them would. PyTorch's
    fused kernel takes longer backwards on a processor.

    Args:
        repeats: Number of equal tokens that the last one stands for.
    """

    def __init__(self, repeats: int = _T5_TOKENS) -> None:
        self._bias = math.log(repeats)

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention.

        Args:
            attn: The block's.
            hidden_states: Of the image, [rows, tokens, channels].
            encoder_hidden_states: Of the text, [rows, tokens, channels].
        """
        rows, tokens, _channels = hidden_states.shape
        text = encoder_hidden_states

        def split(projected: torch.Tensor, norm: Any = None) -> torch.Tensor:
            """Return [rows, heads, tokens, channels of a head]."""
            heads = projected.reshape(rows, -1, attn.heads, projected.shape[-1] // attn.heads).transpose(1, 2)
            normed: torch.Tensor = heads if norm is None else norm(heads)
            return normed

        query = split(attn.to_q(hidden_states), attn.norm_q)
        if not attn.context_pre_only:  # the last block changes the text no more
            query = torch.cat([query, split(attn.add_q_proj(text), attn.norm_added_q)], dim=2)
        key = torch.cat(
            [split(attn.to_k(hidden_states), attn.norm_k), split(attn.add_k_proj(text), attn.norm_added_k)], dim=2
        )
        value = torch.cat([split(attn.to_v(hidden_states)), split(attn.add_v_proj(text))], dim=2)
        bias = torch.zeros(key.shape[2], dtype=query.dtype, device=query.device)
        bias[-1] = self._bias
        scores = torch.baddbmm(bias, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=attn.scale)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        mixed = torch.bmm(weights, value.flatten(0, 1)).reshape(rows, attn.heads, *query.shape[2:])
        mixed = mixed.transpose(1, 2).flatten(2)
        image: torch.Tensor = attn.to_out[0](mixed[:, :tokens])
        return image, text if attn.context_pre_only else attn.to_add_out(mixed[:, tokens:])


def dit_start(start: Path, scratch: Path) -> Path:
    """Return the folder of a model with a transformer to begin a training with.

    Args:
        start: Such a folder; or that of a model with a UNet, of which VAE and text encoders are taken.
        scratch: An empty folder, for the model that is made in the latter case.
    """
    if "transformer" in networks_of(start):
        return start
    torch.manual_seed(_SEED)
    vae = AutoencoderKL.from_pretrained(start / "vae", use_safetensors=True).float()
    vae.register_to_config(shift_factor=_shift(vae))
    StableDiffusion3Pipeline(
        transformer=fresh_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=_projecting(start / "text_encoder"),
        tokenizer=CLIPTokenizer.from_pretrained(start / "tokenizer"),
        text_encoder_2=CLIPTextModelWithProjection.from_pretrained(start / "text_encoder_2", use_safetensors=True),
        tokenizer_2=CLIPTokenizer.from_pretrained(start / "tokenizer_2"),
        text_encoder_3=None,
        tokenizer_3=None,
    ).save_pretrained(scratch, safe_serialization=True)
    preset = Preset(num_inference_steps=30, guidance_scale=_GUIDANCE, dtype="float32")
    (scratch / PRESET_FILE).write_text(preset_text(preset))
    return scratch


def fresh_transformer() -> SD3Transformer2DModel:
    """Return a transformer whose blocks change nothing yet, and which predicts zeros.

    Source: DiT (Peebles and Xie, 2023), section 3.2, adaLN-Zero.
    """
    network = SD3Transformer2DModel(**_CONFIG)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            if name.startswith("time_text_embed"):
                torch.nn.init.normal_(module.weight, std=0.02)
            elif "norm" in name or name == "proj_out":
                torch.nn.init.zeros_(module.weight)
            else:
                torch.nn.init.xavier_uniform_(module.weight.flatten(1))
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    return network


def _projecting(folder: Path) -> Any:
    """Return a text encoder without projection as one whose projection changes nothing, as SD3's folders have it."""
    encoder = CLIPTextModel.from_pretrained(folder, use_safetensors=True).float()
    projecting = CLIPTextModelWithProjection(encoder.config)
    projecting.text_model.load_state_dict(encoder.state_dict())
    torch.nn.init.eye_(projecting.text_projection.weight)
    return projecting


@torch.no_grad()
def _shift(vae: Any) -> float:
    """Return the mean of the latents of some pictures."""
    pictures = draw_corpus(_MEASURED_PICTURES, _SEED).pictures(torch.arange(_MEASURED_PICTURES))
    return round(float(vae.encode(pictures).latent_dist.mean.mean()), 4)
