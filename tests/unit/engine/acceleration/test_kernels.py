"""The engine with each kernel in it, in Triton's interpreter: nearly the same with it, the same before and after."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bottega.addons.edits.engine.masked.backbone import MaskedBackbone
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.addons.loras.engine import LoraSet, Patcher
from bottega.engine.acceleration.acceleration import Acceleration
from bottega.engine.acceleration.kernels import (
    Geglu,
    GroupNormSilu,
    GuidedEulerStep,
    KernelMoves,
    LoraPatch,
    MaskedMoves,
)
from bottega.engine.denoiser import Denoiser
from bottega.engine.forward import Network
from bottega.engine.latent_step import Guidance, guided_step
from bottega.model.model import Model
from bottega.model.operations import EulerStep, GuidedEuler, Operations
from bottega.model.rows import Factors, Half, Row
from bottega.model.samplers import Sampler
from bottega.model.schedulers import SamplerKind
from bottega.model_files.family_names import UNET
from tests.samples.masked_networks import StepInMemory, box, denoiser_of, masked, plain_row, recording
from tests.support.schedulers import BASIC

EXACT = 2e-5
SIZE = (16, 16)
Compute = Callable[[Model], Sequence[Tensor]]


@pytest.fixture(autouse=True)
def interpreted() -> None:
    """Without a device there is nothing else that kernels run in."""
    pytest.importorskip("triton", reason="triton has wheels for Linux alone")


@pytest.fixture
def accelerated(model: Model) -> Iterator[Callable[[Acceleration], None]]:
    """Enables accelerations until the test is over."""
    enabled: list[Acceleration] = []

    def enable(acceleration: Acceleration) -> None:
        enabled.append(acceleration)
        acceleration.enable(model)

    yield enable
    for each in enabled:
        each.disable()


def own_row(model: Model, seed: int = 1, size: tuple[int, int] = SIZE) -> Row:
    """One with a prompt of the model's sizes."""
    config = model.backbone.network.config
    generator = torch.Generator().manual_seed(seed)
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    row = plain_row(seed, size=size)
    embeds = replace(
        row.embeds,
        prompt=torch.randn(row.embeds.prompt.shape[0], config.cross_attention_dim, generator=generator),
        added={
            "text_embeds": torch.randn(pooled, generator=generator),
            "time_ids": torch.tensor([64.0, 64, 0, 0, 64, 64]),
        },
    )
    return replace(row, embeds=embeds)


def forward_of(model: Model) -> list[Tensor]:
    rows = [own_row(model, seed, (8, 8)) for seed in (1, 2)]
    noise = Denoiser(Network(backbone=model.backbone)).predict(rows).noise
    return [noise[row] for row in rows]


@torch.inference_mode()
def decoded(model: Model) -> list[Tensor]:
    latent = torch.randn(1, model.latent_channels, 4, 5, generator=torch.Generator().manual_seed(3))
    return [model.vae.decode(latent, return_dict=False)[0]]


def _lay_out(network: nn.Module, memory_format: torch.memory_format) -> None:
    for parameter in network.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)


@functools.cache
def recorded_by_torch(model: Model) -> StepInMemory:
    """A step, the same for all: it is in float16, in which another last bit is another number. Ask it first without
    kernels."""
    recorded = StepInMemory()
    backbone = MaskedBackbone(model.backbone.network, maps=SparseMaps(), operations=model.operations)
    denoiser = denoiser_of(model.backbone.network, backbone)
    denoiser.predict([recording(own_row(model), recorded)])
    return recorded


def edited(model: Model) -> list[Tensor]:
    """Two masked rows of unlike masks, and one that computes everything, by the masked backbone."""
    recorded = recorded_by_torch(model)
    masks = box(5, 4, 3, 6, size=SIZE), box(0, 11, 4, 5, size=SIZE)
    backbone = MaskedBackbone(model.backbone.network, maps=SparseMaps(), operations=model.operations)
    denoiser = denoiser_of(model.backbone.network, backbone)
    rows = [masked(own_row(model, 7), recorded, each) for each in masks]
    noise = denoiser.predict([rows[0], own_row(model, 9), rows[1]]).noise
    return list(noise.values())


@torch.inference_mode()
def sampled(model: Model) -> list[Tensor]:
    """All steps of a picture whose predictions are noise, and the estimates of its last two."""
    made = []
    for kind in (SamplerKind.EULER, SamplerKind.DPMPP_2M, SamplerKind.EULER_ANCESTRAL):
        sampler = Sampler(kind, model.scheduler_config, steps=6)
        generator = torch.Generator().manual_seed(1)
        latent = torch.randn(1, 4, *SIZE, generator=generator) * sampler.init_noise_sigma
        for step in range(6):
            sampler.model_input(latent, step)
            noise = {half: torch.randn(4, *SIZE, generator=generator) for half in Half}
            latent, estimate = guided_step(
                sampler,
                step,
                latent,
                noise,
                guidance=Guidance(scale=7.0),
                generator=generator,
                operations=model.operations,
            )
        made += [latent, estimate]
    return made


CASES: dict[str, tuple[Callable[[], Acceleration], Compute]] = {
    "norms of the network": (lambda: GroupNormSilu("unet"), forward_of),
    "norms under masks": (lambda: GroupNormSilu("unet"), edited),
    "norms of the decoder": (lambda: GroupNormSilu("vae"), decoded),
    "gates": (Geglu, forward_of),
    "gates under masks": (Geglu, edited),
    "moves": (MaskedMoves, edited),
    "steps": (GuidedEulerStep, sampled),
}
MOVES = {"pack", "merge", "cut", "paste"}


@pytest.mark.parametrize("case", CASES)
def test_with_a_kernel_the_result_is_nearly_the_same_and_without_it_the_same(
    model: Model, accelerated: Callable[[Acceleration], None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: set[str] = set()
    for name in MOVES:
        monkeypatch.setattr(KernelMoves, name, _counted(getattr(KernelMoves, name), moved))
    made, compute = CASES[case]
    acceleration = made()
    before = compute(model)
    assert not moved
    accelerated(acceleration)
    during = compute(model)
    assert moved == (MOVES if isinstance(acceleration, MaskedMoves) else set())
    acceleration.disable()
    after = compute(model)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    for plain, ours in zip(before, during, strict=True):
        assert (plain - ours).abs().max() <= EXACT * plain.abs().max()
    if not isinstance(acceleration, MaskedMoves | GuidedEulerStep):  # bit for bit the same, in single precision
        assert any(not torch.equal(*pair) for pair in zip(before, during, strict=True)), "no kernel ran"


def _counted(move: Callable[..., Any], used: set[str]) -> Callable[..., Any]:
    @functools.wraps(move)
    def counted(*arguments: Any) -> Any:
        used.add(move.__name__)
        return move(*arguments)

    return counted


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(70, 33)
        self.conv = nn.Conv2d(6, 9, 3)
        self.point = nn.Conv2d(6, 9, 1)


def lora_set(net: Layers, seed: int) -> LoraSet:
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for path, module in net.named_children():
        weight = module.weight
        assert isinstance(weight, Tensor)
        factors[path] = Factors(
            down=torch.randn(5, *weight.shape[1:], generator=generator).to(weight.dtype),
            up=torch.randn(weight.shape[0], 5, generator=generator).to(weight.dtype),
        )
    return LoraSet(key=((str(seed), 1.0),), components={UNET: factors})


@pytest.mark.parametrize(
    ("dtype", "keep_on", "channels_last"),
    [
        (torch.float32, None, False),
        (torch.float32, torch.device("cpu"), True),
        (torch.float16, None, True),
        (torch.float16, torch.device("cpu"), False),
    ],
    ids=str,
)
def test_sets_go_into_weights_and_out_of_them_as_without_the_kernel(
    model: Model,
    accelerated: Callable[[Acceleration], None],
    dtype: torch.dtype,
    keep_on: torch.device | None,
    channels_last: bool,
) -> None:
    accelerated(LoraPatch())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours = Layers().to(dtype)
    if channels_last:
        _lay_out(ours, torch.channels_last)
    theirs = Layers().to(dtype)
    theirs.load_state_dict(ours.state_dict())
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in ours.parameters()]
    ways = [
        Patcher(ours, UNET, keep_on=keep_on, operations=model.operations),
        Patcher(theirs, UNET, operations=Operations()),
    ]
    for seed in (1, 2):
        loras = lora_set(ours, seed)
        for patcher in ways:
            patcher.patch(loras)
        for name, tensor in ours.state_dict().items():
            plain = theirs.state_dict()[name]
            assert (tensor.float() - plain.float()).abs().max() <= 2 * torch.finfo(dtype).eps * plain.abs().max()
            assert name.endswith("bias") or not torch.equal(tensor, before[name])
    ways[0].restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())
    assert [parameter.data_ptr() for parameter in ours.parameters()] == addresses


def test_the_kernel_makes_the_steps_of_euler_alone(
    model: Model, accelerated: Callable[[Acceleration], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EulerStep] = []

    accelerated(GuidedEulerStep())
    by_kernel = model.operations.guided_euler
    assert by_kernel is not None

    def counted(*tensors: Any, step: EulerStep, by_kernel: GuidedEuler = by_kernel, **options: Any) -> Any:
        made.append(step)
        return by_kernel(*tensors, step=step, **options)

    monkeypatch.setattr(model.operations, "guided_euler", counted)
    sampled(model)
    assert len(made) == 6
    assert [each.next_sigma for each in made] == [each.sigma for each in made[1:]] + [0.0]


def test_other_samplers_and_predictions_make_their_own_steps(model: Model) -> None:
    for kind in set(BASIC) - {SamplerKind.EULER}:
        assert Sampler(kind, model.scheduler_config, steps=4).euler_step(1) is None
    config = {**model.scheduler_config, "prediction_type": "v_prediction"}
    made = Sampler(SamplerKind.EULER, config, steps=4).euler_step(1)
    assert made is not None
    assert made.velocity
    assert made.sigma > made.next_sigma > 0
    assert Sampler(SamplerKind.EULER, {**config, "prediction_type": "sample"}, steps=4).euler_step(1) is None
