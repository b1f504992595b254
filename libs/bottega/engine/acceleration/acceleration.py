"""The interface of accelerations, the result of the self-check, and the replacement of modules' `forward` methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from bottega.model.model import Model

Probe = Callable[[], Sequence[Tensor]]
"""A computation that an acceleration speeds up, on inputs of the model's usual size.

Returns its results in a fixed order.
"""


class Acceleration(Protocol):
    """A faster way to compute the same results. It changes nothing before `enable`."""

    name: str
    """For example "kernels.group_norm_silu" or "attention.cudnn"; [a-z0-9_.-], at most 64 characters."""
    probe: str
    """Name of the probe that it should speed up: one of the engine, such as "forward" or "decode", or of an add-on."""
    tolerance: float
    """Largest allowed |difference| of the probe's results, as a fraction of the plain path's largest |value|."""
    excludes: Sequence[str]
    """Names of alternatives. It is not tried if one of them is used already."""

    def unsupported(self, model: Model) -> str:
        """Return why it cannot be tried on this model and device, as one sentence; "" if it can be."""
        ...

    def enable(self, model: Model) -> None:
        """Make the engine compute in this way. After an error, it is not used."""
        ...

    def disable(self) -> None:
        """Undo `enable`, bit for bit. May also be called after a failed `enable`, or before any."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerationResult:
    """The self-check's result for one acceleration."""

    name: str
    kept: bool
    """Whether the worker uses it."""
    speedup: float = 0.0
    """Time of the plain path divided by that of the accelerated one; 0 if not timed."""
    difference: float = 0.0
    """Measured difference, in the unit of `tolerance`; 0 if not compared."""
    tolerance: float = 0.0
    reason: str = ""
    """Why it is not used, as a sentence; "" if it is."""


class Forwards:
    """The modules whose `forward` is replaced. Their hooks still run."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any]] = []

    @property
    def count(self) -> int:
        """Number of modules whose `forward` is replaced."""
        return len(self._replaced)

    def replace(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        """Replace a module's `forward` until `restore`. A module can be replaced only once."""
        # The instance attribute hides the class's forward; another tool may have set one before.
        self._replaced.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def restore(self) -> None:
        """Restore all replaced methods."""
        while self._replaced:
            module, before = self._replaced.pop()
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
