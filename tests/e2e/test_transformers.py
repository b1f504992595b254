"""Transformers from `bottega up` to pictures with LoRAs, ControlNets and masks: stock's, by real processes.

One LoRA, in kohya's layout, and the ControlNet are in the model's folder. Another LoRA, in Diffusers' layout, is added
while the suite runs.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

from bottega.client import Client, ControlNet
from bottega.engine.spec import ResolvedSpec
from tests.samples.controlnets import control_image, control_spec
from tests.samples.controlnets import save as save_controlnets
from tests.samples.edits import box_mask, template
from tests.samples.family_models import SIZE, FamilyStock, control_networks, family_model, sampler_of
from tests.samples.lora_files import Part, kohya, save
from tests.samples.transformer_loras import TransformerLora, diffusers_file, kohya_file, random_lora
from tests.support.running_loras import MODULE
from tests.support.running_up import Up, running_up
from tests.support.stock import Pixels, assert_same_image, pixels_of
from tests.support.terminal import run

pytestmark = [pytest.mark.slow]

FAMILIES = {"SD 3 no T5": "Stable Diffusion 3", "Flux dev": "Flux.1"}
"""Models, with the display names of their families."""
PROMPT = "a big red star on the left"
DRAW: Mapping[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0, "width": SIZE, "height": SIZE}
BLOCKS = {"SD 3 no T5": 3 * 2, "Flux dev": 4}
"""Blocks of a step: of both halves of guidance, if there are two."""
SCALES = {"ink": 0.8, "wash": 0.5}
CONTROL = control_image(3, SIZE, SIZE)
IMAGE, MASK = template(SIZE, SIZE), box_mask((0, 0, 8, 8), SIZE, SIZE)
READ = {"SD 3 no T5": ("text_encoder", "text_encoder_2"), "Flux dev": ("text_encoder",)}
"""Text encoders that stock Diffusers reads LoRAs for."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loras(family: str) -> Mapping[str, TransformerLora]:
    """Of the networks that stock Diffusers reads LoRAs for, which T5 is not."""
    made = {name: random_lora(family_model(family), seed=seed) for seed, name in enumerate(SCALES)}
    return {
        name: replace(lora, text={part: text for part, text in lora.text.items() if part[0] in READ[family]})
        for name, lora in made.items()
    }


@pytest.fixture(scope="module")
def suite(family: str, loras: Mapping[str, TransformerLora], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    model = tmp_path_factory.mktemp("models") / "transformer"
    shutil.copytree(family_model(family), model)
    (model / "loras").mkdir()
    kohya_file(loras["ink"], tmp_path_factory.mktemp("ink")).rename(model / "loras" / "ink.safetensors")
    save_controlnets({"edges": control_networks(family)[0]}, model / "controlnets")
    options = ("--model", model, "--threads", 1, "--device", "cpu", "--dtype", "float32")
    with running_up(tmp_path_factory.mktemp("up"), *options) as up:
        yield up


@pytest.fixture(scope="module")
def client(suite: Up) -> Iterator[Client]:
    with Client(suite.record().address, fleet_address=suite.record().fleet_address) as client:
        yield client


def test_pictures_with_and_without_loras_are_stocks(
    client: Client, suite: Up, family: str, loras: Mapping[str, TransformerLora], tmp_path: Path
) -> None:
    addresses = {"address": suite.record().address, "fleet": suite.record().fleet_address}
    files = {}
    for name, lora in loras.items():
        (tmp_path / name).mkdir()
        files[name] = diffusers_file(lora, tmp_path / name)
    added = run("loras", "add", "wash", files["wash"], **addresses)
    assert f"It is for {FAMILIES[family]}: all layers of its file match the model" in added.stderr, added.output
    stock = FamilyStock(family).text
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # PEFT: several are meant
        for name, file in files.items():
            stock.load_lora_weights(file, adapter_name=name, use_safetensors=True)
    requests: list[dict[str, float]] = [{}, {"ink": 0.8}, SCALES, {}]
    for scales in requests:
        drawn = client.generate(PROMPT, seed=8, lora=list(scales.items()), **DRAW)
        stock.disable_lora()
        if scales:
            stock.enable_lora()
            stock.set_adapters(list(scales), list(scales.values()))
        picture = stock(PROMPT, generator=torch.Generator("cpu").manual_seed(8), **DRAW).images[0]
        assert_same_image(pixels_of(drawn.pil()), pixels_of(picture))
        assert drawn.provenance.exact
        assert [use.name for use in drawn.provenance.loras] == list(scales)


def test_pictures_and_edits_with_a_controlnet_on_its_server_are_stocks(client: Client, family: str) -> None:
    spec = ResolvedSpec(
        prompt=PROMPT,
        seed=8,
        sampler=sampler_of(family),
        controlnets=(control_spec("edges", CONTROL, 0.8),),
        **DRAW,
    )
    edges = ControlNet("edges", PIL.Image.fromarray(CONTROL.numpy()), controlnet_conditioning_scale=0.8)
    # 0.6: the strength that stock's pipelines for inpainting, and the suite, take for one that is not given.
    ways: list[tuple[dict[str, Any], ResolvedSpec, dict[str, Any]]] = [
        ({}, spec, {}),
        (
            {"image": IMAGE, "mask_image": MASK, "keep_unmasked": False},
            replace(spec, strength=0.6),
            {"image": IMAGE, "mask": MASK},
        ),
    ]
    stock = FamilyStock(family)
    for asked, said, sources in ways:
        drawn = client.generate(PROMPT, seed=8, controlnets=[edges], **asked, **DRAW)
        theirs = stock.latent(said, networks=control_networks(family)[:1], control_images=[CONTROL], **sources)
        assert_same_image(pixels_of(drawn.pil()), decoded(stock, theirs))
        assert drawn.provenance.exact
        (use,) = drawn.provenance.controlnets
        assert use.servers == ("controlnet-0",)


@torch.no_grad()
def decoded(stock: FamilyStock, latent: torch.Tensor) -> Pixels:
    """Return the picture of a latent. StableDiffusion3InpaintPipeline leaves out the VAE's shift."""
    vae, processor = stock.text.vae, stock.text.image_processor
    pixels = vae.decode(latent / vae.config.scaling_factor + vae.config.shift_factor).sample
    return pixels_of(processor.postprocess(pixels)[0])


def test_the_second_edit_of_a_picture_computes_the_masked_part_alone(client: Client, family: str) -> None:
    exact, first, second = (
        client.edit(
            IMAGE, MASK, PROMPT, seed=8, fidelity=fidelity, keep_unmasked=False, identical_results=False, **DRAW
        )
        for fidelity in ("exact", "balanced", "balanced")
    )
    assert first.provenance.mask.recorded
    assert_same_image(pixels_of(first.pil()), pixels_of(exact.pil()))
    # The strength is 0.6, so that three of four steps are made.
    blocks = 3 * BLOCKS[family]
    assert (second.provenance.blocks_reused, second.provenance.blocks_total) == (blocks, blocks)
    assert 0 < second.provenance.mask.computed_share < 1
    # Recordings are float16.
    assert abs(pixels_of(second.pil()).astype(int) - pixels_of(exact.pil())).max() <= 4


@pytest.mark.timeout(600)  # Pictures of the default size; a model of Flux.1 cannot say a smaller one.
def test_how_late_a_lora_may_come_is_measured_and_requests_keep_to_it(client: Client, suite: Up) -> None:
    addresses = {"address": suite.record().address, "fleet": suite.record().fleet_address}
    prompts = [word for letter in "abcd" for word in ("--prompt", f"a star {letter}")]
    measured = run("loras", "profile", "ink", *prompts, "--steps", 4, **addresses)
    assert "ink may be late until step " in measured.stdout, measured.output
    (bound,) = client.lora("ink").bounds
    drawn = client.generate(PROMPT, seed=8, lora=["ink"], bounded_lora_loading=True, **DRAW)
    assert drawn.provenance.loras[0].from_step <= bound.max_step


def test_what_cannot_be_used_is_refused_with_the_reason(suite: Up, family: str, tmp_path: Path) -> None:
    addresses = {"address": suite.record().address, "fleet": suite.record().fleet_address}
    tensors, _ = kohya({("unet", MODULE): Part(rank=2)})
    other = run("loras", "add", "other", save(tensors, tmp_path / "other.safetensors"), **addresses)
    assert "nothing in the file matches the base model" in other.stderr
    toy = save({"clip_l": torch.ones(1, 32), "clip_g": torch.ones(1, 32)}, tmp_path / "toy.safetensors")
    assert f"none are served with {FAMILIES[family]}" in run("loras", "add", "toy", toy, **addresses).stderr
    drawn = run("generate", PROMPT, "--lora", "nothing", "-o", tmp_path / "a.png", **addresses)
    assert "no such LoRA: nothing" in drawn.stderr
