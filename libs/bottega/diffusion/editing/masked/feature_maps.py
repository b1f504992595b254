"""What happens to feature maps between a masked network's transformers: convolutions, norms, and the way to tokens.

FeatureMaps is the interface; FullMaps computes everything for every row. All tensors have the row as their first
dimension, and row i is the one of `forward.edits[i]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor

from bottega.diffusion.editing.masked.packing import Packing
from bottega.diffusion.editing.masked.residual import computes_in_place, residual
from bottega.diffusion.editing.masked.rows import MaskedActivations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    """What a transformer block has computed.

    items: [items, channels], of `packing`. recorded: by row [tokens, channels], what was recorded for the other tokens;
    None for rows of which every token is computed. Of the last block it is the output projection's.
    """

    items: Tensor
    packing: Packing
    recorded: Sequence[Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokensIn:
    """A transformer's input. whole: [rows, tokens, channels], of all tokens.

    as_recorded: by row, whether those that are not computed are what was recorded; False for rows computed whole.
    """

    whole: Tensor
    as_recorded: Sequence[bool]


class FeatureMaps(Protocol):
    """Operations on feature maps [rows, channels, height, width]. path: of the module, for names of what it records."""

    def conv_in(self, unet: UNet2DConditionModel, sample: Tensor, forward: MaskedActivations) -> Tensor:
        """The first convolution."""
        ...

    def resnet(self, resnet: ResnetBlock2D, path: str, parts: Sequence[Tensor], forward: MaskedActivations) -> Tensor:
        """A residual block over feature maps that are joined over channels: what came last, and a skip connection."""
        ...

    def downsample(self, downsampler: Downsample2D, path: str, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        """To half of the size, rounded up."""
        ...

    def upsample(
        self, upsampler: Upsample2D, path: str, hidden: Tensor, forward: MaskedActivations, *, size: torch.Size | None
    ) -> Tensor:
        """To `size`; to twice its own without one."""
        ...

    def tokens_in(
        self, transformer: Transformer2DModel, path: str, hidden: Tensor, forward: MaskedActivations
    ) -> TokensIn:
        """Norm and input projection."""
        ...

    def tokens_out(
        self,
        transformer: Transformer2DModel,
        path: str,
        packed: PackedTokens,
        hidden: Tensor,
        forward: MaskedActivations,
    ) -> Tensor:
        """Output projection of the last block's output, added to `hidden`, the feature map that tokens_in was given.

        That may be changed.
        """
        ...

    def conv_out(self, unet: UNet2DConditionModel, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        """The last norm and convolution: the prediction."""
        ...


class FullMaps:
    """All of every feature map is computed, for masked rows as well."""

    def conv_in(self, unet: UNet2DConditionModel, sample: Tensor, forward: MaskedActivations) -> Tensor:
        return _output(unet.conv_in(sample))

    def resnet(self, resnet: ResnetBlock2D, path: str, parts: Sequence[Tensor], forward: MaskedActivations) -> Tensor:
        hidden = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
        if computes_in_place(resnet, hidden):
            return residual(resnet, hidden, forward.embedding)
        return _output(resnet(hidden, forward.embedding))

    def downsample(self, downsampler: Downsample2D, path: str, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        return _output(downsampler(hidden))

    def upsample(
        self, upsampler: Upsample2D, path: str, hidden: Tensor, forward: MaskedActivations, *, size: torch.Size | None
    ) -> Tensor:
        return _output(upsampler(hidden, size))

    def tokens_in(
        self, transformer: Transformer2DModel, path: str, hidden: Tensor, forward: MaskedActivations
    ) -> TokensIn:
        normed = transformer.norm(hidden)
        if transformer.use_linear_projection:
            whole = _output(transformer.proj_in(_tokens(normed)))
        else:
            whole = _tokens(_output(transformer.proj_in(normed)))
        return TokensIn(whole=whole, as_recorded=[False] * len(hidden))

    def tokens_out(
        self,
        transformer: Transformer2DModel,
        path: str,
        packed: PackedTokens,
        hidden: Tensor,
        forward: MaskedActivations,
    ) -> Tensor:
        whole = packed.packing.merge(project_out(transformer, packed, forward), packed.recorded)
        forward.put(f"{path}.proj_out", whole)
        rows, channels, height, width = hidden.shape
        # In place: it is what a residual block has just made, and nobody else has it.
        return hidden.add_(whole.view(rows, height, width, channels).permute(0, 3, 1, 2))

    def conv_out(self, unet: UNet2DConditionModel, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        if unet.conv_norm_out:
            hidden = unet.conv_act(unet.conv_norm_out(hidden))
        return _output(unet.conv_out(hidden))


def project_out(transformer: Transformer2DModel, packed: PackedTokens, forward: MaskedActivations) -> Tensor:
    """The output projection of computed tokens: [items, channels]."""
    with forward.spans.packed(packed.packing.offsets):
        if transformer.use_linear_projection:
            return _output(transformer.proj_out(packed.items))
        # The layer is a convolution of single elements: each token is a tile of that size.
        return _output(transformer.proj_out(packed.items[:, :, None, None])).flatten(1)


def _tokens(feature_map: Tensor) -> Tensor:
    """[rows, channels, height, width] as [rows, tokens, channels], row-major."""
    return feature_map.flatten(2).transpose(1, 2)


def _output(made: Any) -> Tensor:
    """Diffusers' modules have no types."""
    tensor: Tensor = made
    return tensor
