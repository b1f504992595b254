"""Feature maps of which masked rows compute only rectangles; the rest is read from a recording.

Each layer outputs a whole map: the recorded map with the computed rectangles pasted in. So the next layer can read
around a rectangle, ControlNets can add to the whole map, and a row that lacks the recording of one layer computes that
layer in full. Source: SIGE (NeurIPS'22), with rectangles in place of blocks of one size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from bottega.addons.edits.engine.masked.feature_maps import FullMaps, TokensIn, is_plain
from bottega.addons.edits.engine.masked.tokens import MaskedActivations, MaskTokens
from bottega.addons.edits.engine.sparse.layer import Layer, RecordedStatistics
from bottega.addons.edits.engine.sparse.pieces import Rectangle, Whole, cover, pays, pieces

# Enough for some tens of running edits, at each level of their networks.
_KNOWN_COVERS = 256


class SparseMaps(FullMaps):
    """FeatureMaps that compute rectangles around masks if that costs less than whole maps."""

    def __init__(self) -> None:
        self._covers: WeakKeyDictionary[MaskTokens, dict[tuple[int, int], tuple[Rectangle, ...]]] = WeakKeyDictionary()
        self._statistics = RecordedStatistics()

    def resnet(self, resnet: ResnetBlock2D, path: str, parts: Sequence[Tensor], forward: MaskedActivations) -> Tensor:
        size = parts[0].shape[2:]
        layer = self._layer((f"{path}:map", f"{path}.norm1:moments", f"{path}.norm2:moments"), size, forward)
        if layer is None or not is_plain(resnet):
            return super().resnet(resnet, path, parts, forward)
        # The second convolution reads one element around the rectangle, so the first one also computes that border.
        # Recording the border instead would take as many bytes again as recording the block's output.
        taken = layer.take(parts, margin=2)
        hidden = layer.norm(resnet.norm1, f"{path}.norm1:moments", taken, margin=2)
        hidden = layer.convolve(resnet.conv1, _each(resnet.nonlinearity, hidden), margin=2)
        if resnet.time_emb_proj is not None:
            embedding = forward.embedding if resnet.skip_time_act else resnet.nonlinearity(forward.embedding)
            hidden = layer.add(hidden, resnet.time_emb_proj(embedding))
        hidden = layer.norm(resnet.norm2, f"{path}.norm2:moments", hidden, margin=1)
        hidden = layer.convolve(resnet.conv2, _each(resnet.nonlinearity, hidden), margin=1)
        taken = layer.core(taken, margin=2)
        if resnet.conv_shortcut is not None:
            taken = layer.convolve(resnet.conv_shortcut, taken, margin=0)
        summed = [(before + made) / resnet.output_scale_factor for before, made in zip(taken, hidden, strict=True)]
        return layer.join(f"{path}:map", summed, size)

    def downsample(self, downsampler: Downsample2D, path: str, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        size = tuple(-(-length // 2) for length in hidden.shape[2:])
        layer = self._layer((f"{path}:map",), size, forward)
        convolution = downsampler.conv
        if layer is None or not convolves_plainly(downsampler):
            return super().downsample(downsampler, path, hidden, forward)
        padding = downsampler.padding
        made: list[Tensor] = []
        for piece in layer.pieces:
            if isinstance(piece, Whole):
                made.append(layer.call(downsampler, piece, piece.take((hidden,))))
                continue
            height, width = piece.shape
            corners = [(2 * each.top - padding, 2 * each.left - padding) for each in piece.rectangles]
            read = piece.cut((hidden,), corners, (2 * height + 1, 2 * width + 1))
            made.append(layer.convolve_piece(convolution, piece, read, margin=0))
        return layer.join(f"{path}:map", made, size)

    def upsample(
        self, upsampler: Upsample2D, path: str, hidden: Tensor, forward: MaskedActivations, *, size: torch.Size | None
    ) -> Tensor:
        target = tuple(size or (2 * length for length in hidden.shape[2:]))
        layer = self._layer((f"{path}:map",), target, forward)
        convolution = upsampler.conv
        if layer is None or not upsamples_plainly(upsampler):
            return super().upsample(upsampler, path, hidden, forward, size=size)
        made: list[Tensor] = []
        for piece in layer.pieces:
            if isinstance(piece, Whole):
                made.append(layer.call(upsampler, piece, piece.take((hidden,)), size))
            else:
                read = piece.take_enlarged(hidden, margin=1)
                made.append(layer.convolve_piece(convolution, piece, read, margin=1))
        return layer.join(f"{path}:map", made, target)

    def tokens_in(
        self, transformer: Transformer2DModel, path: str, hidden: Tensor, forward: MaskedActivations
    ) -> TokensIn:
        size = hidden.shape[2:]
        name = f"{path}.proj_in:map"
        layer = self._layer((f"{path}.norm:moments", name), size, forward)
        if layer is None:
            return super().tokens_in(transformer, path, hidden, forward)
        normed = layer.norm(transformer.norm, f"{path}.norm:moments", layer.take((hidden,), margin=0), margin=0)
        if transformer.use_linear_projection:
            projected = layer.project(transformer.proj_in, normed)
        else:
            projected = layer.convolve(transformer.proj_in, normed, margin=0)
        return TokensIn(
            whole=layer.join(name, projected, size).flatten(2).transpose(1, 2),
            as_recorded=[
                rest is not None and self._covers_exactly(forward.tokens_of(row), (size[0], size[1]))
                for row, rest in enumerate(layer.recorded[name])
            ],
        )

    def conv_out(self, unet: UNet2DConditionModel, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        size = hidden.shape[2:]
        layer = self._layer(("conv_norm_out:moments", "conv_out:map"), size, forward)
        if layer is None or not unet.conv_norm_out:
            return super().conv_out(unet, hidden, forward)
        made = layer.norm(unet.conv_norm_out, "conv_norm_out:moments", layer.take((hidden,), margin=1), margin=1)
        return layer.join("conv_out:map", layer.convolve(unet.conv_out, _each(unet.conv_act, made), margin=1), size)

    def computed_share(self, tokens: MaskTokens, size: tuple[int, int]) -> float:
        """Return the cost of convolutions for a row with this mask, as a share of their cost over whole maps."""
        covered = self._cover(tokens, size)
        return 1.0 if covered is None else sum(each.cost for each in covered) / (size[0] * size[1])

    def _layer(self, names: Sequence[str], size: Sequence[int], forward: MaskedActivations) -> Layer | None:
        """Return the layer; None if no row has tiles or records. A row has tiles if all `names` are recorded."""
        recorded: dict[str, list[Tensor | None]] = {name: [None] * len(forward.edits) for name in names}
        rectangles: list[Sequence[Rectangle] | None] = [None] * len(forward.edits)
        for row, edit in enumerate(forward.edits):
            tokens = forward.tokens_of(row)
            covered = None if tokens is None else self._cover(tokens, (size[0], size[1]))
            if covered is None or edit is None or edit.recorded is None:
                continue
            rests = [edit.recorded.get(name) for name in names]
            if all(rest is not None for rest in rests):
                rectangles[row] = covered
                for name, rest in zip(names, rests, strict=True):
                    recorded[name][row] = rest
        if all(each is None for each in rectangles) and not any(edit and edit.sink for edit in forward.edits):
            return None
        cut = pieces(rectangles, (size[0], size[1]), forward.moves)
        return Layer(forward=forward, pieces=cut, recorded=recorded, statistics=self._statistics)

    def _covers_exactly(self, tokens: MaskTokens | None, size: tuple[int, int]) -> bool:
        """Return whether the rectangles contain no element outside the mask."""
        covered = None if tokens is None else self._cover(tokens, size)
        if tokens is None or covered is None:
            return False
        return sum(each.height * each.width for each in covered) == tokens.at(*size).count

    def _cover(self, tokens: MaskTokens, size: tuple[int, int]) -> tuple[Rectangle, ...] | None:
        """Return the rectangles; None if whole maps cost no more."""
        covers = self._covers.setdefault(tokens, {})
        if size not in covers:
            covers[size] = _covered(tokens.at(*size).mask.numpy().tobytes(), size)
        return covers[size] if pays(covers[size], *size) else None


@functools.lru_cache(maxsize=_KNOWN_COVERS)
def _covered(mask: bytes, size: tuple[int, int]) -> tuple[Rectangle, ...]:
    """Cover a mask, given as bytes. Results are cached, because the same mask is covered many times."""
    return cover(np.frombuffer(mask, dtype=np.bool_).reshape(size))


def _each(activation: nn.Module, maps: Sequence[Tensor]) -> list[Tensor]:
    return [activation(each) for each in maps]


def convolves_plainly(downsampler: Downsample2D) -> bool:
    """Return whether the downsampler is just a convolution, as in SDXL."""
    return downsampler.norm is None and isinstance(downsampler.conv, nn.Conv2d)


def upsamples_plainly(upsampler: Upsample2D) -> bool:
    """Return whether the upsampler repeats elements and then convolves, as in SDXL."""
    return (
        bool(upsampler.interpolate and upsampler.use_conv and not upsampler.use_conv_transpose)
        and upsampler.norm is None
        and isinstance(upsampler.conv, nn.Conv2d)
    )
