"""Chooses which requests run in the next turn (one forward pass of a batch), and how long a request may be passed over.

Each turn belongs to the tenant that has used the fewest device seconds for its weight (bottega.fair_order). Requests
can share a batch if they have the same group key; that of the tenant's oldest request is chosen. The batch is as large
as the measured step times make worth it. A request is passed over in a bounded number of its tenant's turns. If step
times are outdated, one batch is made larger to measure them again.

If the network can compute several sizes at once, requests that differ only in size share a group where that saves time.

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

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Generic

from bottega.engine.batch import BatchSlot, BatchTurn, Request, allow_sizes, by_group, fill, of_several_sizes, places
from bottega.fair_order import FairOrder, Share, TurnLengths
from bottega.planning import (
    MAX_BACKLOG,
    PackedTimes,
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
# Sharing turns with other sizes must save this share of the time; less is within the noise of measured times.
_LEAST_GAIN = 0.05
# Seconds of a row while nothing has been measured: any number, the same for all.
_UNMEASURED_ROW_S = 1.0
_DEFAULT_SHARE = Share()


class Batcher(Generic[Request]):
    """The requests that are being denoised, in order of arrival.

    Of each tenant, the oldest requests are admitted: as many as fit into `max_wait_turns` + 1 turns. The others wait.

    Args:
        times: Step times of plain rows.
        fractions: Cost of partly computed rows. Limits on rows count them in full.
        packed: Times of batches with several sizes; None if every batch must have one size.
        max_rows: Upper bound on rows in one batch. A request with more rows runs alone.
        max_wait_turns: Number of its tenant's turns in which an admitted request may be passed over.
    """

    def __init__(
        self,
        times: StepTimes,
        fractions: RowFractions | None = None,
        packed: PackedTimes | None = None,
        *,
        max_rows: int,
        max_wait_turns: int,
    ) -> None:
        self._times = times
        self._fractions = fractions or RowFractions()
        self._packed = packed
        self.max_rows = max_rows
        self._max_wait_turns = max_wait_turns
        self._order = FairOrder()
        self._came: dict[str, int] = {}
        self._turns_of: dict[str, int] = {}
        self._lengths = TurnLengths(self._came)
        self._slots: dict[Request, BatchSlot[Request]] = {}
        self._admitted: list[BatchSlot[Request]] = []
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
            self._lengths.arrived(share.tenant)
        self._slots[request] = BatchSlot(request, share)
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
            members = self._shortened(fill(own[0], [*own, *others], self._width_now(own[0]), self.max_rows))
        else:
            # If the most urgent request is just in time, the batch has its usual size; if it is late, the largest.
            width = self._width_now(urgent[0]) if lack == 0 else len(urgent)
            members = fill(urgent[0], [*urgent, *others], width, self.max_rows)
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
        return self._lengths.is_long(seconds)

    def _plan(self) -> None:
        """Choose the batch sizes, and admit as many requests as the limit on waiting allows."""
        self._planned_at = self._turn
        packed = {slot.request.key.without_size for slot in self._slots.values() if slot.largest is not None}
        allow_sizes(self._slots.values(), None)
        self._widths = {group: self._width(slots) for group, slots in by_group(self._slots.values()).items()}
        if self._packed is not None:
            self._pack(packed)
        longest_s = max(map(self._turn_s, self._slots.values()), default=0.0)
        self._order.credit = _CREDIT_ROWS * self._least_row_s() + longest_s
        for slots in self._by_tenant().values():
            self._admit(slots)
        self._admitted = [slot for slot in self._slots.values() if slot.admitted]
        trials = {group: self._trial(slots) for group, slots in by_group(self._admitted).items()}
        self._trials = {group: width for group, width in trials.items() if width > self._widths[group]}

    def _pack(self, before: Set[Hashable]) -> None:
        """Let requests that differ only in size share a group, as `before` or not, if that pays and none gets late."""
        for key, slots in of_several_sizes(self._slots.values()).items():
            by_size_s, largest = self._round_s(slots), max((slot.shape for slot in slots), key=math.prod)
            allow_sizes(slots, largest)
            self._widths[slots[0].group] = self._width(slots)
            pays = self._round_s(slots) <= (1.0 - _LEAST_GAIN) * by_size_s
            if pays and (key in before or self._in_time()):
                continue
            allow_sizes(slots, None)
            if key in before and not self._in_time():
                allow_sizes(slots, largest)

    def _in_time(self) -> bool:
        """Return whether all admitted requests can run within the limit on waiting."""
        for tenant, slots in self._by_tenant().items():
            urgent = sorted((slot for slot in slots if slot.admitted), key=lambda slot: slot.turn)
            if urgent and (not self._fits(urgent) or self._lack(urgent, self._turns_of[tenant] + 1) > 0):
                return False
        return True

    def _round_s(self, slots: Sequence[BatchSlot[Request]]) -> float:
        """Return the seconds in which each of these requests makes one step."""
        turns: dict[int, list[BatchSlot[Request]]] = {}
        for slot, turn in zip(slots, places(slots, self._widths, self.max_rows), strict=True):
            turns.setdefault(turn, []).append(slot)
        return sum(map(self._seconds_of, turns.values()))

    def _by_tenant(self) -> dict[str, list[BatchSlot[Request]]]:
        """Return the requests of each tenant: the admitted ones, then the others, oldest first."""
        slots: dict[str, list[BatchSlot[Request]]] = {}
        for slot in sorted(self._slots.values(), key=lambda slot: not slot.admitted):
            slots.setdefault(slot.share.tenant, []).append(slot)
        return slots

    def _admit(self, slots: Sequence[BatchSlot[Request]]) -> None:
        """Admit as many of a tenant's requests as the limit on waiting allows."""
        admitted: list[BatchSlot[Request]] = []
        for slot in slots:
            admitted.append(slot)
            if not (self._fits(admitted) or slot.admitted):
                break
            if not slot.admitted:
                slot.admitted, slot.turn = True, self._turns_of[slot.share.tenant]

    def _least_row_s(self) -> float:
        """Return the seconds per row of the cheapest requests in the batcher."""
        shapes = {(slot.shape, slot.rows) for slot in self._slots.values()}
        return min((self._seconds(shape, rows) / rows for shape, rows in shapes), default=0.0)

    def _seconds(self, shape: Shape, rows: float) -> float:
        measured = self._times.seconds(shape, rows)
        return rows * _UNMEASURED_ROW_S if measured is None else measured

    def _by_share(self) -> tuple[list[BatchSlot[Request]], list[BatchSlot[Request]]]:
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

    def _turn_s(self, slot: BatchSlot[Request]) -> float:
        """Return the expected seconds of a forward pass with this request, at the chosen batch size."""
        return self._group_seconds(slot, self._work(slot).rows * self._widths[slot.group])

    def _shortened(self, members: list[BatchSlot[Request]]) -> list[BatchSlot[Request]]:
        """Return the first requests of a batch, at least one, as many as do not delay another tenant for long."""
        count, tenant = len(members), members[0].share.tenant
        alone_s = [self._seconds_of([slot]) for slot in members]
        while count > 1 and self._lengths.delays_another(
            tenant, self._seconds_of(members[:count]), sum(alone_s[:count])
        ):
            count -= 1
        return members[:count]

    def _splits(self, members: Sequence[BatchSlot[Request]]) -> bool:
        """Return whether to predict the rows of a turn's only request in two turns, as not to delay another tenant."""
        slot, shape, rows = members[0], members[0].shape, self._rows(members[0])
        first = rows / slot.rows
        parts_s = self._seconds(shape, first) + self._seconds(shape, rows - first)
        return len(members) == 1 and self._lengths.delays_another(
            slot.share.tenant, self._seconds(shape, rows), parts_s
        )

    def _seconds_of(self, members: Sequence[BatchSlot[Request]]) -> float:
        shape = members[0].shape
        if all(slot.shape == shape for slot in members):
            return self._seconds(shape, sum(map(self._rows, members)))
        return self._group_seconds(members[0], sum(self._work(slot).rows for slot in members))

    def _group_seconds(self, slot: BatchSlot[Request], rows: float) -> float:
        """Return the seconds of a forward pass of a request's group, with `rows` rows as `_work` counts them."""
        if self._packed is None or slot.largest is None:
            return self._seconds(slot.shape, rows)
        return self._packed.ratio * self._seconds(slot.largest, rows)

    def _charged(self, members: Sequence[BatchSlot[Request]]) -> BatchTurn[Request]:
        """Charge a beginning forward pass to the tenants of its requests, in proportion to their rows."""
        rows = [self._work(slot).rows for slot in members]
        row_s = self._seconds_of(members) / sum(rows)
        for slot, count in zip(members, rows, strict=True):
            self.charge(slot.share, count * row_s)
        tenant, turn_s = members[0].share.tenant, sum(rows) * row_s
        self._lengths.note_turn(tenant, turn_s)
        return BatchTurn(
            splits=self._splits(members),
            requests=[slot.request for slot in members],
            shares=[slot.share for slot in members],
            charged_s=[count * row_s for count in rows],
        )

    def _trial(self, slots: Sequence[BatchSlot[Request]]) -> int:
        """Return the size of a larger batch that would measure an outdated step time; 0 for none.

        Only batches of plain rows of one size measure step times.
        """
        if slots[0].largest is not None or any(slot.request.computed_share < 1.0 for slot in slots):
            return 0
        width = self._widths[slots[0].group]
        for wider in range(min(most_on_trial(width), len(slots)), width, -1):
            rows = sum(slot.rows for slot in slots[:wider])
            if rows <= self.max_rows and self._times.outdated(slots[0].shape, rows):
                return wider
        return 0

    def _width(self, slots: Sequence[BatchSlot[Request]]) -> int:
        if slots[0].exclusive:
            return 1
        works = [self._work(slot) for slot in slots]
        typical = RemainingWork(rows=works[-1].rows, steps=slots[-1].request.evaluations)
        seconds = partial(self._group_seconds, slots[0])
        width = best_width([*works, *[typical] * self._backlog], seconds, max_rows=self.max_rows)
        return max(1, min(width, len(works)))

    def _work(self, slot: BatchSlot[Request]) -> RemainingWork:
        """Return the work that a request still needs, in rows of the largest shape of its group."""
        return RemainingWork(rows=self._rows(slot) * slot.relative_area, steps=slot.request.evaluations_left)

    def _rows(self, slot: BatchSlot[Request]) -> float:
        """Return the cost of a request in each forward pass, in plain rows of its shape."""
        return slot.rows * self._fractions.fraction(slot.shape, slot.request.computed_share)

    def _fits(self, slots: Sequence[BatchSlot[Request]]) -> bool:
        """Return whether these requests of a tenant meet the limit on waiting, and enlarge batches as needed."""
        counts = {
            group: (len(same), max(1, self.max_rows // max(slot.rows for slot in same)))
            for group, same in by_group(slots).items()
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

    def _lack(self, urgent: Sequence[BatchSlot[Request]], now: int) -> int:
        """Return by how many turns the most urgent request is late if this turn skips it; negative if it is not late.

        Args:
            urgent: All admitted requests of the tenant whose turn it is; the one that has waited longest is first.
            now: The number of this turn among those of the tenant.
        """
        # Turns that each may still wait, this one included. The groups up to its own must fit into them.
        spare = [self._max_wait_turns - (now - 1 - slot.turn) for slot in urgent]
        return max(
            place - 1 - left for place, left in zip(places(urgent, self._widths, self.max_rows), spare, strict=True)
        )

    def _width_now(self, leader: BatchSlot[Request]) -> int:
        """Return the number of requests in this turn's batch, whose first one is `leader`."""
        return self._trials.get(leader.group, self._widths[leader.group])
