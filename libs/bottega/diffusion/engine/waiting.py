"""The jobs of an engine whose prompts have not been encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from bottega.diffusion.engine.addon import EngineAddOn, Parts, close_parts, open_parts
from bottega.diffusion.engine.events import JobFailed
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.errors import to_job_failure


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitingOrder:
    """A job whose prompt has not been encoded."""

    order: EngineOrder
    addons: Parts
    """Its parts of add-ons."""

    def refuse(self, error: Exception) -> JobFailed:
        """Close its parts, and return its failure."""
        close_parts(self.addons)
        return JobFailed(key=self.order.key, error=to_job_failure(error))


class WaitingOrders:
    """The jobs whose prompts have not been encoded, oldest first.

    Args:
        addons: The engine's add-ons, which open a part of each job that needs them.
    """

    def __init__(self, addons: Sequence[EngineAddOn]) -> None:
        self._addons = addons
        self._waiting: deque[WaitingOrder] = deque()

    def __iter__(self) -> Iterator[WaitingOrder]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, order: EngineOrder) -> None:
        """Add a job. Raise the BottegaError of an add-on that cannot serve it."""
        self._waiting.append(WaitingOrder(order=order, addons=open_parts(self._addons, order)))

    def drop(self, key: Hashable) -> None:
        """Forget a job, if it is here."""
        for waiting in [waiting for waiting in self._waiting if waiting.order.key == key]:
            self._waiting.remove(waiting)
            close_parts(waiting.addons)

    def enable_previews(self, key: Hashable) -> None:
        """Add previews to the progress of a job, if it is here."""
        self._waiting = deque(
            replace(waiting, order=replace(waiting.order, preview=True)) if waiting.order.key == key else waiting
            for waiting in self._waiting
        )

    def take_ready(
        self, now_s: float, *, used: Callable[[str], float], may_begin: Callable[[str], bool]
    ) -> Iterator[WaitingOrder | JobFailed]:
        """Remove and yield the next job whose prompt can be encoded, after failures of those that never can be.

        Args:
            now_s: The engine's clock.
            used: Returns how much of the device a tenant has used. The oldest job of the tenant with least is next.
            may_begin: Returns whether a tenant's job may be encoded now.
        """
        ordered = sorted(self._waiting, key=lambda waiting: used(waiting.order.share.tenant))
        for waiting in ordered:
            try:
                if not all(part.prompt_ready(now_s) for part in waiting.addons.values()):
                    continue
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                self._waiting.remove(waiting)
                yield waiting.refuse(error)
                continue
            if not may_begin(waiting.order.share.tenant):
                return  # All later ones have used more.
            self._waiting.remove(waiting)
            yield waiting
            return
