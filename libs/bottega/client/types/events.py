"""What happens to a job, as typed events."""

from __future__ import annotations

from dataclasses import dataclass, field

from bottega.client.types.picture import Picture
from bottega.client.types.provenance import Provenance
from bottega.errors import BottegaError


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The job waits for a worker.

    place: jobs of the same model before it.
    estimate_s: seconds until it completes; None while nothing has been measured.
    """

    job_id: str
    place: int
    estimate_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A look at a picture before it is finished: a small JPEG of its latent."""

    index: int
    jpeg: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The job runs. Steps are counted over all its images; previews come when they were asked for."""

    job_id: str
    steps_done: int
    steps_total: int
    previews: tuple[Preview, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The gateway cannot be reached or is restarting; the SDK attaches again by itself after `wait_s`."""

    error: BottegaError
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The job is done; always the last event."""

    job_id: str
    images: tuple[Picture, ...]
    provenance: Provenance = field(repr=False)


Event = Queued | Progress | Interrupted | Completed
