"""Jobs whose prompts are not encoded yet, and requests whose add-ons are not ready for the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bottega.device.device import PausableWork
from bottega.engine.addon import EngineAddOn, Parts, close_parts, open_parts
from bottega.engine.batcher import Batcher
from bottega.engine.errors import to_job_failure
from bottega.engine.events import Event, JobDecided, JobFailed, JobStarted
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.request import Request


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingOrder:
    """A job whose prompt and picture have not been encoded."""

    order: EngineOrder
    addons: Parts
    """The states of its add-ons."""
    held: Parts = field(default_factory=dict)
    """The states of the add-ons that were not ready when they were asked last."""
    encoding: PausableWork[EngineJob] | None = None
    """The encoding, once it has begun."""

    @property
    def encodes_image(self) -> bool:
        """Whether an image is being encoded, and paused."""
        return self.encoding is not None and self.order.image is not None

    def refuse(self, error: Exception) -> JobFailed:
        """Close the job's add-ons, and return its failure."""
        close_parts(self.addons)
        return JobFailed(key=self.order.key, error=to_job_failure(error))


class WaitingOrders:
    """The jobs whose prompts and pictures have not been encoded, oldest first.

    Args:
        addons: The engine's add-ons.
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
        """Remove a job. Do nothing if it is unknown."""
        for waiting in [waiting for waiting in self._waiting if waiting.order.key == key]:
            self._waiting.remove(waiting)
            close_parts(waiting.addons)

    def enable_previews(self, key: Hashable) -> None:
        """Add previews to the progress of a job. Do nothing if it is unknown."""
        for waiting in self._waiting:
            if waiting.order.key == key:
                waiting.order = replace(waiting.order, preview=True)

    def put_back(self, waiting: WaitingOrder) -> None:
        """Let a job wait again whose encoding is paused. It is its tenant's next one."""
        self._waiting.appendleft(waiting)

    def take_ready(
        self, now_s: float, *, used: Callable[[str], float], may_begin: Callable[[str], bool]
    ) -> Iterator[WaitingOrder | JobFailed]:
        """Remove and yield the next job whose prompt can be encoded, after failures of those that never can be.

        Args:
            now_s: The engine's clock.
            used: Returns how much of the device a tenant has used. The oldest job of the tenant with the least is next.
            may_begin: Returns whether a tenant's job may be encoded now.
        """
        ordered = sorted(self._waiting, key=lambda waiting: used(waiting.order.share.tenant))
        # A paused encoding of an image holds memory, so there is one at a time.
        encodes_image = any(waiting.encodes_image for waiting in self._waiting)
        for waiting in ordered:
            if encodes_image and waiting.encoding is None and waiting.order.image is not None:
                continue
            try:
                waiting.held = {addon: part for addon, part in waiting.addons.items() if not part.ready(now_s)}
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                self._waiting.remove(waiting)
                yield waiting.refuse(error)
                continue
            if waiting.held:
                continue
            if not may_begin(waiting.order.share.tenant):
                return  # The tenants of all later ones have used more.
            self._waiting.remove(waiting)
            yield waiting
            return


# How long an idle engine waits for the data of jobs. It is short because commands are read between turns.
_PAUSE_S = 0.05


class ReadinessGate:
    """Adds requests to the batcher when their add-ons are ready, and removes them when they are not."""

    def __init__(self, batcher: Batcher[Request], addons: Sequence[EngineAddOn]) -> None:
        self._batcher = batcher
        self._addons = addons

    def update(self, job: EngineJob, now_s: float) -> Iterator[Event]:
        """Add requests of a job to the batcher if they can make their next step, and remove the others.

        Raises:
            BottegaError: The job can never go on.
        """
        if job.started and not job.addons:
            return
        for part in job.addons.values():
            part.update(now_s)
        yield from self._decisions(job)
        under_way = [request for request in job.runs if not request.done]
        blocked = set[Request]()
        job.held = {}
        for addon, part in job.addons.items():
            if held := {request for request in under_way if part.blocks(request)}:
                job.held, blocked = {**job.held, addon: part}, blocked | held
        for request in job.runs:
            if request in blocked:
                self._batcher.remove(request)
            elif not request.done and request not in self._batcher:
                self._batcher.add(request, job.order.share)
                if request.alone:
                    self._batcher.make_exclusive(request)
        if not job.started and len(blocked) < len(job.runs):
            job.started, job.checkpoint_s = True, now_s
            yield JobStarted(key=job.key, steps_total=job.steps_total, steps_resumed=job.steps_resumed)

    def wait(self, held: Sequence[Parts]) -> None:
        """Wait briefly for the data of the add-ons that hold jobs, when there is nothing else to do."""
        for addon in self._addons:
            waiting = [part for parts in held if (part := parts.get(addon)) is not None]
            if waiting:
                addon.wait(waiting, _PAUSE_S)
                return

    def _decisions(self, job: EngineJob) -> Iterator[Event]:
        """Yield the decisions that add-ons made since the last call, before the steps that they change."""
        made = {addon.kind: part.decision for addon, part in job.addons.items()}
        decided = {kind: decision for kind, decision in made.items() if decision is not None}
        if decided != job.decided:
            job.decided = decided
            yield JobDecided(key=job.key, decisions=decided)
