"""An open loop waits for nothing, counts from intended times, and says when it could not keep up."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

import pytest

from load.replay.driver import replay
from load.replay.results import Answer, Outcome, Result, concluded

DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Only its time."""

    at_s: float


def every(gap_s: float, count: int) -> list[Request]:
    return [Request(at_s=gap_s * number) for number in range(count)]


async def answered(_: Request) -> Result:
    return Result()


async def test_nobody_is_spared_the_requests_that_come_while_others_wait() -> None:
    busy = asyncio.Lock()

    async def send(_: Request) -> Result:
        async with busy:
            await asyncio.sleep(0.05)
        return Result()

    run = await replay(every(0.01, 4), send, deadline_s=DEADLINE_S)

    took_s = run.took_s()
    assert took_s == sorted(took_s), "each waits longer than the one before it"
    assert took_s[3] >= 4 * 0.05 - 0.03
    assert run.latency_s(100) == pytest.approx(took_s[3], rel=0.01)
    assert run.void is None


async def test_latencies_count_from_the_intended_time_where_the_driver_itself_was_held_up() -> None:
    async def send(request: Request) -> Result:
        if request.at_s == 0:
            time.sleep(0.15)  # noqa: ASYNC251  # holds up the loop, as a busy machine would
        return Result()

    run = await replay([Request(at_s=0.0), Request(at_s=0.01)], send, deadline_s=DEADLINE_S)

    assert run.answers[1].latency_s >= 0.13
    assert run.answers[1].delay_s >= 0.13
    assert run.outcomes == {Outcome.ANSWERED: 2}
    assert run.void is not None, "half of it was not offered when it was planned"
    assert "1 of 2 requests went out on time" in run.void
    assert run.achieved_rate == run.offered_rate / 2
    with pytest.raises(RuntimeError, match="void: 1 of 2"):
        run.took_s()


async def test_what_has_no_room_is_counted_and_makes_the_run_void() -> None:
    release = asyncio.Event()
    sent = []

    async def send(request: Request) -> Result:
        sent.append(request.at_s)
        await release.wait()
        return Result()

    plan = [*every(0.0, 5), Request(at_s=0.1)]
    asyncio.get_running_loop().call_later(0.03, release.set)
    run = await replay(plan, send, deadline_s=DEADLINE_S, max_in_flight=3)

    assert sent == [0.0, 0.0, 0.0, 0.1]
    assert run.outcomes == {Outcome.ANSWERED: 4, Outcome.UNSENT: 2}
    assert run.answers[-1].outcome is Outcome.ANSWERED, "there is room again"
    assert run.reasons == {(Outcome.UNSENT, "3 in flight"): 2}
    assert run.latencies.get_total_count() == 4
    assert run.void is not None
    assert "2 were not sent: 3 in flight" in run.void


async def test_one_without_an_answer_by_its_deadline_is_cancelled_and_late() -> None:
    cancelled = asyncio.Event()

    async def send(_: Request) -> Result:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Result()

    run = await replay(every(0.0, 1), send, deadline_s=0.05)

    assert cancelled.is_set()
    assert run.outcomes == {Outcome.LATE: 1}
    assert run.latency_s(50) == pytest.approx(0.05, rel=0.01), "it took that at least"
    assert run.void is None
    with pytest.raises(RuntimeError, match=r"1 of 1 requests were not answered: 1 late \(deadline\)"):
        run.took_s()


async def test_what_the_sender_says_of_a_request_is_counted_by_outcome_and_reason() -> None:
    said = iter(
        [
            Result(outcome=Outcome.REFUSED, reason="QueueFull"),
            Result(outcome=Outcome.FAILED, reason="WorkerLost"),
            Result(outcome=Outcome.REFUSED, reason="QueueFull"),
            Result(),
        ]
    )

    async def send(_: Request) -> Result:
        return next(said)

    run = await replay(every(0.0, 4), send, deadline_s=DEADLINE_S)

    assert run.outcomes == {Outcome.REFUSED: 2, Outcome.FAILED: 1, Outcome.ANSWERED: 1}
    assert run.reasons == {(Outcome.REFUSED, "QueueFull"): 2, (Outcome.FAILED, "WorkerLost"): 1}
    assert run.latencies.get_total_count() == 1, "a refusal is quick, and no answer"


@pytest.mark.parametrize("error", [KeyError("a fault"), TimeoutError("the sender's own")], ids=["fault", "timeout"])
async def test_what_the_sender_raises_ends_the_run(error: Exception) -> None:
    async def send(_: Request) -> Result:
        raise error

    with pytest.raises(ExceptionGroup) as raised:
        await replay(every(60.0, 2), send, deadline_s=DEADLINE_S)
    assert raised.value.exceptions == (error,)


async def test_a_run_that_is_stopped_sends_no_more_and_waits_for_what_it_sent() -> None:
    stop = asyncio.Event()

    async def send(_: Request) -> Result:
        stop.set()
        await asyncio.sleep(0.02)
        return Result()

    run = await replay(every(60.0, 3), send, deadline_s=DEADLINE_S, stop=stop)

    assert run.outcomes == {Outcome.ANSWERED: 1, Outcome.UNSENT: 2}
    assert run.void is not None
    assert run.void.endswith("2 were not sent: the run was stopped")


def answer(number: int, outcome: Outcome = Outcome.ANSWERED, delay_s: float = 0.0) -> Answer[Request]:
    return Answer(request=Request(at_s=float(number)), outcome=outcome, reason="", latency_s=1.0, delay_s=delay_s)


@pytest.mark.parametrize(("unsent", "void"), [(1, False), (2, True)])
def test_a_run_below_99_percent_of_the_offered_rate_is_void(unsent: int, void: bool) -> None:
    answers = [answer(number) for number in range(100 - unsent)]
    answers += [answer(number, Outcome.UNSENT, math.nan) for number in range(unsent)]
    run = concluded(answers, deadline_s=DEADLINE_S, length_s=50.0)
    assert (run.void is not None) is void
    assert (run.offered_rate, run.achieved_rate) == pytest.approx((2.0, (100 - unsent) / 50))


@pytest.mark.parametrize(
    ("plan", "options", "says"),
    [
        ([], {}, "nothing would be sent"),
        ([Request(at_s=2.0), Request(at_s=1.0)], {}, "request 1 is at 1 s, before request 0 at 2 s"),
        ([Request(at_s=-1.0)], {}, "0 or more"),
        ([Request(at_s=math.inf)], {}, "finite"),
        ([Request(at_s=0.0)], {"deadline_s": 0.0}, "deadline_s must be above 0, at most 3600; got 0"),
        ([Request(at_s=0.0)], {"deadline_s": 3601.0}, "at most 3600"),
        ([Request(at_s=0.0)], {"max_in_flight": 0}, "max_in_flight must be at least 1"),
    ],
)
async def test_a_plan_that_cannot_be_sent_is_refused(plan: list[Request], options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        await replay(plan, answered, **{"deadline_s": DEADLINE_S, **options})  # type: ignore[arg-type]
