"""What a gateway's log says of a job: one line for each turn of its life, all found by one request_id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from bottega.errors import TooLarge
from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.services import Service, Services, gateway_config
from tests.support.waiting import eventually

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Services(tmp_path_factory.mktemp("gateway")) as services:
        yield services.start("gateway", gateway_config(codec_processes=1))


@pytest.fixture
async def worker(gateway: Service) -> AsyncIterator[ScriptedWorker]:
    worker = await ScriptedWorker("w1", gateway.fleet).start()
    yield worker
    await worker.die()


@pytest.fixture
async def images(gateway: Service) -> AsyncIterator[image_pb2_grpc.ImageServiceAsyncStub]:
    async with open_channel(gateway.address) as channel:
        yield image_pb2_grpc.ImageServiceStub(channel)


async def _draw(images: image_pb2_grpc.ImageServiceAsyncStub, request_id: str, *, trace: str = "") -> str:
    """Generates to the end, whatever it is; the job's id."""
    request = image_pb2.GenerateRequest(request_id=request_id, spec=GenerationSpec(prompt="a star"))
    metadata = (("x-request-id", trace),) if trace else ()
    job_id = ""
    try:
        async for answer in images.Generate(request, timeout=PATIENCE_S, metadata=metadata):
            job_id = answer.event.job_id
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017 - some tests want it, some do not
    return job_id


def _lines(gateway: Service, request_id: str) -> dict[str, dict[str, Any]]:
    """What was logged under a request_id, by event."""
    return {line["event"]: line for line in gateway.events() if line.get("request_id") == request_id}


async def _until_logged(gateway: Service, event: str, request_id: str) -> dict[str, Any]:
    await eventually(lambda: event in _lines(gateway, request_id))
    return _lines(gateway, request_id)[event]


async def test_a_job_is_logged_when_it_is_accepted_and_completed(
    gateway: Service, worker: ScriptedWorker, images: image_pb2_grpc.ImageServiceAsyncStub
) -> None:
    job_id = await _draw(images, "log-drawn")
    completed = await _until_logged(gateway, "job completed", "log-drawn")
    accepted = _lines(gateway, "log-drawn")["job accepted"]
    for line in (accepted, completed):
        assert (line["job_id"], line["model"], line["level"]) == (job_id, "miniature", "INFO")
    assert (completed["worker"], completed["attempts"]) == ("w1", 1)
    assert 0 < completed["seconds"] < PATIENCE_S
    assert [request.request_id for request in worker.requests] == ["log-drawn"]


async def test_a_failed_job_is_logged_with_its_reason(
    gateway: Service, worker: ScriptedWorker, images: image_pb2_grpc.ImageServiceAsyncStub
) -> None:
    worker.script.failure = TooLarge("no room")
    await _draw(images, "log-failed")
    failed = await _until_logged(gateway, "job failed", "log-failed")
    assert (failed["reason"], failed["text"], failed["level"]) == ("TOO_LARGE", "no room", "WARNING")
    assert (failed["worker"], failed["attempts"]) == ("w1", 1)


async def test_a_cancelled_job_is_logged(
    gateway: Service, worker: ScriptedWorker, images: image_pb2_grpc.ImageServiceAsyncStub
) -> None:
    worker.script.hold_at = 1
    request = image_pb2.SubmitJobRequest(request_id="log-cancelled", spec=GenerationSpec(prompt="a star"))
    job = (await images.SubmitJob(request, timeout=PATIENCE_S)).job
    await worker.arrived.wait()
    await images.CancelJob(image_pb2.CancelJobRequest(job_id=job.job_id), timeout=PATIENCE_S)
    cancelled = await _until_logged(gateway, "job cancelled", "log-cancelled")
    assert (cancelled["job_id"], cancelled["level"]) == (job.job_id, "INFO")


async def test_a_lost_attempt_is_logged_under_the_request_id_of_its_job(
    gateway: Service, worker: ScriptedWorker, images: image_pb2_grpc.ImageServiceAsyncStub
) -> None:
    worker.script.hold_at = 1
    drawing = asyncio.create_task(_draw(images, "log-lost"))
    await worker.arrived.wait()
    await worker.die()
    lost = await _until_logged(gateway, "attempt lost", "log-lost")
    assert lost["worker"] == "w1"
    other = await ScriptedWorker("w2", gateway.fleet).start()
    assert await drawing == lost["job_id"]
    completed = await _until_logged(gateway, "job completed", "log-lost")
    assert (completed["worker"], completed["attempts"]) == ("w2", 2)
    await other.die()


async def test_an_order_without_a_request_id_has_that_of_the_calls_metadata_or_else_its_job_id(
    gateway: Service, worker: ScriptedWorker, images: image_pb2_grpc.ImageServiceAsyncStub
) -> None:
    job_id = await _draw(images, "")
    await _draw(images, "", trace="trace-1")
    await _draw(images, "log-named", trace="trace-2")
    named = [job_id, "trace-1", "log-named"]
    for name in named:
        await _until_logged(gateway, "job completed", name)
    assert [request.request_id for request in worker.requests] == named, "at the worker too"
    assert "job accepted" not in _lines(gateway, "trace-2")


async def test_a_request_id_that_is_refused_does_not_flood_the_log(
    gateway: Service, images: image_pb2_grpc.ImageServiceAsyncStub
) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await images.SubmitJob(image_pb2.SubmitJobRequest(request_id="x" * 5000), timeout=PATIENCE_S)
    refused = await _until_logged(gateway, "call refused", "x" * 128)
    assert refused["reason"] == "INVALID_REQUEST"
    assert not any("x" * 129 in str(line) for line in gateway.events())


FORGED = '{"time": "2026-01-01 00:00:00,000", "level": "ERROR", "event": "the disk is lost"}'


async def test_a_request_id_that_breaks_the_rules_is_in_no_line(
    gateway: Service, images: image_pb2_grpc.ImageServiceAsyncStub
) -> None:
    for request_id in ("a\n" + FORGED, "a\r" + FORGED, "a\x1b[2J", "a\u202eb", "a\u2028b", "a b=c", "\x00", "é"):
        seen = len(gateway.events())
        with pytest.raises(grpc.aio.AioRpcError):
            await images.SubmitJob(image_pb2.SubmitJobRequest(request_id=request_id), timeout=PATIENCE_S)
        await eventually(lambda seen=seen: bool(_refusals(gateway, seen)))  # type: ignore[misc]
        assert not any("request_id" in line for line in _refusals(gateway, seen))
    whole = gateway.log.read_bytes()
    assert not {byte for byte in whole if byte < 0x20 or byte > 0x7E} - {0x0A}, "every line is JSON of ASCII"


def _refusals(gateway: Service, seen: int) -> list[dict[str, Any]]:
    """The refusals that were logged after so many lines. Beyond some in a second, they are told as a number."""
    return [line for line in gateway.events()[seen:] if "refused" in line["event"]]


async def test_the_id_of_the_metadata_is_checked_as_well(
    gateway: Service, images: image_pb2_grpc.ImageServiceAsyncStub
) -> None:
    seen = len(gateway.events())
    for trace in ("two words", "one/word:1"):
        with pytest.raises(grpc.aio.AioRpcError):
            await images.GetJob(
                image_pb2.GetJobRequest(job_id="none"), timeout=PATIENCE_S, metadata=(("x-request-id", trace),)
            )
    await _until_logged(gateway, "call refused", "one/word:1")
    assert not any("words" in str(line) for line in gateway.events()[seen:])
