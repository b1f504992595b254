"""GroupNorm over feature maps of which only tiles are computed.

The norm needs the statistics of the whole map. Instead of its input, only the moments are recorded: mean and standard
deviation over the channels of each group, at each element. The recorded moments outside the tiles and the tiles' own
values give the statistics of the current map, for a fraction of the map's bytes.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from bottega.addons.edits.engine.sparse.rectangles import Rectangle
from bottega.device.pick import open_device

# Masks per template that are cached. Each takes half a kilobyte for each norm and forward.
_KNOWN_MASKS = 8
_KNOWN_WEIGHTS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statistics:
    """Mean and variance of each group over some elements of a feature map, float32 [groups]."""

    mean: Tensor
    variance: Tensor
    elements: int
    """Number of elements over which mean and variance were computed."""


def moments(feature_map: Tensor, groups: int) -> Tensor:
    """Return the moments of [rows, channels, height, width]: [rows, 2 * groups, height, width], means first."""
    rows, channels, height, width = feature_map.shape
    grouped = feature_map.float().reshape(rows, groups, channels // groups, height, width)
    # torch.var_mean takes several times as long on a CPU.
    mean = grouped.mean(dim=2)
    return torch.cat([mean, (grouped - mean[:, :, None]).square_().mean(dim=2).sqrt_()], dim=1)


class RecordedStatistics:
    """Caches the statistics of recorded moments outside the tiles, as long as the recorded tensor lives.

    They are the same for every edit with the same mask, because later additions to a recording are inside earlier
    masks.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, dict[tuple[Rectangle, ...], Statistics]] = WeakIdKeyDictionary()

    def outside(self, recorded: Tensor, rectangles: tuple[Rectangle, ...], *, stored: Tensor) -> Statistics:
        """Return the statistics of moments [2 * groups, height, width] outside the rectangles, which must not overlap.

        `stored` is the tensor from which `recorded` was copied, or `recorded` itself; see `RecordedActivations`.
        """
        of_masks = self._known.setdefault(stored, {})
        found = of_masks.get(rectangles)
        if found is None:
            if len(of_masks) == _KNOWN_MASKS:
                del of_masks[next(iter(of_masks))]
            found = of_masks[rectangles] = _outside(recorded, rectangles)
        return found


def _outside(recorded: Tensor, rectangles: Sequence[Rectangle]) -> Statistics:
    means, deviations = recorded.float().chunk(2)
    height, width = recorded.shape[1:]
    inside = torch.zeros(height, width, dtype=torch.bool)
    for each in rectangles:
        inside[each.rows, each.columns] = True
    outside = open_device(recorded.device).to_device((~inside).float())
    elements = height * width - sum(each.height * each.width for each in rectangles)
    share = 1 / max(elements, 1)
    mean = (means * outside).sum(dim=(1, 2)) * share
    spread = (means - mean[:, None, None]).square() + deviations.square()
    return Statistics(mean=mean, variance=(spread * outside).sum(dim=(1, 2)) * share, elements=elements)


def of_tiles(norm: nn.GroupNorm, tiles: Tensor) -> list[Statistics]:
    """Return the statistics of each tile in [tiles, channels, height, width]."""
    count, channels, height, width = tiles.shape
    elements = height * width
    # The normalized output is discarded; this is the only call that returns mean and variance of every group.
    _, mean, inverse = torch.native_group_norm(
        tiles.float().contiguous(), None, None, count, channels, elements, norm.num_groups, norm.eps
    )
    variance = inverse.pow(-2).sub_(norm.eps)
    return [
        Statistics(mean=each, variance=of_each, elements=elements)
        for each, of_each in zip(mean.unbind(), variance.unbind(), strict=True)
    ]


def scale_and_shift(norm: nn.GroupNorm, rows: Sequence[Sequence[Statistics]]) -> tuple[Tensor, Tensor]:
    """Return the norm's factor and addend, float32 [rows, channels, 1, 1], from the parts of each row's whole map."""
    parts = max(map(len, rows))
    # Rows with fewer parts than others repeat their first one, with weight 0.
    padded = [part for row in rows for part in [*row, *[row[0]] * (parts - len(row))]]
    means = torch.stack([part.mean for part in padded]).view(len(rows), parts, -1)
    variances = torch.stack([part.variance for part in padded]).view(len(rows), parts, -1)
    weights = _weights(tuple(tuple(part.elements for part in row) for row in rows), means.device)
    mean = (means * weights).sum(dim=1)
    centred = means - mean[:, None]
    variance = (torch.addcmul(variances, centred, centred) * weights).sum(dim=1)
    channels = norm.num_groups, norm.num_channels // norm.num_groups
    scale = (variance + norm.eps).rsqrt()[:, :, None] * norm.weight.float().view(channels)
    shift = torch.addcmul(norm.bias.float().view(channels), mean[:, :, None], scale, value=-1)
    shape = len(rows), norm.num_channels, 1, 1
    return scale.view(shape), shift.view(shape)


@functools.lru_cache(maxsize=_KNOWN_WEIGHTS)
def _weights(elements: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return each part's share of the whole map: float32 [rows, parts, 1]."""
    parts = max(map(len, elements))
    shares = [[each / sum(row) for each in row] + [0.0] * (parts - len(row)) for row in elements]
    return open_device(device).to_device(torch.tensor(shares)[:, :, None])


def scaled(tiles: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply each tile's scale and shift to [tiles, channels, height, width], in the tiles' dtype."""
    return torch.addcmul(shift, tiles.float(), scale).to(tiles.dtype)
