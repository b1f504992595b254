"""What every acceleration is, and what the self-check says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.diffusion.model.model import Model

Probe = Callable[[], Sequence[Tensor]]
"""What an acceleration speeds up, run once on inputs of the model's own size. Returns what it made, in one order."""


class Acceleration(Protocol):
    """One way to compute the same faster. It changes nothing before `enable`.

    name: such as "kernels.group_norm_silu", "attention.cudnn", "graphs", "compile"; [a-z0-9_.-], at most 64 characters.
    probe: which of the engine's probes shows what it gains: "forward", "decode", "patch", "step", "masked", "copies".
    tolerance: largest |difference| that the probe's results may have, as a share of the plain result's largest |value|.
    excludes: names of others in whose place it would be: it is not tried where one of them is kept.
    """

    name: str
    probe: str
    tolerance: float
    excludes: Sequence[str]

    def unsupported(self, model: Model) -> str:
        """Why it cannot be tried on this model and device, one sentence; empty where it can."""
        ...

    def enable(self, model: Model) -> None:
        """From now on the engine computes this way. Raises what it raises: it counts as refused then."""
        ...

    def disable(self) -> None:
        """As before `enable`, to the last bit. Harmless when it is not enabled, or only half."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerationResult:
    """What the self-check found of one acceleration.

    kept: whether the worker uses it. speedup: plain time over its own, of the probe; 0 where it was not timed.
    difference: as `tolerance`; 0 where it was not compared. reason: why it is off, for a person; empty where it is
    kept.
    """

    name: str
    kept: bool
    speedup: float = 0.0
    difference: float = 0.0
    tolerance: float = 0.0
    reason: str = ""
