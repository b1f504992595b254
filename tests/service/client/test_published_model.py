"""An SDXL folder as people publish it, from `bottega up` to pictures: those of stock Diffusers.

Its weights are an fp16 variant in shards. It has two ControlNets and three LoRAs: of the UNet and of both text encoders
in Diffusers' layout, and of all three in kohya's. Two more ControlNets cannot be used.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline, StableDiffusionXLPipeline

from bottega.client import Client, ControlNet, Picture
from tests.samples.controlnets import control_image
from tests.samples.published import Layout, published_model, write_controlnet, write_lora
from tests.samples.published_configs import TINY
from tests.support.running_up import Up, running_up
from tests.support.stock import Pixels, assert_same_image, load_stock, pixels_of, variant
from tests.support.terminal import run

LAYOUT = Layout(variants=("fp16",), shards=2)
PROMPT = "a big red star on the left on a blue background"
DRAW: Mapping[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0}
IMAGES = {name: PIL.Image.fromarray(control_image(seed).numpy()) for seed, name in enumerate(("canny", "depth"), 1)}
SCALES = {"canny": 0.7, "depth": 0.5}
LORAS = {"style": 0.8, "words": 1.0, "trained": 0.6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sdxl"
    shutil.copytree(published_model(LAYOUT), folder)
    write_controlnet(folder / "controlnets" / "labels", changes={**TINY["controlnet"], "num_class_embeds": 4})
    (folder / "controlnets" / "pose.safetensors").touch()
    (folder / "loras").mkdir()
    write_lora(folder / "loras" / "style.safetensors", "diffusers", ["unet"], strength=0.5, seed=1)
    write_lora(folder / "loras" / "words.safetensors", "diffusers", ["text_encoder", "text_encoder_2"], seed=2)
    write_lora(folder / "loras" / "trained.safetensors", "kohya", strength=0.5, seed=3)
    return folder


@pytest.fixture(scope="module")
def suite(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    options = ("--model", model, "--threads", 1, "--device", "cpu", "--dtype", "float32")
    with running_up(tmp_path_factory.mktemp("up"), *options) as up:
        yield up


@pytest.fixture(scope="module")
def client(suite: Up) -> Iterator[Client]:
    with Client(suite.record().address, fleet_address=suite.record().fleet_address) as client:
        yield client


@pytest.fixture(scope="module")
def stock(model: Path) -> Any:
    """Stock's pipeline with all three LoRAs, none in force."""
    pipeline = load_stock(model, variant="fp16")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # PEFT: several are meant
        for name in LORAS:
            pipeline.load_lora_weights(str(model / "loras" / f"{name}.safetensors"), adapter_name=name)
    pipeline.disable_lora()
    return pipeline


@pytest.fixture(scope="module")
def nets(model: Path) -> dict[str, ControlNetModel]:
    folders = {name: model / "controlnets" / name for name in IMAGES}
    return {
        name: ControlNetModel.from_pretrained(folder, variant="fp16", use_safetensors=True, torch_dtype=torch.float32)
        for name, folder in folders.items()
    }


def test_what_cannot_be_used_is_named_when_the_suite_is_ready(suite: Up, model: Path) -> None:
    addresses = {"address": suite.record().address, "fleet": suite.record().fleet_address}
    shown = [suite.printed.read_text(), run("fleet", "--once", **addresses).stdout]
    shown.append(run("doctor", "--model", model, **addresses).stdout)
    for text in shown:
        words = " ".join(text.split())  # a table is cut into lines
        assert "num_class_embeds must be null, not 4: it needs class labels" in words
        assert "pose.safetensors" in words
    assert "2 ControlNets of" in shown[-1]


def test_a_picture_with_two_controlnets_and_all_loras_is_stocks(
    client: Client, stock: Any, nets: Mapping[str, ControlNetModel]
) -> None:
    names, loras = ["canny", "depth"], list(LORAS)
    controls = [ControlNet(name, IMAGES[name], controlnet_conditioning_scale=SCALES[name]) for name in names]
    lora = [(name, LORAS[name]) for name in loras]
    drawn = client.generate(PROMPT, seed=8, controlnets=controls, lora=lora, **DRAW)
    pipeline = _controlled(stock, StableDiffusionXLControlNetPipeline, nets, names)
    options = {"image": [IMAGES[name] for name in names]}
    _assert_stock(drawn, _stock_pixels(pipeline, loras, seed=8, **options, **_scales(names)))
    assert [use.name for use in drawn.provenance.loras] == loras


def test_lines_on_transparency_are_drawn_from_as_by_stock_and_it_is_said(
    client: Client, suite: Up, stock: Any, nets: Mapping[str, ControlNetModel], tmp_path: Path
) -> None:
    """A control image of black lines on transparency is a black one."""
    lines = PIL.Image.new("RGBA", (64, 64))
    lines.paste((0, 0, 0, 255), (8, 8, 56, 12))
    drawn = client.generate(PROMPT, seed=10, controlnets=[ControlNet("canny", lines)], **DRAW)
    pipeline = _controlled(stock, StableDiffusionXLControlNetPipeline, nets, ["canny"])
    _assert_stock(drawn, _stock_pixels(pipeline, [], seed=10, image=[lines.convert("RGB")]))
    assert [use.transparency_unread for use in drawn.provenance.controlnets] == [True]
    lines.save(tmp_path / "lines.png")
    arguments = ("generate", PROMPT, "--steps", "2", "--control", f"canny={tmp_path / 'lines.png'}")
    said = run(
        *arguments, "-o", tmp_path / "star.png", address=suite.record().address, fleet=suite.record().fleet_address
    )
    assert "the image of control canny is partly transparent" in said.stderr, said.output


def _controlled(stock: Any, kind: Any, nets: Mapping[str, ControlNetModel], names: Sequence[str]) -> Any:
    return variant(stock, kind, controlnet=[nets[name] for name in names])


def _scales(names: Sequence[str]) -> dict[str, Any]:
    return {"controlnet_conditioning_scale": [SCALES[name] for name in names]}


def _stock_pixels(pipeline: StableDiffusionXLPipeline, loras: Sequence[str], *, seed: int, **options: Any) -> Pixels:
    """Return what a stock pipeline draws with these LoRAs in force."""
    if loras:
        pipeline.enable_lora()
        pipeline.set_adapters(list(loras), [LORAS[name] for name in loras])
    else:
        pipeline.disable_lora()
    return pixels_of(pipeline(PROMPT, generator=torch.Generator("cpu").manual_seed(seed), **DRAW, **options).images[0])


def _assert_stock(drawn: Picture, stock: Pixels) -> None:
    assert_same_image(pixels_of(drawn.pil()), stock)
    assert drawn.provenance.exact
