"""The values that a worker's engine passes to the add-ons that it loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from bottega.device.heartbeat import Heartbeat
from bottega.model.model import Model
from bottega.transport import DeviceLinks, LinkCounters, OfferSource

SectionT = TypeVar("SectionT")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddOnContext:
    """The arguments of the function that makes an engine add-on."""

    sections: Sequence[object]
    """The objects that make up the engine's configuration, each of a different class."""
    fixed_rows: int
    """Batch rows to which every forward pass is padded; 0 for no padding."""
    model: Model
    offers: OfferSource
    """Opens tensor connections to services."""
    counters: LinkCounters
    """Metrics of all tensor connections of the process."""
    heartbeat: Heartbeat
    """Shows that the engine is alive while it computes a forward pass."""
    devices: DeviceLinks | None = None
    """Connections between GPUs; None where they are not possible."""

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the object in `sections` that is of this class."""
        return next(section for section in self.sections if isinstance(section, kind))
