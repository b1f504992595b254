"""The jobs that an engine has taken in and whose prompts have not been encoded yet."""

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
    """A job whose prompt has not been encoded. addons: its parts."""

    order: EngineOrder
    addons: Parts

    def refuse(self, error: Exception) -> JobFailed:
        """It is not drawn, because of this. Its parts are closed."""
        close_parts(self.addons)
        return JobFailed(key=self.order.key, error=to_job_failure(error))


class WaitingOrders:
    """The oldest first. addons: what opens a part of each job that needs it."""

    def __init__(self, addons: Sequence[EngineAddOn]) -> None:
        self._addons = addons
        self._waiting: deque[WaitingOrder] = deque()

    def __iter__(self) -> Iterator[WaitingOrder]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, order: EngineOrder) -> None:
        """Raises what an add-on raises that cannot serve it."""
        self._waiting.append(WaitingOrder(order=order, addons=open_parts(self._addons, order)))

    def drop(self, key: Hashable) -> None:
        """Forgets a job. Harmless when it is not here."""
        for waiting in [each for each in self._waiting if each.order.key == key]:
            self._waiting.remove(waiting)
            close_parts(waiting.addons)

    def enable_previews(self, key: Hashable) -> None:
        """The job's progress will have previews. Harmless when it is not here."""
        self._waiting = deque(
            replace(each, order=replace(each.order, preview=True)) if each.order.key == key else each
            for each in self._waiting
        )

    def take_ready(
        self, now_s: float, *, used: Callable[[str], float], may_begin: Callable[[str], bool]
    ) -> Iterator[WaitingOrder | JobFailed]:
        """Take out the next job whose prompt has all that it needs, and those before it that never will have.

        Args:
            now_s: The engine's clock.
            used: What a tenant has used of the device: of that with least, the oldest job is next.
            may_begin: Whether a tenant's job may be encoded now.
        """
        ordered = sorted(self._waiting, key=lambda each: used(each.order.share.tenant))
        for waiting in ordered:
            try:
                if not all(part.prompt_ready(now_s) for part in waiting.addons.values()):
                    continue
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                self._waiting.remove(waiting)
                yield waiting.refuse(error)
                continue
            if not may_begin(waiting.order.share.tenant):
                return  # nor may those that come after it
            self._waiting.remove(waiting)
            yield waiting
            return
