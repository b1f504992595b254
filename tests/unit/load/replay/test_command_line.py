"""What an operator may ask of a replay, and what is refused before anything begins."""

from __future__ import annotations

import pytest

from load.replay.__main__ import overrides, parse
from load.replay.arrivals import ArrivalShape
from load.replay.mix import Mix, load_mix


def mix_of(*arguments: str) -> Mix:
    options = parse(arguments)
    return load_mix(options.mix, overrides(options))


def test_options_change_the_mix_and_leave_the_rest() -> None:
    day = load_mix("day")
    changed = mix_of("--rate", "3", "--minutes", "5", "--burstiness", "8", "--no-curve")
    assert (changed.rate_per_s, changed.minutes) == (3.0, 5.0)
    assert changed.arrivals == ArrivalShape(burstiness=8.0, bursts=day.arrivals.bursts)
    assert (changed.edits, changed.loras) == (day.edits, day.loras)
    assert mix_of("--no-bursts").arrivals.bursts is None
    assert mix_of("--bursts").arrivals.bursts == day.arrivals.bursts


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
