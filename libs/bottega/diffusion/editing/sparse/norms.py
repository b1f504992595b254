"""GroupNorm over feature maps of which only tiles are computed.

Its statistics are of the whole map. What is recorded of its input, in place of the input itself, is the mean and the
standard deviation of each group's channels at each element, its moments: with the tiles' own in their places they give
the statistics of the map as it is now, for a fraction of the map's bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def moments(feature_map: Tensor, groups: int) -> Tensor:
    """Of [rows, channels, height, width]: [rows, 2 * groups, height, width], the means, then the deviations."""
    rows, channels, height, width = feature_map.shape
    grouped = feature_map.float().reshape(rows, groups, channels // groups, height, width)
    # torch.var_mean takes several times as long on a CPU.
    mean = grouped.mean(dim=2)
    return torch.cat([mean, (grouped - mean[:, :, None]).square_().mean(dim=2).sqrt_()], dim=1)


def scale_and_shift(norm: nn.GroupNorm, of_maps: Tensor) -> tuple[Tensor, Tensor]:
    """What the norm multiplies by and adds, for whole maps with these moments: each float32 [rows, channels, 1, 1]."""
    means, deviations = of_maps.flatten(2).chunk(2, dim=1)
    mean = means.mean(dim=2)
    between = (means - mean[:, :, None]).square_().mean(dim=2)
    within = deviations.square().mean(dim=2)
    each = norm.num_channels // norm.num_groups
    inverse = (between + within + norm.eps).rsqrt().repeat_interleave(each, dim=1)
    scale = inverse * norm.weight.float()
    shift = norm.bias.float() - mean.repeat_interleave(each, dim=1) * scale
    return scale[:, :, None, None], shift[:, :, None, None]


def scaled(tiles: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """tiles: [tiles, channels, height, width]; scale and shift: of each tile. In the tiles' element type."""
    return torch.addcmul(shift, tiles.float(), scale).to(tiles.dtype)
