"""Tasks beside their owner: bounded, told of when they fail, and ended with it."""

from __future__ import annotations

import asyncio

import pytest

from bottega.background_tasks import BackgroundTasks, run_until_first_ends
from bottega.errors import Draining, QueueFull


async def _forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


async def _fail() -> None:
    raise ValueError("a fault")


async def test_they_are_bounded_and_cancelled_with_their_owner() -> None:
    ended: list[str] = []
    tasks = BackgroundTasks("tests", max_tasks=2)
    for _ in range(2):
        tasks.start(_forever(ended))
    with pytest.raises(QueueFull, match="2 run already"):
        tasks.start(_forever(ended))
    await tasks.cancel()  # they have not made their first step
    assert (ended, len(tasks)) == (["ended"] * 2, 0)


async def test_a_failure_is_logged_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks("tests")
    tasks.start(_fail())
    assert await tasks.start(asyncio.sleep(0.01, "done")) == "done"
    (line,) = caplog.records
    assert (line.getMessage(), vars(line)["task"]) == ("a background task failed", "tests")
    assert line.exc_info


async def test_what_is_shielded_runs_to_its_end_and_its_errors_are_the_callers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = BackgroundTasks("tests")
    with pytest.raises(ValueError, match="a fault"):
        await tasks.run_shielded(_fail())
    done = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.set()

    calling = asyncio.create_task(tasks.run_shielded(work()))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling])
    assert not done.is_set()
    await tasks.join()
    assert done.is_set()
    assert not caplog.records


async def test_one_of_them_can_end_the_others_but_does_not_wait_for_itself() -> None:
    ended: list[str] = []
    tasks = BackgroundTasks("tests")
    tasks.start(_forever(ended))
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.start(tasks.cancel()), 5)
    assert ended == ["ended"]


async def test_what_starts_while_they_are_cancelled_ends_as_well_and_what_starts_later_runs() -> None:
    ended: list[str] = []
    tasks = BackgroundTasks("tests")

    async def start_another() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.start(_forever(ended))

    tasks.start(start_another())
    await asyncio.wait_for(tasks.cancel(), 5)
    assert ended == ["ended"]
    assert await tasks.start(asyncio.sleep(0.01, "done")) == "done"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_caller_whose_shielded_work_is_cancelled_gets_the_reason_that_the_work_gives(begun: bool) -> None:
    tasks = BackgroundTasks("tests")
    given_back: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Draining("the service is stopping") from None
        finally:
            given_back.append("a process")

    calling = asyncio.create_task(tasks.run_shielded(work()))
    await asyncio.sleep(0)
    if begun:
        await asyncio.sleep(0)
    await tasks.cancel()
    with pytest.raises(Draining):
        await calling
    assert given_back == ["a process"]


async def test_of_several_the_first_that_ends_ends_the_others_and_its_error_is_raised() -> None:
    ended: list[str] = []
    await run_until_first_ends(_forever(ended), asyncio.sleep(0.01))
    with pytest.raises(ValueError, match="a fault"):
        await run_until_first_ends(_forever(ended), _fail())
    assert ended == ["ended"] * 2


async def test_one_that_has_begun_makes_no_further_step_when_it_is_cancelled() -> None:
    steps: list[str] = []
    tasks = BackgroundTasks("tests")
    news = asyncio.Event()

    async def work() -> None:
        steps.append("begun")
        await news.wait()
        steps.append("heard")

    tasks.start(work())
    await asyncio.sleep(0)
    news.set()  # its next step is due
    tasks.cancel_soon()
    await tasks.join()
    assert steps == ["begun"]
