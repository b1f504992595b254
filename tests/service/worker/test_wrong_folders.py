"""A worker that is given a wrong folder: one process, one sentence, no traceback, and no second start."""

from __future__ import annotations

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
# On a slower machine it takes at most so many times what importing a few of its libraries takes (4 to 6 were seen).
LIMIT_OF_IMPORTS = 8.0
IMPORTS = "import grpc.aio, prometheus_client, pydantic, yaml"
# One of another family, and one whose weights are damaged; the checker is the same for all.
_IN_EVERY_RUN = frozenset({"Stable Diffusion 1.5", "a file that is cut off"})


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(wrong, marks=() if wrong.name in _IN_EVERY_RUN else pytest.mark.slow, id=wrong.name)
        for wrong in WRONG_FOLDERS
    ],
)
@pytest.mark.parametrize("gateway", ["''", "127.0.0.1:9"], ids=["alone", "without its gateway"])
def test_a_worker_ends_with_the_sentence(wrong: WrongFolder, gateway: str, tmp_path: Path) -> None:
    given, sentence = wrong.make_at(tmp_path / "model")
    config = tmp_path / "worker.yaml"
    config.write_text(f"gateway: {gateway}\nengine: {{model: '{given}'}}\n")
    command = [sys.executable, "-m", "bottega.worker", "--config", str(config)]
    began_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    took_s = time.monotonic() - began_s
    assert done.stderr == f"bottega.worker: the model {given} cannot be served: {sentence}\n"
    assert done.stdout == ""
    assert done.returncode == ConfigError.exit_status  # systemd's units do not start it again
    assert took_s < LIMIT_S or took_s < LIMIT_OF_IMPORTS * _imports_s()


def _imports_s() -> float:
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=60)
    return time.monotonic() - began_s
