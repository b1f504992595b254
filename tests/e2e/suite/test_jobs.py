"""Jobs outlive connections: they can be looked at, watched, attached to, cancelled and fetched, by id."""

from __future__ import annotations

from pathlib import Path

from bottega.client import Client
from tests.e2e.conftest import Suite
from tests.support.terminal import run

PROMPT = "a small green circle on a white background"


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
