"""When a soak is well: every request has one picture, all went out, nothing has grown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import cast

import pytest

from load.replay.requests import PlannedRequest
from load.replay.results import Answer, Outcome, concluded
from load.soak.judgement import Soaked, judge
from load.soak.levels import Sample

REQUESTS = 200
LENGTH_S = 1000.0


def answers(outcomes: Mapping[int, Outcome]) -> list[Answer[PlannedRequest]]:
    """One a request, answered where nothing else is said."""
    made = []
    for number in range(REQUESTS):
        outcome = outcomes.get(number, Outcome.ANSWERED)
        request = PlannedRequest(
            at_s=5.0 * number,
            kind="draw",
            prompt="",
            seed=number,
            steps=10,
            template=None,
            mask_ratio=None,
            controlnets=(),
            loras=(),
            session=0,
        )
        sent = outcome is not Outcome.UNSENT
        made.append(
            Answer(
                request=request,
                outcome=outcome,
                reason="" if outcome is Outcome.ANSWERED else "why",
                latency_s=1.0 if sent else math.nan,
                delay_s=0.0 if sent else math.nan,
            )
        )
    return made


def soaked(
    outcomes: Mapping[int, Outcome] | None = None, *, completed: Mapping[str, int] | None = None, grown: float = 0.0
) -> Soaked:
    """A run of LENGTH_S. grown: of memory, from its level to the end, as a share."""
    memory = [100_000_000 if number < 50 else round(100_000_000 * (1.0 + grown)) for number in range(100)]
    return Soaked(
        samples=[
            Sample(at_s=10.0 * number, memory_bytes=each, descriptors=9, shared_bytes=0, disk_bytes=1)
            for number, each in enumerate(memory)
        ],
        faults=Counter({"kill": 3, "freeze": 1}),
        replayed=concluded(answers(outcomes or {}), deadline_s=120.0, length_s=LENGTH_S),
        completed=Counter(completed or {"soak-0": 1, "soak-1": 1}),
    )


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """The values of the last line."""
    return cast("dict[str, float]", json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_a_run_in_which_each_request_has_its_picture_and_nothing_grew_is_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert judge(soaked(grown=0.009), LENGTH_S)
    values = said(capsys)
    assert (values["requests"], values["lost"], values["double"], values["faults"]) == (REQUESTS, 0, 0, 4)
    assert values["growth_memory"] == pytest.approx(0.009)


@pytest.mark.parametrize(
    ("run", "figure", "value"),
    [
        (soaked({7: Outcome.FAILED, 8: Outcome.LATE, 9: Outcome.REFUSED}), "lost", 3),
        (soaked(completed={"soak-0": 3, "soak-1": 1}), "double", 2),
        (soaked(grown=0.02), "growth_memory", pytest.approx(0.02)),
    ],
    ids=["pictures are lost", "a picture was drawn twice", "memory grew by more than a hundredth"],
)
def test_a_run_is_not_well_where(run: Soaked, figure: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert not judge(run, LENGTH_S)
    assert said(capsys)[figure] == value


def test_a_run_that_asked_for_less_than_was_planned_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = soaked(dict.fromkeys(range(REQUESTS // 2), Outcome.UNSENT))
    assert (run.lost, run.double) == (0, 0)
    assert not run.answered_well
    assert not judge(run, LENGTH_S)
    assert "void: 100 of 200 requests went out on time" in capsys.readouterr().out
