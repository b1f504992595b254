"""What an operator may ask of a replay, and what is refused before anything begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from load.replay.__main__ import main
from load.replay.arrivals import ArrivalShape
from load.replay.command_line import parse
from load.replay.mix import Mix, load_mix


def mix_of(*arguments: str) -> Mix:
    options = parse(arguments)
    return load_mix(options.mix, options.overrides())


def test_without_options_the_day_is_what_its_file_says() -> None:
    assert mix_of() == load_mix("day")


def test_options_change_the_mix_and_leave_the_rest() -> None:
    day = load_mix("day")
    changed = mix_of("--rate", "3", "--minutes", "5", "--burstiness", "8", "--no-curve")
    assert (changed.rate_per_s, changed.minutes) == (3.0, 5.0)
    assert changed.arrivals == ArrivalShape(burstiness=8.0, bursts=day.arrivals.bursts)
    assert (changed.edits, changed.loras) == (day.edits, day.loras)
    assert mix_of("--no-bursts").arrivals.bursts is None
    assert mix_of("--bursts").arrivals.bursts == day.arrivals.bursts


def test_a_trace_takes_the_place_of_all_other_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert mix_of("--trace", "mine.csv").arrivals == ArrivalShape(trace=tmp_path / "mine.csv")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--deadline-s", "0"), "must be above 0, at most 3600 seconds"),
        (("--max-in-flight", "0"), "must be at least 1"),
        (("--histogram", "nowhere/latencies.hgrm"), "there is no folder nowhere"),
        (("--fidelity", "best"), "invalid choice"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_the_command_exits_with_2_where_it_cannot_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mix", "night"]) == 2
    assert capsys.readouterr().err.startswith("there is no mix night: give one of day")
