"""A job from the terminal, from its beginning without anybody waiting to its picture, through the real suite."""

from __future__ import annotations

from pathlib import Path

from bottega.client import Client
from tests.e2e.conftest import Suite
from tests.support.terminal import run

PROMPT = "a big yellow square on a blue background"


def said(suite: Suite, *arguments: object) -> str:
    """What the command prints, with the suite's gateway."""
    result = run(*arguments, address=suite.gateway.address)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_detached_job_is_found_followed_and_fetched(suite: Suite, client: Client, tmp_path: Path) -> None:
    job_id = said(suite, "generate", PROMPT, "--seed", 7, "--steps", 20, "--detach").strip()

    assert f"{job_id} completed" in said(suite, "jobs", "watch", job_id)
    said(suite, "jobs", "get", job_id, "-o", tmp_path / "square.png")
    row = next(line.strip() for line in said(suite, "jobs").splitlines() if job_id in line)

    assert "completed" in row
    assert "20/20" in row
    assert row.endswith(PROMPT)
    assert (tmp_path / "square.png").read_bytes() == client.generate(PROMPT, seed=7, num_inference_steps=20).data
