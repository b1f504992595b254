"""The step at which a LoRA must be in."""

from __future__ import annotations

import math

import pytest

from bottega.addons.loras.client.sdk import latest_step


@pytest.mark.parametrize(
    ("similarities", "expected"),
    [
        ([0.5, 1.0, 1.0], 0),  # the very first step leads away
        ([1.0, 0.99, 0.9899, 1.0], 2),  # as soon as it does, though it may come back
        ([1.0, 1.0], 2),  # it changes nothing
        ([1.0, math.nan], 1),
        ([], 0),
    ],
)
def test_it_is_the_first_step_that_leads_too_far_away_without_it(similarities: list[float], expected: int) -> None:
    assert latest_step(similarities) == expected
