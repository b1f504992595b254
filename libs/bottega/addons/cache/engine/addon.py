"""The engine add-on for cached latents: queries a cache when a prompt is encoded, and uses latents that arrive in time.

A job hardly waits for similar latents: only until the prompt's embedding has been copied from the device, and then for
at most a tenth of a step until a cache responds. After that it begins from noise. If a latent arrives later, a picture
continues from it, unless the picture has made as many steps itself. A job does wait for a latent that its request or an
earlier attempt names, because all attempts must draw the same picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from bottega import kinds, rules
from bottega.addons.cache.engine.job_starts import JobCachedStarts
from bottega.addons.cache.engine.order import PIN_FIELD, StartOrder, has_key, read_order, start_key
from bottega.addons.cache.engine.recorder import (
    LatentSource,
)
from bottega.engine.addon import EngineAddOn, JobAddOn, add_counts
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.errors import Violation
from bottega.model.model import Model
from bottega.model.rows import Row
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import ServiceAddress

EVENTS = ("hits", "steps_skipped", "late_hits", "unfit_hits", "recordings", "dropped_recordings")


class EngineCachedStarts(EngineAddOn):
    """The engine add-on for cached latents.

    Attributes:
        events: See `counts`.
        step_s: Seconds of the last step of any job; 0 before the first.

    Args:
        model: The model that draws.
        source: Provides latents and accepts recordings.
        timeout_s: Seconds that a job waits for a latent that it must start from.
    """

    kind = kinds.CACHE

    def __init__(
        self,
        model: Model,
        source: LatentSource,
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self.model = model
        self.source = source
        self.timeout_s = timeout_s
        self.events: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self.step_s = 0.0

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of events, by the names in `EVENTS`.

        - hits: pictures that started from a latent; steps_skipped: steps that they did not compute
        - late_hits, unfit_hits: latents that arrived too late, or did not fit
        - recordings, dropped_recordings: recordings that were accepted, or dropped because the buffer was full
        """
        return self.events

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add the counts to the engine's periodic report."""
        add_counts(beat, self.kind, self.counts)

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """Set the addresses of the caches."""
        self.source.set_stores(services)

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Return the add-on's object for one job, or None if the job uses no cached latents.

        Raises:
            InvalidRequest: The order is malformed, or names a latent that no job of this kind can start from.
        """
        start = read_order(order)
        if start is None and kinds.CACHE not in order.decisions:
            return None
        start = start or StartOrder()
        if not has_key(order.spec):
            if start.pin is not None:
                rule = "must be absent: a picture like this never starts from a cached latent"
                rules.refuse([Violation(field=PIN_FIELD, description=rule)])
            return None
        if not (start.read or start.record or start.pin or kinds.CACHE in order.decisions):
            return None
        return JobCachedStarts(self, start)

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Wait until an embedding or a response has arrived, or until the time-out."""
        for part in parts:
            if isinstance(part, JobCachedStarts) and part.arriving is not None:
                part.arriving.take()
                return
        asked = [part.asked for part in parts if isinstance(part, JobCachedStarts) and part.asked is not None]
        wait(asked, timeout_s, FIRST_COMPLETED)

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None, *, masked: bool) -> bool:
        """Record the time of a forward pass without masked rows."""
        if not masked:
            self.step_s = seconds
        return True

    def key_of(self, spec: ResolvedSpec, tenant: str) -> str:
        """Return the key that two jobs must share for one to start from the other's latents."""
        return start_key(spec, model_hash=self.model.digest, dtype=self.model.dtype_name, tenant=tenant)
