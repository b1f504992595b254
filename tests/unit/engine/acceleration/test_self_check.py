"""The self-check with accelerations that are slow, wrong, broken or endless: each is refused, and it is said why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bottega.engine.acceleration.acceleration import Acceleration, AccelerationResult
from bottega.engine.acceleration.self_check import SelfCheck, SelfCheckSettings, TrialLog
from bottega.errors import InternalError
from bottega.model.model import Model

SECONDS = 1.0
TOLERANCE = 0.01


@dataclass
class Machine:
    """Computes one number on a clock of its own. speedups: of what is in it; offset: of its result.

    spell: which of its runs take how many times as long, because of what else the machine does.
    """

    now_s: float = 0.0
    spell: tuple[range, float] = (range(0), 1.0)
    runs: int = 0
    speedups: dict[str, float] = field(default_factory=dict)
    offset: float = 0.0
    results: Callable[[Tensor], Tensor] = lambda plain: plain
    synchronized: int = 0

    def clock(self) -> float:
        return self.now_s

    def synchronize(self) -> None:
        self.synchronized += 1

    def probe(self) -> Sequence[Tensor]:
        runs, slower = self.spell
        seconds = SECONDS * (slower if self.runs in runs else 1.0)
        self.runs += 1
        for speedup in self.speedups.values():
            seconds /= speedup
        self.now_s += seconds
        return [self.results(torch.full((4,), 2.0)) + self.offset]


@dataclass
class Faked:
    """An acceleration of the machine."""

    machine: Machine
    name: str = "faked"
    speedup: float = 2.0
    probe: str = "forward"
    tolerance: float = TOLERANCE
    excludes: Sequence[str] = ()
    why_not: str = ""
    on_enable: Callable[[], None] = lambda: None
    results: Callable[[Tensor], Tensor] = lambda plain: plain
    sticks: float = 0.0
    enabled: bool = False

    def unsupported(self, model: Model) -> str:
        return self.why_not

    def enable(self, model: Model) -> None:
        self.enabled = True
        self.machine.speedups[self.name] = self.speedup
        self.machine.results = self.results
        self.on_enable()

    def disable(self) -> None:
        self.enabled = False
        self.machine.speedups.pop(self.name, None)
        self.machine.results = lambda plain: plain
        self.machine.offset = self.sticks


@pytest.fixture
def machine() -> Machine:
    return Machine()


def check(
    model: Model, machine: Machine, *candidates: Acceleration, deadline_s: float = 1e6, trials: TrialLog | None = None
) -> list[AccelerationResult]:
    settings = SelfCheckSettings(
        synchronize=machine.synchronize, beat=lambda: None, deadline_s=deadline_s, clock=machine.clock
    )
    return SelfCheck(model, {"forward": machine.probe}, settings, trials).run(candidates)


def test_what_is_faster_and_equal_is_kept_and_measured(model: Model, machine: Machine) -> None:
    faked = Faked(machine, results=lambda plain: plain * 1.005)
    (found,) = check(model, machine, faked)
    assert (found.kept, found.reason, faked.enabled) == (True, "", True)
    assert found.speedup == pytest.approx(2.0)
    assert found.difference == pytest.approx(0.005, rel=1e-3)
    assert machine.synchronized, "else a device's times would be those of launches"


def test_what_saves_memory_is_kept_though_it_is_slower_unless_it_is_wrong(model: Model, machine: Machine) -> None:
    slow = Faked(machine, name="weights.float8", speedup=0.5)
    (found,) = check(model, machine, slow)
    assert (found.kept, found.reason, slow.enabled) == (True, "", True)
    slow.disable()
    (found,) = check(model, machine, Faked(machine, name="weights.float8", results=lambda plain: plain * 1.02))
    assert "differ by 0.02" in found.reason


def raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def nan(plain: Tensor) -> Tensor:
    return torch.where(torch.arange(4) == 3, torch.nan, plain)


REFUSED: dict[str, tuple[Callable[[Machine], Faked], str]] = {
    "slower": (lambda machine: Faked(machine, speedup=0.5), "0.50 times as fast"),
    "hardly faster": (lambda machine: Faked(machine, speedup=1.02), "1.02 times as fast"),
    "wrong": (lambda machine: Faked(machine, results=lambda plain: plain * 1.02), "differ by 0.02"),
    "NaN": (lambda machine: Faked(machine, results=nan), "differ by inf"),
    "infinite": (lambda machine: Faked(machine, results=lambda plain: plain / 0), "differ by inf"),
    "another shape": (lambda machine: Faked(machine, results=lambda plain: plain[:3]), "differ by inf"),
    "failing": (
        lambda machine: Faked(machine, on_enable=raises(RuntimeError("no such\nthing"))),
        "it failed: RuntimeError: no such",
    ),
    "out of memory": (
        lambda machine: Faked(machine, results=raises(torch.OutOfMemoryError("tried to allocate 3 GiB"))),  # type: ignore[arg-type]
        "OutOfMemoryError: tried to allocate 3 GiB",
    ),
    "unsupported": (lambda machine: Faked(machine, why_not="it is for another device"), "it is for another device"),
    "unprobed": (lambda machine: Faked(machine, probe="none"), "there is no probe none"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_faster_or_not_equal_is_off_and_it_is_said_why(
    model: Model, machine: Machine, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, said = REFUSED[what]
    faked = made(machine)
    with caplog.at_level("INFO"):
        (found,) = check(model, machine, faked)
    assert (found.kept, faked.enabled) == (False, False)
    assert said in found.reason
    assert machine.speedups == {}
    (record,) = [each for each in caplog.records if each.getMessage() == "an acceleration is not used"]
    assert said in record.__dict__["why"]


RUNS = 3 + 3  # of a measurement: the first ones are not timed
BEFORE, ACCELERATED, AFTER = (range(RUNS * place, RUNS * (place + 1)) for place in range(3))  # of the first turn


# Without further turns, what is slower or quicker for a while would be taken for what the acceleration does.
@pytest.mark.parametrize(
    ("spell", "speedup", "factor", "kept"),
    [
        *((spell, 1.07, 1.12, True) for spell in (BEFORE, ACCELERATED, AFTER)),
        *((spell, 0.97, 0.88, False) for spell in (BEFORE, ACCELERATED, AFTER)),
        (BEFORE, 1.0, 1.12, False),
        (BEFORE, 0.9, 3.0, False),
        (AFTER, 1.0, 1.6, False),
        (AFTER, 0.9, 1.8, False),
    ],
)
def test_both_ways_take_turns_where_what_else_runs_could_decide(
    model: Model, machine: Machine, spell: range, speedup: float, factor: float, kept: bool
) -> None:
    machine.spell = spell, factor
    (found,) = check(model, machine, Faked(machine, speedup=speedup))
    assert found.kept == kept
    assert found.speedup == pytest.approx(speedup)


def test_what_is_far_from_the_least_that_counts_is_measured_once(model: Model, machine: Machine) -> None:
    check(model, machine, Faked(machine, name="slow", speedup=0.5))
    assert machine.runs == 3 * RUNS, "plain, its own, plain again"
    check(model, machine, Faked(machine, name="wrong", speedup=1.02, results=nan))
    assert machine.runs == 6 * RUNS, "nor is the speed of what is wrong in doubt"


def test_turns_of_one_leave_the_others_their_part_of_the_time(model: Model, machine: Machine) -> None:
    doubtful, quick = Faked(machine, name="doubtful", speedup=1.0), Faked(machine, name="quick")
    found = check(model, machine, doubtful, quick, deadline_s=6 * RUNS * SECONDS)
    assert [each.kept for each in found] == [False, True]
    assert machine.runs == 3 * RUNS + 2 * RUNS + 1, "a turn of each; the plain way was measured before the second one"


def test_what_fails_or_differs_in_a_later_turn_is_off(model: Model, machine: Machine) -> None:
    def fail() -> None:
        raise RuntimeError("out of graphs")

    def differ() -> None:
        machine.results = lambda plain: plain * 1.5

    for later, reason in ((fail, "it failed: RuntimeError: out of graphs"), (differ, "differ by 0.5")):
        turns = iter([lambda: None, later])
        faked = Faked(machine, speedup=1.05, on_enable=lambda turns=turns: next(turns)())  # type: ignore[misc]
        (found,) = check(model, machine, faked)
        assert not found.kept
        assert reason in found.reason
        assert machine.speedups == {}


def test_what_differs_only_once_it_is_warm_is_off(model: Model, machine: Machine) -> None:
    """As a graph that is recorded at its third use, and then repeated."""
    runs: list[int] = []

    def warm(plain: Tensor) -> Tensor:
        runs.append(1)
        return plain if len(runs) <= 3 else plain * 1.5

    (found,) = check(model, machine, Faked(machine, results=warm))
    assert not found.kept
    assert "differ by 0.5" in found.reason


def test_each_is_tried_on_top_of_those_that_are_kept(model: Model, machine: Machine) -> None:
    first, second = Faked(machine, name="first"), Faked(machine, name="second", speedup=1.5)
    wrong = Faked(machine, name="wrong", results=nan)
    found = check(model, machine, first, wrong, second)
    assert [each.kept for each in found] == [True, False, True]
    assert found[2].speedup == pytest.approx(1.5)
    assert machine.speedups == {"first": 2.0, "second": 1.5}


def test_of_those_that_exclude_each_other_the_first_that_is_kept_stays(model: Model, machine: Machine) -> None:
    slow = Faked(machine, name="slow", speedup=0.5)
    kept = Faked(machine, name="kept", excludes=("slow", "other"))
    other = Faked(machine, name="other", excludes=("slow", "kept"))
    found = check(model, machine, slow, kept, other)
    assert [each.kept for each in found] == [False, True, False]
    assert found[2].reason == "kept is used instead"


def test_after_the_deadline_nothing_more_is_tried(model: Model, machine: Machine) -> None:
    first, second = Faked(machine, name="first", speedup=1.05), Faked(machine, name="second")
    found = check(model, machine, first, second, deadline_s=3 * SECONDS)
    assert [each.kept for each in found] == [True, False]
    assert machine.runs == 3 * RUNS + 1, "no more turns of the first one either"
    assert "no time was left" in found[1].reason


def test_what_does_not_go_away_again_ends_the_engine_by_name(model: Model, machine: Machine) -> None:
    with pytest.raises(InternalError, match="faked was disabled, and results still differ"):
        check(model, machine, Faked(machine, sticks=1.0))


def test_what_ended_a_process_is_not_tried_by_the_next_one(model: Model, machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    during: list[object] = []
    dying = Faked(machine, name="dying", on_enable=lambda: during.append(json.loads(path.read_text())))
    check(model, machine, dying, trials=TrialLog(path))
    assert during[0] == ["dying"]
    assert json.loads(path.read_text()) == [], "it has not ended the process"
    path.write_text(json.dumps(during[0]))  # as it stands where the process ends meanwhile
    found = check(model, machine, Faked(machine, name="dying"), Faked(machine, name="other"), trials=TrialLog(path))
    assert (found[0].kept, found[0].reason) == (False, "an engine process died while it was tried")
    assert found[1].kept
    assert json.loads(path.read_text()) == ["dying"], "nor by the one after that"


def test_an_engine_starts_also_where_trials_cannot_be_noted(
    model: Model, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "tidied up" / "trials.json"
    found = check(model, machine, Faked(machine, name="faked"), trials=TrialLog(gone))
    assert found[0].kept
    told = [each.__dict__ for each in caplog.records if "cannot write the trial log" in each.getMessage()]
    assert [each["tried"] for each in told] == [[], ["faked"], []]
    assert {each["why"] for each in told} == {"No such file or directory"}


def test_what_cannot_be_taken_out_is_not_tried_by_the_next_one(model: Model, machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    with pytest.raises(InternalError):
        check(model, machine, Faked(machine, sticks=1.0), trials=TrialLog(path))
    assert TrialLog(path).fatal == {"faked"}


def test_after_two_engines_that_ended_the_next_one_tries_nothing(
    model: Model, machine: Machine, tmp_path: Path
) -> None:
    path = tmp_path / "trials.json"
    path.write_text(json.dumps(["one", "two"]))
    (found,) = check(model, machine, Faked(machine, name="third"), trials=TrialLog(path))
    assert found.reason == "engine processes died while one, two were tried, so no more are tried"


@pytest.mark.parametrize("text", ["", "{", "{}", "[1, null]"])
def test_a_log_that_cannot_be_read_is_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trials.json"
    path.write_text(text)
    assert TrialLog(path).fatal == frozenset()
