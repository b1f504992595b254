"""What is requested for the steps that come: by costs, in the order of use of all rows, once, and some turns ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from bottega.addons.edits.engine.planner import Coming, ComingRow, LoadPlanner, LoadPolicy
from bottega.addons.edits.engine.recordings.recording import StepKey
from bottega.addons.edits.engine.recordings.step import MemoryStep
from bottega.addons.edits.engine.recordings.step_access import StepLoads
from bottega.addons.edits.engine.times import BlockTimes
from bottega.addons.edits.planning import BlockCost, StepPlan, plan_steps
from bottega.model.rows import Half
from tests.samples.activations_elsewhere import ActivationsElsewhere, StepElsewhere
from tests.samples.masked_networks import box, small_unet

SIZE = (32, 32)
UNET = small_unet()


@dataclass
class Reader:
    """An edit of `turns` steps of which both halves are elsewhere, `steps` of another one where they are given.

    log: requests of all its steps, in order. waits: how long was waited for any at most.
    """

    turns: int
    times: BlockTimes
    size: tuple[int, int] = SIZE
    made: int = 0
    log: list[tuple[int, Half, str]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    steps: dict[tuple[int, Half], StepElsewhere] = field(default_factory=dict)
    loads: dict[StepKey, StepLoads] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.computed = box(8, 8, 8, 8, size=SIZE)
        self.steps = self.steps or {(turn, half): self._step(turn, half) for turn in range(self.turns) for half in Half}

    def _step(self, turn: int, half: Half) -> StepElsewhere:
        outputs = {
            name: torch.zeros(shape, dtype=torch.float16)
            for block in self.times.blocks(SIZE)
            for name, shape in zip(block.names, block.shapes, strict=True)
        }
        log, waits = self.log, self.waits

        class Logged(StepElsewhere):
            def request(self, names: object) -> None:
                assert isinstance(names, list | tuple)
                super().request(names)
                log.extend((turn, half, name) for name in names)

            def wait(self, name: str, timeout_s: float) -> bool:
                waits.append(timeout_s)
                return super().wait(name, timeout_s)

        return Logged(MemoryStep(valid=torch.ones(SIZE, dtype=torch.bool), outputs=outputs), lambda name: True)

    def coming(self, turn: int) -> Coming:
        step = self.made + turn
        if step >= self.turns:
            return (), 0
        keys = {half: StepKey(timestep=float(step), noise_level=1.0, half=half) for half in Half}
        rows = [
            ComingRow(key=key, step=self.steps[step, half], computed=self.computed, share=0.1, loads=self.loads)
            for half, key in keys.items()
        ]
        return rows, 0

    @property
    def outstanding(self) -> Iterable[StepLoads]:
        return self.loads.values()

    def make(self) -> None:
        """All that was requested for the next step has come, and it is made."""
        for half in Half:
            self.steps[self.made, half].load()
            self.loads.pop(StepKey(timestep=float(self.made), noise_level=1.0, half=half), None)
        self.made += 1


def planner(rate: float | None, policy: LoadPolicy | None = None) -> tuple[LoadPlanner, BlockTimes]:
    source, times = ActivationsElsewhere(1 << 30), BlockTimes(UNET, sparse=True)
    source.load_bytes_per_s = rate
    return LoadPlanner(source, times, policy), times


def names_of(times: BlockTimes) -> list[str]:
    return [name for block in times.blocks(SIZE) for name in block.names]


def test_a_fast_store_is_asked_for_all_that_saves_anything_some_turns_ahead_and_once() -> None:
    plans, times = planner(1e12)
    reader = Reader(5, times)
    plans.plan([reader], others=0)
    assert {turn for turn, _, _ in reader.log} == {0, 1, 2}
    asked = len(reader.log)
    plans.plan([reader], others=0)
    assert len(reader.log) == asked, "nothing twice"
    reader.make()
    plans.plan([reader], others=0)
    assert {turn for turn, _, _ in reader.log[asked:]} == {3}


def test_requests_are_in_the_order_of_use_and_within_some_bytes_for_both_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bottega.addons.edits.engine.planner._REQUEST_BYTES", 1 << 15)
    plans, times = planner(1e12)
    reader = Reader(2, times)
    plans.plan([reader], others=0)
    order = names_of(times)
    places = [(turn, order.index(name)) for turn, half, name in reader.log if half is Half.CONDITIONAL]
    assert places == sorted(places)
    assert [turn for turn, _, _ in reader.log] == sorted(turn for turn, _, _ in reader.log)
    halves = [half for turn, half, _ in reader.log if turn == 0]
    assert set(halves[: len(halves) // 4]) == set(Half)


def test_a_slow_store_is_asked_for_less_and_a_dead_slow_one_for_nothing() -> None:
    counts = []
    for rate in (1e12, 2e6, 1.0):
        plans, times = planner(rate)
        reader = Reader(3, times)
        (planned,) = plans.plan([reader], others=0)
        assert 0 < planned.row_equivalents < 2
        counts.append((len(reader.log), planned.seconds))
    (most, least_s), (some, middle_s), (none, most_s) = counts
    assert most > some > none == 0
    assert least_s < middle_s < most_s
    plans, times = planner(None)
    assert plans.plan([Reader(3, times)], others=0) == [], "nothing is ever loaded"


def test_what_two_edits_take_of_the_same_step_is_loaded_once() -> None:
    loads = []
    for readers in (1, 2):
        chosen: list[float] = []

        def choose(steps: Sequence[Sequence[BlockCost]], busy_s: float, costs: list[float] = chosen) -> list[StepPlan]:
            costs.extend(block.load_s for blocks in steps for block in blocks)
            return plan_steps(steps, load_busy_s=busy_s)

        plans, times = planner(1e9, LoadPolicy(choose=choose))
        first = Reader(3, times)
        others = [Reader(3, times, steps=first.steps) for _ in range(readers - 1)]
        plans.plan([first, *others], others=0)
        loads.append(chosen)
    assert max(loads[0]) > 0.0
    assert loads[1] == loads[0]


def test_what_edits_wait_for_keeps_the_load_stream_busy_once() -> None:
    rate, busy = 1e9, list[float]()

    def choose(steps: Sequence[Sequence[BlockCost]], busy_s: float) -> list[StepPlan]:
        busy.append(busy_s)
        return plan_steps(steps, load_busy_s=busy_s)

    plans, times = planner(rate, LoadPolicy(choose=choose))
    first = Reader(5, times)
    all_of_them = [first, Reader(5, times, steps=first.steps)]
    plans.plan(all_of_them, others=0)
    requested = {(turn, half, name) for turn, half, name in first.log if turn}
    requested_bytes = sum(first.steps[turn, half].bytes_of(name) for turn, half, name in requested)
    for reader in all_of_them:
        reader.make()
    plans.plan(all_of_them, others=0)
    assert busy == [0.0, pytest.approx(requested_bytes / rate)]


def test_nothing_is_waited_for_longer_than_an_engine_may_say_nothing() -> None:
    plans, times = planner(1e12, LoadPolicy(patience=1e15))
    reader = Reader(1, times)
    plans.plan([reader], others=0)
    loads = next(iter(reader.loads.values()))
    assert loads.wait_for(reader.log[0][2])
    assert reader.waits == [10.0]
