"""The load that benches make is the load that they say they make."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest

from load.bench.arrivals import Arrival, closed_loop, open_loop, poisson
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


async def test_an_open_loop_waits_for_nothing_and_counts_from_the_intended_arrival() -> None:
    busy = asyncio.Lock()

    async def draw(number: int) -> None:
        async with busy:
            await asyncio.sleep(0.05)

    took_s = await open_loop(draw, [Arrival(at_s=0.01 * number, steps=20) for number in range(4)])

    assert took_s == sorted(took_s), "each waits longer than the one before it"
    assert took_s[3] >= 4 * 0.05 - 0.03


async def test_an_open_loop_that_is_late_still_counts_the_lateness() -> None:
    async def draw(number: int) -> None:
        if number == 0:
            time.sleep(0.1)  # noqa: ASYNC251  # holds up the loop, as a busy machine would

    took_s = await open_loop(draw, [Arrival(at_s=0.0, steps=20), Arrival(at_s=0.01, steps=20)])

    assert took_s[1] >= 0.08


def test_poisson_arrivals_come_at_the_rate_and_with_the_steps_asked_for() -> None:
    steps = [20, 30, 50] * 1000

    arrivals = poisson(2.0, steps, random.Random(1))

    assert [arrival.steps for arrival in arrivals] == steps
    assert len(arrivals) / arrivals[-1].at_s == pytest.approx(2.0, rel=0.05)
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(arrivals)]
    assert percentile(gaps, 0.5) == pytest.approx(0.3466, rel=0.1), "exponential: the median is ln 2 of the mean"


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.95, 95), (1.0, 100), (0.0, 1)])
def test_a_percentile_is_a_value_that_was_measured(share: float, value: int) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], share) == value
