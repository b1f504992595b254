"""The interface of accelerations, and the result of the self-check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.model.model import Model

Probe = Callable[[], Sequence[Tensor]]
"""A computation that an acceleration speeds up, on inputs of the model's own size. Returns its results in a fixed
order.
"""


class Acceleration(Protocol):
    """A faster way to compute the same. It changes nothing before `enable`."""

    name: str
    """For example "kernels.group_norm_silu" or "attention.cudnn"; [a-z0-9_.-], at most 64 characters."""
    probe: str
    """The probe that shows the gain: one of the engine, such as "forward" or "decode", or of an add-on."""
    tolerance: float
    """Largest allowed |difference| of the probe's results, as a share of the plain result's largest |value|."""
    excludes: Sequence[str]
    """Names of alternatives: it is not tried if one of them is kept."""

    def unsupported(self, model: Model) -> str:
        """Return why it cannot be tried on this model and device, as one sentence; empty if it can."""
        ...

    def enable(self, model: Model) -> None:
        """Make the engine compute this way. An error counts as a refusal."""
        ...

    def disable(self) -> None:
        """Restore the state before `enable`, bit for bit. Does nothing if not enabled; also works if half enabled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerationResult:
    """The self-check's result for one acceleration."""

    name: str
    kept: bool
    """Whether the worker uses it."""
    speedup: float = 0.0
    """Plain time divided by accelerated time of the probe; 0 if not timed."""
    difference: float = 0.0
    """As `Acceleration.tolerance`; 0 if not compared."""
    tolerance: float = 0.0
    reason: str = ""
    """Why it is off, as a sentence; empty if kept."""
