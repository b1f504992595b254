"""What `bottega models` says of folders and single files of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bottega.client.cli import main
from bottega.miniature import WEIGHTS
from tests.samples.wrong_folders import change_json, link_model, write_zeros

_UNET = "model.diffusion_model."
_TENSORS = (
    f"{_UNET}input_blocks.0.0.weight",
    f"{_UNET}label_emb.0.0.weight",
    "conditioner.embedders.0.transformer.a.weight",
    "conditioner.embedders.1.model.b.weight",
    "first_stage_model.decoder.c.weight",
)


def _run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["models", *arguments])


def _single_file(path: Path) -> Path:
    write_zeros(path, dict.fromkeys(_TENSORS, ("F16", (1024, 1024))))
    return path


def test_inspect_shows_all_about_a_folder_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = _run("inspect", "miniature")
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= 80 or str(WEIGHTS) in shown.output
    words = " ".join(shown.output.split())
    for text in (
        "SDXL",
        "StableDiffusionXLPipeline",
        "F16",
        "64 x 64",
        "euler",
        "epsilon",
        "8.27 MiB in half precision",
    ):
        assert text in words


def test_inspect_of_a_single_file_says_how_to_import_it(tmp_path: Path) -> None:
    file = _single_file(tmp_path / "model.safetensors")
    facts = json.loads(_run("inspect", str(file), "--json").output)
    assert (facts["kind"], facts["family"], facts["prediction_type"]) == ("single file", "SDXL", "epsilon")
    assert {part["name"]: part["size_bytes"] for part in facts["parts"]} == {
        "text_encoder": 2 << 20,
        "text_encoder_2": 2 << 20,
        "unet": 4 << 20,
        "vae": 2 << 20,
    }
    assert (facts["parameters"], facts["half_bytes"], facts["problems"]) == (5 << 20, 10 << 20, [])
    assert facts["advice"] == (
        f"`bottega up --model {file}` serves it, and `bottega models import {file}` converts it to a folder"
    )


def test_check_gives_every_reason_and_fails(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    link_model(folder)
    good = _run("check", str(folder))
    assert (good.exit_code, good.output) == (0, f"{folder}: SDXL; it can be served\n")
    change_json(folder / "unet" / "config.json", act_fn="tanh", in_channels=True)
    bad = _run("check", str(folder))
    assert bad.exit_code == 1
    assert [line.split(":")[1] for line in bad.output.splitlines()] == [" unet/config.json"] * 2
    answer = json.loads(_run("check", str(folder), "--json").output)
    assert (answer["served"], len(answer["problems"])) == (False, 2)


def test_list_shows_the_models_in_a_folder(tmp_path: Path) -> None:
    link_model(tmp_path / "good")
    link_model(tmp_path / "wrong")
    change_json(tmp_path / "wrong" / "unet" / "config.json", act_fn="tanh")
    _single_file(tmp_path / "single.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no model")
    (tmp_path / "notes").mkdir()
    lines = _run("list", str(tmp_path), "--json").output.splitlines()
    served = {(facts := json.loads(line))["name"]: not facts["problems"] for line in lines}
    assert served == {"broken": False, "good": True, "single": True, "wrong": False}
    table = _run("list", str(tmp_path)).output
    assert max(map(len, table.splitlines())) <= 80
    rows = [line.split() for line in table.splitlines()]
    assert {row[0]: row[-1] for row in rows if row[-1:] in (["yes"], ["no"])} == {
        "broken.safetensors": "no",
        "good": "yes",
        "single.safetensors": "yes",
        "wrong": "no",
    }
    assert "wrong is not served: unet/config.json: act_fn" in " ".join(table.split())


def test_import_refuses_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_zeros(file, {"lora_unet_a.lora_up.weight": ("F16", (4, 4))})
    refused = _run("import", str(file))
    assert refused.exit_code == 1
    assert (
        f"error: {file} cannot be converted: it is a LoRA; add it with `bottega loras add NAME FILE`" in refused.output
    )
    assert not (tmp_path / "model").exists()
