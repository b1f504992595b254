"""Jobs outlive connections: they can be looked at, watched, attached to, cancelled and fetched, by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bottega.client import Client, JobState
from bottega.errors import ImageNotFound
from tests.e2e.conftest import Suite
from tests.support.terminal import run
from tests.support.waiting import wait_until

PROMPT = "a small green circle on a white background"
QUICK: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 4.0}


def _ended(client: Client, job_id: str) -> JobState:
    wait_until(lambda: client.job(job_id).status().state.ended, f"{job_id} to end")
    return client.job(job_id).status().state


def test_a_submitted_job_runs_to_its_end_and_keeps_its_picture(client: Client) -> None:
    job = client.submit(PROMPT, num_images=2, seed=4, **QUICK)
    assert job.status().state in {JobState.QUEUED, JobState.RUNNING}

    assert _ended(client, job.id) is JobState.COMPLETED

    done = job.status()
    assert (done.steps_done, done.steps_total, done.image_count) == (8, 8, 2)
    assert done.started is not None
    assert done.ended is not None
    assert done.created <= done.started <= done.ended
    assert done.provenance is not None
    alone = client.generate(PROMPT, seed=5, **QUICK)
    assert job.image(1).data == alone.data
    with pytest.raises(ImageNotFound):
        job.image(2)


def test_a_job_from_the_terminal_is_found_followed_and_fetched(suite: Suite, client: Client, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        result = run(*arguments, address=suite.gateway.address)
        assert result.exit_code == 0, result.output
        return result.stdout

    job_id = said("generate", PROMPT, "--seed", 7, "--steps", 20, "--detach").strip()
    assert f"{job_id} completed" in said("jobs", "watch", job_id)
    said("jobs", "get", job_id, "-o", tmp_path / "circle.png")
    row = next(line.strip() for line in said("jobs").splitlines() if job_id in line)
    assert ("completed" in row, "20/20" in row, row.endswith(PROMPT)) == (True, True, True)
    assert (tmp_path / "circle.png").read_bytes() == client.generate(PROMPT, seed=7, num_inference_steps=20).data
