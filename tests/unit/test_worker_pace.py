"""Who goes on with residuals of the step before: as the request, the profile and what was measured say together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bottega.diffusion.controls import Control, ControlHosts
from bottega.errors import ConfigError
from bottega.worker.controlnets import Pace, read_profile

CONTROL = Control(
    name="edges",
    image=torch.zeros(8, 8, 3, dtype=torch.uint8),
    height=64,
    width=64,
    halves={},
    hosts=ControlHosts(digest="ab"),
    may_be_stale=True,
)


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(similarity: dict[str, float], *, encoder_s: float = 0.1, step_s: float = 0.5) -> Pace:
    """After some steps of these times."""
    clock = Clock()
    pace = Pace(similarity, clock)
    for _ in range(3):
        pace.asked()
        clock.now += encoder_s
        pace.needed()
        pace.needed()  # asked again and again until they are there
        clock.now += step_s - encoder_s
    pace.asked()
    return pace


@pytest.mark.parametrize(
    ("similarity", "answer_s", "expected"),
    [
        ({"ab": 0.995}, 0.4, True),
        ({"edges": 0.995}, 0.4, True),  # by name, where the version has no entry
        ({"ab": 0.9, "edges": 0.995}, 0.4, False),  # the version counts
        ({"depth": 0.995}, 0.4, False),
        ({"ab": 0.995}, 0.12, False),  # the encoder hides it
        ({"ab": 0.995}, 0.0, False),  # not measured yet
    ],
)
def test_it_takes_a_profile_and_a_wait_that_is_worth_it(
    similarity: dict[str, float], answer_s: float, expected: bool
) -> None:
    assert measured(similarity).pipelined(CONTROL, answer_s) is expected


def test_a_request_that_wants_exact_steps_has_them() -> None:
    assert not measured({"ab": 1.0}).pipelined(replace(CONTROL, may_be_stale=False), 0.4)


def test_before_anything_was_measured_steps_wait() -> None:
    assert not Pace({"ab": 1.0}).pipelined(CONTROL, 0.4)


def test_a_rest_between_requests_is_no_long_step() -> None:
    clock = Clock()
    pace = Pace({"ab": 1.0}, clock)
    for _ in range(2):
        pace.asked()
        clock.now += 0.1
        pace.needed()
        clock.now += 0.4
    pace.rests()
    clock.now += 3600
    pace.asked()
    assert pace.pipelined(CONTROL, 0.4)


def test_a_profile_is_read_and_one_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"edges": 0.991}')
    assert read_profile(path) == {"edges": 0.991}
    for text in ("{", '{"edges": "much"}', '{"edges": 7}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"profile\.json"):
            read_profile(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "missing")
