"""Who goes on with residuals of the step before: as the request, the profile and what was measured say together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bottega.diffusion.controlnets.provider import ControlHosts, ControlInput
from bottega.worker.controlnets import StalenessPolicy

CONTROL = ControlInput(
    name="edges",
    image=torch.zeros(8, 8, 3, dtype=torch.uint8),
    height=64,
    width=64,
    halves={},
    hosts=ControlHosts(digest="ab", similarity=0.995),
    may_be_stale=True,
)


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(*, encoder_s: float = 0.1, step_s: float = 0.5) -> StalenessPolicy:
    """After some steps of these times."""
    clock = Clock()
    policy = StalenessPolicy(clock)
    for _ in range(3):
        policy.on_turn()
        clock.now += encoder_s
        policy.on_residuals_needed()
        policy.on_residuals_needed()  # asked again and again until they are there
        clock.now += step_s - encoder_s
    policy.on_turn()
    return policy


@pytest.mark.parametrize(
    ("similarity", "answer_s", "expected"),
    [
        (0.995, 0.4, True),
        (0.98, 0.4, False),
        (None, 0.4, False),  # without a profile
        (0.995, 0.12, False),  # the encoder hides it
        (0.995, 0.0, False),  # not measured yet
    ],
)
def test_it_takes_a_profile_and_a_wait_that_is_worth_it(
    similarity: float | None, answer_s: float, expected: bool
) -> None:
    control = replace(CONTROL, hosts=replace(CONTROL.hosts, similarity=similarity))
    assert measured().allows(control, answer_s=answer_s, transfer_s=answer_s) is expected


def test_a_request_that_wants_exact_steps_has_them() -> None:
    assert not measured().allows(replace(CONTROL, may_be_stale=False), answer_s=0.4, transfer_s=0.4)


def test_waiting_for_a_server_that_is_busy_is_no_reason() -> None:
    assert not measured().allows(CONTROL, answer_s=0.4, transfer_s=0.01)


def test_before_anything_was_measured_steps_wait() -> None:
    assert not StalenessPolicy().allows(CONTROL, answer_s=0.4, transfer_s=0.4)


def test_a_rest_between_requests_is_no_long_step() -> None:
    clock = Clock()
    policy = StalenessPolicy(clock)
    for _ in range(2):
        policy.on_turn()
        clock.now += 0.1
        policy.on_residuals_needed()
        clock.now += 0.4
    policy.on_idle()
    clock.now += 3600
    policy.on_turn()
    assert policy.allows(CONTROL, answer_s=0.4, transfer_s=0.4)
