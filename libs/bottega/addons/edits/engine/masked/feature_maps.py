"""The operations between a masked network's transformers: convolutions, norms, and conversion to and from tokens.

`FeatureMaps` is the interface; `FullMaps` computes all elements for every row. The first dimension of all tensors is
the row, and row i belongs to `forward.edits[i]`.
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
from torch import Tensor, nn
from torch.nn import functional

from bottega.addons.edits.engine.masked.tokens import MaskedActivations, Packing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    """The tokens that a transformer block computed."""

    items: Tensor
    """The computed tokens, [tokens, channels], as in `packing`."""
    packing: Packing
    recorded: Sequence[Tensor | None]
    """Recorded tokens of each row, [tokens, channels]; None for rows that compute all tokens. For the last block,
    tokens are recorded after the output projection."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokensIn:
    """A transformer's input."""

    whole: Tensor
    """All tokens, [rows, tokens, channels]."""
    as_recorded: Sequence[bool]
    """For each row, whether its tokens that are not computed equal the recorded ones; False for rows that compute all
    tokens."""


class FeatureMaps(Protocol):
    """Operations on feature maps [rows, channels, height, width].

    Names of recorded outputs begin with `path`.
    """

    def conv_in(self, unet: UNet2DConditionModel, sample: Tensor, forward: MaskedActivations) -> Tensor:
        """Apply the first convolution."""
        ...

    def resnet(self, resnet: ResnetBlock2D, path: str, parts: Sequence[Tensor], forward: MaskedActivations) -> Tensor:
        """Apply a residual block to the previous output and a skip connection, concatenated over channels."""
        ...

    def downsample(self, downsampler: Downsample2D, path: str, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        """Halve the size, rounding up."""
        ...

    def upsample(
        self, upsampler: Upsample2D, path: str, hidden: Tensor, forward: MaskedActivations, *, size: torch.Size | None
    ) -> Tensor:
        """Enlarge to `size`, by default to twice the size."""
        ...

    def tokens_in(
        self, transformer: Transformer2DModel, path: str, hidden: Tensor, forward: MaskedActivations
    ) -> TokensIn:
        """Apply the norm and the input projection."""
        ...

    def tokens_out(
        self,
        transformer: Transformer2DModel,
        path: str,
        packed: PackedTokens,
        hidden: Tensor,
        forward: MaskedActivations,
    ) -> Tensor:
        """Project the last block's output, and add it to `hidden`, the input of `tokens_in`, possibly in place."""
        ...

    def conv_out(self, unet: UNet2DConditionModel, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        """Apply the last norm and convolution, and return the prediction."""
        ...


class FullMaps:
    """Computes all elements of feature maps, also for masked rows."""

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
        whole = packed.packing.merge(project_out(transformer, packed), packed.recorded)
        forward.put(f"{path}.proj_out", whole)
        rows, channels, height, width = hidden.shape
        # In place: `hidden` is a residual block's output that nothing else refers to.
        return hidden.add_(whole.view(rows, height, width, channels).permute(0, 3, 1, 2))

    def conv_out(self, unet: UNet2DConditionModel, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        if unet.conv_norm_out:
            hidden = unet.conv_act(unet.conv_norm_out(hidden))
        return _output(unet.conv_out(hidden))


def project_out(transformer: Transformer2DModel, packed: PackedTokens) -> Tensor:
    """Apply the output projection to computed tokens: [tokens, channels]."""
    layout = packed.packing.layout
    if transformer.use_linear_projection:
        return layout.run(transformer.proj_out, packed.items)
    # The layer is a 1 x 1 convolution, so each token is passed as a tile of one element.
    return layout.run(transformer.proj_out, packed.items[:, :, None, None]).flatten(1)


def _tokens(feature_map: Tensor) -> Tensor:
    """Return [rows, channels, height, width] as [rows, tokens, channels], row-major."""
    return feature_map.flatten(2).transpose(1, 2)


def _output(made: Any) -> Tensor:
    """Cast the output of a Diffusers module, which has no types."""
    tensor: Tensor = made
    return tensor


def is_plain(resnet: ResnetBlock2D) -> bool:
    """Return whether a block adds the time embedding and keeps the size."""
    return resnet.time_embedding_norm == "default" and not (resnet.upsample or resnet.downsample)


def computes_in_place(resnet: ResnetBlock2D, hidden: Tensor) -> bool:
    """Return whether `residual` computes a block bit for bit. Only on CPUs, because GPUs use other kernels."""
    return is_plain(resnet) and type(resnet.nonlinearity) is nn.SiLU and hidden.device.type == "cpu"


def residual(resnet: ResnetBlock2D, hidden: Tensor, embedding: Tensor) -> Tensor:
    """Compute a residual block of a feature map [rows, channels, height, width], which is not changed.

    Layers are called as modules, so that their hooks run. `embedding` is that of the time, [rows, channels].
    """
    made: Tensor = resnet.conv1(functional.silu(resnet.norm1(hidden), inplace=True))
    if resnet.time_emb_proj is not None:
        embedding = embedding if resnet.skip_time_act else functional.silu(embedding)
        made.add_(resnet.time_emb_proj(embedding)[:, :, None, None])
    made = resnet.conv2(resnet.dropout(functional.silu(resnet.norm2(made), inplace=True)))
    made.add_(hidden if resnet.conv_shortcut is None else resnet.conv_shortcut(hidden))
    return made if resnet.output_scale_factor == 1.0 else made.div_(resnet.output_scale_factor)
