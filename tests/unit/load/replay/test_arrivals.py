"""Requests come as often, as irregularly and in such bursts as they are meant to."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean

import pytest

from bottega.errors import ConfigError
from load.bench.framework import percentile
from load.replay import arrivals
from load.replay.arrivals import ArrivalShape, BurstShape, arrival_times, read_times


def times(shape: ArrivalShape, *, rate_per_s: float = 10.0, length_s: float = 300.0, seed: int = 1) -> list[float]:
    return arrival_times(shape, rate_per_s=rate_per_s, length_s=length_s, chance=random.Random(seed))


@pytest.mark.parametrize("burstiness", [1.0, 8.0])
def test_a_run_offers_the_same_load_however_it_comes(burstiness: float) -> None:
    arrivals = times(ArrivalShape(burstiness=burstiness))
    assert len(arrivals) == 3000
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] < arrivals[-1] < 300
    assert arrivals == times(ArrivalShape(burstiness=burstiness)), "the same ones for the same seed"
    assert arrivals != times(ArrivalShape(burstiness=burstiness), seed=2)


def test_in_bursts_ten_times_as_many_come() -> None:
    arrivals = times(ArrivalShape(bursts=BurstShape(times=10.0, length_s=5.0, every_s=60.0)), rate_per_s=20.0)
    assert len(arrivals) == 6000, "the rate is that of all of it"
    by_second = [sum(int(at_s) == second for at_s in arrivals) for second in range(300)]
    between = percentile(by_second, 0.5)
    assert between == pytest.approx(6000 / (5 * (55 + 50)), rel=0.25)
    for minute in range(5):
        fullest = sorted(by_second[60 * minute : 60 * (minute + 1)])[-4:]
        assert mean(fullest) == pytest.approx(10 * between, rel=0.25), f"in minute {minute}"


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (ArrivalShape(curve=(0.0, 0.0)), "all parts are 0"),
        (ArrivalShape(bursts=BurstShape(length_s=60.0, every_s=60.0)), "length_s must be less"),
        (
            ArrivalShape(bursts=BurstShape(length_s=301.0, every_s=400.0)),
            "shorter than one burst of 301 s: make it longer, or give --no-bursts",
        ),
        (ArrivalShape(trace=Path("none.csv"), burstiness=4.0), "a trace has its own bursts"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(shape: ArrivalShape, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        times(shape)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "what,Timestamp\nx,1700000005\nz,1700000009\ny,1700000006.5\n",
        "\ufefftimestamp\n2024-05-10T00:00:05Z\n\n2024-05-10T02:00:06.5+02:00\n2024-05-10 00:00:09.0000000\n",
    ],
    ids=["unordered seconds", "dates and zones"],
)
def test_a_trace_has_seconds_or_dates(tmp_path: Path, text: str) -> None:
    assert read_times(written(tmp_path, text)) == pytest.approx([0.0, 1.5, 4.0])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("when\n1\n", "must name its columns in the first line, one of them at_s or timestamp"),
        ("at_s\n", "has no requests"),
        ("at_s\n1\nsoon\n", "line 3: 'soon' is neither seconds nor a time of ISO 8601"),
        ("at_s\nnan\n", "line 2: 'nan' is no number of seconds"),
        ("at_s\n1\n2\n3\n4\n", "more than 3 requests"),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused_by_its_line(
    tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MAX_ROWS", 3)
    with pytest.raises(ConfigError, match=says):
        read_times(written(tmp_path, text))
