"""What the scheduling policy knows of a worker, and what a job needs of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from bottega.planning import RemainingWork, RowFractions, Shape, StepTimes

# Seconds of one row and turn while nothing was measured: proportional, so that nothing shares a worker then.
_UNMEASURED_S = 0.1
# Turns of one shape of a worker, each of so many rows, of which is remembered what they take until it reports again.
_TURNS = 1024


class ResourceRequest(NamedTuple):
    """The resources that a job needs of a worker. It is a tuple because it is a key of caches in the hot path."""

    rows: int
    """In each turn."""
    steps: int
    """Turns to go."""
    shape: Shape
    """Of its latent; (0, 0) is unknown."""
    share: float = 1.0
    """Of the tokens of its rows, what is computed; less than 1 of an edit whose template's activations are at hand."""
    slowdown: float = 1.0
    """How many times as long its turns take by its ControlNets and LoRAs."""


# What was added since the state was made, the job in question, and how many are behind it, or may run together.
Question = tuple[tuple[ResourceRequest, ...], ResourceRequest, int]


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was already found out of a worker's state, for later rounds, by what was asked.

    widths outlive the state as long as the same jobs run: a step made or two change none of them. What turns take does
    so as long as the worker has not reported: turns, by shape and then by rows; alone, of a job alone its rows, in
    plain ones, and the seconds of a turn, by its rows, shape and share. slack and ends_s: by what was added, the job,
    and how many may run together.
    """

    widths: dict[Question, int] = field(default_factory=dict)
    slack: dict[Question, bool] = field(default_factory=dict)
    ends_s: dict[Question, float] = field(default_factory=dict)
    alone: dict[tuple[int, Shape, float], tuple[float, float]] = field(default_factory=dict)
    turns: dict[Shape, Callable[[float], float]] = field(default_factory=dict)
    load_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker at the start of a round.

    running: what still denoises there, first come first. due_s: seconds until each of these is due, when the state was
    made, and endless for one that is not; empty where none is. finishing: attempts there that do not denoise any more.
    exclusive: a job there must be left alone. fixed_s: seconds that a job takes beside its turns.
    max_rows: of one turn; 0 is without bound. fractions: what rows cost of which a part is computed.
    findings: go with the state: a worker that has moved, or has reported, gets another one.
    """

    worker: str
    running: tuple[ResourceRequest, ...]
    times: StepTimes
    fixed_s: float
    max_rows: int
    due_s: tuple[float, ...] = ()
    finishing: int = 0
    exclusive: bool = False
    fractions: RowFractions = field(default_factory=RowFractions, compare=False)
    findings: Findings = field(default_factory=Findings, compare=False, repr=False)

    @property
    def most_rows(self) -> int:
        """Of one turn."""
        return self.max_rows or 1 << 30

    def turn_seconds(self, shape: Shape) -> Callable[[float], float]:
        """Seconds of one turn of that shape, by its rows."""
        seconds = self.findings.turns.get(shape)
        if seconds is None:
            seconds = self.findings.turns[shape] = _turn_seconds(self.times, shape)
        return seconds

    def work(self, request: ResourceRequest, shape: Shape) -> RemainingWork:
        """A job as plain rows of one shape: a larger latent counts as more rows, an edit as fewer."""
        rows = self.alone(request)[0]
        if request.shape != shape:
            rows *= _area_ratio(request.shape, shape)
        # As more turns, not as more rows: others wait no longer in each.
        return RemainingWork(ceil(request.steps * request.slowdown), rows)

    def alone(self, request: ResourceRequest) -> tuple[float, float]:
        """Return what the rows of one job cost, in plain ones, and the seconds of a turn with nothing else.

        Without what add-ons add.
        """
        rows, shape, share = request.rows, request.shape, request.share
        known = self.findings.alone
        found = known.get((rows, shape, share))
        if found is None:
            plain = float(rows)
            if share < 1.0:
                plain *= self.fractions.fraction(shape, share)
            found = known[rows, shape, share] = plain, self.turn_seconds(shape)(plain)
        return found

    def alone_s(self, request: ResourceRequest) -> float:
        """Seconds of the turns of one job, alone."""
        return self.alone(request)[1] * request.steps * request.slowdown

    @property
    def unmeasured(self) -> bool:
        """Whether it has measured no step yet."""
        return next(iter(self.times.entries()), None) is None


def _area_ratio(shape: Shape, other: Shape) -> float:
    """Of two latents; 1 where one is unknown."""
    area, of = shape[0] * shape[1], other[0] * other[1]
    return area / of if area and of else 1.0


def _turn_seconds(times: StepTimes, shape: Shape) -> Callable[[float], float]:
    """Looked up once for each number of rows: one choice of a width asks for the same ones many times."""

    @lru_cache(_TURNS)
    def seconds(rows: float) -> float:
        measured = times.seconds(shape, rows)
        return rows * _UNMEASURED_S if measured is None else measured

    return seconds
