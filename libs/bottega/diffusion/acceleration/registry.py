"""Which accelerations there are, in the order in which they are tried, and which of them a worker is to try."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.diffusion.acceleration.acceleration import Acceleration
from bottega.diffusion.acceleration.attention import AttentionBackend, FlashAttention
from bottega.diffusion.acceleration.channels_last import ChannelsLast
from bottega.diffusion.acceleration.compiled import RegionalCompile
from bottega.diffusion.acceleration.graphs.graphs import Graphs
from bottega.diffusion.acceleration.kernels.candidates import kernel_accelerations
from bottega.diffusion.acceleration.pageable_copies import PageableCopies
from bottega.diffusion.model.model import Model
from bottega.errors import ConfigError

AUTO, OFF = "auto", "off"


def all_accelerations() -> list[Acceleration]:
    """New ones, none of them enabled: of one engine. Those that others are tried on top of come first."""
    return [
        PageableCopies(),
        FlashAttention(),
        AttentionBackend("cudnn"),
        AttentionBackend("flash"),
        AttentionBackend("efficient"),
        *kernel_accelerations(),
        # Behind the kernels: torch's own normalization on a GPU would lay feature maps out anew.
        ChannelsLast("unet"),
        ChannelsLast("vae"),
        RegionalCompile(),
        Graphs(),
    ]


def candidates(wanted: str | Sequence[str], model: Model) -> list[Acceleration]:
    """What is tried for a model. wanted: "auto" is all on a GPU and none on a CPU; "off" is none; else names.

    Raises ConfigError for a name that there is not.
    """
    known = all_accelerations()
    if wanted == OFF or (wanted == AUTO and model.device.type == "cpu"):
        return []
    if wanted == AUTO:
        return known
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = sorted(set(names) - {each.name for each in known})
    if unknown:
        there = ", ".join(each.name for each in known)
        raise ConfigError(f"engine.accelerations: there is no {', '.join(unknown)}; auto, off, or of: {there}")
    return [each for each in known if each.name in names]
