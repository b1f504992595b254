"""Flux.1's transformer in blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import FluxControlNetModel, FluxTransformer2DModel
from torch import Tensor

from bottega.model.backbone import GUIDANCE, POOLED, Activations, Block, Inputs, RowSpans


class FluxBackbone:
    """Flux.1's transformer in blocks. The blocks' results are bit-equal to those of the transformer's forward.

    Rows have unpacked latents. A token is a patch of 2x2 elements; with Flux Fill, it includes the mask and the masked
    image. Residual point i is the picture's part of the output of block i. Single blocks are numbered after joint
    blocks.

    `network` may also be a FluxControlNetModel, which has the same inputs and blocks, but no `finish`.

    Source: FluxPipeline and FluxFillPipeline of Diffusers.
    """

    spans: RowSpans | None = None
    patch_size = 2

    def __init__(self, transformer: FluxTransformer2DModel | FluxControlNetModel) -> None:
        self.network = transformer
        """The transformer or the ControlNet, as Diffusers loads it."""
        packed = self.patch_size**2
        self.latent_channels = transformer.out_channels // packed
        self.image_channels = transformer.config.in_channels // packed - self.latent_channels
        layers = [
            (f"{kind}.{index}", block)
            for kind in ("transformer_blocks", "single_transformer_blocks")
            for index, block in enumerate(getattr(transformer, kind))
        ]
        self.blocks: Sequence[Block] = [
            Block(name=name, run=partial(_run_joint, block, place), needs=(place - 1,) if place else ())
            for place, (name, block) in enumerate(layers)
        ]
        self.finish_needs: tuple[int, ...] = (len(layers) - 1,)

    def begin(self, inputs: Inputs) -> Activations:
        network = self.network
        size = (inputs.sample.shape[-2], inputs.sample.shape[-1])
        hidden = network.x_embedder(self.pack(inputs.sample))
        # The pipelines pass thousandths in the network's element type, and the network multiplies them again.
        timestep, pooled = inputs.timestep.to(hidden.dtype) / 1000 * 1000, inputs.added[POOLED].to(hidden.dtype)
        guided = network.config.guidance_embeds
        scales = (inputs.added[GUIDANCE][:, 0].to(hidden.dtype) * 1000,) if guided else ()
        context = network.context_embedder(inputs.prompt_embeds)
        return Activations(
            hidden=hidden,
            embedding=network.time_text_embed(timestep, *scales, pooled),
            context=context,
            size=size,
            rotary=network.pos_embed(self._positions(context, size)),
        )

    def residual_at(self, point: int, count: int, singles: int = 0) -> int | None:
        """Return which of a ControlNet's residuals is added at a point, as an index; None if no residual is.

        A residual is added after several blocks if the ControlNet has fewer residuals than the model has blocks.
        Source: FluxTransformer2DModel.forward.

        Args:
            point: The residual point.
            count: Number of the ControlNet's residuals.
            singles: Number of residuals that belong to single blocks. They come last.
        """
        joint, doubles = len(self.network.transformer_blocks), count - singles
        if point < joint:
            return point // math.ceil(joint / doubles) if doubles else None
        interval = math.ceil((len(self.blocks) - joint) / singles) if singles else 0
        return doubles + (point - joint) // interval if interval else None

    def finish(self, activations: Activations) -> Tensor:
        network = self.network
        hidden = activations.points.pop(len(self.blocks) - 1, activations.hidden)
        tokens = network.proj_out(network.norm_out(hidden, activations.embedding))
        return self.unpatchify(tokens, activations.size)

    def unpatchify(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Arrange patches, [rows, tokens, features], as a prediction with this height and width."""
        (height, width), patch, channels = size, self.patch_size, self.latent_channels
        patches = tokens.reshape(len(tokens), height // patch, width // patch, channels, patch, patch)
        prediction: Tensor = patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), channels, height, width)
        return prediction

    def pack(self, sample: Tensor) -> Tensor:
        """Return latents as tokens, [rows, tokens, channels]. The network reads the masked image before the mask."""
        rows, _, height, width = sample.shape
        channels = self.latent_channels
        if self.image_channels:
            mask = self.image_channels - channels
            sample = torch.cat(
                [sample[:, :channels], sample[:, channels + mask :], sample[:, channels : channels + mask]], dim=1
            )
        patch = self.patch_size
        patches = sample.reshape(rows, -1, height // patch, patch, width // patch, patch)
        return patches.permute(0, 2, 4, 1, 3, 5).reshape(rows, (height // patch) * (width // patch), -1)

    def _positions(self, context: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the position of each token, [tokens, 3]: 0 of the text's, and row and column of the picture's."""
        height, width = (side // self.patch_size for side in size)
        # In the network's element type, in which the pipelines make them.
        positions = torch.zeros(height, width, 3, device=context.device, dtype=context.dtype)
        positions[..., 1] = torch.arange(height, device=context.device)[:, None]
        positions[..., 2] = torch.arange(width, device=context.device)
        return torch.cat([positions.new_zeros(context.shape[1], 3), positions.reshape(height * width, 3)])


def _run_joint(block: Any, place: int, activations: Activations) -> None:
    """Run the block of Flux with this index, in which the tokens of text and picture attend to each other."""
    activations.context, activations.hidden = block(
        # After `select`, only the tensor in `points` has the residuals, not `hidden`.
        hidden_states=activations.points.pop(place - 1, activations.hidden),
        encoder_hidden_states=activations.context,
        temb=activations.embedding,
        image_rotary_emb=activations.rotary,
    )
    activations.points[place] = activations.hidden
