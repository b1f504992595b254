"""An open loop waits for nothing, counts from intended times, and says when it could not keep up."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from load.replay.driver import replay
from load.replay.results import Answer, Outcome, Replay, Result, concluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Only its time."""

    at_s: float


class _SkippingSelector(selectors.DefaultSelector):
    """Waits for nothing: the seconds that it would wait have passed at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


class FakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only where all of it waits."""

    def __init__(self) -> None:
        self.clock = _SkippingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


def run(plan: Sequence[Request], send: Callable[[Request], Awaitable[Result]], **options: object) -> Replay[Request]:
    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        return runner.run(replay(plan, send, **{"deadline_s": 5.0, **options}))  # type: ignore[arg-type]


def every(gap_s: float, count: int) -> list[Request]:
    return [Request(at_s=gap_s * number) for number in range(count)]


def test_nobody_is_spared_the_requests_that_come_while_others_wait() -> None:
    busy = asyncio.Lock()

    async def send(_: Request) -> Result:
        async with busy:
            await asyncio.sleep(0.05)
        return Result()

    done = run(every(0.01, 4), send)
    assert done.took_s() == pytest.approx([0.05, 0.09, 0.13, 0.17])
    assert done.latency_s(100) == pytest.approx(0.17, rel=0.01)


def test_latencies_count_from_the_intended_time_where_the_driver_itself_was_held_up() -> None:
    async def send(request: Request) -> Result:
        if request.at_s == 0:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, FakeLoop)
            loop.clock.now_s += 0.15  # holds up the loop, as a busy machine would
        return Result()

    done = run([Request(at_s=0.0), Request(at_s=0.01)], send)
    assert (done.answers[1].latency_s, done.answers[1].delay_s) == pytest.approx((0.14, 0.14))
    assert done.void is not None
    assert "1 of 2 requests went out on time" in done.void
    assert done.achieved_rate == done.offered_rate / 2
    with pytest.raises(RuntimeError, match="void: 1 of 2"):
        done.took_s()


def test_what_has_no_room_is_counted_and_makes_the_run_void() -> None:
    sent = []

    async def send(request: Request) -> Result:
        sent.append(request.at_s)
        await asyncio.sleep(0.03)
        return Result()

    done = run([*every(0.0, 5), Request(at_s=0.1)], send, max_in_flight=3)
    assert sent == [0.0, 0.0, 0.0, 0.1], "there is room again"
    assert done.outcomes == {Outcome.ANSWERED: 4, Outcome.UNSENT: 2}
    assert done.latencies.get_total_count() == 4
    assert done.void is not None
    assert "2 were not sent: 3 in flight" in done.void


def test_one_without_an_answer_by_its_deadline_is_cancelled_and_late() -> None:
    cancelled = asyncio.Event()

    async def send(_: Request) -> Result:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Result()

    done = run(every(0.0, 1), send)
    assert cancelled.is_set()
    assert (done.outcomes, done.void) == ({Outcome.LATE: 1}, None)
    assert done.latency_s(50) == pytest.approx(5.0, rel=0.01), "it took that at least"
    with pytest.raises(RuntimeError, match=r"1 of 1 requests were not answered: 1 late \(deadline\)"):
        done.took_s()


def test_what_the_sender_says_of_a_request_is_counted_by_outcome_and_reason() -> None:
    full, lost = ((Outcome.REFUSED, "QueueFull"), (Outcome.FAILED, "WorkerLost"))
    said = iter([*(Result(outcome=outcome, reason=reason) for outcome, reason in (full, lost, full)), Result()])

    async def send(_: Request) -> Result:
        return next(said)

    done = run(every(0.0, 4), send)
    assert done.outcomes == {Outcome.REFUSED: 2, Outcome.FAILED: 1, Outcome.ANSWERED: 1}
    assert done.reasons == {full: 2, lost: 1}
    assert done.latencies.get_total_count() == 1, "a refusal is quick, and no answer"


def test_what_the_sender_raises_ends_the_run_even_a_timeout_of_its_own() -> None:
    async def send(_: Request) -> Result:
        raise TimeoutError("the sender's own")

    with pytest.raises(ExceptionGroup) as raised:
        run(every(60.0, 2), send)
    assert [str(error) for error in raised.value.exceptions] == ["the sender's own"]


def test_a_run_that_is_stopped_sends_no_more_and_waits_for_what_it_sent() -> None:
    stop = asyncio.Event()

    async def send(_: Request) -> Result:
        stop.set()
        await asyncio.sleep(0.02)
        return Result()

    done = run(every(60.0, 3), send, stop=stop)
    assert done.outcomes == {Outcome.ANSWERED: 1, Outcome.UNSENT: 2}
    assert done.void is not None
    assert done.void.endswith("2 were not sent: the run was stopped")


@pytest.mark.parametrize(("unsent", "void"), [(1, False), (2, True)])
def test_a_run_below_99_percent_of_the_offered_rate_is_void(unsent: int, void: bool) -> None:
    answers = [
        Answer(
            request=Request(at_s=float(number)),
            outcome=Outcome.UNSENT if number < unsent else Outcome.ANSWERED,
            reason="",
            latency_s=1.0,
            delay_s=math.nan if number < unsent else 0.0,
        )
        for number in range(100)
    ]
    done = concluded(answers, deadline_s=5.0, length_s=50.0)
    assert (done.void is not None) is void
    assert (done.offered_rate, done.achieved_rate) == pytest.approx((2.0, (100 - unsent) / 50))


@pytest.mark.parametrize(
    ("plan", "options", "says"),
    [
        ([], {}, "nothing would be sent"),
        ([Request(at_s=2.0), Request(at_s=1.0)], {}, "request 1 is at 1 s, before request 0 at 2 s"),
        ([Request(at_s=math.inf)], {}, "finite"),
        ([Request(at_s=0.0)], {"deadline_s": 3601.0}, "deadline_s must be above 0, at most 3600; got 3601"),
        ([Request(at_s=0.0)], {"max_in_flight": 0}, "max_in_flight must be at least 1"),
    ],
)
def test_a_plan_that_cannot_be_sent_is_refused(plan: list[Request], options: dict[str, float], says: str) -> None:
    async def send(_: Request) -> Result:
        return Result()

    with pytest.raises(ValueError, match=says):
        run(plan, send, **options)
