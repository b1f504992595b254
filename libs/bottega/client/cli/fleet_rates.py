"""What services do a second, from what they say that they have counted, at two moments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bottega.v1.fleet_pb2 import Activity, ListMembersResponse, Member

WINDOW_S = 10.0
"""Rates are of the last so many seconds."""

# Of one service: a look every second needs a dozen.
_MOST_SAMPLES = 64

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a service has done of late.

    completed, failed, steps, lookups: a second. batch: steps of one turn; None where there was no turn. wait_s: that
    jobs waited for the worker that they got, on average; None where none got one. hit_share: of the questions for what
    it keeps, 0 to 1; None where nobody asked.
    """

    completed: float
    failed: float
    steps: float
    lookups: float
    batch: float | None
    wait_s: float | None
    hit_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """What a service had counted at a moment of our clock."""

    at: float
    activity: Activity


class FleetRates:
    """Follows the services of a fleet; those that have left are forgotten."""

    def __init__(self) -> None:
        self._samples: dict[_Key, deque[_Sample]] = {}

    def add(self, fleet: ListMembersResponse, *, now: float) -> None:
        """Takes in the fleet as it was at `now`, of a clock that never goes back."""
        before = self._samples
        self._samples = {_key(member): before.get(_key(member), _no_samples()) for member in fleet.members}
        for member in fleet.members:
            # A report is as old as the time since its service was heard.
            sample = _Sample(at=now - member.heard_s, activity=member.load.activity)
            _append(self._samples[_key(member)], sample)

    def of(self, member: Member) -> Rates | None:
        """None until it has reported twice."""
        samples = self._samples.get(_key(member))
        if not samples or samples[-1].at <= samples[0].at:
            return None
        first, last = samples[0], samples[-1]
        return _rates(first.activity, last.activity, seconds=last.at - first.at)


def hit_share(activity: Activity) -> float | None:
    """Of all questions since the start; None where there was none."""
    return _share(activity.hits, activity.lookups)


def _append(samples: deque[_Sample], sample: _Sample) -> None:
    if samples and _began_anew(samples[-1].activity, sample.activity):
        samples.clear()
    samples.append(sample)
    # One that is older stays, so that the window is covered.
    while len(samples) > 2 and samples[1].at <= sample.at - WINDOW_S:
        samples.popleft()


def _began_anew(before: Activity, after: Activity) -> bool:
    """Whether another process or engine counts now."""
    return any(getattr(after, field.name) < value for field, value in before.ListFields())


def _rates(before: Activity, after: Activity, *, seconds: float) -> Rates:
    steps, lookups = after.steps - before.steps, after.lookups - before.lookups
    turns, routed = after.turns - before.turns, after.routed - before.routed
    return Rates(
        completed=(after.completed - before.completed) / seconds,
        failed=(after.failed - before.failed) / seconds,
        steps=steps / seconds,
        lookups=lookups / seconds,
        batch=steps / turns if turns else None,
        wait_s=(after.waited_s - before.waited_s) / routed if routed else None,
        hit_share=_share(after.hits - before.hits, lookups),
    )


def _share(hits: int, lookups: int) -> float | None:
    return hits / lookups if lookups > 0 else None


def _key(member: Member) -> _Key:
    return member.registration.kind, member.registration.name


def _no_samples() -> deque[_Sample]:
    return deque(maxlen=_MOST_SAMPLES)
