"""Structural similarity of two pictures, as Wang et al. (2004) define it."""

from __future__ import annotations

import numpy as np
import PIL.Image
import torch
from torch.nn.functional import conv2d

# Of the paper: an 11 x 11 Gaussian window of standard deviation 1.5; K1 and K2, for levels 0 to 255.
_WINDOW = 11
_SIGMA = 1.5
_C1 = (0.01 * 255.0) ** 2
_C2 = (0.03 * 255.0) ** 2


def ssim(picture: PIL.Image.Image, other: PIL.Image.Image) -> float:
    """1 for the same picture, around 0 for unrelated ones. Mean over red, green, blue and all whole windows.

    ValueError when the sizes differ or are below 11 pixels a side.
    """
    return float(_similarity(picture, other).mean())


def ssim_within(picture: PIL.Image.Image, other: PIL.Image.Image, region: torch.Tensor) -> float:
    """The same over those windows whose centres lie in a region.

    region: bool [height, width]. ValueError also where no whole window has its centre there, and where it has another
    size than the pictures.
    """
    similarity = _similarity(picture, other)
    edge = _WINDOW // 2
    if region.shape != picture.size[::-1]:
        raise ValueError(f"ssim needs a region of the pictures' size: {tuple(region.shape)}, {picture.size[::-1]}")
    inside = region[edge:-edge, edge:-edge]
    if not inside.any():
        raise ValueError(f"no window of {_WINDOW} pixels has its centre in the region")
    return float(similarity[:, inside].mean())


def _similarity(picture: PIL.Image.Image, other: PIL.Image.Image) -> torch.Tensor:
    """By channel and window, [3, height - 10, width - 10]."""
    if picture.size != other.size or min(picture.size) < _WINDOW:
        raise ValueError(f"ssim needs two pictures of one size, from 11 pixels a side: {picture.size}, {other.size}")
    one, two = _channels(picture), _channels(other)
    mean_one, mean_two = _blur(one), _blur(two)
    variance_one = _blur(one * one) - mean_one**2
    variance_two = _blur(two * two) - mean_two**2
    covariance = _blur(one * two) - mean_one * mean_two
    above = (2 * mean_one * mean_two + _C1) * (2 * covariance + _C2)
    below = (mean_one**2 + mean_two**2 + _C1) * (variance_one + variance_two + _C2)
    return (above / below)[:, 0]


def _channels(picture: PIL.Image.Image) -> torch.Tensor:
    """(3, 1, height, width)."""
    return torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.float64)).permute(2, 0, 1)[:, None]


def _blur(values: torch.Tensor) -> torch.Tensor:
    """The window's weighted mean at each place where the whole window fits."""
    distance = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    weights = torch.exp(-distance.square() / (2 * _SIGMA**2))
    weights = weights / weights.sum()
    return conv2d(conv2d(values, weights[None, None, None, :]), weights[None, None, :, None])
