"""A batch: the requests that share a forward pass, and how batches are filled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bottega.fair_order import Share
from bottega.model.rows import GroupKey
from bottega.planning import Shape, relative_area


class BatchCandidate(Protocol):
    """A request, as the batcher needs it."""

    @property
    def key(self) -> GroupKey: ...
    @property
    def row_count(self) -> int:
        """Number of rows of the request in each forward pass."""

    @property
    def computed_share(self) -> float:
        """Fraction of its rows' tokens that the next forward pass computes; the rest is reused."""

    @property
    def packs(self) -> bool:
        """Whether it may share a forward pass with requests of other sizes, if the network can do that."""

    @property
    def evaluations(self) -> int: ...
    @property
    def evaluations_left(self) -> int: ...


Request = TypeVar("Request", bound=BatchCandidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTurn(Generic[Request]):
    """A forward pass of a batch: its requests, and the device seconds charged to their tenants."""

    requests: list[Request]
    """The requests of the batch; empty if none was ready."""
    shares: Sequence[Share] = ()
    """Tenant and weight of each request."""
    charged_s: Sequence[float] = ()
    """Seconds of the device that were charged for each request."""
    splits: bool = False
    """Whether to predict the rows of its only request in two forward passes, so that others wait less."""


@dataclass(slots=True, eq=False)
class BatchSlot(Generic[Request]):
    """A request in the batcher."""

    request: Request
    share: Share
    turn: int = 0
    """Number of its tenant's turn in which it made its last step, or was admitted."""
    admitted: bool = False
    exclusive: bool = False
    """Whether it always runs alone."""
    largest: Shape | None = None
    """The largest shape of its group if that may have several; None if all members must have this request's size."""

    @property
    def shape(self) -> Shape:
        """Height and width of its latent."""
        _, height, width = self.request.key.shape
        return height, width

    @property
    def group(self) -> object:
        """Requests with the same value may share a batch."""
        if self.exclusive:
            return self
        return self.request.key if self.largest is None else self.request.key.without_size

    @property
    def rows(self) -> int:
        return self.request.row_count

    @property
    def relative_area(self) -> float:
        """The area of its shape as a multiple of the group's largest one."""
        return 1.0 if self.largest is None else relative_area(self.shape, self.largest)


def allow_sizes(slots: Iterable[BatchSlot[Request]], largest: Shape | None) -> None:
    """Let requests share groups of several sizes, see `BatchSlot.largest`; None groups them by size."""
    for slot in slots:
        slot.largest = largest


def of_several_sizes(slots: Iterable[BatchSlot[Request]]) -> dict[Hashable, list[BatchSlot[Request]]]:
    """Return the requests that differ only in size and may share forward passes, by what they have in common."""
    found: dict[Hashable, list[BatchSlot[Request]]] = {}
    for slot in slots:
        if slot.request.packs and not slot.exclusive:
            found.setdefault(slot.request.key.without_size, []).append(slot)
    return {key: alike for key, alike in found.items() if len({slot.request.key for slot in alike}) > 1}


def by_group(slots: Iterable[BatchSlot[Request]]) -> dict[object, list[BatchSlot[Request]]]:
    """Return the requests of each group, in their order."""
    found: dict[object, list[BatchSlot[Request]]] = {}
    for slot in slots:
        found.setdefault(slot.group, []).append(slot)
    return found


def places(slots: Sequence[BatchSlot[Request]], widths: Mapping[object, int], max_rows: int) -> list[int]:
    """Return in which turn, from 1, each request runs if batches are filled in this order.

    Args:
        widths: Number of requests in a batch, by group.
        max_rows: Upper bound on rows in one batch.
    """
    filling: dict[object, _Filling] = {}
    found: list[int] = []
    turns = 0
    for slot in slots:
        current = filling.get(slot.group)
        if current is None or not current.takes(slot.rows, widths[slot.group], max_rows):
            turns += 1
            current = filling[slot.group] = _Filling(turn=turns)
        current.requests += 1
        current.rows += slot.rows
        found.append(current.turn)
    return found


def fill(
    leader: BatchSlot[Request], order: Sequence[BatchSlot[Request]], width: int, max_rows: int
) -> list[BatchSlot[Request]]:
    """Return the requests of a batch: its first one, and others of its group in this order, as many as fit."""
    members = [leader]
    filled = _Filling(requests=1, rows=leader.rows)
    for slot in order:
        if slot is leader or slot.group != leader.group:
            continue
        if not filled.takes(slot.rows, width, max_rows):
            break
        members.append(slot)
        filled.requests += 1
        filled.rows += slot.rows
    return members


@dataclass(slots=True, kw_only=True)
class _Filling:
    turn: int = 0
    """The turn in which it runs."""
    requests: int = 0
    rows: int = 0

    def takes(self, rows: int, width: int, max_rows: int) -> bool:
        return self.requests < width and self.rows + rows <= max_rows
