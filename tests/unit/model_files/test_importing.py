"""A single file that is to be served becomes a folder in the state folder, once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from bottega.model_files import check_model_folder
from bottega.model_files.importing import import_file, import_for_serving
from tests.samples.single_files import write_single_file, write_vae_file


def test_a_file_is_converted_once(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "scenes.safetensors", "sdxl")
    parts: list[str] = []

    def import_it() -> Path:
        return asyncio.run(
            import_for_serving(file, tmp_path / "state", on_part=lambda part, _: parts.append(part))
        ).folder

    folder = import_it()
    assert check_model_folder(folder).problems == ()
    assert sorted(parts) == ["text_encoder", "text_encoder_2", "unet", "vae"]
    assert import_it() == folder
    assert len(parts) == 4

    (folder / "loras").mkdir()  # the user's
    (folder.parent / f".{folder.name}.importing-killed").mkdir()
    write_single_file(file, "sdxl", seed=1)
    os.utime(file, ns=(0, 0))
    changed = import_it()
    assert [path.name for path in (tmp_path / "state" / "imported").iterdir()] == [changed.name] != [folder.name]
    assert (changed / "loras").is_dir()


def test_a_refusal_is_the_converters_sentence(tmp_path: Path) -> None:
    file = write_vae_file(tmp_path / "vae.safetensors")
    with pytest.raises(ConfigError) as refused:
        asyncio.run(import_file(file, tmp_path / "vae"))
    assert refused.value.message == (
        f"{file} cannot be converted: VAEs of all families have the same tensors; say which one it is for: "
        "--family sd15, sd21 or sdxl"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["vae.safetensors"]


def test_a_state_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "scenes.safetensors", "sdxl")
    (tmp_path / "state").touch()
    with pytest.raises(ConfigError) as refused:
        asyncio.run(import_for_serving(file, tmp_path / "state"))
    assert refused.value.message == f"{file} cannot be converted: {tmp_path / 'state'}: File exists"


def test_a_conversion_ends_with_its_stdin_and_leaves_nothing(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "scenes.safetensors", "sdxl")
    command = [sys.executable, "-m", "bottega.worker.conversion", str(file), str(tmp_path / "folder")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["scenes.safetensors"]
