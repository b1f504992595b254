"""Jobs over HTTP: start, list, watch, fetch, cancel and delete them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import Forbidden
from bottega.http.answers import JobAnswer, JobsAnswer, TraceAnswer
from bottega.v1 import image_pb2
from tests.fakes.scripted_gateway import ScriptedGateway, job, progress, serving
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_http import Door, running_http
from tests.support.waiting import eventually
from tests.support.webhook_receiver import SECRET, delivering, receiving

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def _start(door: Door, **body: Any) -> str:
    answer = await door.http.post("/v1/jobs", json={"prompt": "a star", **body})
    assert answer.status_code == 202, answer.text
    job = JobAnswer.model_validate_json(answer.content)
    assert answer.headers["location"] == f"/v1/jobs/{job.id}"
    return job.id


async def _events(door: Door, job_id: str, *, seen: str = "", **query: str) -> list[dict[str, Any]]:
    headers = {"last-event-id": seen} if seen else {}
    answer = await door.http.get(f"/v1/jobs/{job_id}/events", headers=headers, params=query)
    found = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "data" in fields:
            found.append({**json.loads(fields["data"]), "id": fields["id"]})
    return found


async def test_a_job_outlives_its_request_and_its_pictures_are_files(door: Door, worker: ScriptedWorker) -> None:
    job_id = await _start(door, n=2, bottega={"seed": 9})
    events = await _events(door, job_id)
    assert events[-1]["type"] == "job.completed"
    assert [image["seed"] for image in events[-1]["images"]] == [9, 10]
    job = JobAnswer.model_validate_json((await door.http.get(f"/v1/jobs/{job_id}")).content)
    assert (job.status, job.parameters["seed"], len(job.images)) == ("completed", 9, 2)
    picture = await door.http.get(job.images[1].url)
    assert (picture.content, picture.headers["content-type"]) == (b"picture 1", "image/png")
    TraceAnswer.model_validate_json((await door.http.get(f"/v1/jobs/{job_id}/trace")).content)


async def test_a_part_of_a_picture_and_a_known_one(door: Door, worker: ScriptedWorker) -> None:
    job_id = await _start(door)
    await _events(door, job_id)
    path = f"/v1/jobs/{job_id}/images/0"
    etag = (await door.http.get(path)).headers["etag"]
    known = await door.http.get(path, headers={"if-none-match": etag})
    assert (known.status_code, known.content) == (304, b"")
    for wanted, status, content in (
        ("bytes=0-3", 206, b"pict"),
        ("bytes=5-", 206, b"re 0"),
        ("bytes=-1", 206, b"0"),
        ("bytes=90-", 416, b""),
        ("bytes=0-1,3-4", 200, b"picture 0"),
        ("bytes=5-3", 200, b"picture 0"),
    ):
        answer = await door.http.get(path, headers={"range": wanted})
        assert (answer.status_code, answer.content) == (status, content), wanted
    other = await door.http.get(path, headers={"range": "bytes=0-3", "if-range": '"other"'})
    assert (other.status_code, other.content) == (200, b"picture 0")
    for headers in ({}, {"if-none-match": "*"}):
        assert (await door.http.get(f"/v1/jobs/{job_id}/images/7", headers=headers)).status_code == 404


async def test_events_go_on_after_the_last_one_that_a_client_got(door: Door, worker: ScriptedWorker) -> None:
    worker.script.hold_at = 2
    job_id = await _start(door, bottega={"num_inference_steps": 4})
    async with door.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line == "id: steps-2":
                break
    watching = asyncio.create_task(_events(door, job_id, seen="steps-2"))
    worker.script.release.set()
    events = await watching
    assert events[-1]["type"] == "job.completed"
    assert "steps-2" not in [event["id"] for event in events]
    again = await door.http.get(f"/v1/jobs/{job_id}/events", headers={"last-event-id": events[-1]["id"]})
    assert again.status_code == 204, "an EventSource attaches again until it gets that"


async def test_previews_come_with_progress_where_they_are_wanted(door: Door, worker: ScriptedWorker) -> None:
    worker.script.hold_at, worker.script.preview, worker.script.pace_s = 2, b"a jpeg", 0.03
    job_id = await _start(door)
    watching = asyncio.create_task(_events(door, job_id, preview="true"))
    await eventually(lambda: any(key[0] == job_id for key in worker.previewed))
    worker.script.release.set()
    previews = [event["previews"] for event in await watching if event.get("previews")]
    assert {"index": 0, "b64_json": "YSBqcGVn"} in previews[0]


async def test_jobs_are_listed_page_by_page(door: Door, worker: ScriptedWorker) -> None:
    made = [await _start(door, prompt=f"star {number}") for number in range(3)]
    for job_id in made:
        await _events(door, job_id)
    listed: list[str] = []
    token = ""
    while len(listed) < len(made):
        params = {"page_size": "2", "page_token": token, "states": "completed,failed"}
        page = JobsAnswer.model_validate_json((await door.http.get("/v1/jobs", params=params)).content)
        listed += [job.id for job in page.data]
        token = page.next_page_token
    assert listed[:3] == made[::-1]
    wrong = await door.http.get("/v1/jobs", params={"states": "done", "page": "2"})
    fields = {item["field"] for item in wrong.json()["error"]["bottega"]["violations"]}
    assert fields == {"states[0]", "page"}


async def test_a_job_is_cancelled_and_deleted(door: Door, worker: ScriptedWorker) -> None:
    worker.script.hold_at = 1
    job_id = await _start(door)
    cancelled = await door.http.post(f"/v1/jobs/{job_id}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    (failed,) = await _events(door, job_id)
    assert (failed["type"], failed["error"]["code"]) == ("job.failed", "job_cancelled")
    other = await _start(door, prompt="another")
    for gone in (job_id, other):
        assert (await door.http.delete(f"/v1/jobs/{gone}")).status_code == 204
        assert (await door.http.get(f"/v1/jobs/{gone}")).status_code == 404


async def test_a_stream_that_breaks_ends_without_a_result_of_the_job() -> None:
    running, ended = job(image_pb2.JOB_STATE_RUNNING), job(image_pb2.JOB_STATE_FAILED)
    ended.error.message = "the latent has NaN"
    gateway = ScriptedGateway(
        scripts=[[progress(3), Forbidden("no more")]] * 2, looks=[running, running, running, ended]
    )
    with serving(gateway) as address:
        async with running_http(address) as door:
            assert [found["type"] for found in await _events(door, "job-1")] == ["job.progress"]
            assert [found["type"] for found in await _events(door, "job-1")] == ["job.progress", "job.failed"]


async def test_an_unknown_job_is_not_found(door: Door) -> None:
    for path in ("", "/events", "/trace", "/images/0"):
        answer = await door.http.get(f"/v1/jobs/unknown{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")


async def test_the_end_of_a_job_is_announced_with_urls_of_its_pictures(tmp_path: Path) -> None:
    async with receiving(SECRET) as receiver, delivering(tmp_path) as house, running_http(house.address) as door:
        webhook = {"url": receiver.url, "events": ["job.completed"]}
        answer = await door.http.post("/v1/jobs", json={"prompt": "a star", "webhook": webhook})
        assert answer.status_code == 202
        assert answer.json()["webhook"] == webhook
        await eventually(lambda: bool(receiver.accepted))
        data = receiver.accepted[0].data
        assert data["job_id"] == answer.json()["id"]
        assert (await door.http.get(data["images"][0]["url"])).content == b"picture 0"
        for wrong, field in (({"url": "https://evil.example/"}, "webhook.url"), ({"url": 1}, "webhook.url")):
            refused = await door.http.post("/v1/jobs", json={"prompt": "a star", "webhook": wrong})
            assert refused.status_code == 400
            assert field in {violation["field"] for violation in refused.json()["error"]["bottega"]["violations"]}
