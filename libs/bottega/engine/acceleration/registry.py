"""The list of all accelerations, in the order in which they are tried, and the choice of those that a worker tries."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.engine.acceleration.acceleration import Acceleration
from bottega.engine.acceleration.graphs.graphs import Graphs
from bottega.engine.acceleration.kernels.layers import Geglu, GroupNormSilu
from bottega.engine.acceleration.kernels.operations import GuidedEulerStep, LoraPatch, MaskedMoves
from bottega.engine.acceleration.torch_options import (
    AttentionBackend,
    ChannelsLast,
    FlashAttention,
    PageableCopies,
    RegionalCompile,
)
from bottega.errors import ConfigError
from bottega.model.model import Model

AUTO, OFF = "auto", "off"


def all_accelerations() -> list[Acceleration]:
    """Return new accelerations, not enabled, in the order in which they are tried on top of each other."""
    return [
        PageableCopies(),
        FlashAttention(),
        AttentionBackend("cudnn"),
        AttentionBackend("flash"),
        AttentionBackend("efficient"),
        GroupNormSilu("unet"),
        Geglu(),
        GroupNormSilu("vae"),
        LoraPatch(),
        MaskedMoves(),
        GuidedEulerStep(),
        # After the kernels: torch's own normalization on a GPU would change the layout of feature maps.
        ChannelsLast("unet"),
        ChannelsLast("vae"),
        RegionalCompile(),
        Graphs(),
    ]


def candidates(wanted: str | Sequence[str], model: Model) -> list[Acceleration]:
    """Return the accelerations to try on a model. Raise ConfigError for an unknown name.

    `wanted` is a list of names, "off" for none, or "auto", which is all on a GPU and none on a CPU.
    """
    known = all_accelerations()
    if wanted == OFF or (wanted == AUTO and model.device.type == "cpu"):
        return []
    if wanted == AUTO:
        return known
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = sorted(set(names) - {acceleration.name for acceleration in known})
    if unknown:
        available = ", ".join(acceleration.name for acceleration in known)
        raise ConfigError(
            f"engine.accelerations: unknown {', '.join(unknown)}; use auto, off, or names of: {available}"
        )
    return [acceleration for acceleration in known if acceleration.name in names]
