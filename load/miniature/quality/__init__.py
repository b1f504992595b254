"""The quality harness: CLIP score, Fréchet and perceptual distance, SSIM. It imports torch.

By default the features are those of the miniature's own towers, which have seen nothing but its scenes: figures
compare pictures of the miniature with each other, and not with figures published for CLIP, LPIPS or
Inception. `load_clip` takes a CLIP of transformers by path, for other models.

What the CLIP score of the miniature's towers does not see is which thing has which colour: of 645 rendered scenes of
two things it preferred the right caption to one with the colours exchanged in 50 %: chance. The oracle sees it.
"""

from bottega.quality.clip import Clip, clip_scores, load_clip, load_miniature
from load.miniature.quality.distances import frechet_distance, perceptual_distances
from load.miniature.quality.measure import Quality, measure
from load.miniature.quality.ssim import ssim, ssim_within

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
