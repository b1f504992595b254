"""A worker whose configuration names a single file serves the folder that is made from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from bottega.model_files import check_model_folder
from bottega.worker.config import EngineConfig, WorkerConfig, check_model
from bottega.worker.imported_model import with_imported_model
from tests.samples.single_files import write_single_file, write_vae_file


def test_a_single_file_is_converted_into_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    file = write_single_file(tmp_path / "scenes.safetensors", "sdxl")
    config = EngineConfig(model=str(file))
    check_model(WorkerConfig(engine=config))

    imported = asyncio.run(with_imported_model(config))

    assert imported.model_name == "scenes"
    assert Path(imported.model).parent == tmp_path / "state" / "imported"
    assert check_model_folder(Path(imported.model)).problems == ()
    assert [path.name for path in (tmp_path / "state" / "imported").iterdir()] == [Path(imported.model).name]
    check_model(WorkerConfig(engine=imported))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (
            lambda path: write_vae_file(path),
            "VAEs of all families have the same tensors; say which one it is for: --family sd15, sd21 or sdxl",
        ),
        (
            lambda path: path.write_bytes(b"{}"),
            "it is damaged or cut off (it is shorter than the length of a header)",
        ),
    ],
    ids=["a VAE", "no model"],
)
def test_another_file_is_refused_before_the_start(
    write: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    write(file)
    with pytest.raises(ConfigError) as refused:
        check_model(WorkerConfig(engine=EngineConfig(model=str(file))))
    assert refused.value.message.startswith(f"the model {file} cannot be served: {sentence}")


def test_the_converters_sentence_is_the_reason_of_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    file = write_vae_file(tmp_path / "vae.safetensors")
    with pytest.raises(ConfigError) as refused:
        asyncio.run(with_imported_model(EngineConfig(model=str(file))))
    assert refused.value.message.startswith(f"{file} cannot be converted: VAEs of all families")
    assert list((tmp_path / "state" / "imported").iterdir()) == []
