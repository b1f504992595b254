"""How fast loads are: as measured of late, and guessed again where nothing was loaded for long."""

from __future__ import annotations

from bottega.addons.edits.worker.load_meter import LoadMeter
from tests.fakes.fake_time import FakeTime


def test_a_pace_that_was_slow_once_is_forgotten_when_nothing_is_loaded() -> None:
    clock = FakeTime()
    meter = LoadMeter(clock.monotonic)
    guessed = meter.bytes_per_s
    meter.came(1000, 1.0)
    assert meter.bytes_per_s == 1000
    clock.now += 9
    assert meter.bytes_per_s == 1000
    clock.now += 2
    assert meter.bytes_per_s == guessed
    meter.came(1000, 1.0)
    assert meter.bytes_per_s == 1000


def test_what_is_mapped_says_nothing_of_how_fast_the_rest_is_loaded() -> None:
    clock = FakeTime()
    meter = LoadMeter(clock.monotonic)
    guessed = meter.bytes_per_s
    meter.came(1 << 40, 1e-3, mapped=True)
    assert meter.bytes_per_s == guessed
    meter.came(1000, 1.0)
    meter.came(1 << 40, 1e-3, mapped=True)
    assert meter.bytes_per_s == 1000
    assert meter.counts["load_bytes"] == 2 * (1 << 40) + 1000
