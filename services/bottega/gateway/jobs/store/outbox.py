"""The outbox of a job store: the webhook events of ended jobs that are to be delivered, and those that were given up.

An event is written in the transaction that ends its job, so there is no job whose event is lost and no event of a job
that did not end. It is stored until it is delivered, also if its job is deleted, and has one ID for all its deliveries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEvent:
    """A webhook event in the outbox. Names that end in `_steady` are times of the steady clock."""

    event_id: str
    job_id: str
    tenant: str
    kind: str
    """Type of the event, such as job.completed."""
    url: str
    """Where it is delivered."""
    host: str
    """Host of the URL; deliveries to one host are limited."""
    body: bytes
    """The payload, the same for each delivery."""
    created_wall: float
    """Time of the job's end, in Unix seconds."""
    tried_since_steady: float
    """Time from which the event is tried: the job's end, or the last replay."""
    due_steady: float
    """Time of the next delivery."""
    attempts: int = 0
    """Number of deliveries that have failed since `tried_since_steady`."""
    error: str = ""
    """Why the last delivery failed."""
    dead: bool = False
    """Whether it was given up, and waits for a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxPlace:
    """The fields of an event by which deliveries are scheduled."""

    number: int
    """Number of the event in the order in which events were written; it is never used again."""
    event_id: str
    tenant: str
    host: str
    due_steady: float
    created_wall: float
    attempts: int = 0
    dead: bool


class Outbox(Protocol):
    """The outbox of a job store. JobStore.add and JobStore.update write events to it.

    Methods raise as those of JobStore do. One process at a time delivers.
    """

    async def places(self, *, after: int, limit: int) -> list[OutboxPlace]:
        """Return the first `limit` events with numbers above `after`, by number."""

    async def get(self, event_id: str) -> OutboxEvent | None:
        """Return an event, or None. Raises DataLoss if its row is damaged."""

    async def replace(self, event: OutboxEvent) -> bool:
        """Store the changed event under its ID. Return False if it is not there any more."""

    async def remove(self, event_ids: Sequence[str]) -> int:
        """Remove events, and return how many there were."""

    async def page(
        self, *, tenant: str | None, dead: bool | None, before: int | None, size: int
    ) -> list[tuple[int, OutboxEvent]]:
        """Return up to `size` events with their numbers, newest first. Damaged ones are omitted.

        Args:
            tenant: The tenant whose events are listed; None for all.
            dead: Whether to list those that were given up or those that wait; None for both.
            before: Number before which to begin; None begins with the newest.
            size: Upper bound on the number of events.
        """
