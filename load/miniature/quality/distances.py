"""Distances in the features of two towers."""

from __future__ import annotations

from collections.abc import Sequence

import PIL.Image
import torch
from torch.nn.functional import normalize

from bottega.quality.clip import Clip


def perceptual_distances(
    clip: Clip, pictures: Sequence[PIL.Image.Image], others: Sequence[PIL.Image.Image]
) -> torch.Tensor:
    """For each pair, how far the layers' patches differ: 0 for the same picture, 4 at most.

    As LPIPS (Zhang et al., 2018) without learned weights: squared difference of unit vectors, mean over patches and
    layers.
    """
    found = [
        (normalize(one, dim=-1) - normalize(other, dim=-1)).square().sum(dim=-1).mean(dim=-1)
        for one, other in zip(clip.layers(pictures), clip.layers(others), strict=True)
    ]
    return torch.stack(found).mean(dim=0)


def frechet_distance(features: torch.Tensor, others: torch.Tensor) -> float:
    """Between normal distributions fitted to two sets of features (rows, width); rows need not correspond.

    Needs more rows than the features are wide, and compares only sets of the same size: few rows make it larger.
    Source: FID (Heusel et al., 2017).
    """
    one, other = features.double(), others.double()
    shift = (one.mean(dim=0) - other.mean(dim=0)).square().sum()
    first, second = torch.cov(one.T), torch.cov(other.T)
    root = _root(first)
    # The trace of the root of the product, through a symmetric matrix of the same eigenvalues.
    common = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0.0).sqrt().sum()
    return max(float(shift + first.trace() + second.trace() - 2.0 * common), 0.0)


def _root(matrix: torch.Tensor) -> torch.Tensor:
    """Of a symmetric matrix without negative eigenvalues, but for rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    root: torch.Tensor = (vectors * values.clamp(min=0.0).sqrt()) @ vectors.T
    return root
