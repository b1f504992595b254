"""Clients of a closed loop wait for their answers, and a percentile is one of the values."""

from __future__ import annotations

import asyncio

import pytest

from load.bench.closed_loop import closed_loop
from load.bench.report import percentile


async def test_clients_of_a_closed_loop_wait_for_their_answers() -> None:
    drawn: list[int] = []
    at_once = most = 0

    async def draw(number: int) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        drawn.append(number)

    rate = await closed_loop(draw, requests=10, clients=4)

    assert sorted(drawn) == list(range(10))
    assert most == 4
    assert 0 < rate <= 10 / 0.03


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.95, 95), (1.0, 100), (0.0, 1)])
def test_a_percentile_is_a_value_that_was_measured(share: float, value: int) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], share) == value
