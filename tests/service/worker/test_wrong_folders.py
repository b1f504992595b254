"""A worker that is given a wrong folder: one process, one sentence, no traceback, and no second start."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from tests.samples.wrong_folders import WRONG_FOLDERS, WrongFolder

pytestmark = pytest.mark.alone

# From the command to its end, the start of Python and the imports of the front included.
LIMIT_S = 2.0
TRIES = 3
"""Runs of the command; the quickest one counts, because other tests may take the cores from one of them."""
_GATEWAYS = {"alone": "''", "without its gateway": "127.0.0.1:9"}
# One of another family, and one whose weights are damaged; the checker is the same for all.
_IN_EVERY_RUN = {("Stable Diffusion 3", "alone"), ("a file that is cut off", "without its gateway")}


@pytest.mark.parametrize(
    ("wrong", "gateway"),
    [
        pytest.param(
            wrong,
            address,
            marks=() if (wrong.name, gateway) in _IN_EVERY_RUN else pytest.mark.slow,
            id=f"{wrong.name}-{gateway}",
        )
        for wrong in WRONG_FOLDERS
        for gateway, address in _GATEWAYS.items()
    ],
)
def test_a_worker_ends_with_the_sentence(wrong: WrongFolder, gateway: str, tmp_path: Path) -> None:
    given, sentence = wrong.make_at(tmp_path / "model")
    config = tmp_path / "worker.yaml"
    config.write_text(f"gateway: {gateway}\nengine: {{model: '{given}'}}\n")
    command = [sys.executable, "-m", "bottega.worker", "--config", str(config)]
    took_s = math.inf
    for _ in range(TRIES):
        began_s = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        took_s = min(took_s, time.monotonic() - began_s)
        if took_s < LIMIT_S:
            break
    assert done.stderr == f"bottega.worker: the model {given} cannot be served: {sentence}\n"
    assert done.stdout == ""
    assert done.returncode == ConfigError.exit_status  # systemd's units do not start it again
    assert took_s < LIMIT_S
