"""Typed events of a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from bottega.client.types.picture import Picture
from bottega.client.types.provenance import Provenance
from bottega.errors import BottegaError


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The job waits for a worker."""

    job_id: str
    place: int
    """Number of jobs of the same model before it."""
    estimate_s: float | None
    """Estimated seconds until it completes; None if nothing has been measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A small image of an unfinished picture."""

    index: int
    """Index of the picture in the job, from 0."""
    jpeg: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The job runs."""

    job_id: str
    steps_done: int
    """Denoising steps done, over all pictures."""
    steps_total: int
    previews: tuple[Preview, ...] = ()
    """Previews, if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The gateway does not answer. The SDK attaches again by itself after `wait_s`."""

    error: BottegaError
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The job has completed. This is always the last event."""

    job_id: str
    images: tuple[Picture, ...]
    provenance: Provenance = field(repr=False)


Event = Queued | Progress | Interrupted | Completed
