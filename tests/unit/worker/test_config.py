"""What a worker may not be told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from bottega.worker.__main__ import _imported
from bottega.worker.config import EngineConfig, PeerConfig, WorkerConfig, check_model
from tests.samples.single_files import write_single_file, write_vae_file


def test_a_pair_with_fixed_rows_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="a pair gains nothing"):
        EngineConfig(fixed_rows=4, peer=PeerConfig(address="127.0.0.1:1"))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (
            write_vae_file,
            "VAEs of all families have the same tensors; say which one it is for: --family sd15, sd21 or sdxl",
        ),
        (
            lambda path: path.write_bytes(b"{}"),
            "it is damaged or cut off (it is shorter than the length of a header); download the file again",
        ),
    ],
    ids=["a VAE", "no model"],
)
def test_a_single_file_of_something_else_is_refused(
    write: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    write(file)
    with pytest.raises(ConfigError) as refused:
        check_model(WorkerConfig(engine=EngineConfig(model=str(file))))
    assert refused.value.message == f"the model {file} cannot be served: {sentence}"


def test_a_single_file_of_a_whole_model_may_be_served(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "model.safetensors", "sdxl")
    check_model(WorkerConfig(engine=EngineConfig(model=str(file))))


def test_a_worker_logs_what_it_guesses_of_a_single_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    file = write_single_file(tmp_path / "model.safetensors", "sd21")
    with caplog.at_level(logging.INFO):
        engine = asyncio.run(_imported(EngineConfig(model=str(file))))
    assert (Path(engine.model).parent.name, engine.model_name) == ("imported", "model")
    (logged,) = (record for record in caplog.records if record.name == "bottega.worker.__main__")
    assert logged.getMessage() == (
        "Prediction type: v_prediction, a guess: the default of Stable Diffusion 2; for a base model at 512 pixels "
        "import it with --prediction-type epsilon."
    )
