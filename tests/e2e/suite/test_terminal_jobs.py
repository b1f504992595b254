"""A job from the terminal, from its beginning without anybody waiting to its picture, through the real suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bottega.client import Client
from bottega.client.cli import main
from tests.e2e.conftest import Suite

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
