"""One group of unlike requests against stock Diffusers: what a row holds, and what rows must have in common.

A plain request, an unguided one, one with two ControlNets whose residuals come by hand (late once), one whose
LoRA goes in at step 5, and one resumed from a checkpoint share forwards; each ends as its own stock pipeline does.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from peft import LoraConfig
from torch import Tensor

from bottega.diffusion.engine.checkpoint import SavedJob, read_checkpoint, write_checkpoint
from bottega.diffusion.engine.encode import encode_prompts
from bottega.diffusion.engine.forward import Denoiser
from bottega.diffusion.engine.request import ActiveControl, Request
from bottega.diffusion.loras import UNET, LoraAtScale, LoraLayer, LoraSet, LoraWeights
from bottega.diffusion.model.model import Model, load_model
from bottega.diffusion.model.samplers import SamplerKind
from bottega.diffusion.rows import Half, Row
from bottega.diffusion.spec import ResolvedSpec
from bottega.miniature import WEIGHTS
from tests.support.stock import assert_close, latent_of, load_stock, variant

CPU = torch.device("cpu")
CONTROLS = [ActiveControl(handle=net, first=0, last=10) for net in (0, 1)]
LORA_FROM = 5
SCALES = (0.8, 1.3)
PLAIN = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=12, width=64, height=64, seed=1
)
UNGUIDED = ResolvedSpec(
    prompt="a small green circle on a white background",
    num_inference_steps=9,
    guidance_scale=1.0,
    width=64,
    height=64,
    seed=2,
)
CONTROLLED = ResolvedSpec(
    prompt="a yellow square on a black background",
    negative_prompt="a circle",
    num_inference_steps=10,
    guidance_scale=3.0,
    width=64,
    height=64,
    seed=3,
)
STYLED = ResolvedSpec(
    prompt="a purple triangle on a gray background",
    num_inference_steps=11,
    guidance_scale=6.0,
    guidance_rescale=0.5,
    width=64,
    height=64,
    seed=4,
    sampler=SamplerKind.EULER_ANCESTRAL,
)
RESUMED = ResolvedSpec(
    prompt="a big orange heart on a green background",
    num_inference_steps=14,
    width=64,
    height=64,
    seed=5,
    sampler=SamplerKind.DPMPP_2M,
)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(WEIGHTS, name="miniature", device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def stock() -> StableDiffusionXLPipeline:
    return load_stock()


@pytest.fixture(scope="module")
def controlnets(stock: StableDiffusionXLPipeline) -> list[ControlNetModel]:
    """Two whose zero convolutions are not zero any more, so that they matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        nets = [ControlNetModel.from_unet(stock.unet, conditioning_embedding_out_channels=(16, 32, 64)) for _ in SCALES]
        for net in nets:
            for convolution in (*net.controlnet_down_blocks, net.controlnet_mid_block):
                torch.nn.init.normal_(convolution.weight, std=0.05)
            torch.nn.init.normal_(net.controlnet_cond_embedding.conv_out.weight, std=0.2)
    return [net.eval().requires_grad_(False) for net in nets]


@pytest.fixture(scope="module")
def control_images() -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(7)
    return [torch.rand(1, 3, 64, 64, generator=generator) for _ in SCALES]


@pytest.fixture(scope="module")
def styled_unet() -> UNet2DConditionModel:
    """The UNet with a LoRA in linear and convolution layers, as PEFT adds it; not active yet."""
    unet = UNet2DConditionModel.from_pretrained(WEIGHTS, subfolder="unet", use_safetensors=True, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2", "conv1", "conv_shortcut", "downsamplers.0.conv"]
        unet.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    unet.disable_adapters()
    return unet


@dataclass(kw_only=True)
class ResidualsByHand:
    """Runs the ControlNets row by row where it is asked, and withholds one answer once."""

    nets: list[ControlNetModel]
    images: list[Tensor]
    late_step: int
    withheld: int = 0
    answers: dict[Row, list[list[Tensor]]] = field(default_factory=dict)

    def ask(self, rows: list[Row]) -> None:
        self.answers = {row: [self._run(row, handle) for handle in row.controls] for row in rows}

    def ask_ahead(self, rows: list[Row]) -> None:
        """Nothing is gained by it here."""

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        if row.step == self.late_step and row.half is Half.CONDITIONAL and not self.withheld:
            self.withheld += 1
            return False
        return True

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        raise AssertionError("others could go on: nobody should wait")

    def is_void(self, row: Row) -> bool:
        return False

    def take(self, row: Row, point: int) -> list[Tensor]:
        return [residuals[point] for residuals in self.answers[row]]

    def _run(self, row: Row, handle: Hashable) -> list[Tensor]:
        assert isinstance(handle, int)
        down, middle = self.nets[handle](
            row.sample[None],
            row.timestep,
            encoder_hidden_states=row.embeds.prompt[None],
            controlnet_cond=self.images[handle],
            conditioning_scale=SCALES[handle],
            added_cond_kwargs={"text_embeds": row.embeds.pooled[None], "time_ids": row.embeds.time_ids[None]},
            return_dict=False,
        )
        return [residual[0] for residual in (*down, middle)]


def request(model: Model, spec: ResolvedSpec, **options: Any) -> Request:
    made = Request(model, spec, encode_prompts(model, spec))
    for name, value in options.items():
        setattr(made, name, value)
    return made


def lora_of(model: Model, unet: UNet2DConditionModel) -> LoraSet:
    """What PEFT added, in the canonical form."""
    layers = {}
    for path, module in unet.named_modules():
        if hasattr(module, "lora_A"):
            down, up = module.lora_A["default"].weight.detach(), module.lora_B["default"].weight.detach()
            layers[path] = LoraLayer(down=down, up=up, scale=module.scaling["default"])
    assert len(layers) > 20
    return LoraWeights(model).unet_set([LoraAtScale(digest="style", scale=1.0, layers={UNET: layers})])


def resumed_request(model: Model, denoiser: Denoiser) -> Request:
    """Six steps in one request, the others in another one that has nothing but the bytes of a checkpoint."""
    first = request(model, RESUMED)
    for _ in range(6):
        step(denoiser, [first])
    data = write_checkpoint(model, RESUMED, SavedJob(images=[first.state()]))
    step(denoiser, [first])  # what happens later is not in the checkpoint
    return request(model, RESUMED, resume=read_checkpoint(data, model, RESUMED).images[0])


def step(denoiser: Denoiser, group: list[Request]) -> int:
    """One turn of the group; how many of its requests made their step."""
    rows = [row for member in group for row in member.rows()]
    noise = denoiser.predict(rows).noise
    stepped = 0
    for member in group:
        halves = {row.half: noise[row] for row in rows if row.owner is member and row in noise}
        if halves:
            assert len(halves) == member.spec.rows
            member.advance(halves)
            stepped += 1
    return stepped


@pytest.fixture(scope="module")
def group(
    model: Model, controlnets: list[ControlNetModel], control_images: list[Tensor], styled_unet: UNet2DConditionModel
) -> tuple[dict[str, Request], list[int], ResidualsByHand]:
    """The five requests, run to their ends in shared forwards; sizes of the groups; the residuals' provider."""
    residuals = ResidualsByHand(nets=controlnets, images=control_images, late_step=3)
    denoiser = Denoiser(model.backbone, LoraWeights(model), residuals)
    requests = {
        "plain": request(model, PLAIN),
        "unguided": request(model, UNGUIDED),
        "controlled": request(model, CONTROLLED, controls=CONTROLS),
        "styled": request(model, STYLED, loras=lora_of(model, styled_unet), loras_from=LORA_FROM),
        "resumed": resumed_request(model, denoiser),
    }
    assert len({member.key for member in requests.values()}) == 1
    sizes = []
    while running := [member for member in requests.values() if not member.done]:
        sizes.append(step(denoiser, running))
    return requests, sizes, residuals


Group = tuple[dict[str, Request], list[int], ResidualsByHand]


def test_a_plain_row_ends_as_the_stock_pipeline_does(group: Group, stock: StableDiffusionXLPipeline) -> None:
    assert_close(group[0]["plain"].latent, latent_of(stock, PLAIN))


def test_an_unguided_request_has_one_row_and_ends_as_stock_does(group: Group, stock: StableDiffusionXLPipeline) -> None:
    assert UNGUIDED.rows == 1
    assert_close(group[0]["unguided"].latent, latent_of(stock, UNGUIDED))


def test_two_controlnets_are_summed_as_in_the_stock_pipeline(
    group: Group, stock: StableDiffusionXLPipeline, controlnets: list[ControlNetModel], control_images: list[Tensor]
) -> None:
    pipeline = variant(stock, StableDiffusionXLControlNetPipeline, controlnet=controlnets)
    theirs = latent_of(pipeline, CONTROLLED, image=control_images, controlnet_conditioning_scale=list(SCALES))
    assert_close(group[0]["controlled"].latent, theirs)
    assert (theirs - latent_of(stock, CONTROLLED)).abs().max() > 0.05  # the ControlNets matter


def test_a_row_whose_residuals_are_late_leaves_one_turn_and_the_others_go_on(group: Group) -> None:
    _, sizes, residuals = group
    assert residuals.withheld == 1
    assert sizes[:5] == [5, 5, 5, 4, 5]


def test_a_lora_by_the_side_path_counts_from_its_step_on(
    group: Group, stock: StableDiffusionXLPipeline, styled_unet: UNet2DConditionModel
) -> None:
    scheduler = EulerAncestralDiscreteScheduler.from_config(stock.scheduler.config)
    pipeline = variant(stock, unet=styled_unet, scheduler=scheduler)

    def enable(_: Any, done: int, __: Any, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        if done == LORA_FROM - 1:
            styled_unet.enable_adapters()
        return kept

    theirs = latent_of(pipeline, STYLED, callback_on_step_end=enable)
    styled_unet.disable_adapters()
    assert_close(group[0]["styled"].latent, theirs)
    assert (theirs - latent_of(pipeline, STYLED)).abs().max() > 0.05  # the LoRA matters


def test_a_request_resumed_from_a_checkpoint_ends_as_an_unbroken_one(
    group: Group, stock: StableDiffusionXLPipeline
) -> None:
    scheduler = DPMSolverMultistepScheduler.from_config(stock.scheduler.config)
    assert_close(group[0]["resumed"].latent, latent_of(variant(stock, scheduler=scheduler), RESUMED))


def test_requests_of_another_size_have_another_key(model: Model) -> None:
    larger = ResolvedSpec(prompt="a star", num_inference_steps=2, width=96, height=64)
    assert request(model, larger).key != request(model, PLAIN).key
