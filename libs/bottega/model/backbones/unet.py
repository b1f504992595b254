"""Diffusers' UNet in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diffusers import UNet2DConditionModel
from torch import Tensor

from bottega.model.backbone import TIMESTEP_COND, Activations, Block, Inputs, RowSpans


class UNetBackbone:
    """A Diffusers UNet in blocks. Their results are bit-equal to those of its forward.

    Residual points 0 to n-1 are the skip connections in the order in which the encoder makes them, and n is the output
    of the middle block. This is the order of a ControlNet's residuals in Diffusers.
    """

    spans: RowSpans | None = None
    finish_needs: tuple[int, ...] = ()
    patch_size = 1
    """Number of elements of the latent, on each side, that one token stands for; 1 for UNets, which have none."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.network = unet
        """The UNet, as Diffusers loads it."""
        self.image_channels = int(unet.config.in_channels - unet.config.out_channels)
        """Number of channels of a mask and a masked image that it reads after the latent; 0 if it reads none."""
        blocks: list[Block] = []
        skips = 1
        for index, block in enumerate(unet.down_blocks):
            blocks.append(Block(name=f"down_blocks.{index}", run=self._down(index, skips)))
            skips += len(block.resnets) + len(block.downsamplers or ())
        self.middle_point = skips
        blocks.append(Block(name="mid_block", run=self._middle))
        for index, block in enumerate(unet.up_blocks):
            count = len(block.resnets)
            taken = tuple(range(skips - count, skips))
            skips -= count
            needs = (self.middle_point, *reversed(taken)) if index == 0 else tuple(reversed(taken))
            blocks.append(Block(name=f"up_blocks.{index}", run=self._up(index, taken), needs=needs))
        self.blocks: Sequence[Block] = blocks

    def begin(self, inputs: Inputs) -> Activations:
        sample, embedding = self.embed(inputs)
        hidden = self.network.conv_in(sample)
        return Activations(hidden=hidden, embedding=embedding, context=inputs.prompt_embeds, points={0: hidden})

    def embed(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the input of the first convolution, and the embedding of timesteps and added conditions."""
        unet = self.network
        sample = 2 * inputs.sample - 1.0 if unet.config.center_input_sample else inputs.sample
        embedding = unet.time_embedding(
            unet.get_time_embed(sample=sample, timestep=inputs.timestep), inputs.added.get(TIMESTEP_COND)
        )
        added = unet.get_aug_embed(
            emb=embedding, encoder_hidden_states=inputs.prompt_embeds, added_cond_kwargs=dict(inputs.added)
        )
        if added is not None:
            embedding = embedding + added
        if unet.time_embed_act is not None:
            embedding = unet.time_embed_act(embedding)
        return sample, embedding

    def finish(self, activations: Activations) -> Tensor:
        unet = self.network
        hidden = activations.hidden
        if unet.conv_norm_out:
            hidden = unet.conv_act(unet.conv_norm_out(hidden))
        prediction: Tensor = unet.conv_out(hidden)
        return prediction

    def _down(self, index: int, first_point: int) -> Callable[[Activations], None]:
        block = self.network.down_blocks[index]
        attends = getattr(block, "has_cross_attention", False)

        def run(activations: Activations) -> None:
            extra = {"encoder_hidden_states": activations.context} if attends else {}
            activations.hidden, skips = block(hidden_states=activations.hidden, temb=activations.embedding, **extra)
            activations.points.update(enumerate(skips, first_point))

        return run

    def _middle(self, activations: Activations) -> None:
        block = self.network.mid_block
        if block is not None:
            attends = getattr(block, "has_cross_attention", False)
            extra = {"encoder_hidden_states": activations.context} if attends else {}
            activations.hidden = block(activations.hidden, activations.embedding, **extra)
        else:
            # Residuals are added in place, and the last skip connection is the same tensor.
            activations.hidden = activations.hidden.clone()
        activations.points[self.middle_point] = activations.hidden

    def _up(self, index: int, taken: tuple[int, ...]) -> Callable[[Activations], None]:
        block = self.network.up_blocks[index]
        attends = getattr(block, "has_cross_attention", False)
        last = index == len(self.network.up_blocks) - 1
        middle = self.middle_point if index == 0 else None

        def run(activations: Activations) -> None:
            points = activations.points
            if middle is not None:
                activations.hidden = points.pop(middle)
            skips = tuple(points.pop(point) for point in taken)
            # The size of the next skip connection. Doubling is wrong if a latent is no multiple of all downsampling.
            size = None if last else points[taken[0] - 1].shape[2:]
            extra = {"encoder_hidden_states": activations.context} if attends else {}
            activations.hidden = block(
                hidden_states=activations.hidden,
                temb=activations.embedding,
                res_hidden_states_tuple=skips,
                upsample_size=size,
                **extra,
            )

        return run
