"""What a run says, to people and to programs."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import pytest

from load.replay.mix import Mix
from load.replay.plan import plan
from load.replay.progress import Progress
from load.replay.report import by_kind, json_line, table
from load.replay.requests import PlannedRequest
from load.replay.results import Answer, Outcome, Replay, Result, concluded

REQUESTS = plan(Mix(minutes=1.0), 1)


def answer(number: int, outcome: Outcome = Outcome.ANSWERED, **said: object) -> Answer[PlannedRequest]:
    facts = {"reason": "", "latency_s": 0.1 * (number + 1), "delay_s": 0.0, **said}
    return Answer(request=REQUESTS[number], outcome=outcome, **facts)  # type: ignore[arg-type]


def run(*answers: Answer[PlannedRequest]) -> dict[str, Replay[PlannedRequest]]:
    ran = concluded(answers, deadline_s=5.0, length_s=10.0)
    return by_kind(ran, deadline_s=5.0, length_s=10.0)


def test_draws_and_edits_are_told_apart_and_reasons_counted() -> None:
    runs = run(*(answer(number) for number in range(38)), answer(38, Outcome.FAILED, reason="WorkerLost"))
    assert set(runs) == {"all", "draws", "edits"}
    assert len(runs["draws"].answers) + len(runs["edits"].answers) == 39
    heads, whole, *_ = table(runs).splitlines()
    columns = ["requests", "answered", "refused", "late", "failed", "unsent", "p50", "p95", "p99", "most"]
    assert heads.split() == columns
    assert whole.split()[:7] == ["all", "39", "38", "0", "0", "1", "0"]
    assert "  1 failed: WorkerLost" in table(runs)


def test_the_line_of_json_has_counts_and_seconds() -> None:
    said = json.loads(json_line("day", 7, run(*(answer(number) for number in range(20)))))
    assert (said["replay"], said["seed"], said["requests"], said["answered"], said["void"]) == ("day", 7, 20, 20, None)
    assert said["p50_s"] == pytest.approx(1.0, rel=0.01)
    assert said["most_s"] == pytest.approx(2.0, rel=0.01)
    assert (said["offered_per_s"], said["achieved_per_s"]) == (2.0, 2.0)


def test_where_nothing_was_answered_there_are_no_seconds() -> None:
    drawn = replace(answer(0, Outcome.UNSENT, reason="1 in flight"), latency_s=math.nan, delay_s=math.nan)
    said = json.loads(json_line("day", 1, run(drawn)))
    assert said["p50_s"] is None
    assert said["void"].endswith("1 were not sent: 1 in flight")
    assert table(run(drawn)).splitlines()[1].split()[-4:] == ["-"] * 4


async def test_progress_counts_what_is_sent_and_what_it_came_to(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = asyncio.Event()

    async def send(request: PlannedRequest) -> Result:
        if request is REQUESTS[1]:
            await waiting.wait()
        return Result(outcome=Outcome.REFUSED if request is REQUESTS[0] else Outcome.ANSWERED)

    progress = Progress(send, 3)
    await progress.send(REQUESTS[0])
    pending = asyncio.create_task(progress.send(REQUESTS[1]))
    async with progress.shown(interval_s=0.01):
        await asyncio.sleep(0.05)
    assert capsys.readouterr().err.splitlines()[-1] == "2 of 3 sent, 1 in flight, 1 refused"
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    assert str(progress) == "2 of 3 sent, 0 in flight, 1 late, 1 refused"
