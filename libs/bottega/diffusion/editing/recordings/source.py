"""Where recordings come from and go to, as the engine sees it: this worker's memory, or a store behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from bottega.diffusion.editing.recordings.keys import RecordingKey, StepKey
from bottega.diffusion.editing.recordings.recording import DrawnTemplate, Recording
from bottega.diffusion.engine.store_work import StoreWork
from bottega.v1.fleet_pb2 import ServiceAddress

EVENTS = ("hits", "misses", "recorded", "given_up", "evictions", "dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateQuery:
    """Is this template recorded? key: of its recordings. recording: this one alone, 32 hex digits; empty is any.

    would_record: whether the job would record it, if nobody has. origin: see Recording. width, height: of what the job
    draws, in pixels; 0 where nobody says.
    """

    key: RecordingKey
    recording: str = ""
    would_record: bool = True
    origin: str = ""
    width: int = 0
    height: int = 0


class ActivationSource(Protocol):
    """All calls come from the engine's thread, but for `stop` and what operators see, and none waits.

    A recording that it hands out is in use until it is released: it is not evicted, and what its steps hold stays where
    it is. A source may hand out one of which parts are elsewhere, to be requested: what a step does not have is
    computed. What was loaded may go again for what its users, or others, need sooner.
    """

    @property
    def load_bytes_per_s(self) -> float | None:
        """How fast what is requested comes, as it was measured of late; None where nothing is ever loaded: what there
        is is here. Positive.
        """
        ...

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """The stores that there are now, the best first."""
        ...

    def ask(self, query: TemplateQuery) -> Future[StoreWork | None]:
        """Finds out, in the background, what `find` and `begin` say of a template.

        Done when they know, with what a store has done for that, where one had to. It never fails. Whoever does not
        wait for it any more cancels it.
        """
        ...

    def find(self, key: RecordingKey, recording: str = "") -> Recording | None:
        """A template's complete recording, in use from now on; None where there is none. recording: only this one."""
        ...

    def begin(
        self, key: RecordingKey, shape: tuple[int, int], drawn: DrawnTemplate | None = None, *, origin: str = ""
    ) -> Recording | None:
        """A new recording of a template, in use from now on, until it is completed or abandoned; see Recording.

        None where somebody is recording the template, and where it has a recording already.
        """
        ...

    def changed(self, recording: Recording, key: StepKey) -> None:
        """A step of it was added, replaced or grown: others may be given it, too, but not before it is complete."""
        ...

    def reserve(self, recording: Recording, size_bytes: int) -> bool:
        """Makes room, so that the recording may take so many bytes in all; whether there is room."""
        ...

    def complete(self, recording: Recording) -> None:
        """A recording that was begun is whole: others may use it. It is not in use any more."""
        ...

    def abandon(self, recording: Recording) -> None:
        """A recording that was begun is worth nothing, and is forgotten."""
        ...

    def release(self, recording: Recording) -> None:
        """One that was found is not used any more."""
        ...

    # What operators see.

    @property
    def budget_bytes(self) -> int:
        """That all recordings may take."""
        ...

    @property
    def spare_bytes(self) -> int:
        """Of the budget, what nothing takes."""
        ...

    @property
    def recordings(self) -> Sequence[Recording]:
        """Those that are here, the one used last first."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """How often what has happened since the start, by EVENTS."""
        ...

    def drop(self, prefix: str) -> int:
        """Forgets the recordings whose ids begin so, but for those in use. Returns how many."""
        ...

    def stop(self) -> None:
        """The process ends: closes links. From any thread; harmless the second time."""
        ...
