"""Stable Diffusion 3's transformer in blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from diffusers import SD3Transformer2DModel
from torch import Tensor

from bottega.model.backbone import POOLED, Activations, Block, Inputs, RowSpans


class Sd3Backbone:
    """Stable Diffusion 3's transformer in blocks. Their results are bit-equal to those of its forward.

    Residual point i is the output of block i, to which a ControlNet adds. The last block has none.
    """

    spans: RowSpans | None = None
    finish_needs: tuple[int, ...] = ()
    image_channels = 0

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        self.network = transformer
        """The transformer, as Diffusers loads it."""
        positions = transformer.pos_embed.pos_embed
        self._embed_for_controlnets = copy.deepcopy(transformer.pos_embed, {id(positions): positions})
        self.patch_size = int(transformer.config.patch_size)
        self.blocks: Sequence[Block] = [
            Block(name=f"transformer_blocks.{index}", run=self._joint(index), needs=(index - 1,) if index else ())
            for index in range(len(transformer.transformer_blocks))
        ]

    def begin(self, inputs: Inputs) -> Activations:
        network = self.network
        return Activations(
            # Contiguous, as in the network's forward: the last bits of a sum depend on the memory layout.
            hidden=network.pos_embed(inputs.sample).contiguous(),
            embedding=network.time_text_embed(inputs.timestep, inputs.added[POOLED]),
            context=network.context_embedder(inputs.prompt_embeds),
            size=(inputs.sample.shape[-2], inputs.sample.shape[-1]),
        )

    def residual_at(self, point: int, count: int, singles: int = 0) -> int | None:
        """Return which of a ControlNet's residuals is added at a point; see `FluxBackbone.residual_at`.

        Source: SD3Transformer2DModel.forward.
        """
        return int(point / (len(self.blocks) / count))

    def tokens(self, sample: Tensor) -> Tensor:
        """Return latents [rows, channels, height, width] as the embedded tokens that some ControlNets read.

        As in Diffusers, LoRAs do not change them. Source: StableDiffusion3ControlNetPipeline.
        """
        embedded: Tensor = self._embed_for_controlnets(sample).contiguous()
        return embedded

    def finish(self, activations: Activations) -> Tensor:
        network = self.network
        tokens = network.proj_out(network.norm_out(activations.hidden, activations.embedding))
        return self.unpatchify(tokens, activations.size)

    def unpatchify(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Return patches, [rows, tokens, features], as a prediction of this height and width."""
        patch, channels = self.network.config.patch_size, self.network.out_channels
        height, width = (side // patch for side in size)
        patches = tokens.reshape(len(tokens), height, width, patch, patch, channels)
        prediction: Tensor = patches.permute(0, 5, 1, 3, 2, 4).reshape(
            len(tokens), channels, height * patch, width * patch
        )
        return prediction

    def _joint(self, index: int) -> Callable[[Activations], None]:
        block = self.network.transformer_blocks[index]

        def run(activations: Activations) -> None:
            # Not `hidden`, which is another tensor after `select`.
            activations.hidden = activations.points.pop(index - 1, activations.hidden)
            context, activations.hidden = block(
                hidden_states=activations.hidden,
                encoder_hidden_states=activations.context,
                temb=activations.embedding,
            )
            if context is not None:  # The last block returns none.
                activations.context = context
                activations.points[index] = activations.hidden

        return run
