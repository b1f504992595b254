"""What `bottega models` says of folders and single files of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bottega.client.cli import main
from bottega.model_files.single_file import OTHER_VERSION
from bottega.model_files.single_file_check import refusal_of
from bottega.safetensors_header import read_header
from tests.samples.single_files import SHAPES, TRUE_SHAPES, write_zeros_file
from tests.samples.wrong_folders import change_json, link_model, write_zeros

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def _run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["models", *arguments])


def test_inspect_of_a_single_file_says_all_that_its_header_tells(tmp_path: Path) -> None:
    file = write_zeros_file(tmp_path / "model.safetensors", "sdxl", TRUE_SHAPES["sdxl"])
    facts = json.loads(_run("inspect", str(file), "--json").output)
    assert (facts["kind"], facts["family"], facts["problems"]) == ("single file", "SDXL", [])
    assert (facts["prediction_type"], facts["sampler"], facts["default_size"]) == ("epsilon", "euler", 1024)
    assert [part["name"] for part in facts["parts"]] == ["text_encoder", "text_encoder_2", "unet", "vae"]
    unet = facts["parts"][2]
    assert (unet["parameters"], unet["size_bytes"]) == (2_567_463_684, 5_134_927_368)  # as published
    assert facts["half_bytes"] == 2 * facts["parameters"] == facts["size_bytes"]
    assert facts["advice"] == (
        f"`bottega up --model {file}` serves it, and `bottega models import {file}` converts it to a folder, "
        "and only that checks whether all weights are finite numbers"
    )


@pytest.mark.parametrize(("family", "sampler", "size"), [("sd15", "pndm", 128), ("sd21", "ddim", 192)])
def test_inspect_derives_the_sampler_and_the_size(family: str, sampler: str, size: int, tmp_path: Path) -> None:
    file = write_zeros_file(tmp_path / "model.safetensors", family, SHAPES[family])
    facts = json.loads(_run("inspect", str(file), "--json").output)
    assert (facts["sampler"], facts["default_size"], facts["problems"]) == (sampler, size, [])
    checked = _run("check", str(file))
    assert checked.exit_code == 0, checked.output
    assert "only that checks whether all weights are finite numbers" in " ".join(checked.output.split())


_UNET = "model.diffusion_model."
_OTHER_UNET = "its unet is not that of a Stable Diffusion 1 model"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongHeader:
    """A whole model whose header shows that it cannot be converted."""

    name: str
    change: Callable[[Tensors], Tensors]
    sentence: str
    family: str = "sd15"
    shape: Mapping[str, Any] = field(default_factory=dict)


WRONG_HEADERS = (
    WrongHeader(
        name="a UNet of 8 channels",
        change=dict,
        shape={"in_channels": 8},
        sentence="its parts do not fit each other: unet/config.json: in_channels must be 4, as out_channels is, or 9 "
        "for inpainting, with a mask and a masked image beside the latent, not 8",
    ),
    WrongHeader(
        name="no VAE",
        change=lambda tensors: {name: tensor for name, tensor in tensors.items() if "first_stage" not in name},
        sentence="it has no VAE; give the file of one with --vae, in a worker's configuration as engine.vae.folder",
    ),
    WrongHeader(
        name="two tensors of different shapes under each other's names",
        change=lambda tensors: _swapped(tensors, f"{_UNET}out.2.bias", f"{_UNET}out.0.bias"),
        sentence=f"{_OTHER_UNET}: out.0.bias has the shape [4] instead of [32]; {OTHER_VERSION}",
    ),
    WrongHeader(
        name="a UNet that reads the guidance scale",
        change=lambda tensors: tensors | {f"{_UNET}time_embed.cond_proj.weight": ("F16", (128, 256))},
        sentence=f"{_OTHER_UNET}: nothing takes time_embed.cond_proj.weight; {OTHER_VERSION}",
    ),
    WrongHeader(
        name="an OpenCLIP without a bias",
        family="sd21",
        change=lambda tensors: _without(tensors, "resblocks.1.attn.in_proj_bias"),
        sentence="its text_encoder is not that of a Stable Diffusion 2 model: it lacks "
        f"transformer.resblocks.1.attn.in_proj_bias; {OTHER_VERSION}",
    ),
)


@pytest.mark.parametrize("wrong", WRONG_HEADERS, ids=lambda wrong: wrong.name)
def test_check_refuses_a_single_file_by_its_header(wrong: WrongHeader, tmp_path: Path) -> None:
    file = write_zeros_file(tmp_path / "model.safetensors", wrong.family, replace(SHAPES[wrong.family], **wrong.shape))
    with file.open("rb") as opened:
        tensors = {entry.name: (entry.dtype, entry.shape) for entry in read_header(opened).tensors}
    write_zeros(file, wrong.change(tensors))
    checked = _run("check", str(file))
    assert (checked.exit_code, checked.output) == (1, f"{file}: {wrong.sentence}\n")
    assert refusal_of(file) == f"the model {file} cannot be served: {wrong.sentence}"


def _without(tensors: Tensors, ending: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


def _swapped(tensors: Tensors, one: str, other: str) -> Tensors:
    return tensors | {one: tensors[other], other: tensors[one]}


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
    write_zeros_file(tmp_path / "single.safetensors", "sdxl", SHAPES["sdxl"])
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
