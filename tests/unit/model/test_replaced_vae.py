"""A VAE of another folder replaces the model's own, is checked as it is, and is part of the model's hash."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bottega.miniature import WEIGHTS
from bottega.model.loading import load_model
from bottega.model_files.digest import model_digest
from bottega.model_files.folder_check import check_model_folder
from tests.samples.wrong_folders import change_json

_FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def vae(tmp_path: Path) -> Path:
    """A copy of the embedded model's VAE with other weights."""
    folder = Path(shutil.copytree(WEIGHTS / "vae", tmp_path / "better"))
    state = load_file(folder / _FILE)
    state["decoder.conv_out.bias"] += 0.25
    save_file(state, folder / _FILE)
    return folder


def test_the_vae_of_another_folder_is_loaded(vae: Path) -> None:
    model = load_model(WEIGHTS, name="m", device=torch.device("cpu"), dtype=torch.float32, vae_folder=vae)
    wanted = load_file(vae / _FILE)["decoder.conv_out.bias"]
    assert torch.equal(model.vae.decoder.conv_out.bias.data, wanted.float())
    assert (
        model.digest == model_digest(check_model_folder(WEIGHTS, vae=vae)) != model_digest(check_model_folder(WEIGHTS))
    )


def test_a_vae_that_does_not_fit_is_refused(vae: Path, tmp_path: Path) -> None:
    assert check_model_folder(WEIGHTS, vae=tmp_path / "absent").problems == (
        f"the folder {tmp_path / 'absent'} of the VAE is missing; correct engine.vae.folder",
    )
    file = vae / _FILE
    advice = f"`bottega models import {file} --family FAMILY` converts it to a folder"
    assert check_model_folder(WEIGHTS, vae=file).problems == (f"engine.vae.folder names the file {file}; {advice}",)
    change_json(vae / "config.json", act_fn="tanh")
    assert [problem.partition(" must be")[0] for problem in check_model_folder(WEIGHTS, vae=vae).problems] == [
        "vae/config.json: act_fn"
    ]


def test_nan_in_a_vae_is_refused_when_it_is_loaded(vae: Path) -> None:
    state = load_file(vae / _FILE)
    state["decoder.conv_in.weight"][0] = torch.nan
    save_file(state, vae / _FILE)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole text is compared
        load_model(WEIGHTS, name="m", device=torch.device("cpu"), dtype=torch.float32, vae_folder=vae)
    assert str(refused.value) == (
        f"better/{_FILE}: the tensor decoder.conv_in.weight has values that are no finite numbers; download the file "
        "again"
    )
