"""The accelerations by kernels, in the order in which the self-check tries them."""

from __future__ import annotations

from bottega.diffusion.acceleration.acceleration import Acceleration
from bottega.diffusion.acceleration.kernels.geglu import Geglu
from bottega.diffusion.acceleration.kernels.group_norm import GroupNormSilu
from bottega.diffusion.acceleration.kernels.guided_euler import GuidedEulerStep
from bottega.diffusion.acceleration.kernels.lora_patch import LoraPatch
from bottega.diffusion.acceleration.kernels.masked_moves import MaskedMoves


def kernel_accelerations() -> list[Acceleration]:
    """Return new accelerations for one engine, none of them enabled."""
    return [
        GroupNormSilu("unet"),
        Geglu(),
        GroupNormSilu("vae"),
        LoraPatch(),
        MaskedMoves(),
        GuidedEulerStep(),
    ]
