"""What a worker may not be told."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bottega.errors import ConfigError
from bottega.worker.__main__ import _imported
from bottega.worker.config import (
    EngineConfig,
    PeerConfig,
    TextConfig,
    TextEncoderConfig,
    VaeConfig,
    WorkerConfig,
    check_model,
    report_on_model,
)
from tests.samples.single_files import write_single_file, write_vae_file


def test_a_pair_with_fixed_rows_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="a pair gains nothing"):
        EngineConfig(fixed_rows=4, peer=PeerConfig(address="127.0.0.1:1"))


def test_a_worker_with_one_stage_refuses_named_accelerations() -> None:
    with pytest.raises(ValueError, match="a worker with the role decode tries none; remove the key, or set it to off"):
        EngineConfig(roles=("decode",), accelerations=("channels_last.vae",))
    with pytest.raises(ValueError, match=r"must have exactly one role: \[encode\] or \[decode\]"):
        EngineConfig(roles=("encode", "decode"))


def test_settings_of_a_text_encoder_that_the_model_lacks_are_refused() -> None:
    check_model(WorkerConfig(engine=EngineConfig(text=TextConfig(text_encoder_2=TextEncoderConfig(keep_on="host")))))
    assert _refusal(EngineConfig(text=TextConfig(text_encoder_3=TextEncoderConfig(dtype="bfloat16")))) == (
        "engine.text.text_encoder_3 is set, but the model has only text_encoder, text_encoder_2; remove the setting"
    )


def test_a_single_file_of_a_whole_model_may_be_served(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "model.safetensors", "sdxl")
    check_model(WorkerConfig(engine=EngineConfig(model=str(file))))


def test_a_single_file_without_a_vae_needs_one(tmp_path: Path) -> None:
    file = write_single_file(tmp_path / "model.safetensors", "sd15")
    whole = load_file(file)
    save_file({name: tensor for name, tensor in whole.items() if "first_stage" not in name}, file)
    config = EngineConfig(model=str(file))
    lacking = "it has no VAE; give the file of one with --vae, in a worker's configuration as engine.vae.folder"
    assert _refusal(config) == f"the model {file} cannot be served: {lacking}"
    vae = write_vae_file(tmp_path / "vae.safetensors")
    check_model(WorkerConfig(engine=replace(config, vae=VaeConfig(folder=str(vae)))))


def test_a_vae_of_a_file_for_a_folder_is_checked_first(tmp_path: Path) -> None:
    lora = tmp_path / "lora.safetensors"
    save_file({"lora_unet_a.lora_up.weight": torch.zeros(4, 4)}, lora)
    check_model(
        WorkerConfig(engine=EngineConfig(vae=VaeConfig(folder=str(write_vae_file(tmp_path / "v.safetensors")))))
    )
    assert _refusal(EngineConfig(vae=VaeConfig(folder=str(lora)))) == (
        f"the VAE {lora} cannot be served: it is a LoRA; add it with `bottega loras add NAME FILE`"
    )


def _refusal(config: EngineConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        check_model(WorkerConfig(engine=config))
    return refused.value.message


def test_a_worker_converts_its_model_and_its_vae_as_its_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    file = write_single_file(tmp_path / "model.safetensors", "sd21")
    vae = VaeConfig(folder=str(write_vae_file(tmp_path / "vae.safetensors")), tile_pixels=9)
    engine = asyncio.run(_imported(EngineConfig(model=str(file), prediction_type="epsilon", vae=vae)))
    scheduler = json.loads((Path(engine.model) / "scheduler" / "scheduler_config.json").read_text())
    assert (scheduler["prediction_type"], engine.vae) == ("epsilon", VaeConfig(tile_pixels=9))
    alone = asyncio.run(_imported(EngineConfig(vae=vae)))
    assert (alone.model, alone.vae.tile_pixels) == ("miniature", 9)
    assert report_on_model(alone).problems == ()
    assert (Path(alone.vae.folder) / "config.json").is_file()
