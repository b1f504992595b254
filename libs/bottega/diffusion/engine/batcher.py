"""Which requests share the next turn, and how long one may be passed over.

A turn is led by the tenant that has used least of the device for its weight, in seconds (bottega.fair_order).
A turn is charged to the tenants of its requests when it begins, by the measured step times, and corrected when it is
known what it took (`settle`). Of that tenant's requests the oldest leads, and the turn is as wide as pays off by the
measured step times. A request is passed over for a bounded number of turns of its own tenant. Where step times are
outdated, one turn is made wider, to measure it again.

Requests of other tenants that compute the same share the turn. A tenant that comes and is behind, because it asked for
little, has turns of its own for a while: beside others its own would take as long as theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from bottega.diffusion.rows import GroupKey
from bottega.fair_order import FairOrder, Share
from bottega.planning import (
    MAX_BACKLOG,
    RemainingWork,
    RowFractions,
    Shape,
    StepTimes,
    best_width,
    most_on_trial,
)

# Turns after which the widths are chosen anew though nobody came or went: step times drift.
_REPLAN_TURNS = 16
# What a tenant that asked for less than its share may be ahead of the others, in seconds of so many rows: about four
# guided images of 50 steps, as some come together. Rows of the smallest requests that are here: nobody is held up for
# four large images by somebody who was idle.
_CREDIT_ROWS = 400.0
# Turns after its coming in which a tenant that is behind shares none with others.
_OWN_TURNS = 256
# A turn so many times as long as another tenant's is split, where that tenant had one within so many seconds of turns.
_LONG_TURN, _RECENT_S = 4.0, 600.0
# Seconds of a row while nothing was measured: any number, the same for all.
_UNMEASURED_ROW_S = 1.0
_EVERYBODYS = Share()


class BatchCandidate(Protocol):
    """What the batcher sees of a request. row_count: rows of each of its turns. steps: in all.

    computed_share: of the tokens of its rows, what the next turn computes.
    """

    @property
    def key(self) -> GroupKey: ...
    @property
    def row_count(self) -> int: ...
    @property
    def computed_share(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def steps_left(self) -> int: ...


Request = TypeVar("Request", bound=BatchCandidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTurn(Generic[Request]):
    """The requests of one turn, and what their tenants were charged for it."""

    requests: list[Request]
    """Empty where nobody was ready for a turn."""
    shares: Sequence[Share] = ()
    """Whose the requests are, in the same order."""
    charged_s: Sequence[float] = ()
    """Seconds of the device that were charged for each, in the same order."""
    splits: bool = False
    """Whether the rows of its only request should be predicted in two turns: they would hold up another tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecentTurn:
    """The last turn that a tenant had."""

    at_s: float
    """When it ended, in seconds of turns since the start."""
    seconds: float
    """What it was expected to take."""


@dataclass(slots=True, eq=False)
class _Slot(Generic[Request]):
    """A request in the batcher.

    turn: its tenant's turn in which it made its last step, or was admitted. exclusive: shares no group.
    """

    request: Request
    share: Share
    turn: int = 0
    admitted: bool = False
    exclusive: bool = False

    @property
    def group(self) -> object:
        """What it must have in common with the others of its group."""
        return self if self.exclusive else self.request.key

    @property
    def rows(self) -> int:
        """Rows that it puts into a turn."""
        return self.request.row_count


class Batcher(Generic[Request]):
    """The requests being denoised, in order of arrival.

    times: of plain rows. fractions: what rows cost of which a part is computed; the bounds count them as rows.
    max_rows: of one group; a request with more rows runs by itself. max_wait_turns: of its tenant, in which a request
    may be passed over once it is admitted. Of each tenant as many are admitted, first come first, as one group more
    than so many turns can hold; the others wait.
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
        self._recent: dict[str, _RecentTurn] = {}
        self._device_s = 0.0
        self._slots: dict[Request, _Slot[Request]] = {}
        self._admitted: list[_Slot[Request]] = []
        self._widths: dict[object, int] = {}
        self._trials: dict[object, int] = {}
        self._turn = 0
        self._planned_at = -_REPLAN_TURNS
        self._backlog = 0

    def add(self, request: Request, share: Share = _EVERYBODYS) -> None:
        """Takes in a request that is not done. share: of whose it is."""
        if all(slot.share.tenant != share.tenant for slot in self._slots.values()):
            if not self._slots:
                self._order.begin_alone(share.tenant)
            self._came[share.tenant], self._turns_of[share.tenant] = self._turn, 0
        self._slots[request] = _Slot(request, share)
        self._planned_at = -_REPLAN_TURNS

    def remove(self, request: Request) -> None:
        """Forgets a request, done or not. Harmless when it is not here."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            if all(other.share.tenant != slot.share.tenant for other in self._slots.values()):
                del self._came[slot.share.tenant], self._turns_of[slot.share.tenant]
            # At once: while nothing runs there is no next plan, and a request that is kept holds a device's memory.
            self.regroup()

    @property
    def requests(self) -> Iterator[Request]:
        """Those that are here, in order of arrival."""
        return iter(self._slots)

    def __contains__(self, request: object) -> bool:
        return request in self._slots

    def regroup(self) -> None:
        """Requests share groups with others than before: their keys have changed."""
        self._admitted, self._widths, self._trials = [], {}, {}
        self._planned_at = -_REPLAN_TURNS

    def make_exclusive(self, request: Request) -> None:
        """From now on the request shares no group: somebody in its last one made the turn fail."""
        self._slots[request].exclusive = True
        self._planned_at = -_REPLAN_TURNS

    def set_backlog(self, backlog: int) -> None:
        """So many requests wait elsewhere and will come when there is room."""
        self._backlog = min(backlog, MAX_BACKLOG)

    def next_turn(self) -> BatchTurn[Request]:
        """Return the requests of the next turn, which begins now. `settle` it when it is known what it took."""
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
            # Just in time is enough to be served in turn; later than that, the group takes all it can.
            width = self._width_now(urgent[0]) if lack == 0 else len(urgent)
            members = self._fill(urgent[0], [*urgent, *others], width)
        for slot in members:
            slot.turn = self._turns_of[slot.share.tenant]
        if self._trials and len(members) > self._widths[members[0].group]:
            self._times.tried()
            self._planned_at = -_REPLAN_TURNS  # the next turn is as wide as pays off by what this one took
        return self._charged(members)

    def settle(self, turn: BatchTurn[Request], seconds: Sequence[float]) -> None:
        """Charge what a turn took of the device instead of what was expected; for each of its requests."""
        for share, charged_s, took_s in zip(turn.shares, turn.charged_s, seconds, strict=True):
            self.charge(share, took_s - charged_s)

    def used(self, tenant: str) -> float:
        """Return what a tenant has used of the device, over its weight; below that of others it goes first."""
        return self._order.next_tag(tenant)

    def may_go_first(self, tenant: str) -> bool:
        """Return whether no tenant with requests here has used less: else work of this one beside its turns waits."""
        used = self.used(tenant)
        return all(used <= self.used(other) for other in self._came)

    def charge(self, share: Share, seconds: float) -> None:
        """Charge a tenant for seconds of the device beside its turns."""
        self._order.charge(share.tenant, cost=seconds, weight=share.weight)

    def _plan(self) -> None:
        """Chooses the widths, and whom to admit: as many as the bound on waiting allows."""
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
        """Return the requests of each tenant: those that are admitted, then the others, oldest first."""
        slots: dict[str, list[_Slot[Request]]] = {}
        for slot in sorted(self._slots.values(), key=lambda slot: not slot.admitted):
            slots.setdefault(slot.share.tenant, []).append(slot)
        return slots

    def _admit(self, slots: Sequence[_Slot[Request]]) -> None:
        """Admit as many of a tenant's requests as its bound on waiting allows."""
        admitted: list[_Slot[Request]] = []
        for slot in slots:
            admitted.append(slot)
            if not (self._fits(admitted) or slot.admitted):
                break
            if not slot.admitted:
                slot.admitted, slot.turn = True, self._turns_of[slot.share.tenant]

    def _least_row_s(self) -> float:
        """Return the seconds of a row of the smallest requests that are here."""
        shapes = {(_shape(slot.request), slot.rows) for slot in self._slots.values()}
        return min((self._seconds(shape, rows) / rows for shape, rows in shapes), default=0.0)

    def _seconds(self, shape: Shape, rows: float) -> float:
        """Return what a turn is expected to take."""
        measured = self._times.seconds(shape, rows)
        return rows * _UNMEASURED_ROW_S if measured is None else measured

    def _by_share(self) -> tuple[list[_Slot[Request]], list[_Slot[Request]]]:
        """Return the admitted requests of the tenant that has used least, and those that may share its turn.

        Both are oldest first, the others by what their tenants have used. Those of a tenant that came lately and is
        behind share its turns with nobody.
        """
        first = self._admitted[0].share.tenant
        if all(slot.share.tenant == first for slot in self._admitted):
            self._order.served(self._order.next_tag(first))
            return self._admitted, []
        tags = {slot.share.tenant: self._order.next_tag(slot.share.tenant) for slot in self._admitted}
        tenant = min(tags, key=tags.__getitem__)
        self._order.served(tags[tenant])
        own = [slot for slot in self._admitted if slot.share.tenant == tenant]
        # Those who alternate are a turn apart.
        apart_s = max(self._turn_s(slot) / slot.share.weight for slot in self._admitted)
        behind = tags[tenant] < max(tags.values()) - apart_s
        if behind and self._came[tenant] >= self._turn - _OWN_TURNS:
            return own, []
        others = [slot for slot in self._admitted if slot.share.tenant != tenant]
        return own, sorted(others, key=lambda slot: tags[slot.share.tenant])

    def _turn_s(self, slot: _Slot[Request]) -> float:
        """Return the seconds of a turn that is as wide as pays off for a request."""
        return self._seconds(_shape(slot.request), self._work(slot.request).rows * self._widths[slot.group])

    def _shortened(self, members: list[_Slot[Request]]) -> list[_Slot[Request]]:
        """Return as many of a turn's requests, one at least, as hold up no other tenant for long."""
        count = len(members)
        while count > 1 and self._holds_up(members[0].share.tenant, self._seconds_of(members[:count])):
            count -= 1
        return members[:count]

    def _holds_up(self, tenant: str, turn_s: float) -> bool:
        """Return whether a turn is much longer than those of another tenant that was here lately, and may come again.

        Args:
            tenant: Whose turn it is.
            turn_s: Seconds of the turn.
        """
        others = (turn.seconds for name, turn in self._recent.items() if name != tenant)
        return turn_s > _LONG_TURN * min(others, default=turn_s)

    def _note(self, tenant: str, turn_s: float) -> None:
        """Note a tenant's turn, and forget tenants that were not here for long."""
        self._device_s += turn_s
        self._recent.pop(tenant, None)
        self._recent[tenant] = _RecentTurn(at_s=self._device_s, seconds=turn_s)  # the last one is the newest
        while next(iter(self._recent.values())).at_s < self._device_s - _RECENT_S:
            del self._recent[next(iter(self._recent))]

    def _seconds_of(self, members: Sequence[_Slot[Request]]) -> float:
        """Return what a turn of these is expected to take."""
        return self._seconds(_shape(members[0].request), sum(self._work(slot.request).rows for slot in members))

    def _charged(self, members: Sequence[_Slot[Request]]) -> BatchTurn[Request]:
        """Charge a turn that begins to those who are in it, by their rows."""
        rows = [self._work(slot.request).rows for slot in members]
        row_s = self._seconds(_shape(members[0].request), sum(rows)) / sum(rows)
        for slot, count in zip(members, rows, strict=True):
            self.charge(slot.share, count * row_s)
        tenant, turn_s = members[0].share.tenant, sum(rows) * row_s
        self._note(tenant, turn_s)
        return BatchTurn(
            splits=len(members) == 1 and self._holds_up(tenant, turn_s),
            requests=[slot.request for slot in members],
            shares=[slot.share for slot in members],
            charged_s=[count * row_s for count in rows],
        )

    def _trial(self, slots: Sequence[_Slot[Request]]) -> int:
        """How many of a group should have one turn together, because what it takes is outdated; 0 when it is not.

        Only plain rows measure anything.
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
        typical = RemainingWork(rows=works[-1].rows, steps=slots[-1].request.steps)
        seconds = partial(self._seconds, _shape(slots[0].request))
        width = best_width([*works, *[typical] * self._backlog], seconds, max_rows=self.max_rows)
        return max(1, min(width, len(works)))

    def _work(self, request: BatchCandidate) -> RemainingWork:
        cost = self._fractions.fraction(_shape(request), request.computed_share)
        return RemainingWork(rows=request.row_count * cost, steps=request.steps_left)

    def _fits(self, slots: Sequence[_Slot[Request]]) -> bool:
        """Return whether the bound on waiting allows these of one tenant, in wider groups than planned where needed."""
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
        """Return the turns in which all are served, in whatever order groups are filled.

        counts: by group, how many there are, and how many of the largest among them fit into a turn.
        """
        return sum(-(-count // min(self._widths[group], capacity)) for group, (count, capacity) in counts.items())

    def _lack(self, urgent: Sequence[_Slot[Request]], now: int) -> int:
        """Return the turns that are missing if somebody else than the most urgent is served now; below 0, none are.

        urgent: all admitted requests of the tenant whose turn it is, those that have waited longest first. now: the
        number of this turn among those of the tenant.
        """
        # Each may wait for so many turns more, this one included; the groups up to its own must fit into them.
        spare = [self._max_wait_turns - (now - 1 - slot.turn) for slot in urgent]
        return max(place - 1 - left for place, left in zip(self._places(urgent), spare, strict=True))

    def _places(self, slots: Sequence[_Slot[Request]]) -> list[int]:
        """For each of `slots`, in which turn it is served when groups are filled in this order, from 1."""
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
        """How many the group that `leader` leads takes in this turn."""
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
    """A group that is being filled. turn: in which it is served."""

    turn: int = 0
    requests: int = 0
    rows: int = 0

    def takes(self, rows: int, width: int, max_rows: int) -> bool:
        """Whether a request of `rows` rows has room."""
        return self.requests < width and self.rows + rows <= max_rows


def _shape(request: BatchCandidate) -> Shape:
    _, height, width = request.key.shape
    return height, width


def _by_group(slots: Iterable[_Slot[Request]]) -> dict[object, list[_Slot[Request]]]:
    found: dict[object, list[_Slot[Request]]] = {}
    for slot in slots:
        found.setdefault(slot.group, []).append(slot)
    return found
