"""How long the parts of a guided step with a ControlNet take alone, for SDXL and Stable Diffusion 3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from load.bench.framework import timed

PARTS = ("encoder_s", "decoder_s", "controlnet_s")
"""Names of the parts."""
# Tokens that T5 adds to those of CLIP's prompts.
_T5_TOKENS = 256


def measure_parts(pipeline: Any, folder: str, rounds: int) -> dict[str, float]:
    """Measure each part by itself, in turns; the ControlNet without what is the same at every step.

    A transformer is all encoder, because its ControlNet runs beside all of it.
    """
    import torch

    from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
    from bottega.model.backbones.unet import UNetBackbone

    of_unet = "unet" in pipeline.components
    backbone: Any = UNetBackbone(pipeline.unet) if of_unet else Sd3Backbone(pipeline.transformer)
    inputs = (_unet_inputs if of_unet else _transformer_inputs)(pipeline)
    controlled = (_unet_controlnet if of_unet else _transformer_controlnet)(folder, inputs)
    blocks = backbone.blocks
    half = next(index for index, block in enumerate(blocks) if block.needs) if of_unet else len(blocks)

    def encoded() -> Any:
        activations = backbone.begin(inputs)
        for block in blocks[:half]:
            block.run(activations)
        if half == len(blocks):
            backbone.finish(activations)
        return activations

    def decoded(activations: Any) -> None:
        if half < len(blocks):
            for block in blocks[half:]:
                block.run(activations)
            backbone.finish(activations)

    taken: dict[str, list[float]] = {name: [] for name in PARTS}
    with torch.inference_mode():
        for _ in range(rounds):
            activations, seconds = timed(encoded)
            taken["encoder_s"].append(seconds)
            taken["decoder_s"].append(timed(partial(decoded, activations))[1])
            taken["controlnet_s"].append(timed(controlled)[1])
    return {name: median(seconds) for name, seconds in taken.items()}


def _unet_inputs(pipeline: Any) -> Any:
    import torch

    from bottega.model.backbone import Inputs

    config = pipeline.unet.config
    return Inputs(
        sample=torch.randn(2, config.in_channels, config.sample_size, config.sample_size),
        timestep=torch.tensor([500.0, 500.0]),
        prompt_embeds=torch.randn(2, pipeline.tokenizer.model_max_length, config.cross_attention_dim),
        added={
            "text_embeds": torch.randn(2, pipeline.text_encoder_2.config.projection_dim),
            "time_ids": torch.zeros(2, 6),
        },
    )


def _unet_controlnet(folder: str, inputs: Any) -> Callable[[], object]:
    import torch
    from diffusers import ControlNetModel

    net: Any = ControlNetModel.from_pretrained(folder, use_safetensors=True, torch_dtype=torch.float32)
    net.controlnet_cond_embedding = torch.nn.Identity()
    return partial(
        net,
        inputs.sample,
        inputs.timestep,
        encoder_hidden_states=inputs.prompt_embeds,
        controlnet_cond=torch.zeros(2, net.config.block_out_channels[0], *inputs.sample.shape[2:]),
        added_cond_kwargs=dict(inputs.added),
        return_dict=False,
    )


def _transformer_inputs(pipeline: Any) -> Any:
    import torch

    from bottega.model.backbone import POOLED, Inputs

    config = pipeline.transformer.config
    return Inputs(
        sample=torch.randn(2, config.in_channels, config.sample_size, config.sample_size),
        timestep=torch.tensor([500.0, 500.0]),
        prompt_embeds=torch.randn(2, pipeline.tokenizer.model_max_length + _T5_TOKENS, config.joint_attention_dim),
        added={POOLED: torch.randn(2, config.pooled_projection_dim)},
    )


def _transformer_controlnet(folder: str, inputs: Any) -> Callable[[], object]:
    import torch
    from diffusers import SD3ControlNetModel

    from bottega.model.backbone import POOLED

    net: Any = SD3ControlNetModel.from_pretrained(folder, use_safetensors=True, torch_dtype=torch.float32)
    return partial(
        net,
        hidden_states=inputs.sample,
        controlnet_cond=inputs.sample,
        encoder_hidden_states=inputs.prompt_embeds,
        pooled_projections=inputs.added[POOLED],
        timestep=inputs.timestep,
        return_dict=False,
    )
