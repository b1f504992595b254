"""Which news of its engine a worker reports at once, and which with its next regular report."""

from __future__ import annotations

from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import RunningAttempt, StepTime
from bottega.worker.worker import _reported_at_once
from tests.samples.hosted_loras import at_hand


def _beat(*, steps_left: int = 9, seconds: float = 0.1, rows: int = 2, loras: tuple[str, ...] = ()) -> EngineBeat:
    times = [StepTime(latent_height=8, latent_width=8, rows=rows, seconds=seconds)]
    return EngineBeat(running=[RunningAttempt(steps_left=steps_left)], step_times=times, hosted=at_hand(*loras))


def test_steps_and_drifting_times_wait_for_the_regular_report() -> None:
    assert _reported_at_once(_beat()) == _reported_at_once(_beat(steps_left=3, seconds=0.2))


def test_a_width_that_was_measured_or_a_lora_that_came_is_told_at_once() -> None:
    assert _reported_at_once(_beat()) != _reported_at_once(_beat(rows=4))
    assert _reported_at_once(_beat()) != _reported_at_once(_beat(loras=("a" * 64,)))
    assert _reported_at_once(EngineBeat()) != _reported_at_once(_beat())
