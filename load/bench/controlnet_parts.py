"""How long the parts of a step with a ControlNet take alone, for SDXL, Stable Diffusion 3 and Flux.1."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from load.bench.framework import timed

PARTS = ("encoder_s", "decoder_s", "controlnet_s")
"""Names of the parts."""
# Tokens that T5 adds to those of CLIP's prompts in Stable Diffusion 3, and all that Flux.1 schnell reads.
_T5_TOKENS = 256


def measure_parts(pipeline: Any, folder: str, side: int, rounds: int) -> dict[str, float]:
    """Measure each part by itself, in turns; the ControlNet without what is the same at every step.

    A transformer is all encoder, because its ControlNet runs beside all of it.

    Args:
        pipeline: Stock's, with the model.
        folder: Of the ControlNet.
        side: Pixels a side of a picture.
        rounds: How often each part is measured; the results are medians.
    """
    import torch

    from bottega.model.backbones import make_backbone

    of_unet = "unet" in pipeline.components
    backbone: Any = make_backbone(pipeline.unet if of_unet else pipeline.transformer)
    measured = {"UNetBackbone": _unet, "Sd3Backbone": _stable_diffusion_3, "FluxBackbone": _flux}
    inputs, controlled = measured[type(backbone).__name__](pipeline, folder, side // pipeline.vae_scale_factor)
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


def _unet(pipeline: Any, folder: str, side: int) -> tuple[Any, Callable[[], object]]:
    import torch
    from diffusers import ControlNetModel

    from bottega.model.backbone import Inputs

    config, net = pipeline.unet.config, _loaded(ControlNetModel, folder)
    net.controlnet_cond_embedding = torch.nn.Identity()
    inputs = Inputs(
        sample=torch.randn(2, config.in_channels, side, side),
        timestep=torch.tensor([500.0, 500.0]),
        prompt_embeds=torch.randn(2, pipeline.tokenizer.model_max_length, config.cross_attention_dim),
        added={
            "text_embeds": torch.randn(2, pipeline.text_encoder_2.config.projection_dim),
            "time_ids": torch.zeros(2, 6),
        },
    )
    return inputs, partial(
        net,
        inputs.sample,
        inputs.timestep,
        encoder_hidden_states=inputs.prompt_embeds,
        controlnet_cond=torch.zeros(2, net.config.block_out_channels[0], side, side),
        added_cond_kwargs=dict(inputs.added),
        return_dict=False,
    )


def _stable_diffusion_3(pipeline: Any, folder: str, side: int) -> tuple[Any, Callable[[], object]]:
    import torch
    from diffusers import SD3ControlNetModel

    tokens = pipeline.tokenizer.model_max_length + _T5_TOKENS
    inputs = _transformer_inputs(pipeline, torch.randn(2, pipeline.transformer.config.in_channels, side, side), tokens)
    return inputs, partial(
        _loaded(SD3ControlNetModel, folder),
        hidden_states=inputs.sample,
        controlnet_cond=inputs.sample,
        timestep=inputs.timestep,
        return_dict=False,
        **_conditions(inputs),
    )


def _flux(pipeline: Any, folder: str, side: int) -> tuple[Any, Callable[[], object]]:
    import torch
    from diffusers import FluxControlNetModel

    inputs = _transformer_inputs(
        pipeline, torch.randn(1, pipeline.transformer.config.in_channels // 4, side, side), _T5_TOKENS
    )
    tokens = pipeline._pack_latents(inputs.sample, *inputs.sample.shape)
    return inputs, partial(
        _loaded(FluxControlNetModel, folder),
        hidden_states=tokens,
        controlnet_cond=tokens,
        timestep=inputs.timestep / 1000,
        txt_ids=torch.zeros(_T5_TOKENS, 3),
        img_ids=pipeline._prepare_latent_image_ids(1, side // 2, side // 2, "cpu", torch.float32),
        return_dict=False,
        **_conditions(inputs),
    )


def _loaded(kind: Any, folder: str) -> Any:
    import torch

    return kind.from_pretrained(folder, use_safetensors=True, torch_dtype=torch.float32)


def _transformer_inputs(pipeline: Any, sample: Any, tokens: int) -> Any:
    import torch

    from bottega.model.backbone import POOLED, Inputs

    config, rows = pipeline.transformer.config, len(sample)
    return Inputs(
        sample=sample,
        timestep=torch.full((rows,), 500.0),
        prompt_embeds=torch.randn(rows, tokens, config.joint_attention_dim),
        added={POOLED: torch.randn(rows, config.pooled_projection_dim)},
    )


def _conditions(inputs: Any) -> dict[str, Any]:
    """Return the prompt's embeddings as arguments of a transformer's ControlNet."""
    from bottega.model.backbone import POOLED

    return {"encoder_hidden_states": inputs.prompt_embeds, "pooled_projections": inputs.added[POOLED]}
