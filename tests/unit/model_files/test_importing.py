"""A single file that is to be served becomes a folder in the state folder, once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bottega.client.cli import main
from bottega.errors import ConfigError
from bottega.model_files.importing import import_file, import_for_serving
from tests.samples.family_models import family_model
from tests.samples.single_files import write_single_file, write_vae_file

_FACTS = dict.fromkeys(("kind", "family", "title", "prediction_type", "prediction_source"), "")
# Stands in for the interpreter, whose arguments are -m MODULE FILE FOLDER FAMILY PREDICTION_TYPE VAE PARTS.
_QUICK_CONVERSION = f"""#!/bin/sh
mkdir -p "$4" && if [ -n "$7" ]; then cp "$7" "$4/vae"; fi
if [ -n "$8" ]; then ln -s "$8" "$4/parts"; fi
echo '{json.dumps({"is_new": True, "prediction_is_guess": False, **_FACTS})}'
"""


@pytest.fixture
def quick_conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = tmp_path / "converter"
    converter.write_text(_QUICK_CONVERSION)
    converter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(converter))


def _import(file: Path, state: Path, **options: Any) -> Path:
    return asyncio.run(import_for_serving(file, state, **options)).folder


@pytest.mark.usefixtures("quick_conversions")
def test_a_file_is_converted_once_and_keeps_its_own_loras_when_it_changes(tmp_path: Path) -> None:
    state, file = tmp_path / "state", write_single_file(tmp_path / "scenes.safetensors", "sdxl")
    folder = _import(file, state)
    (folder / "converted").touch()
    assert _import(file, state) == folder
    assert (folder / "converted").exists()

    (folder / "loras").mkdir()  # the user's
    (folder.parent / f".{folder.name}.importing-killed").mkdir()
    os.utime(file, ns=(0, 0))
    changed = _import(file, state)
    assert [path.name for path in (state / "imported").iterdir()] == [changed.name] != [folder.name]
    assert (changed / "loras").is_dir()


@pytest.mark.usefixtures("quick_conversions")
def test_each_vae_and_version_of_it_gets_a_folder_that_other_imports_keep(tmp_path: Path) -> None:
    state, file = tmp_path / "state", write_single_file(tmp_path / "scenes.safetensors", "sd15")
    vaes = [write_vae_file(tmp_path / f"{seed}.safetensors", seed=seed) for seed in range(2)]
    for vae in vaes:
        os.utime(vae, ns=(0, 0))
    first, second = (_import(file, state, vae=vae) for vae in vaes)
    assert [(folder / "vae").read_bytes() for folder in (first, second)] == [vae.read_bytes() for vae in vaes]
    shutil.copy2(vaes[1], vaes[0])
    third = _import(file, state, vae=vaes[0])
    assert set((state / "imported").iterdir()) == {second, third}
    assert (third / "vae").read_bytes() == vaes[1].read_bytes()


@pytest.mark.usefixtures("quick_conversions")
def test_the_command_names_the_folder_of_other_parts(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "scenes.safetensors", "sd15")
    folder, parts = tmp_path / "scenes", tmp_path / "flux"
    done = CliRunner().invoke(main, ["models", "import", str(file), "--parts", str(parts)])
    assert done.exit_code == 0, done.output
    assert (folder / "parts").readlink() == parts


def test_the_command_refuses_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["models", "import", str(tmp_path / "scenes.safetensors")])
    assert (done.exit_code, "does not exist" in done.stderr, "download" in done.stderr) == (2, True, False)


@pytest.mark.usefixtures("quick_conversions")
def test_a_file_without_other_parts_keeps_the_folder_of_earlier_releases(tmp_path: Path) -> None:
    """Another name would convert the file again, and give the model another name in the fleet."""
    file = write_single_file(tmp_path / "scenes.safetensors", "sd15")
    status = file.stat()
    rest = (f"{file}\0v_prediction\0", f"{status.st_size} {status.st_mtime_ns}\0")
    hashes = (hashlib.sha256(text.encode()).hexdigest()[:12] for text in rest)
    assert _import(file, tmp_path / "state", prediction_type="v_prediction").name == f"scenes-{'-'.join(hashes)}"


@pytest.mark.usefixtures("quick_conversions")
def test_each_folder_of_other_parts_gets_a_folder(tmp_path: Path) -> None:
    state, file = tmp_path / "state", write_single_file(tmp_path / "scenes.safetensors", "sd15")
    parts = family_model("SD 1")
    folder = _import(file, state, parts=parts)
    assert (folder / "parts").readlink() == parts
    assert _import(file, state) != folder
    with pytest.raises(ConfigError, match="of --parts cannot be used: its model is of Stable Diffusion 3"):
        _import(file, state, parts=family_model("SD 3"))


def test_a_refusal_is_the_converters_sentence(tmp_path: Path) -> None:
    file = write_vae_file(tmp_path / "vae.safetensors")
    with pytest.raises(ConfigError) as refused:
        asyncio.run(import_file(file, tmp_path / "vae"))
    assert refused.value.message == (
        f"{file} cannot be converted: VAEs of several families have the same tensors; say for which it is: "
        "--family sd15|sd21|sdxl|sd3|flux"
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
