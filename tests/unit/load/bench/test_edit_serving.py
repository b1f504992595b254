"""The benches of serving edits: what comes when and of what size, the clock that they run on, and what they report."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.events import EngineRecord, Event, JobFinished
from bottega.diffusion.engine.job import EngineOrder
from bottega.planning import RowFractions, StepTimes
from load.bench import edit_queue
from load.bench.edit_batching import Round, values_of
from load.bench.edit_model import MARGIN, SIZE, TOKEN, placed_mask, square_mask
from load.bench.edit_queue import Arriving, StaticBatches, serve, step_by_step
from load.bench.edit_serving import Measured
from load.bench.report import percentile
from load.bench.typical_arrivals import one_by_one, typical_arrivals


def test_a_mask_is_the_same_square_wherever_it_lies() -> None:
    chance = random.Random(1)
    placed = [placed_mask(0.19, chance) for _ in range(20)]
    assert {int(mask.sum()) for mask in placed} == {int(square_mask(0.19).sum())}
    corners = {tuple(np.argwhere(mask)[0] // TOKEN - MARGIN) for mask in placed}
    assert len(corners) > 5
    assert all(row % 2 == column % 2 == 0 for row, column in corners)
    assert placed_mask(1.0, chance).sum() == 255 * (SIZE - 2 * MARGIN * TOKEN) ** 2


def test_a_queue_of_one_server_is_that_of_its_services() -> None:
    assert one_by_one([0, 1, 10], iter([3, 4, 5])) == [3, 6, 5]


def test_typical_arrivals_come_at_their_rate_and_neither_pile_up_nor_stay_away() -> None:
    at_s = typical_arrivals(2.0, 400, capacity_per_s=2.5)
    assert at_s == sorted(at_s)
    assert len(at_s) / at_s[-1] == pytest.approx(2.0, rel=0.15)
    p95_s = percentile(one_by_one(at_s, itertools.repeat(0.4)), 0.95)
    others = [typical_arrivals(2.0, 400, capacity_per_s=2.5, seed=f"{seed}") for seed in range(3)]
    for other in others:
        assert percentile(one_by_one(other, itertools.repeat(0.4)), 0.95) == pytest.approx(p95_s, rel=0.1)


class ScriptedEngine:
    """An engine whose turns take a second for each request, up to its width, and whose requests take two turns."""

    def __init__(self, width: int) -> None:
        self.step_times = StepTimes.from_entries([((8, 8), rows, float(rows)) for rows in (1, 2, 4)])
        self.row_fractions = RowFractions()
        self.now_s = 0.0
        self.held: dict[object, int] = {}
        self.most_held = 0
        self._width = width

    def submit(self, order: EngineOrder) -> None:
        self.held[order.key] = 2
        self.most_held = max(self.most_held, len(self.held))

    def set_backlog(self, _: int) -> None:
        pass

    def computed_shares(self) -> dict[object, float]:
        return dict.fromkeys(self.held, 1.0)

    def steps_left(self) -> Iterator[tuple[object, int]]:
        yield from self.held.items()

    def turn(self) -> Iterator[Event]:
        for key in list(self.held)[: self._width]:
            self.now_s += 1.0
            self.held[key] -= 1
            if not self.held[key]:
                del self.held[key]
                yield JobFinished(key=key, record=cast(EngineRecord, None))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """Alone on the clock of edit_queue."""
    scripted = ScriptedEngine(1)
    monkeypatch.setattr(edit_queue, "perf_counter", lambda: scripted.now_s)
    return scripted


def arriving(*at_s: float) -> list[Arriving]:
    order: Any = SimpleNamespace
    spec = order(num_inference_steps=2)
    return [Arriving(at_s=when, order=order(key=number, spec=spec)) for number, when in enumerate(at_s)]


def test_the_clock_skips_what_nobody_waits_in_and_counts_from_the_arrival(engine: ScriptedEngine) -> None:
    served = serve(cast(Engine, engine), arriving(0, 1, 100), step_by_step)
    assert list(served.took_s) == [2, 3, 2]
    assert served.busy_s == 6


def test_the_engine_holds_what_runs_and_one_more(engine: ScriptedEngine) -> None:
    serve(cast(Engine, engine), arriving(*[0.0] * 6), step_by_step)
    assert engine.most_held == 2


def test_joining_and_leaving_hold_a_strawman_up(engine: ScriptedEngine) -> None:
    served = serve(cast(Engine, engine), arriving(0, 100), step_by_step, stall_s=0.5)
    assert list(served.took_s) == [3, 3]
    assert served.stalls == 4


def test_a_static_batch_is_answered_when_its_last_one_ends_and_nobody_joins_it(engine: ScriptedEngine) -> None:
    served = serve(cast(Engine, engine), arriving(0, 0, 1), StaticBatches(), together=True)
    assert list(served.took_s) == [4, 4, 5]


def test_p95s_are_compared_in_times_of_an_edit_alone() -> None:
    slow = Round(name="a", capacity_per_s=1, edit_s=10, static=[20, 40], engine=[10, 20], strawman=[30, 60])
    fast = Round(name="b", capacity_per_s=1, edit_s=1, static=[2, 3], engine=[1, 1.5], strawman=[1, 2])
    values = values_of([slow, fast])
    assert values["static_p95_ratio"] == 2
    assert values["strawman_p95_ratio"] == pytest.approx(60 / (20 + 3.2))
    assert (values["static_p95_ratio_b"], values["requests"]) == (2, 4)


def test_what_the_suite_takes_beside_its_engine_counts_to_each_edit() -> None:
    measured = Measured(alone=[3.0], engine_alone=[2.5], theirs={1.0: [10.0]}, ours={1.0: [2.0]})
    assert measured.reduction(1.0) == pytest.approx(0.75)
