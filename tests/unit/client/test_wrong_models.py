"""What `bottega up` and `bottega doctor` say of every wrong model folder: its sentence, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bottega.client.checkup.machine import check_model
from bottega.client.cli import main
from bottega.client.types.checks import Level
from tests.samples.wrong_folders import WRONG_FOLDERS, WrongFolder


@pytest.mark.parametrize("wrong", WRONG_FOLDERS, ids=lambda wrong: wrong.name)
def test_up_and_doctor_refuse_a_wrong_folder_with_its_sentence(wrong: WrongFolder, tmp_path: Path) -> None:
    given, sentence = wrong.make_at(tmp_path / "model")
    result = CliRunner().invoke(main, ["up", "--model", str(given), "--state", str(tmp_path / "state")])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert sentence in result.output
    assert not (tmp_path / "state").exists()
    (found,) = check_model(str(given))
    assert found.level is Level.FAIL
    assert found.what.endswith(sentence)
