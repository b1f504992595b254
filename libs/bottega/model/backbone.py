"""The denoising network as a list of blocks with residual points.

A residual point is a place where a ControlNet adds its output. A block names the points that must have been added
before it runs. So a turn waits for residuals only where they are needed, and earlier blocks run while the ControlNets
do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self

import torch
from diffusers import FluxTransformer2DModel, ModelMixin, SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor

from bottega.model.rows import RowActivations

TIMESTEP_COND = "timestep_cond"
"""Name of the embedding of the guidance scale among added conditions."""

POOLED = "pooled_projections"
"""Name of the pooled outputs of text encoders among added conditions of transformers."""

GUIDANCE = "guidance"
"""Name of the guidance scale itself among added conditions, [1]."""

PromptOrigin = tuple[Tensor, Hashable]
"""Embeddings of a prompt, and the key of the LoRAs. Both determine its projections, which may be cached over steps."""


@dataclass(slots=True, kw_only=True)
class Inputs:
    """The inputs of one forward, stacked over the rows of a group."""

    sample: Tensor
    """Scaled latents, [rows, channels, height, width], with the mask and the masked image if the network reads them."""
    timestep: Tensor
    """[rows], float32."""
    prompt_embeds: Tensor
    """[rows, tokens, features]."""
    added: Mapping[str, Tensor] = field(default_factory=dict)
    """Further conditions, [rows, ...] each; see `Embeds.added`."""
    activations: Sequence[RowActivations | None] = ()
    """Each row's access to recordings, for reading or writing; empty if no row has any."""
    origins: Sequence[PromptOrigin] = ()
    """Cache keys for the projections of each row's prompt; empty if projections are not cached."""
    controlled: bool = False
    """Whether residuals of ControlNets are added."""


@dataclass(slots=True, kw_only=True)
class Activations:
    """The state that each block passes to the next one. The first dimension of every tensor is the row."""

    hidden: Tensor
    embedding: Tensor
    context: Tensor
    """Embeddings of the prompts. The blocks of a transformer change them."""
    size: tuple[int, int] = (0, 0)
    """Height and width of the latent, for networks whose `hidden` does not have them."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the positions of all tokens, [tokens, features], which are equal in all rows."""
    points: dict[int, Tensor] = field(default_factory=dict)
    """The tensors that residuals are added to, by residual point."""

    def row_of(self, tensor: Tensor, row: int) -> Tensor:
        """Return a row's part of a tensor with the layout of `hidden`, as a view."""
        return tensor[row]

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keep only these rows, in ascending order. `index` is the same as int64 on their device."""
        before, self.hidden = self.hidden, self.hidden.index_select(0, index)
        self.embedding, self.context = (each.index_select(0, index) for each in (self.embedding, self.context))
        # A transformer's point is `hidden` itself, so that what is added to it goes on.
        points = self.points.items()
        self.points = {place: self.hidden if it is before else it.index_select(0, index) for place, it in points}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a network."""

    name: str
    run: Callable[[Activations], None]
    needs: tuple[int, ...] = ()
    """Residual points that must have been added before `run`."""


class RowSpans:
    """The offsets of each row in dimension 0 of the current layer call, for hooks that treat rows differently."""

    __slots__ = ("_next", "offsets")

    def __init__(self) -> None:
        self.offsets: tuple[int, ...] | None = None
        """Row i is [offsets[i], offsets[i + 1]); None if dimension 0 is the rows."""
        self._next: tuple[int, ...] | None = None

    def packed(self, offsets: tuple[int, ...]) -> Self:
        """Return a context in which layers get packed items: tokens [items, channels], or tiles of feature maps."""
        self._next = offsets
        return self

    # Written as a class, because one is entered for each layer, and a generator would take as long as a small layer.
    def __enter__(self) -> None:
        self.offsets = self._next

    def __exit__(self, *_: object) -> None:
        self.offsets = None


class Backbone(Protocol):
    """A denoising network in blocks."""

    blocks: Sequence[Block]

    @property
    def spans(self) -> RowSpans | None:
        """Offsets of rows in each call of a layer; None if dimension 0 always is the rows."""
        ...

    def begin(self, inputs: Inputs) -> Activations:
        """Embed the inputs. `hidden` of the result is the input of the first block."""
        ...

    def finish(self, activations: Activations) -> Tensor:
        """Return the prediction, [rows, channels, height, width]."""
        ...


class UNetBackbone:
    """A Diffusers UNet in blocks. Their results are bit-equal to those of its forward.

    Residual points 0 to n-1 are the skip connections in the order in which the encoder makes them, and n is the output
    of the middle block. This is the order of a ControlNet's residuals in Diffusers.
    """

    spans: RowSpans | None = None
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


class Sd3Backbone:
    """Stable Diffusion 3's transformer in blocks. Their results are bit-equal to those of its forward.

    Residual point i is the output of block i, to which a ControlNet adds. The last block has none.
    """

    spans: RowSpans | None = None
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

    def residual_at(self, point: int, count: int) -> int:
        """Return the index of the residual of a ControlNet with `count` residuals that is added at a point.

        A residual serves several blocks if the ControlNet has fewer. Source: SD3Transformer2DModel.forward.
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


MadeBackbone = UNetBackbone | Sd3Backbone | FluxBackbone
"""The backbones of models that are loaded."""


def make_backbone(network: ModelMixin) -> MadeBackbone:
    """Return the blocks of a denoising network."""
    if isinstance(network, UNet2DConditionModel):
        return UNetBackbone(network)
    return FluxBackbone(network) if isinstance(network, FluxTransformer2DModel) else Sd3Backbone(network)
