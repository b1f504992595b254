"""The denoising network as a list of blocks with residual points.

A residual point is a place where a ControlNet adds its output. A block names the points that must have been added
before it runs. So a turn waits for residuals only where they are needed, and earlier blocks run while the ControlNets
do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

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
    prompt_lengths: Sequence[int] = ()
    """Number of prompt tokens of each row; `prompt_embeds` is padding after them. Empty if nothing is padded."""
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
    rotations: Tensor | None = None
    """Rotary embedding of each row's tokens, complex, [rows, tokens, features]; used if rows may differ."""
    mask: Tensor | None = None
    """bool [rows, tokens], False for padding, to which no token attends; None if nothing is padded."""
    lengths: Sequence[int] = ()
    """Number of each row's tokens, after which `hidden` is padding; empty if rows cannot differ."""
    sizes: Sequence[tuple[int, int]] = ()
    """Height and width of each row's latent, in place of `size`; empty if rows cannot differ."""
    points: dict[int, Tensor] = field(default_factory=dict)
    """The tensors that residuals are added to, by residual point."""

    def row_of(self, tensor: Tensor, row: int) -> Tensor:
        """Return a row's part of a tensor with the layout of `hidden`, as a view."""
        return tensor[row, : self.lengths[row]] if self.lengths else tensor[row]

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        """Keep only these rows, in ascending order. `index` is the same as int64 on their device."""
        before, self.hidden = self.hidden, self.hidden.index_select(0, index)
        self.embedding, self.context = (each.index_select(0, index) for each in (self.embedding, self.context))
        self.rotations = None if self.rotations is None else self.rotations.index_select(0, index)
        self.mask = None if self.mask is None else self.mask.index_select(0, index)
        self.lengths = [self.lengths[row] for row in rows] if self.lengths else ()
        self.sizes = [self.sizes[row] for row in rows] if self.sizes else ()
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
    finish_needs: tuple[int, ...]
    """Residual points that must have been added before `finish`."""

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


def guidance_embedding(guidance_scale: float, width: int) -> Tensor:
    """Return the condition of UNets that take the guidance scale as an input, [width], in float32.

    Source: get_guidance_scale_embedding of Diffusers' pipelines.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
    angles = (torch.tensor(guidance_scale - 1) * 1000.0) * frequencies
    return functional.pad(torch.cat([torch.sin(angles), torch.cos(angles)]), (0, width % 2))
