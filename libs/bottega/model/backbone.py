"""The denoising network as a list of blocks with residual points.

A residual point is a place where a ControlNet adds its output. A block names the points that must have been added
before it runs. So a turn waits for residuals only where they are needed, and earlier blocks run while the ControlNets
do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from diffusers import ModelMixin, SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor

from bottega.model.rows import RowActivations

TIMESTEP_COND = "timestep_cond"
"""Name of the embedding of the guidance scale among added conditions."""

POOLED = "pooled_projections"
"""Name of the pooled outputs of text encoders among added conditions of transformers."""

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
    points: dict[int, Tensor] = field(default_factory=dict)
    """The tensors that residuals are added to, by residual point."""

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keep only these rows, in this order. `index` is the same as int64 on their device."""
        self.hidden = self.hidden.index_select(0, index)
        self.embedding = self.embedding.index_select(0, index)
        self.context = self.context.index_select(0, index)
        self.points = {point: tensor.index_select(0, index) for point, tensor in self.points.items()}


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

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.network = unet
        """The UNet, as Diffusers loads it."""
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

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        self.network = transformer
        """The transformer, as Diffusers loads it."""
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

    def finish(self, activations: Activations) -> Tensor:
        network = self.network
        tokens = network.proj_out(network.norm_out(activations.hidden, activations.embedding))
        patch, channels = network.config.patch_size, network.out_channels
        height, width = (side // patch for side in activations.size)
        patches = tokens.reshape(len(tokens), height, width, patch, patch, channels)
        prediction: Tensor = patches.permute(0, 5, 1, 3, 2, 4).reshape(
            len(tokens), channels, height * patch, width * patch
        )
        return prediction

    def _joint(self, index: int) -> Callable[[Activations], None]:
        block = self.network.transformer_blocks[index]

        def run(activations: Activations) -> None:
            activations.points.pop(index - 1, None)
            context, activations.hidden = block(
                hidden_states=activations.hidden,
                encoder_hidden_states=activations.context,
                temb=activations.embedding,
            )
            if context is not None:  # The last block returns none.
                activations.context = context
                activations.points[index] = activations.hidden

        return run


MadeBackbone = UNetBackbone | Sd3Backbone
"""The backbones of models that are loaded."""


def make_backbone(network: ModelMixin) -> MadeBackbone:
    """Return the blocks of a denoising network."""
    return UNetBackbone(network) if isinstance(network, UNet2DConditionModel) else Sd3Backbone(network)
