"""The SDK against a real gRPC server that follows a script."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from bottega.client import AsyncClient, Client, Completed, Interrupted, JobState, Progress, Queued, RetryPolicy
from bottega.client.transport import calls
from bottega.errors import (
    BottegaError,
    DeadlinePassed,
    Draining,
    InternalError,
    InvalidRequest,
    JobCancelled,
    ModelNotFound,
    NoWorker,
    QueueFull,
    TooLarge,
    Unavailable,
    Violation,
    WorkerLost,
)
from bottega.rpc.channel import MAX_MESSAGE_MIB
from bottega.rpc.status import to_job_error
from bottega.v1 import generation_pb2, image_pb2
from tests.fakes.scripted_gateway import SMALL, ScriptedGateway, Step, completed, image, progress, queued
from tests.support.terminal import NO_UNICODE
from tests.support.waiting import eventually

BIG = bytes(range(256)) * 12_000  # 3 MiB: travels by GetImage
HURRIED = RetryPolicy(first_wait_s=0.01, longest_wait_s=0.05)
LATE = grpc.StatusCode.DEADLINE_EXCEEDED  # as gRPC itself ends a call whose time is up


def test_generate_returns_a_picture_that_saves_itself(gateway: ScriptedGateway, address: str, tmp_path: Path) -> None:
    gateway.scripts = [[queued(), progress(3), completed()]]
    with Client(address) as client:
        picture = client.generate("a big red star", seed=7, num_inference_steps=30, sampler="dpmpp_2m")
    assert (picture.seed, picture.width, picture.format, picture.job_id) == (7, 64, "png", "job-1")
    assert picture.provenance.worker == "worker-0"
    assert picture.save(tmp_path / "star.png").read_bytes() == SMALL
    spec = gateway.requests[0].spec
    assert (spec.prompt, spec.seed, spec.num_inference_steps) == ("a big red star", 7, 30)
    assert spec.sampler == generation_pb2.SAMPLER_DPMPP_2M
    assert not spec.HasField("negative_prompt")
    assert gateway.cancelled == []


def test_a_call_that_brought_its_picture_is_ended_by_the_gateway_and_not_cancelled(
    gateway: ScriptedGateway, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_END_S", 30.0)
    late = threading.Event()
    gateway.scripts = [[completed(), late]]
    with Client(address) as client:
        threading.Timer(0.2, late.set).start()
        client.generate("a star")
    assert gateway.whole_streams == 1


def test_a_broken_stream_attaches_again_with_the_same_request_id(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[queued(), progress(3), Unavailable("cut off")], [progress(9), completed()]]
    with Client(address, retry=HURRIED) as client:
        events = list(client.stream("a star", seed=7))
    assert [type(event) for event in events] == [Queued, Progress, Interrupted, Progress, Completed]
    first, second = gateway.requests
    assert second.deadline_s < first.deadline_s  # the same moment, and less time to it
    second.deadline_s = first.deadline_s
    assert first == second
    assert len(first.request_id) == 32
    assert gateway.cancelled == []


def test_a_stream_without_a_last_event_attaches_again(gateway: ScriptedGateway, address: str) -> None:
    cut_off = grpc.StatusCode.CANCELLED  # at the end of a gateway
    gateway.scripts = [
        [queued()],
        [completed()],
        [queued(), cut_off],
        [cut_off],
        [completed()],
        [queued(), Unavailable("cut off")],
        [NoWorker("none yet")],
        [queued(), completed()],
    ]
    with Client(address, retry=HURRIED) as client:
        for _ in range(3):
            assert client.generate("a star").data == SMALL
    assert gateway.scripts == []


def test_big_images_come_by_get_image_even_over_a_broken_stream(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[completed(image(0, BIG, inline=False))]]
    gateway.images = {0: BIG}
    gateway.torn_fetches = 1
    with Client(address, retry=HURRIED) as client:
        assert client.generate("a star").data == BIG
    assert gateway.torn_fetches == 0


def test_bytes_that_do_not_match_their_digest_are_refused(gateway: ScriptedGateway, address: str) -> None:
    wrong = image(0, SMALL)
    wrong.data = b"other bytes"
    gateway.scripts = [[completed(wrong)]]
    with Client(address) as client, pytest.raises(InternalError, match="digest"):
        client.generate("a star")


def test_errors_keep_their_class_and_facts_and_are_not_retried(gateway: ScriptedGateway, address: str) -> None:
    errors: list[BottegaError] = [
        InvalidRequest("1 is wrong", violations=[Violation(field="spec.width", description="not 7")]),
        ModelNotFound("no such model", metadata={"served": "miniature"}),
        WorkerLost("it died twice"),
        JobCancelled("somebody cancelled the job"),
        NoWorker("none for too long", retry_after_s=0.1),
    ]
    scripts: list[list[Step]] = [[queued(), error] for error in errors]
    gateway.scripts = [*scripts, [QueueFull("256 jobs wait already", retry_after_s=0.2)]]
    with Client(address, retry=HURRIED) as client:
        for script in tuple(gateway.scripts):
            error = script[-1]
            assert isinstance(error, BottegaError)
            with pytest.raises(type(error)) as caught:
                client.generate("a star")
            assert caught.value.message == error.message
            assert caught.value.metadata == error.metadata
            assert caught.value.violations == error.violations
    assert len(gateway.requests) == 6
    assert gateway.cancelled == []


def test_a_gateway_that_takes_in_as_much_as_it_can_is_asked_again(gateway: ScriptedGateway, address: str) -> None:
    busy = QueueFull("its hands are full", metadata={"limit": "max_calls"}, retry_after_s=0.2)
    gateway.scripts = [[busy], [queued(), completed()]]
    gateway.failures = [busy]
    with Client(address) as client:
        assert [type(event) for event in client.stream("a star")] == [Interrupted, Queued, Completed]
        assert client.submit("a star").id == "job-1"
    assert len(gateway.submitted) == 2


def test_a_long_time_without_news_uses_up_no_patience(gateway: ScriptedGateway, address: str) -> None:
    quiet = threading.Event()
    threading.Timer(0.6, quiet.set).start()
    gateway.scripts = [[queued(), quiet, Unavailable("cut off")], [queued(), completed()]]
    with Client(address, retry=RetryPolicy(patience_s=0.3, first_wait_s=0.01)) as client:
        assert client.generate("a star").data == SMALL


def _is_left(found_s: float, of_s: float, began_s: float) -> bool:
    """Say whether `found_s` may be left of `of_s` seconds that began after `began_s`; gRPC rounds up to a second."""
    return of_s - (time.monotonic() - began_s) - 0.1 <= found_s <= of_s + 1.0


def test_the_deadline_travels_where_the_call_owns_its_job_or_says_one(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[completed()] for _ in range(4)]
    with Client(address, retry=HURRIED) as client:
        began_s = time.monotonic()
        client.generate("a star")
        assert _is_left(gateway.seconds_left, 600, began_s)
        assert _is_left(gateway.requests[0].deadline_s, 600, began_s)
        began_s = time.monotonic()
        client.generate("a star", timeout_s=20)
        assert _is_left(gateway.seconds_left, 20, began_s)
        assert _is_left(gateway.requests[1].deadline_s, 20, began_s)
        client.generate("a star", request_id="mine")
        began_s = time.monotonic()
        client.generate("a star", request_id="yours", deadline_s=8)
        client.submit("a star")
        client.submit("a star", deadline_s=9)
        assert _is_left(gateway.requests[3].deadline_s, 8, began_s)
        assert _is_left(gateway.submitted[1].deadline_s, 9, began_s)
    assert not gateway.requests[2].HasField("deadline_s")
    assert not gateway.submitted[0].HasField("deadline_s")


def test_a_submitted_jobs_deadline_does_not_move_while_its_gateway_is_away(
    gateway: ScriptedGateway, address: str
) -> None:
    gateway.failures = [Draining("stopping", retry_after_s=0.6)]
    began_s = time.monotonic()
    with Client(address, retry=HURRIED) as client:
        client.submit("a star", deadline_s=30)
    first, second = gateway.submitted
    assert first.deadline_s <= 30
    assert second.deadline_s <= first.deadline_s - 0.6
    assert _is_left(second.deadline_s, 30, began_s)
    second.deadline_s = first.deadline_s
    assert first == second, "only the time that is left may differ"


def test_running_out_of_time_cancels_the_job(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[queued(), progress(3), LATE]]
    with Client(address) as client, pytest.raises(DeadlinePassed) as late:
        client.generate("a star", timeout_s=20)
    assert gateway.cancelled == ["job-1"]
    assert str(late.value) == "not done within 20 s: 3 of 30 steps were done, and job job-1 is cancelled"
    assert late.value.metadata == {"job_id": "job-1", "steps_done": "3"}
    assert "submit()" in late.value.__notes__[0]


def test_a_job_that_goes_on_when_time_runs_out_is_named(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[queued(), LATE], [LATE]]
    with Client(address) as client:
        with pytest.raises(DeadlinePassed, match=r"no step was done, and job job-1 goes on") as late:
            client.generate("a star", timeout_s=20, request_id="mine")
        assert "client.job('job-1')" in late.value.__notes__[0]
        with pytest.raises(DeadlinePassed, match=r"not done within 20 s: .* job job-2 goes on"):
            list(client.job("job-2").stream(timeout_s=20))
    assert gateway.cancelled == []


def test_a_gateway_that_says_nothing_in_time_is_told_in_our_words(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[threading.Event()]] * 2
    with Client(address) as client, pytest.raises(DeadlinePassed) as late:
        client.generate("a star", timeout_s=0.5)
    assert str(late.value) == "not done within 0.5 s"


def test_leaving_a_stream_cancels_the_job_that_it_began(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[queued(), progress(3), threading.Event()]]
    with Client(address) as client:
        for event in client.stream("a star"):
            if isinstance(event, Progress):
                break
        gc.collect()
        assert gateway.cancel_heard.wait(60)
    assert gateway.cancelled == ["job-1"]


async def test_leaving_before_the_first_event_finds_the_job_and_cancels_it(
    gateway: ScriptedGateway, address: str
) -> None:
    gateway.scripts = [[threading.Event()], [queued()]]
    async with AsyncClient(address) as client:
        drawing = asyncio.create_task(client.generate("a star"))
        await eventually(lambda: bool(gateway.requests))
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
    assert gateway.requests[0] == gateway.requests[1]
    assert gateway.cancelled == ["job-1"]


async def test_a_job_with_an_id_of_the_callers_own_goes_on_when_the_caller_leaves(
    gateway: ScriptedGateway, address: str
) -> None:
    gateway.scripts = [[queued(), threading.Event()]]
    async with AsyncClient(address) as client, aclosing(client.stream("a star", request_id="order-17")) as events:
        assert isinstance(await anext(events), Queued)
    assert gateway.requests[0].request_id == "order-17"
    assert gateway.cancelled == []


def test_jobs_are_submitted_looked_at_listed_and_cancelled(gateway: ScriptedGateway, address: str) -> None:
    gateway.failures = [Unavailable("once")]
    since = datetime(2026, 1, 1, tzinfo=UTC)
    with Client(address, fleet_address=address, retry=HURRIED) as client:
        assert client.submit("a star", seed=1).id == "job-1"
        found = client.job("job-1").status()
        assert (found.state, found.state.ended, found.image_count) == (JobState.COMPLETED, True, 1)
        assert found.created == datetime(2026, 1, 2, tzinfo=UTC)
        page = client.list_jobs(states=["failed", JobState.QUEUED], created_after=since, page_size=5)  # type: ignore[list-item]
        assert (page.jobs[0].state, page.next_page_token) == (JobState.FAILED, "more")
        assert client.job("job-1").cancel().state is JobState.CANCELLED
        assert client.fleet().queued == 4
    assert gateway.submitted[0].request_id == gateway.submitted[1].request_id != ""
    asked = gateway.listed[0]
    assert (list(asked.states), asked.page_size) == ([image_pb2.JOB_STATE_FAILED, image_pb2.JOB_STATE_QUEUED], 5)
    assert asked.created_after.ToDatetime(tzinfo=UTC) == since


def test_a_watched_job_that_failed_raises_what_a_direct_call_would(gateway: ScriptedGateway, address: str) -> None:
    failed = image_pb2.JobEvent(job_id="job-1", failed=to_job_error(WorkerLost("it died twice")))
    gateway.scripts = [[progress(3), Unavailable("cut off")], [failed]]
    with Client(address, retry=HURRIED) as client:
        events = client.job("job-1").stream()
        assert [type(next(events)) for _ in range(2)] == [Progress, Interrupted]
        with pytest.raises(WorkerLost, match="died twice"):
            next(events)


def test_a_job_keeps_its_client_open(gateway: ScriptedGateway, address: str) -> None:
    job = Client(address).job("job-1")
    gc.collect()
    assert job.status().state is JobState.COMPLETED
    client = weakref.ref(job._client)
    del job
    gc.collect()
    assert client() is None


WRONG_CALLS: dict[str, Callable[[Any], object]] = {
    "page_size": lambda client: client.list_jobs(page_size=10**12),
    "page_token": lambda client: client.list_jobs(page_token=NO_UNICODE),
    "states": lambda client: client.list_jobs(states=["ended"]),
    "created_after": lambda client: client.list_jobs(created_after=datetime(2026, 1, 1)),  # noqa: DTZ001
    "index": lambda client: client.job("job-1").image(10**12),
    "job_id": lambda client: client.job(NO_UNICODE).status(),
    "job_id of cancel": lambda client: client.job(None).cancel(),
    "job_id of stream of a job": lambda client: list(client.job(NO_UNICODE).stream()),
    "preview": lambda client: list(client.stream("a star", preview="yes")),
    "prompt": lambda client: client.generate(None),
    "num_images": lambda client: client.generate_many("stars", None),
    "seed": lambda client: client.submit("a star", seed=10**30),
    "request_id": lambda client: client.submit("a star", request_id=NO_UNICODE),
    "request_id of generate": lambda client: client.generate("a star", request_id=7),
    "deadline_s": lambda client: client.submit("a star", deadline_s="soon"),
    "deadline_s of generate": lambda client: client.generate("a star", deadline_s=float("nan")),
    "timeout_s": lambda client: client.generate("a star", timeout_s=1e15),
    "timeout_s of stream of a job": lambda client: list(client.job("job-1").stream(timeout_s=-1)),
    "timeout_s of image": lambda client: client.job("job-1").image(timeout_s=0),
    "timeout_s of a client": lambda client: Client(client.address, timeout_s=0),
    "address": lambda _: Client(NO_UNICODE),
    "cases": lambda client: client.profile_controlnet("edges", None),
    "cases of others": lambda client: client.profile_controlnet("edges", ["edges.png"]),
    "prompts": lambda client: client.profile_lora("ink", "a star"),
    "prompts of others": lambda client: client.profile_lora("ink", [1, 2, 3, 4]),
    "folder": lambda client: client.add_controlnet("edges", NO_UNICODE),
    "name": lambda client: client.add_lora(NO_UNICODE, "ink.safetensors"),
    "path": lambda client: client.add_lora("ink", None),
    "path of register": lambda client: client.register_lora("ink", NO_UNICODE),
    "pinned": lambda client: client.pin_lora("ink", pinned="yes"),
}


def test_what_cannot_be_sent_is_refused_by_its_name_and_nothing_is_sent(gateway: ScriptedGateway, address: str) -> None:
    with Client(address, fleet_address=address, retry=HURRIED) as client:
        for argument, call in WRONG_CALLS.items():
            with pytest.raises(InvalidRequest) as caught:
                call(client)
            (violation,) = caught.value.violations
            assert violation.field == argument.partition(" ")[0]
            assert violation.description.startswith("must be "), argument
    assert [*gateway.requests, *gateway.submitted, *gateway.listed, *gateway.cancelled] == []


def _image_beside(**fields: Any) -> bytes:
    """As large as it may be in a request with those fields."""
    fields = {"request_id": "mine", "deadline_s": 30.0, **fields}

    def request(size: int) -> image_pb2.GenerateRequest:
        return image_pb2.GenerateRequest(
            spec=generation_pb2.GenerationSpec(prompt="a star", image=bytes(size)), **fields
        )

    limit = MAX_MESSAGE_MIB << 20
    image = bytes(limit - (request(limit).ByteSize() - limit))
    assert request(len(image)).ByteSize() == limit
    return image


def test_the_largest_request_arrives_and_one_that_is_larger_is_refused_in_our_words(
    gateway: ScriptedGateway, address: str
) -> None:
    largest = _image_beside()
    gateway.scripts = [[completed()]]
    with Client(address, retry=HURRIED) as client:
        client.generate("a star", image=largest, request_id="mine", deadline_s=30)
        assert len(gateway.requests[0].spec.image) == len(largest)
        client.submit("a star", image=largest, request_id="mine", deadline_s=30)
        assert len(gateway.submitted[0].spec.image) == len(largest)
        for draw in (client.generate, client.submit):
            with pytest.raises(
                TooLarge, match=r"is 24\.1 MiB, and at most 24 MiB can be sent; its input images: image 24"
            ):
                draw("a star", image=largest + b"x", request_id="mine", deadline_s=30)
    assert (len(gateway.requests), len(gateway.submitted)) == (1, 1)


def test_a_closed_client_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    left = set(threading.enumerate()) - before  # gRPC's own thread serves the whole process
    assert "bottega-client" not in {thread.name for thread in left}
