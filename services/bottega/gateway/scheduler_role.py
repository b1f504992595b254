"""Who the scheduler is, of several gateways that share their jobs, as one of them knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """The gateway that holds the scheduler's lease."""

    generation: int
    """Generation of the lease: a number that rises with every takeover."""
    name: str
    """Name in its configuration."""
    address: str
    """host:port of its public port, for other gateways."""
    fleet_address: str = ""
    """host:port of its port for services."""
    objects: str = ""
    """Where its pictures are, s3://bucket/prefix; empty if they are in its own folder, where no other reads them."""
    page_token_key: bytes = field(default=b"", repr=False, compare=False)
    """Key of the page tokens, the same for all gateways."""


class SchedulerRole:
    """Whether this gateway is the scheduler, and which one is. The lease sets it, and everything else reads it.

    Attributes:
        holder: The scheduler, perhaps this gateway; None if there is none, or it is unknown.
        held: Whether this gateway is the scheduler.
        serves: Whether it is the scheduler and has read the jobs.
        lost: Whether it was the scheduler and another gateway has taken the lease since.
    """

    def __init__(self) -> None:
        self.holder: LeaseHolder | None = None
        self.held = self.serves = self.lost = False
        self._own_generation = 0
        self._changed = asyncio.Event()

    @property
    def other(self) -> LeaseHolder | None:
        """The other gateway that is the scheduler, or None."""
        return None if self.held else self.holder

    @property
    def generation(self) -> int:
        """Generation of the newest lease that this gateway has held; 0 if it never was the scheduler."""
        return self._own_generation

    def set(self, holder: LeaseHolder | None, *, held: bool = False, serves: bool = False, lost: bool = False) -> None:
        """Set who the scheduler is, and wake those that wait for a change."""
        self.holder, self.held, self.serves, self.lost = holder, held, serves, lost
        if held and holder is not None:
            self._own_generation = holder.generation
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def change(self) -> None:
        """Return at the next change."""
        await self._changed.wait()
