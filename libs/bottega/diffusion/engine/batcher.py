"""Which requests share the next turn, and how long one may be passed over.

Of the tenant that had least of its share, oldest first, as wide as pays off by the measured step times, and nobody
waits longer than a bound. Where those times are outdated, one turn is made wider, to measure it again. Time is counted
in turns, and what a tenant had in rows, each turn of one.

A tenant that comes and is behind, because it asked for little, has turns of its own for a while: beside others its
own would take as long as theirs. Meanwhile those may be passed over for longer, but not without end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bottega.diffusion.rows import GroupKey
from bottega.planning import (
    MAX_BACKLOG,
    FairOrder,
    RemainingWork,
    RowFractions,
    Shape,
    Share,
    StepTimes,
    best_width,
    most_on_trial,
)

# Turns after which the widths are chosen anew though nobody came or went: step times drift.
_REPLAN_TURNS = 16
# What a tenant that asked for less than its share may have ahead of the others: about four guided images of 50 steps,
# as some come together; and the turn by which those who take turns may be apart.
_CREDIT_ROWS = 400.0
# Turns after its coming in which a tenant that is behind shares none with others, and by which the bound on waiting is
# longer for those meanwhile.
_OWN_TURNS, _PATIENCE = 256, 4
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


@dataclass(slots=True, eq=False)
class _Slot(Generic[Request]):
    """A request in the batcher. turn: of its last step, or in which it was admitted. exclusive: shares no group."""

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
    max_rows: of one group; a request with more rows runs by itself. max_wait_turns: that a request may be
    passed over once it is admitted. As many are admitted, first come first, as one group more than so many
    turns can hold; the others wait.
    """

    def __init__(
        self, times: StepTimes, fractions: RowFractions | None = None, *, max_rows: int, max_wait_turns: int
    ) -> None:
        self._times = times
        self._fractions = fractions or RowFractions()
        self.max_rows = max_rows
        self._max_wait_turns = max_wait_turns
        self._order = FairOrder(credit=_CREDIT_ROWS + max_rows)
        self._behind: frozenset[str] = frozenset()
        self._came: dict[str, int] = {}
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
            self._came[share.tenant] = self._turn
        self._slots[request] = _Slot(request, share)
        self._planned_at = -_REPLAN_TURNS

    def remove(self, request: Request) -> None:
        """Forgets a request, done or not. Harmless when it is not here."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            if all(other.share.tenant != slot.share.tenant for other in self._slots.values()):
                del self._came[slot.share.tenant]
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

    def next_group(self) -> list[Request]:
        """The requests of the next turn, which begins now; empty when there are none."""
        if self._turn - self._planned_at >= _REPLAN_TURNS:
            self._plan()
        self._turn += 1
        if not self._admitted:
            return []
        fair = self._by_share()
        urgent = sorted(self._admitted, key=lambda slot: slot.turn)
        lack = self._lack(urgent)
        if lack < 0:
            members = self._fill(fair[0], fair, self._width_now(fair[0]))
        else:
            # Just in time is enough to be served in turn; later than that, the group takes all it can.
            width = self._width_now(urgent[0]) if lack == 0 else len(urgent)
            members = self._fill(urgent[0], urgent, width)
        self._charge(members)
        for slot in members:
            slot.turn = self._turn
        if self._trials and len(members) > self._widths[members[0].group]:
            self._times.tried()
            self._planned_at = -_REPLAN_TURNS  # the next turn is as wide as pays off by what this one took
        return [slot.request for slot in members]

    def _plan(self) -> None:
        """Chooses the widths, and whom to admit: as many as the bound on waiting allows."""
        self._planned_at = self._turn
        by_group: dict[object, list[_Slot[Request]]] = {}
        for slot in self._slots.values():
            by_group.setdefault(slot.group, []).append(slot)
        self._widths = {group: self._width(slots) for group, slots in by_group.items()}
        self._admitted = []
        for slot in self._in_line():
            fits = self._admit(slot)
            if not (fits or slot.admitted):
                self._admitted.pop()
                break
            if not slot.admitted:
                slot.admitted, slot.turn = True, self._turn
        trials = {group: self._trial(slots) for group, slots in self._groups().items()}
        self._trials = {group: width for group, width in trials.items() if width > self._widths[group]}

    def _in_line(self) -> list[_Slot[Request]]:
        """Those who are admitted, then the others, as their tenants' shares let them begin."""
        admitted = [slot for slot in self._slots.values() if slot.admitted]
        others = [slot for slot in self._slots.values() if not slot.admitted]
        if len({slot.share.tenant for slot in self._slots.values()}) > 1:
            begins = self._begins([*admitted, *others])
            others.sort(key=lambda slot: begins[slot])
        return [*admitted, *others]

    def _begins(self, slots: Sequence[_Slot[Request]]) -> dict[_Slot[Request], float]:
        """When each would begin, in what its tenant has had by then."""
        had: dict[str, float] = {}
        begins: dict[_Slot[Request], float] = {}
        for slot in slots:
            tenant = slot.share.tenant
            begins[slot] = had.setdefault(tenant, self._order.next_tag(tenant))
            work = self._work(slot.request)
            had[tenant] += work.rows * work.steps / slot.share.weight
        return begins

    def _by_share(self) -> Sequence[_Slot[Request]]:
        """Those who may have a turn by their shares: of tenants that are behind, if any, else all who are admitted.

        Of those tenants first that had least; of one, oldest first.
        """
        tags = {slot.share.tenant: self._order.next_tag(slot.share.tenant) for slot in self._admitted}
        last, new = max(tags.values()) - self.max_rows, self._turn - _OWN_TURNS
        self._behind = frozenset(tenant for tenant, tag in tags.items() if tag < last and self._came[tenant] >= new)
        if len(tags) == 1:
            return self._admitted
        chosen = [slot for slot in self._admitted if not self._behind or slot.share.tenant in self._behind]
        return sorted(chosen, key=lambda slot: tags[slot.share.tenant])

    def _charge(self, members: Sequence[_Slot[Request]]) -> None:
        """These have the turn."""
        self._order.served(min(self._order.next_tag(slot.share.tenant) for slot in self._admitted))
        for slot in members:
            self._order.tag(slot.share.tenant, cost=self._work(slot.request).rows, weight=slot.share.weight)

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
        shape = _shape(slots[0].request)

        def seconds(rows: float) -> float:
            measured = self._times.seconds(shape, rows)
            return float(rows) if measured is None else measured

        width = best_width([*works, *[typical] * self._backlog], seconds, max_rows=self.max_rows)
        return max(1, min(width, len(works)))

    def _work(self, request: BatchCandidate) -> RemainingWork:
        cost = self._fractions.fraction(_shape(request), request.computed_share)
        return RemainingWork(rows=request.row_count * cost, steps=request.steps_left)

    def _admit(self, slot: _Slot[Request]) -> bool:
        """Admits one more, in wider groups than planned where needed; whether the bound on waiting allows it."""
        self._admitted.append(slot)
        while self._turns_for_all() > self._max_wait_turns + 1:
            narrow = [group for group, (count, capacity) in self._counts().items() if self._widths[group] < capacity]
            if not narrow:
                return False
            narrowest = min(narrow, key=lambda group: self._widths[group])
            self._widths[narrowest] += 1
        return True

    def _turns_for_all(self) -> int:
        """Turns in which everybody admitted is served, in whatever order groups are filled."""
        return sum(
            -(-count // min(self._widths[group], capacity)) for group, (count, capacity) in self._counts().items()
        )

    def _counts(self) -> dict[object, tuple[int, int]]:
        """By group: how many are admitted, and how many of the largest among them fit into a turn."""
        return {
            group: (len(same), max(1, self.max_rows // max(slot.rows for slot in same)))
            for group, same in self._groups().items()
        }

    def _groups(self) -> dict[object, list[_Slot[Request]]]:
        """Those who are admitted, by group."""
        slots: dict[object, list[_Slot[Request]]] = {}
        for slot in self._admitted:
            slots.setdefault(slot.group, []).append(slot)
        return slots

    def _lack(self, urgent: Sequence[_Slot[Request]]) -> int:
        """Turns that are missing if somebody else than the most urgent is served now; below 0, none are.

        urgent: all that are admitted, those that have waited longest first.
        """
        # Each may wait for so many turns more, this one included; the groups up to its own must fit into them.
        spare = [self._bound_of(slot) - (self._turn - 1 - slot.turn) for slot in urgent]
        return max(place - 1 - left for place, left in zip(self._places(urgent), spare, strict=True))

    def _bound_of(self, slot: _Slot[Request]) -> int:
        """Turns that a request may be passed over now."""
        waits_for_others = self._behind and slot.share.tenant not in self._behind
        return self._max_wait_turns * (_PATIENCE if waits_for_others else 1)

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
