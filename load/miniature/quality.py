"""The quality harness: CLIP score, Fréchet and perceptual distance, SSIM. It imports torch.

By default the features are those of the miniature's own towers, which were trained on its scenes alone: figures compare
pictures of the miniature with each other, and not with figures published for CLIP, LPIPS or Inception. `load_clip`
takes a CLIP of transformers by path, for other models.

The CLIP score of the miniature's towers does not tell which thing has which colour: of 645 rendered scenes of two
things it preferred the right caption to one with the colours exchanged in 50 %: chance. The oracle tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
import PIL.Image
import torch
from torch.nn.functional import conv2d, normalize

from bottega.quality.clip import Clip, clip_scores, load_clip, load_miniature

__all__ = [
    "Clip",
    "Quality",
    "clip_scores",
    "frechet_distance",
    "load_clip",
    "load_miniature",
    "measure",
    "perceptual_distances",
    "ssim",
    "ssim_within",
]

# Of the paper: an 11 x 11 Gaussian window of standard deviation 1.5; K1 and K2, for levels 0 to 255.
_WINDOW = 11
_SIGMA = 1.5
_C1 = (0.01 * 255.0) ** 2
_C2 = (0.03 * 255.0) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Means over the pictures. The last three compare with references, and are None without."""

    clip_score: float
    frechet: float | None = None
    perceptual: float | None = None
    ssim: float | None = None


def measure(
    clip: Clip,
    pictures: Sequence[PIL.Image.Image],
    texts: Sequence[str],
    references: Sequence[PIL.Image.Image] | None = None,
) -> Quality:
    """Measure a set of pictures.

    Args:
        clip: The towers.
        pictures: What was drawn.
        texts: The prompt of each picture.
        references: What each picture should look like, of the same size. The Fréchet distance compares the sets, and
            has little meaning with fewer pictures than features (64 for the miniature).
    """
    score = float(clip_scores(clip, pictures, texts).mean())
    if references is None:
        return Quality(clip_score=score)
    return Quality(
        clip_score=score,
        frechet=frechet_distance(clip.embed_pictures(pictures), clip.embed_pictures(references)),
        perceptual=float(perceptual_distances(clip, pictures, references).mean()),
        ssim=mean(ssim(one, other) for one, other in zip(pictures, references, strict=True)),
    )


def ssim(picture: PIL.Image.Image, other: PIL.Image.Image) -> float:
    """Return the structural similarity of two pictures, as Wang et al. (2004) define it.

    It is 1 for the same picture and around 0 for unrelated ones: the mean over red, green, blue and all whole windows.
    Raises ValueError when the sizes differ or are below 11 pixels a side.
    """
    return float(_similarity(picture, other).mean())


def ssim_within(picture: PIL.Image.Image, other: PIL.Image.Image, region: torch.Tensor) -> float:
    """Return the same over the windows whose centres lie in a region, bool [height, width].

    Raises ValueError also where no whole window has its centre there, and where the region has another size.
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
    """Return the similarity by channel and window, [3, height - 10, width - 10]."""
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
    """Return (3, 1, height, width)."""
    return torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.float64)).permute(2, 0, 1)[:, None]


def _blur(values: torch.Tensor) -> torch.Tensor:
    """Return the window's weighted mean at each place where the whole window fits."""
    distance = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    weights = torch.exp(-distance.square() / (2 * _SIGMA**2))
    weights = weights / weights.sum()
    return conv2d(conv2d(values, weights[None, None, None, :]), weights[None, None, :, None])


def perceptual_distances(
    clip: Clip, pictures: Sequence[PIL.Image.Image], others: Sequence[PIL.Image.Image]
) -> torch.Tensor:
    """Return for each pair how far the layers' patches differ: 0 for the same picture, 4 at most.

    This is LPIPS (Zhang et al., 2018) without learned weights: squared difference of unit vectors, mean over patches
    and layers.
    """
    found = [
        (normalize(one, dim=-1) - normalize(other, dim=-1)).square().sum(dim=-1).mean(dim=-1)
        for one, other in zip(clip.layers(pictures), clip.layers(others), strict=True)
    ]
    return torch.stack(found).mean(dim=0)


def frechet_distance(features: torch.Tensor, others: torch.Tensor) -> float:
    """Return the distance of normal distributions fitted to two sets of features (rows, width).

    Rows need not correspond. It needs more rows than the features are wide, and compares only sets of the same size:
    few rows make it larger. Source: FID (Heusel et al., 2017).
    """
    one, other = features.double(), others.double()
    shift = (one.mean(dim=0) - other.mean(dim=0)).square().sum()
    first, second = torch.cov(one.T), torch.cov(other.T)
    root = _root(first)
    # The trace of the root of the product, through a symmetric matrix of the same eigenvalues.
    common = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0.0).sqrt().sum()
    return max(float(shift + first.trace() + second.trace() - 2.0 * common), 0.0)


def _root(matrix: torch.Tensor) -> torch.Tensor:
    """Return the root of a symmetric matrix without negative eigenvalues, but for rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    root: torch.Tensor = (vectors * values.clamp(min=0.0).sqrt()) @ vectors.T
    return root
