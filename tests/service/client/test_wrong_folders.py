"""What commands say of a wrong model folder: the sentence that a worker says, soon, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.samples.wrong_folders import WRONG_FOLDERS
from tests.support.processor_speed import on_this_machine, seconds_of_children

# Processor seconds from the command to its end, the start of Python included.
LIMIT_S = 2.0


@pytest.mark.parametrize("command", ["up --detach", "config check"])
def test_a_command_says_the_sentence_soon(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTEGA_ADDRESS", "127.0.0.1:9")  # nobody listens there
    given, sentence = WRONG_FOLDERS[0].make_at(tmp_path / "model")
    file = tmp_path / "workers" / "left.yaml"
    file.parent.mkdir()
    file.write_text(f"engine: {{model: '{given}'}}\n")
    state = tmp_path / "state"
    options = [str(file)] if command == "config check" else ["--model", str(given), "--state", str(state)]
    before_s = seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-m", "bottega.client.cli", *command.split(), *options],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert seconds_of_children() - before_s < on_this_machine(LIMIT_S)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert sentence in said
    assert "Traceback" not in said
    assert not state.exists()
