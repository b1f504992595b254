"""What a store has spent on a request: laps of one clock, and what of another one's is believed."""

from __future__ import annotations

import time

import pytest

from bottega.store_times import LapTimer, check_times
from bottega.v1.trace_pb2 import StoreTimes


def test_laps_are_all_the_time_there_was() -> None:
    before_s = time.monotonic()
    timer = LapTimer()
    made_s = time.monotonic()
    laps = [timer.lap() for _ in range(3)]
    after_s = time.monotonic()
    assert all(lap >= 0.0 for lap in laps)
    assert sum(laps) <= after_s - before_s
    time.sleep(0.01)
    assert timer.lap() >= 0.01
    assert sum(laps) + timer.lap() < time.monotonic() - made_s


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e-9, 1e9], ids=str)
@pytest.mark.parametrize("part", [field.name for field in StoreTimes.DESCRIPTOR.fields])
def test_what_is_no_duration_is_refused(part: str, seconds: float) -> None:
    times = StoreTimes(read_s=0.5)
    assert check_times(times) is times
    setattr(times, part, seconds)
    with pytest.raises(ValueError, match="are not 0 to"):
        check_times(times)
