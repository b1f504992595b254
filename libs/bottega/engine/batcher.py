"""Chooses which requests run in the next turn (one forward pass of a batch), and how long a request may be passed over.

Each turn belongs to the tenant that has used the fewest device seconds for its weight (bottega.fair_order). Requests
can share a batch if they have the same group key; that of the tenant's oldest request is chosen. The batch is as large
as the measured step times make worth it. A request is passed over in a bounded number of its tenant's turns. If step
times are outdated, one batch is made larger to measure them again.

The tenants of a batch are charged when its turn begins, by the measured step times. The charge is corrected when the
time of the turn is known (`settle`).

Requests of other tenants with the same group key share the batch. A tenant that has just arrived and has used little of
the device gets batches of its own for a while, because shared ones would take as long as those of the others.

A tenant that arrives during another's turn has to wait for its end. So turns that are much longer than those of another
tenant are kept short, while that tenant has requests here or is expected back. A tenant is expected back for about
twice as long as it last stayed away, and only briefly after its first visit; for ten minutes where short turns cost
next to nothing, as for large pictures on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from bottega.fair_order import FairOrder, Share
from bottega.model.rows import GroupKey
from bottega.planning import (
    MAX_BACKLOG,
    RemainingWork,
    RowFractions,
    Shape,
    StepTimes,
    best_width,
    most_on_trial,
)

# Batch sizes ("widths") are chosen again after this many turns, because step times drift.
_REPLAN_TURNS = 16
# How far a tenant that asked for less than its share may get ahead of the others, in seconds of so many rows: about
# four guided images of 50 steps, because some are submitted together. These are rows of the smallest requests that are
# here, so that no tenant is held up for four large images by one that was idle.
_CREDIT_ROWS = 400.0
# Number of turns after its arrival in which a tenant that is behind shares no batch with others.
_OWN_TURNS = 256
# A turn is too long if it takes this many times as long as another tenant's.
_LONG_TURN = 4.0
# How long a tenant is expected back, in seconds of the device: after its first visit, and at most. Shorter turns cost
# throughput, so a single small picture must not keep them short for minutes.
_FIRST_RETURN_S, _MAX_RETURN_S = 10.0, 600.0
# Short turns cost next to nothing if they take together at most this many times as long as the long turn.
_CHEAP_PARTS = 1.1
# Seconds of a row while nothing has been measured: any number, the same for all.
_UNMEASURED_ROW_S = 1.0
_DEFAULT_SHARE = Share()


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


@dataclass(slots=True, kw_only=True)
class _Visitor:
    """A tenant whose requests have run and who is here or may come back. Times count device seconds."""

    last_s: float
    """End of its last turn."""
    turn_s: float
    """Expected length of its last turn."""
    return_s: float = _FIRST_RETURN_S
    """Seconds after its last turn for which it is expected back."""

    def come_back(self, now_s: float) -> None:
        """Expect the tenant for twice as long as it stayed away this time, but at least half as long as before."""
        away_s = now_s - self.last_s
        self.return_s = min(max(2 * away_s, self.return_s / 2, _FIRST_RETURN_S), _MAX_RETURN_S)


@dataclass(slots=True, eq=False)
class _Slot(Generic[Request]):
    """A request in the batcher."""

    request: Request
    share: Share
    turn: int = 0
    """Number of its tenant's turn in which it made its last step, or was admitted."""
    admitted: bool = False
    exclusive: bool = False
    """Whether it always runs alone."""

    @property
    def group(self) -> object:
        """Requests with the same value may share a batch."""
        return self if self.exclusive else self.request.key

    @property
    def rows(self) -> int:
        return self.request.row_count


class Batcher(Generic[Request]):
    """The requests that are being denoised, in order of arrival.

    Of each tenant, the oldest requests are admitted: as many as fit into `max_wait_turns` + 1 turns. The others wait.

    Args:
        times: Step times of plain rows.
        fractions: Cost of partly computed rows. Limits on rows count them in full.
        max_rows: Upper bound on rows in one batch. A request with more rows runs alone.
        max_wait_turns: Number of its tenant's turns in which an admitted request may be passed over.
    """

    def __init__(
        self, times: StepTimes, fractions: RowFractions | None = None, *, max_rows: int, max_wait_turns: int
    ) -> None:
        self._times = times
        self._fractions = fractions or RowFractions()
        self.max_rows = max_rows
        self._max_wait_turns = max_wait_turns
        self._order = FairOrder()
        self._came: dict[str, int] = {}
        self._turns_of: dict[str, int] = {}
        self._visitors: dict[str, _Visitor] = {}  # The tenant whose turn was last comes last.
        self._device_s = 0.0
        self._slots: dict[Request, _Slot[Request]] = {}
        self._admitted: list[_Slot[Request]] = []
        self._widths: dict[object, int] = {}
        self._trials: dict[object, int] = {}
        self._turn = 0
        self._planned_at = -_REPLAN_TURNS
        self._backlog = 0

    def add(self, request: Request, share: Share = _DEFAULT_SHARE) -> None:
        """Add a request that is not done."""
        if all(slot.share.tenant != share.tenant for slot in self._slots.values()):
            if not self._slots:
                self._order.begin_alone(share.tenant)
            self._came[share.tenant], self._turns_of[share.tenant] = self._turn, 0
            if share.tenant in self._visitors:
                self._visitors[share.tenant].come_back(self._device_s)
        self._slots[request] = _Slot(request, share)
        self._planned_at = -_REPLAN_TURNS

    def remove(self, request: Request) -> None:
        """Remove a request, done or not. Do nothing if it is unknown."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            if all(other.share.tenant != slot.share.tenant for other in self._slots.values()):
                del self._came[slot.share.tenant], self._turns_of[slot.share.tenant]
            # Not later: an idle batcher plans nothing, and a reference to the request would hold device memory.
            self.regroup()

    @property
    def requests(self) -> Iterator[Request]:
        """The requests, in order of arrival."""
        return iter(self._slots)

    def __contains__(self, request: object) -> bool:
        return request in self._slots

    def regroup(self) -> None:
        """Read the requests' group keys again, because they have changed."""
        self._admitted, self._widths, self._trials = [], {}, {}
        self._planned_at = -_REPLAN_TURNS

    def make_exclusive(self, request: Request) -> None:
        """Let a request run alone from now on."""
        self._slots[request].exclusive = True
        self._planned_at = -_REPLAN_TURNS

    def set_backlog(self, backlog: int) -> None:
        """Set the number of requests that wait outside the batcher and will be added when others are done."""
        self._backlog = min(backlog, MAX_BACKLOG)

    def next_turn(self) -> BatchTurn[Request]:
        """Return the next batch, whose forward pass begins now. Call `settle` when its time is known."""
        if self._turn - self._planned_at >= _REPLAN_TURNS:
            self._plan()
        self._turn += 1
        if not self._admitted:
            return BatchTurn(requests=[])
        own, others = self._by_share()
        tenant = own[0].share.tenant
        now = self._turns_of[tenant] = self._turns_of[tenant] + 1
        urgent = sorted(own, key=lambda slot: slot.turn)
        lack = self._lack(urgent, now)
        if lack < 0:
            members = self._shortened(self._fill(own[0], [*own, *others], self._width_now(own[0])))
        else:
            # If the most urgent request is just in time, the batch has its usual size; if it is late, the largest.
            width = self._width_now(urgent[0]) if lack == 0 else len(urgent)
            members = self._fill(urgent[0], [*urgent, *others], width)
        for slot in members:
            slot.turn = self._turns_of[slot.share.tenant]
        if self._trials and len(members) > self._widths[members[0].group]:
            self._times.tried()
            self._planned_at = -_REPLAN_TURNS  # The measured time of this turn may change the batch size.
        return self._charged(members)

    def settle(self, turn: BatchTurn[Request], seconds: Sequence[float]) -> None:
        """Correct what was charged for a forward pass to the device seconds that each of its requests took."""
        for share, charged_s, took_s in zip(turn.shares, turn.charged_s, seconds, strict=True):
            self.charge(share, took_s - charged_s)

    def used(self, tenant: str) -> float:
        """Return a tenant's used device time divided by its weight. The tenant with the least is served first."""
        return self._order.next_tag(tenant)

    def may_go_first(self, tenant: str) -> bool:
        """Return whether a tenant may use the device for other work: no tenant with requests here has used less."""
        used = self.used(tenant)
        return all(used <= self.used(other) for other in self._came)

    def charge(self, share: Share, seconds: float) -> None:
        """Charge a tenant for seconds of the device for other work."""
        self._order.charge(share.tenant, cost=seconds, weight=share.weight)

    def is_long(self, seconds: float) -> bool:
        """Return whether work takes longer than a turn of one of several tenants that are here or were here lately.

        Only work that can pause at no cost ends for that.
        """
        turns_s = [visitor.turn_s for visitor in self._visitors.values()]
        return len(turns_s) > 1 and seconds > min(turns_s)

    def _plan(self) -> None:
        """Choose the batch sizes, and admit as many requests as the limit on waiting allows."""
        self._planned_at = self._turn
        self._widths = {group: self._width(slots) for group, slots in _by_group(self._slots.values()).items()}
        longest_s = max(map(self._turn_s, self._slots.values()), default=0.0)
        self._order.credit = _CREDIT_ROWS * self._least_row_s() + longest_s
        for slots in self._by_tenant().values():
            self._admit(slots)
        self._admitted = [slot for slot in self._slots.values() if slot.admitted]
        trials = {group: self._trial(slots) for group, slots in _by_group(self._admitted).items()}
        self._trials = {group: width for group, width in trials.items() if width > self._widths[group]}

    def _by_tenant(self) -> dict[str, list[_Slot[Request]]]:
        """Return the requests of each tenant: the admitted ones, then the others, oldest first."""
        slots: dict[str, list[_Slot[Request]]] = {}
        for slot in sorted(self._slots.values(), key=lambda slot: not slot.admitted):
            slots.setdefault(slot.share.tenant, []).append(slot)
        return slots

    def _admit(self, slots: Sequence[_Slot[Request]]) -> None:
        """Admit as many of a tenant's requests as the limit on waiting allows."""
        admitted: list[_Slot[Request]] = []
        for slot in slots:
            admitted.append(slot)
            if not (self._fits(admitted) or slot.admitted):
                break
            if not slot.admitted:
                slot.admitted, slot.turn = True, self._turns_of[slot.share.tenant]

    def _least_row_s(self) -> float:
        """Return the seconds per row of the cheapest requests in the batcher."""
        shapes = {(_shape(slot.request), slot.rows) for slot in self._slots.values()}
        return min((self._seconds(shape, rows) / rows for shape, rows in shapes), default=0.0)

    def _seconds(self, shape: Shape, rows: float) -> float:
        measured = self._times.seconds(shape, rows)
        return rows * _UNMEASURED_ROW_S if measured is None else measured

    def _by_share(self) -> tuple[list[_Slot[Request]], list[_Slot[Request]]]:
        """Return the admitted requests of the tenant that has used least, and those that may share its batch.

        The first are sorted by age, the second by how much their tenants have used. A tenant that arrived lately and is
        behind shares its batches with no other.
        """
        first = self._admitted[0].share.tenant
        if all(slot.share.tenant == first for slot in self._admitted):
            self._order.served(self._order.next_tag(first))
            return self._admitted, []
        tags = {slot.share.tenant: self._order.next_tag(slot.share.tenant) for slot in self._admitted}
        tenant = min(tags, key=tags.__getitem__)
        self._order.served(tags[tenant])
        own = [slot for slot in self._admitted if slot.share.tenant == tenant]
        # Tenants that alternate differ by one turn.
        apart_s = max(self._turn_s(slot) / slot.share.weight for slot in self._admitted)
        behind = tags[tenant] < max(tags.values()) - apart_s
        if behind and self._came[tenant] >= self._turn - _OWN_TURNS:
            return own, []
        others = [slot for slot in self._admitted if slot.share.tenant != tenant]
        return own, sorted(others, key=lambda slot: tags[slot.share.tenant])

    def _turn_s(self, slot: _Slot[Request]) -> float:
        """Return the expected seconds of a forward pass with this request, at the chosen batch size."""
        return self._seconds(_shape(slot.request), self._work(slot.request).rows * self._widths[slot.group])

    def _shortened(self, members: list[_Slot[Request]]) -> list[_Slot[Request]]:
        """Return the first requests of a batch, at least one, as many as do not delay another tenant for long."""
        count, tenant = len(members), members[0].share.tenant
        alone_s = [self._seconds_of([slot]) for slot in members]
        while count > 1 and self._delays_another(tenant, self._seconds_of(members[:count]), sum(alone_s[:count])):
            count -= 1
        return members[:count]

    def _splits(self, members: Sequence[_Slot[Request]]) -> bool:
        """Return whether to predict the rows of a turn's only request in two turns, as not to delay another tenant."""
        slot, shape, rows = members[0], _shape(members[0].request), self._work(members[0].request).rows
        first = rows / slot.rows
        parts_s = self._seconds(shape, first) + self._seconds(shape, rows - first)
        return len(members) == 1 and self._delays_another(slot.share.tenant, self._seconds(shape, rows), parts_s)

    def _delays_another(self, tenant: str, turn_s: float, parts_s: float) -> bool:
        """Return whether a turn of a tenant is much longer than those of another that is here or expected back.

        Args:
            turn_s: Seconds of the turn.
            parts_s: Seconds of short turns in its place. If they are about as many, also tenants count that were here
                lately.
        """
        cheap = parts_s <= _CHEAP_PARTS * turn_s
        others = (
            visitor.turn_s
            for name, visitor in self._visitors.items()
            if name != tenant and (cheap or self._expects(name))
        )
        return turn_s > _LONG_TURN * min(others, default=turn_s)

    def _expects(self, tenant: str) -> bool:
        visitor = self._visitors[tenant]
        return tenant in self._came or visitor.last_s + visitor.return_s >= self._device_s

    def _note_turn(self, tenant: str, turn_s: float) -> None:
        """Record a tenant's turn, and remove tenants that have stayed away for long."""
        self._device_s += turn_s
        visitor = self._visitors.pop(tenant, None) or _Visitor(last_s=self._device_s, turn_s=turn_s)
        visitor.last_s, visitor.turn_s = self._device_s, turn_s
        self._visitors[tenant] = visitor
        for name in list(self._visitors):
            if self._visitors[name].last_s >= self._device_s - _MAX_RETURN_S:
                return
            if name not in self._came:
                del self._visitors[name]

    def _seconds_of(self, members: Sequence[_Slot[Request]]) -> float:
        return self._seconds(_shape(members[0].request), sum(self._work(slot.request).rows for slot in members))

    def _charged(self, members: Sequence[_Slot[Request]]) -> BatchTurn[Request]:
        """Charge a beginning forward pass to the tenants of its requests, in proportion to their rows."""
        rows = [self._work(slot.request).rows for slot in members]
        row_s = self._seconds(_shape(members[0].request), sum(rows)) / sum(rows)
        for slot, count in zip(members, rows, strict=True):
            self.charge(slot.share, count * row_s)
        tenant, turn_s = members[0].share.tenant, sum(rows) * row_s
        self._note_turn(tenant, turn_s)
        return BatchTurn(
            splits=self._splits(members),
            requests=[slot.request for slot in members],
            shares=[slot.share for slot in members],
            charged_s=[count * row_s for count in rows],
        )

    def _trial(self, slots: Sequence[_Slot[Request]]) -> int:
        """Return the size of a larger batch that would measure an outdated step time; 0 for none.

        Only batches of plain rows measure step times.
        """
        if any(slot.request.computed_share < 1.0 for slot in slots):
            return 0
        width = self._widths[slots[0].group]
        for wider in range(min(most_on_trial(width), len(slots)), width, -1):
            rows = sum(slot.rows for slot in slots[:wider])
            if rows <= self.max_rows and self._times.outdated(_shape(slots[0].request), rows):
                return wider
        return 0

    def _width(self, slots: Sequence[_Slot[Request]]) -> int:
        if slots[0].exclusive:
            return 1
        works = [self._work(slot.request) for slot in slots]
        typical = RemainingWork(rows=works[-1].rows, steps=slots[-1].request.evaluations)
        seconds = partial(self._seconds, _shape(slots[0].request))
        width = best_width([*works, *[typical] * self._backlog], seconds, max_rows=self.max_rows)
        return max(1, min(width, len(works)))

    def _work(self, request: BatchCandidate) -> RemainingWork:
        cost = self._fractions.fraction(_shape(request), request.computed_share)
        return RemainingWork(rows=request.row_count * cost, steps=request.evaluations_left)

    def _fits(self, slots: Sequence[_Slot[Request]]) -> bool:
        """Return whether these requests of a tenant meet the limit on waiting, and enlarge batches as needed."""
        counts = {
            group: (len(same), max(1, self.max_rows // max(slot.rows for slot in same)))
            for group, same in _by_group(slots).items()
        }
        while self._turns_for(counts) > self._max_wait_turns + 1:
            narrow = [group for group, (_, capacity) in counts.items() if self._widths[group] < capacity]
            if not narrow:
                return False
            narrowest = min(narrow, key=lambda group: self._widths[group])
            self._widths[narrowest] += 1
        return True

    def _turns_for(self, counts: Mapping[object, tuple[int, int]]) -> int:
        """Return the number of turns that serve all requests, in whatever order batches are filled.

        Args:
            counts: By group key: the number of requests, and how many of the largest fit into a batch.
        """
        return sum(-(-count // min(self._widths[group], capacity)) for group, (count, capacity) in counts.items())

    def _lack(self, urgent: Sequence[_Slot[Request]], now: int) -> int:
        """Return by how many turns the most urgent request is late if this turn skips it; negative if it is not late.

        Args:
            urgent: All admitted requests of the tenant whose turn it is; the one that has waited longest is first.
            now: The number of this turn among those of the tenant.
        """
        # Turns that each may still wait, this one included. The groups up to its own must fit into them.
        spare = [self._max_wait_turns - (now - 1 - slot.turn) for slot in urgent]
        return max(place - 1 - left for place, left in zip(self._places(urgent), spare, strict=True))

    def _places(self, slots: Sequence[_Slot[Request]]) -> list[int]:
        """Return in which turn, from 1, each request runs if batches are filled in this order."""
        filling: dict[object, _Filling] = {}
        places: list[int] = []
        turns = 0
        for slot in slots:
            current = filling.get(slot.group)
            if current is None or not current.takes(slot.rows, self._widths[slot.group], self.max_rows):
                turns += 1
                current = filling[slot.group] = _Filling(turn=turns)
            current.requests += 1
            current.rows += slot.rows
            places.append(current.turn)
        return places

    def _width_now(self, leader: _Slot[Request]) -> int:
        """Return the number of requests in this turn's batch, whose first one is `leader`."""
        return self._trials.get(leader.group, self._widths[leader.group])

    def _fill(self, leader: _Slot[Request], order: Sequence[_Slot[Request]], width: int) -> list[_Slot[Request]]:
        members = [leader]
        filled = _Filling(requests=1, rows=leader.rows)
        for slot in order:
            if slot is leader or slot.group != leader.group:
                continue
            if not filled.takes(slot.rows, width, self.max_rows):
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


def _shape(request: BatchCandidate) -> Shape:
    _, height, width = request.key.shape
    return height, width


def _by_group(slots: Iterable[_Slot[Request]]) -> dict[object, list[_Slot[Request]]]:
    found: dict[object, list[_Slot[Request]]] = {}
    for slot in slots:
        found.setdefault(slot.group, []).append(slot)
    return found
