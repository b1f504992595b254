"""Flux.1's transformer in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from bottega.model.backbone import GUIDANCE, POOLED, Activations, Block, Inputs, RowSpans


class FluxBackbone:
    """Flux.1's transformer in blocks. Their results are bit-equal to those of its forward.

    Rows have unpacked latents; a token is a patch of 2x2 elements, with the mask and the masked image of Flux Fill. It
    has no residual points, because ControlNets for it are not served.

    Source: FluxPipeline and FluxFillPipeline of Diffusers.
    """

    spans: RowSpans | None = None
    patch_size = 2

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        self.network = transformer
        """The transformer, as Diffusers loads it."""
        packed = self.patch_size**2
        self.latent_channels = transformer.out_channels // packed
        self.image_channels = transformer.config.in_channels // packed - self.latent_channels
        self.blocks: Sequence[Block] = [
            Block(name=f"{kind}.{index}", run=partial(_run_joint, block))
            for kind in ("transformer_blocks", "single_transformer_blocks")
            for index, block in enumerate(getattr(transformer, kind))
        ]

    def begin(self, inputs: Inputs) -> Activations:
        network = self.network
        size = (inputs.sample.shape[-2], inputs.sample.shape[-1])
        hidden = network.x_embedder(self._pack(inputs.sample))
        # The pipelines pass thousandths in the network's element type, and the network multiplies them again.
        timestep = inputs.timestep.to(hidden.dtype) / 1000 * 1000
        pooled, guidance = inputs.added[POOLED], inputs.added.get(GUIDANCE)
        scales = () if guidance is None else (guidance[:, 0].to(hidden.dtype) * 1000,)
        context = network.context_embedder(inputs.prompt_embeds)
        return Activations(
            hidden=hidden,
            embedding=network.time_text_embed(timestep, *scales, pooled),
            context=context,
            size=size,
            rotary=network.pos_embed(self._positions(context, size)),
        )

    def finish(self, activations: Activations) -> Tensor:
        network, (height, width) = self.network, activations.size
        tokens = network.proj_out(network.norm_out(activations.hidden, activations.embedding))
        patch = self.patch_size
        patches = tokens.reshape(len(tokens), height // patch, width // patch, self.latent_channels, patch, patch)
        prediction: Tensor = patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), self.latent_channels, height, width)
        return prediction

    def _pack(self, sample: Tensor) -> Tensor:
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


def _run_joint(block: Any, activations: Activations) -> None:
    """Run a block of Flux, in which the tokens of text and picture attend to each other."""
    activations.context, activations.hidden = block(
        hidden_states=activations.hidden,
        encoder_hidden_states=activations.context,
        temb=activations.embedding,
        image_rotary_emb=activations.rotary,
    )
