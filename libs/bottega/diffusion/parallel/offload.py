"""The other worker of a pair, as the engine that leads sees it: what it is told of a job, and of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from bottega.diffusion.rows import Embeds, Half, Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadedPart:
    """What an add-on tells the one of its kind at the follower about a job. header: JSON. tensors: by name."""

    header: bytes
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteJob:
    """A job whose rows may be offloaded. The follower is told of it once, and keeps it.

    halves: its conditions. parts: what its add-ons tell those of the follower, by kind.
    """

    halves: Mapping[Half, Embeds]
    parts: Mapping[str, OffloadedPart] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadedRow:
    """A row that the follower is to compute. image: its place among the job's.

    active: of each part, see JobAddOn.active_in.
    """

    row: Row
    remote_job: RemoteJob
    image: int
    active: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadResult:
    """The follower's result for the rows that were offloaded to it.

    noise: [channels, height, width] by row; those whose residuals were late there are missing. seconds: from lending to
    the answer, without waiting for residuals there: this engine waits for its own meanwhile.
    """

    noise: Mapping[Row, Tensor]
    seconds: float


class OffloadTarget(Protocol):
    """The engine that computes rows for this one. All calls come from the engine's thread, and none waits long."""

    @property
    def name(self) -> str:
        """Of its worker."""
        ...

    @property
    def free(self) -> bool:
        """Whether rows can be offloaded to it now: it is linked, has nothing of its own to do, and owes no answer."""
        ...

    def accepts(self, remote_job: RemoteJob) -> bool:
        """Whether rows of this job can be offloaded; the job is sent to it first where it was not."""
        ...

    def forget(self, remote_job: RemoteJob) -> None:
        """The job has ended. Harmless when it was not told of it."""
        ...

    def offload(self, rows: Sequence[OffloadedRow]) -> bool:
        """Sends rows of one group to be computed; whether they are on their way."""
        ...

    def result(self, timeout_s: float) -> OffloadResult | None:
        """The result of the rows that were offloaded last; None where that has not come within the timeout."""
        ...

    @property
    def awaits_result(self) -> bool:
        """Whether its answer to the rows that were offloaded last may still come."""
        ...
