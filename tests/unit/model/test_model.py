"""What is no model is refused with the reason; only a folder's own safetensors are opened, and its hash is theirs."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from bottega.model.loading import load_model
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.model_files import digest
from bottega.model_files.digest import KnownDigests, model_digest
from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.presets import PRESET_FILE
from tests.support.waiting import wait_until

UNET = Path("unet", "diffusion_pytorch_model.safetensors")


def load(folder: Path) -> Model:
    return load_model(folder, name="it", device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of our own to spoil."""
    return shutil.copytree(WEIGHTS, tmp_path / "model")


def test_what_only_the_libraries_know_to_be_wrong_is_refused_with_their_reason(folder: Path) -> None:
    path = folder / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_return_dict": 1}))
    with pytest.raises(
        ConfigError, match=r"cannot be loaded by Diffusers \(AttributeError: property 'use_return_dict'"
    ):
        load(folder)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("model-hash")]


@pytest.mark.parametrize("name", ["some/model", "/absent"])
def test_a_folder_that_is_not_there_is_not_looked_for_anywhere_else(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the model {name} cannot be served: there is no such folder"):
        load(Path(name))


def test_the_hash_follows_weights_and_configuration_but_not_defaults_and_adapters(folder: Path) -> None:
    before = model_digest(check_model_folder(folder))
    assert len(before) == 64
    assert before == model_digest(check_model_folder(WEIGHTS))
    (folder / PRESET_FILE).write_text('{"num_inference_steps": 7}')
    adapter = folder / "controlnets" / "another"
    adapter.mkdir(parents=True)
    (adapter / "config.json").write_text("{}")
    assert model_digest(check_model_folder(folder)) == before
    shutil.copy(folder / UNET, (folder / UNET).with_suffix(".fp16.safetensors"))
    (folder / "unet" / "old").mkdir()
    (folder / "unet" / "old" / "config.json").write_text("{}")
    assert model_digest(check_model_folder(folder)) == before
    weights = bytearray((folder / UNET).read_bytes())
    weights[-1] ^= 1
    (folder / UNET).write_bytes(weights)
    assert model_digest(check_model_folder(folder)) != before


def test_a_large_file_is_hashed_once_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_LEAST_KEPT_BYTES", 1)
    kept, file = tmp_path / "state" / "digests.json", tmp_path / "weights"
    file.write_bytes(bytes(9 << 20))
    pieces: list[int] = []
    monkeypatch.setattr(digest, "_UNSETTLED_NS", 1 << 62)
    recent = KnownDigests(kept).digest(file)
    assert not kept.exists(), "it may change again within one tick of its time stamp"
    monkeypatch.setattr(digest, "_UNSETTLED_NS", 0)
    assert KnownDigests(kept).digest(file) == recent
    assert KnownDigests(kept).digest(file, pieces.append) == recent
    assert pieces == [9 << 20], "nothing was read"
    with file.open("r+b") as opened:
        opened.write(b"1")
    changed = KnownDigests(kept).digest(file, pieces.append)
    assert changed != recent
    assert len(pieces) == 4
    kept.write_text("[1]")
    assert KnownDigests(kept).digest(file) == changed


def test_a_change_that_restores_the_time_stamp_is_noticed(tmp_path: Path, kept: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"before")
    before = file.stat()
    digest_before = KnownDigests(kept).digest(file)
    assert kept.exists()
    file.write_bytes(b"after!")

    def touched() -> bool:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return file.stat().st_ctime_ns != before.st_ctime_ns

    wait_until(touched, "the kernel's clock to tick")
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert KnownDigests(kept).digest(file) != digest_before


def test_processes_that_share_a_file_keep_the_digests_of_each_other(tmp_path: Path, kept: Path) -> None:
    files = [tmp_path / name for name in ("unet", "vae")]
    processes = [KnownDigests(kept) for _ in files]
    for file, process in zip(files, processes, strict=True):
        file.write_bytes(b"weights")
        process.digest(file)
    assert list(json.loads(kept.read_text())) == [str(file) for file in files]


def test_no_digest_is_kept_of_a_file_system_without_a_change_time(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "disk" / "weights"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    mounts = [("/", "ext4"), (str(file.parent), "ext4"), (str(file.parent), "vfat"), (f"{file.parent}/w", "ext4")]
    disks = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: disks)
    KnownDigests(kept).digest(file)
    assert not kept.exists()
    KnownDigests(kept).digest(file.rename(tmp_path / "weights"))
    assert kept.exists()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests of files of any size and age are kept."""
    monkeypatch.setattr(digest, "_LEAST_KEPT_BYTES", 1)
    monkeypatch.setattr(digest, "_UNSETTLED_NS", 0)
    return tmp_path / "state" / "digests.json"


def test_a_strange_key_of_the_index_is_refused_before_a_file_that_it_leads_to_is_read(folder: Path) -> None:
    index = folder / "model_index.json"
    other = folder.parent / "other"
    other.mkdir()
    os.mkfifo(other / "config.json")  # who opens it waits for ever
    index.write_text(json.dumps(json.loads(index.read_text()) | {str(other): ["a", "b"], "../other": ["a", "b"]}))
    with pytest.raises(ConfigError, match="is a part that is not served"):
        load(folder)


def test_a_preset_sets_defaults_and_the_spacing_of_timesteps(folder: Path) -> None:
    plain = load(folder)
    (folder / PRESET_FILE).write_text('{"num_inference_steps": 4, "guidance_scale": 0, "sampler": "ddim"}')
    model = load(folder)
    assert (model.defaults.num_inference_steps, model.defaults.guidance_scale) == (4, 0.0)
    assert model.defaults.edit_guidance_scale == 0.0
    assert model.defaults.sampler is SamplerKind.DDIM
    assert model.digest == plain.digest
    (folder / PRESET_FILE).write_text('{"timestep_spacing": "trailing"}')
    respaced = load(folder)
    found = respaced.defaults
    assert (found.num_inference_steps, found.guidance_scale, found.edit_guidance_scale) == (50, 5.0, 7.5), "Diffusers'"
    assert plain.scheduler_config["timestep_spacing"] != "trailing"
    assert respaced.scheduler_config["timestep_spacing"] == "trailing"
    assert respaced.digest != plain.digest  # a checkpoint or a stored result of the other schedule must not fit


def test_a_preset_sets_the_scheduler_for_every_request(folder: Path) -> None:
    preset = {"use_beta_sigmas": True, "final_sigmas_type": "sigma_min", "rescale_betas_zero_snr": False}
    (folder / PRESET_FILE).write_text(json.dumps(preset))
    config = load(folder).scheduler_config
    assert {name: config[name] for name in preset} == preset
    assert not config["use_karras_sigmas"], "one kind of sigmas replaces the other"
