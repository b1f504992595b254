"""A single file that is to be served becomes a folder in the state folder, once."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from bottega.model_files.folder_check import check_model_folder
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


_FACTS = dict.fromkeys(("kind", "family", "title", "prediction_type", "prediction_source"), "")
# Stands in for the interpreter, whose arguments are -m MODULE FILE FOLDER FAMILY PREDICTION_TYPE VAE.
_QUICK_CONVERSION = f"""#!/bin/sh
mkdir -p "$4" && cp "$7" "$4/vae"
echo '{json.dumps({"is_new": True, "prediction_is_guess": False, **_FACTS})}'
"""


def test_each_vae_and_version_of_it_gets_a_folder_that_other_imports_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_single_file(tmp_path / "scenes.safetensors", "sd15")
    vaes = [write_vae_file(tmp_path / f"{seed}.safetensors", seed=seed) for seed in range(2)]
    for vae in vaes:
        os.utime(vae, ns=(0, 0))
    converter = tmp_path / "converter"
    converter.write_text(_QUICK_CONVERSION)
    converter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(converter))

    def import_it(vae: Path) -> Path:
        return asyncio.run(import_for_serving(file, tmp_path / "state", vae=vae)).folder

    first, second = map(import_it, vaes)
    assert [(folder / "vae").read_bytes() for folder in (first, second)] == [vae.read_bytes() for vae in vaes]
    shutil.copy2(vaes[1], vaes[0])
    third = import_it(vaes[0])
    assert set((tmp_path / "state" / "imported").iterdir()) == {second, third}
    assert (third / "vae").read_bytes() == vaes[1].read_bytes()


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
