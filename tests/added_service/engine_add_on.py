"""What a worker's engine does for jobs with colours in their prompt: all attempts at one use the same store's."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.engine.addon import EngineAddOn, EngineAddOnContext, JobAddOn
from bottega.engine.encode import Conditions
from bottega.engine.events import EngineRecord
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.request import Request
from bottega.v1.fleet_pb2 import ServiceAddress
from tests.added_service.calls import messages
from tests.added_service.service_spec import KIND


def create(_context: EngineAddOnContext) -> ColourEngineAddOn:
    """The add-on that the manifest names."""
    return ColourEngineAddOn()


class ColourEngineAddOn(EngineAddOn):
    """All colours of an engine. stores: that there are now, by name."""

    kind = KIND

    def __init__(self) -> None:
        self.stores: list[str] = []

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        self.stores = [service.name for service in services]

    def open(self, order: EngineOrder) -> JobAddOn | None:
        names = messages.ColourOrder.FromString(order.addons.get(KIND, b"")).names
        return JobColours(self) if names else None


class JobColours(JobAddOn):
    """The store of one job."""

    def __init__(self, addon: ColourEngineAddOn) -> None:
        self._addon = addon
        self._store = ""
        self._waiting_since_s = 0.0
        self._waited_s = 0.0

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        self._waiting_since_s = now_s
        self._use(messages.ColourDecision.FromString(job.pinned.get(KIND, b"")).store)

    def update(self, now_s: float) -> None:
        if not self._store and self._addon.stores:
            self._use(self._addon.stores[0])
            self._waited_s = now_s - self._waiting_since_s

    def blocks(self, request: Request) -> bool:
        return not self._store

    def _use(self, store: str) -> None:
        self._store = store
        self.decision = messages.ColourDecision(store=store).SerializeToString() if store else None

    def report(self, record: EngineRecord) -> None:
        record.seconds[KIND] = self._waited_s
