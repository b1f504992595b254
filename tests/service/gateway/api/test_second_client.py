"""The gateway as a client sees it that nobody here wrote: grpc-js, with the contract by reflection alone."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from bottega.v1 import image_pb2
from load.clients.build import missing
from tests.support.ghz_configurations import configurations
from tests.support.running_gateway import Running
from tests.support.second_client import Called, installed, make_calls

SERVICE = "bottega.v1.ImageService"
PICTURE = b"picture 0"

pytestmark = pytest.mark.skipif(bool(missing("typescript")), reason=missing("typescript"))


@pytest.fixture(scope="module")
def packages() -> Path:
    """The client's, installed before the first test."""
    return installed()


def bytes_of(answer: Any) -> bytes:
    return base64.b64decode(answer.get("chunk", ""))


async def test_it_makes_every_public_call(house: Running, packages: Path) -> None:
    await house.worker()
    done = await house.ended((await house.submit(prompt="a star")).job_id)
    planned = [(plan["call"], plan["data"], 10.0) for plan in configurations("smoke", job_id=done.job_id).values()]
    deletion = (f"{SERVICE}/DeleteJob", {"job_id": done.job_id}, 10.0)
    ended, services = await make_calls(packages, house.address, [*planned, deletion])
    by_method: dict[str, Called] = {call.call.removeprefix(f"{SERVICE}/"): call for call in ended}
    assert by_method.keys() == set(image_pb2.DESCRIPTOR.services_by_name["ImageService"].methods_by_name)
    assert {method: (call.code, call.details) for method, call in by_method.items()} == dict.fromkeys(
        by_method, ("OK", "")
    )
    assert {SERVICE, "grpc.health.v1.Health"} <= set(services)
    answers = {method: call.answers for method, call in by_method.items()}

    events = [answer["event"] for answer in answers["Generate"]]
    assert [events[0]["event"], events[-1]["event"]] == ["queued", "completed"]
    [image] = events[-1]["completed"]["images"]
    assert base64.b64decode(image["data"]) == PICTURE
    assert events[-1]["completed"]["provenance"]["parameters"]["num_inference_steps"] == 10

    [watched] = answers["WatchJob"]
    assert (watched["event"]["event"], watched["event"]["job_id"]) == ("completed", done.job_id)
    assert b"".join(map(bytes_of, answers["GetImage"])) == PICTURE
    assert answers["GetImage"][0]["image"]["digest"] == done.images[0].digest
    assert answers["GetJob"][0]["job"]["state"] == "JOB_STATE_COMPLETED"
    assert "queue" in [span["name"] for span in answers["GetJobTrace"][0]["trace"]["spans"]]
    assert answers["CancelJob"][0]["job"]["state"] == "JOB_STATE_COMPLETED"
    assert answers["SubmitJob"][0]["job"]["state"] in ("JOB_STATE_QUEUED", "JOB_STATE_RUNNING")
    assert done.job_id in [job["job_id"] for job in answers["ListJobs"][0]["jobs"]]
    assert [model["name"] for model in answers["ListModels"][0]["models"]] == ["miniature"]
    assert answers["ListAdapters"][0].get("adapters", []) == []
    assert done.job_id not in await house.listed()


async def test_its_deadline_ends_a_picture_that_nobody_waits_for(house: Running, packages: Path) -> None:
    worker = await house.worker(hold_at=3)
    [call], _ = await make_calls(
        packages, house.address, [(f"{SERVICE}/Generate", {"spec": {"prompt": "a star"}}, 1.0)]
    )
    assert call.code == "DEADLINE_EXCEEDED"
    assert [answer["event"]["event"] for answer in call.answers][:1] == ["queued"]
    cancelled = await worker.cancelled.get()
    assert cancelled.job_id == call.answers[0]["event"]["job_id"]
