"""How an engine offloads rows to the other worker of a pair, the follower: the interface and its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from bottega.model.rows import Embeds, Half, Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadedPart:
    """An add-on's data about a job for the same add-on of the follower: a JSON header, and tensors by name."""

    header: bytes
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteJob:
    """A job whose rows may be offloaded. The follower receives it once and stores it."""

    halves: Mapping[Half, Embeds]
    parts: Mapping[str, OffloadedPart] = field(default_factory=dict)
    """Data of the job's add-ons, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadedRow:
    """A row for the follower to compute."""

    row: Row
    remote_job: RemoteJob
    image: int
    """Index of the image in the job."""
    active: tuple[int, ...] = ()
    """One number for each add-on in `remote_job.parts`, see `JobAddOn.active_in`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadResult:
    """The follower's result for offloaded rows."""

    noise: Mapping[Row, Tensor]
    """Predicted noise, [channels, height, width], by row; without rows whose residuals were late at the follower."""
    seconds: float
    """Seconds from sending the rows to the answer, without the time that this engine waited for residuals."""


class OffloadTarget(Protocol):
    """The engine that computes rows for this one. Only the engine's thread calls it, and no call waits long."""

    @property
    def name(self) -> str:
        """Name of its worker."""
        ...

    @property
    def free(self) -> bool:
        """Whether it can compute rows now: it is linked and idle, and no answer is pending."""
        ...

    def accepts(self, remote_job: RemoteJob) -> bool:
        """Return whether rows of this job can be offloaded. The job is sent first if it is new."""
        ...

    def forget(self, remote_job: RemoteJob) -> None:
        """Tell the follower that a job has ended, if it knows the job."""
        ...

    def offload(self, rows: Sequence[OffloadedRow]) -> bool:
        """Send rows of one batch, and return whether they were sent."""
        ...

    def result(self, timeout_s: float) -> OffloadResult | None:
        """Return the result for the last rows, or None if it does not come within the timeout."""
        ...

    @property
    def awaits_result(self) -> bool:
        """Whether the result for the last rows is still pending."""
        ...
