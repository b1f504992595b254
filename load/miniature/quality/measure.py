"""All figures of a set of pictures at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import PIL.Image

from bottega.quality.clip import Clip, clip_scores
from load.miniature.quality.distances import frechet_distance, perceptual_distances
from load.miniature.quality.ssim import ssim


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
    """pictures[i] was drawn for texts[i]; references[i] is what it should look like, of the same size.

    frechet compares the sets, and says little with fewer pictures than features (64 for the miniature).
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
