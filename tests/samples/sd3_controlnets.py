"""Tiny random ControlNets for the models of Stable Diffusion 3, and their residuals in pipelines that take none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import PIL.Image
import torch
from diffusers import SD3ControlNetModel
from torch import Tensor, nn

from bottega.engine.spec import ResolvedSpec

SD3_SHAPE: Mapping[str, Any] = {
    "sample_size": 8,
    # The pipeline for inpainting takes no other number.
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 96,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 12,
}
"""Of the transformers and of their ControlNets."""
SD3_CONTROLNETS: Mapping[str, Mapping[str, Any]] = {
    "SD 3": {"num_layers": 3},
    "SD 3.5": {
        "num_layers": 1,
        "joint_attention_dim": None,
        "use_pos_embed": False,
        "pos_embed_type": None,
        "pos_embed_max_size": None,
        "force_zeros_for_pooled_projection": False,
    },
    "SD 3 no T5": {"num_layers": 2, "force_zeros_for_pooled_projection": False, "dual_attention_layers": (1,)},
}
"""Of the ControlNets of each model: as those of SD3 that read no pooled prompt, those of SD3.5 Large, and others."""


def sd3_controlnet(**options: Any) -> Any:
    """Return a random SD3ControlNetModel for these models, all of whose weights matter."""
    network = SD3ControlNetModel(**{**SD3_SHAPE, **options})
    for layer in (*network.controlnet_blocks, network.pos_embed_input.proj):
        nn.init.normal_(layer.weight, std=0.2)
    return network.eval()


@contextmanager
def added_residuals(
    pipeline: Any, spec: ResolvedSpec, networks: Sequence[Any], control_images: Sequence[Tensor]
) -> Iterator[None]:
    """Give the transformer of a pipeline the residuals of these ControlNets at each of its calls in the block."""
    transformer, vae = pipeline.transformer, pipeline.vae
    sides: list[tuple[Any, Tensor, float]] = []
    for network, control, image in zip(networks, spec.controlnets, control_images, strict=True):
        own = copy.deepcopy(network)
        if own.pos_embed is None:
            own.pos_embed = own._get_pos_embed_from_transformer(transformer)
        pixels = pipeline.image_processor.preprocess(PIL.Image.fromarray(image.numpy()), spec.height, spec.width)
        shift = 0.0 if own.config.force_zeros_for_pooled_projection else vae.config.shift_factor
        with torch.no_grad():
            latent = (vae.encode(pixels).latent_dist.mode() - shift) * vae.config.scaling_factor
        sides.append((own, latent, control.controlnet_conditioning_scale))

    def add(_: Any, __: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        blocks = len(transformer.transformer_blocks)
        residuals = list[list[Tensor]]()
        for network, latent, scale in sides:
            rows, zeros = len(given["hidden_states"]), network.config.force_zeros_for_pooled_projection
            pooled, prompt = given["pooled_projections"], given["encoder_hidden_states"]
            (made,) = network(
                hidden_states=given["hidden_states"],
                controlnet_cond=latent.expand(rows, -1, -1, -1),
                conditioning_scale=scale,
                encoder_hidden_states=prompt if network.context_embedder is not None else None,
                pooled_projections=torch.zeros_like(pooled) if zeros else pooled,
                timestep=given["timestep"],
                return_dict=False,
            )
            # Each at its own interval: Diffusers cuts all to the fewest.
            residuals.append([made[int(block / (blocks / len(made)))] for block in range(blocks)])
        return (), {**given, "block_controlnet_hidden_states": [sum(each) for each in zip(*residuals, strict=True)]}

    hook = transformer.register_forward_pre_hook(add, with_kwargs=True)
    try:
        with torch.no_grad():
            yield
    finally:
        hook.remove()
