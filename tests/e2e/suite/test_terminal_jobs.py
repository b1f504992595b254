"""A job from the terminal, from its beginning without anybody waiting to its picture, through the real suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bottega.client import Client
from bottega.client.cli import main
from tests.e2e.conftest import Suite
from tests.support.waiting import wait_until

JOB_ID = re.compile(r"[0-9a-f]{24}")
PROMPT = "a big yellow square on a blue background"


@pytest.fixture
def bottega(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """The command, in a folder of the test's own, with the suite's gateway."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOTTEGA_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("BOTTEGA_ADDRESS", suite.gateway.address)
    return CliRunner()


def run(bottega: CliRunner, *arguments: str) -> Result:
    result = bottega.invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result


def test_a_detached_job_is_found_followed_and_fetched(bottega: CliRunner, client: Client, tmp_path: Path) -> None:
    drawn = ("--seed", "7", "--steps", "20")
    job_id = run(bottega, "generate", PROMPT, *drawn, "--detach").stdout.strip()

    assert f"{job_id} completed" in run(bottega, "jobs", "watch", job_id).stdout
    run(bottega, "jobs", "get", job_id, "-o", "square.png")
    row = next(line.strip() for line in run(bottega, "jobs").stdout.splitlines() if job_id in line)

    assert "completed" in row
    assert "20/20" in row
    assert row.endswith(PROMPT)
    assert (tmp_path / "square.png").read_bytes() == client.generate(PROMPT, seed=7, num_inference_steps=20).data


def test_pages_of_the_list_have_every_job_once(bottega: CliRunner) -> None:
    made = [run(bottega, "generate", PROMPT, "--steps", "1", "--detach").stdout.strip() for _ in range(3)]
    for job_id in made:
        run(bottega, "jobs", "get", job_id, "--wait")

    seen: list[str] = []
    page: list[str] = ["jobs", "-n", "2", "--state", "completed"]
    while page and len(seen) < len(made):
        result = run(bottega, *page)
        seen += [word for word in result.stdout.split() if JOB_ID.fullmatch(word)]
        page = result.stderr.removeprefix("More: bottega ").split()

    assert seen[:3] == made[::-1]


def test_a_job_is_cancelled_and_its_picture_then_refused(bottega: CliRunner, client: Client) -> None:
    job_id = run(bottega, "generate", PROMPT, "-n", "8", "--steps", "200", "--detach").stdout.strip()
    wait_until(lambda: client.job(job_id).status().steps_done > 0, "the first step")

    early = bottega.invoke(main, ["jobs", "get", job_id])
    run(bottega, "jobs", "cancel", job_id)
    late = bottega.invoke(main, ["jobs", "get", job_id])

    assert (early.exit_code, late.exit_code) == (1, 1)
    assert "is running" in early.stderr
    assert "cancelled" in late.stderr
