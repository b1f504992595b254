"""Who goes on with residuals of the step before: as the request, the profile and what was measured say together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bottega.addons.controlnets.engine.provider import ControlHosts, ControlInput
from bottega.addons.controlnets.worker import StalenessPolicy
from tests.fakes.fake_time import FakeTime

CONTROL = ControlInput(
    name="edges",
    images=(torch.zeros(8, 8, 3, dtype=torch.uint8),),
    height=64,
    width=64,
    halves={},
    hosts=ControlHosts(digest="ab", similarity=0.995),
    may_be_stale=True,
)


def measured(*, encoder_s: float = 0.1, step_s: float = 0.5) -> StalenessPolicy:
    """After some steps of these times."""
    clock = FakeTime()
    policy = StalenessPolicy(clock.monotonic)
    for _ in range(3):
        policy.on_turn()
        clock.now += encoder_s
        policy.on_residuals_needed()
        policy.on_residuals_needed()  # asked again and again until they are there
        clock.now += step_s - encoder_s
    policy.on_turn()
    return policy


@pytest.mark.parametrize(
    ("control", "answer_s", "transfer_s", "expected"),
    [
        (CONTROL, 0.4, 0.4, True),
        (replace(CONTROL, hosts=replace(CONTROL.hosts, similarity=0.98)), 0.4, 0.4, False),
        (replace(CONTROL, hosts=replace(CONTROL.hosts, similarity=None)), 0.4, 0.4, False),
        (replace(CONTROL, may_be_stale=False), 0.4, 0.4, False),
        (CONTROL, 0.12, 0.12, False),
        (CONTROL, 0.0, 0.0, False),
        (CONTROL, 0.4, 0.01, False),
    ],
    ids=["worth it", "unlike", "no profile", "exact", "hidden by the encoder", "not measured", "a busy server"],
)
def test_it_takes_a_profile_and_a_wait_that_is_worth_it(
    control: ControlInput, answer_s: float, transfer_s: float, expected: bool
) -> None:
    assert measured().allows(control, answer_s=answer_s, transfer_s=transfer_s) is expected


def test_before_anything_was_measured_steps_wait() -> None:
    assert not StalenessPolicy().allows(CONTROL, answer_s=0.4, transfer_s=0.4)


def test_a_rest_between_requests_is_no_long_step() -> None:
    clock = FakeTime()
    policy = StalenessPolicy(clock.monotonic)
    for _ in range(2):
        policy.on_turn()
        clock.now += 0.1
        policy.on_residuals_needed()
        clock.now += 0.4
    policy.on_idle()
    clock.now += 3600
    policy.on_turn()
    assert policy.allows(CONTROL, answer_s=0.4, transfer_s=0.4)
