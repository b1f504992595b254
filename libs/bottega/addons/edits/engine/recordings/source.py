"""The interface of a source of recordings: this worker's memory, or that and the activation stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from bottega.addons.edits.engine.recordings.keys import RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording
from bottega.engine.store_work import StoreWork
from bottega.v1.fleet_pb2 import ServiceAddress

EVENTS = ("hits", "misses", "recorded", "given_up", "evictions", "dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateQuery:
    """A query for the recording of a template."""

    key: RecordingKey
    recording: str = ""
    """ID of the only acceptable recording, 32 hex digits; empty for any."""
    would_record: bool = True
    """Whether the job would record the template if there is no recording."""
    origin: str = ""
    """Name of the source image at the gateway; see `Recording`."""
    width: int = 0
    """Width of the picture in pixels; 0 if not known."""
    height: int = 0


class ActivationSource(Protocol):
    """Finds, makes and keeps recordings. No method blocks.

    The engine's thread makes all calls except `stop` and those for operators. A recording that was handed out is in use
    until it is released: it is not evicted, and tensors that its steps hold stay valid. Parts of it may be in a store
    and must be requested; the engine computes what a step does not have. Loaded parts may be dropped for others that
    are needed sooner.
    """

    @property
    def load_bytes_per_s(self) -> float | None:
        """Recent rate of loading, above 0; None if nothing is ever loaded because everything is in this process."""
        ...

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Set the stores that exist now, the best first."""
        ...

    def ask(self, query: TemplateQuery) -> Future[StoreWork | None]:
        """Look up a template in the background, so that `find` and `begin` can respond at once.

        The future never fails. Its result is the time that a store spent on the query, if one was asked. Cancel it to
        stop waiting.
        """
        ...

    def find(self, key: RecordingKey, recording: str = "") -> Recording | None:
        """Return a template's complete recording, now in use, or None. `recording` is the only acceptable ID."""
        ...

    def begin(
        self, key: RecordingKey, shape: tuple[int, int], drawn: DrawnTemplate | None = None, *, origin: str = ""
    ) -> Recording | None:
        """Begin a template's recording, which is in use until it is completed or abandoned; see `Recording`.

        Return None if the template has a recording or one is being made.
        """
        ...

    def changed(self, recording: Recording, key: StepKey) -> None:
        """Handle that a step was added, replaced or extended. Other processes get the recording when it is complete."""
        ...

    def reserve(self, recording: Recording, size_bytes: int) -> bool:
        """Reserve memory so that the recording may have `size_bytes` in total. Return whether there is enough."""
        ...

    def complete(self, recording: Recording) -> None:
        """Publish a recording that was begun, and release it."""
        ...

    def abandon(self, recording: Recording) -> None:
        """Discard a recording that was begun."""
        ...

    def release(self, recording: Recording) -> None:
        """Release a recording that was found."""
        ...

    # For operators.

    @property
    def budget_bytes(self) -> int:
        """Maximum bytes of all recordings."""
        ...

    @property
    def spare_bytes(self) -> int:
        """Unused bytes of the budget."""
        ...

    @property
    def recordings(self) -> Sequence[Recording]:
        """The recordings in this process, most recently used first."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of events since the start, by the names in `EVENTS`."""
        ...

    def drop(self, prefix: str) -> int:
        """Remove the idle recordings whose IDs begin with `prefix`, and return how many there were."""
        ...

    def stop(self) -> None:
        """Close the connections. Thread-safe; later calls do nothing."""
        ...
