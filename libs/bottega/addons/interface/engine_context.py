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
    """The values from which the factory of an engine add-on makes it."""

    sections: Sequence[object]
    """The sections of the engine's configuration."""
    fixed_rows: int
    """Number of rows to which every forward pass is padded; 0 for no padding."""
    model: Model
    offers: OfferSource
    """Opens links to services."""
    counters: LinkCounters
    """Counts all links of the process."""
    heartbeat: Heartbeat
    """Beats while a turn runs."""
    devices: DeviceLinks | None = None
    """Links between devices, where they are possible."""

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the section of the engine's configuration that is of this class."""
        return next(section for section in self.sections if isinstance(section, kind))
