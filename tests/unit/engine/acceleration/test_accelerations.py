"""The accelerations that run on a CPU too: the same result while they are enabled, and afterwards to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, MethodType
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from bottega.addons.edits.engine.masked.checks import masked_probe
from bottega.addons.loras.engine.patching import patch_probe
from bottega.device.heartbeat import Heartbeat
from bottega.engine.acceleration import torch_options
from bottega.engine.acceleration.acceleration import Probe
from bottega.engine.acceleration.kernels import LoraPatch
from bottega.engine.acceleration.self_check import all_accelerations, candidates
from bottega.engine.acceleration.torch_options import (
    AttentionBackend,
    ChannelsLast,
    Float8Weights,
    PageableCopies,
    RegionalCompile,
)
from bottega.engine.addon import EngineAddOn
from bottega.engine.denoiser import Denoiser
from bottega.engine.engine import Engine
from bottega.engine.forward import Network
from bottega.engine.limits import EngineLimits
from bottega.engine.spans import DeviceClock
from bottega.engine.warm_up import engine_probes, sample_job
from bottega.errors import ConfigError
from bottega.model.model import Model
from tests.samples.masked_edits import IMAGE, LEFT, SPEC, EditDesk, masked_order
from tests.samples.small_model import small_model
from tests.support.manual_engine import load
from tests.support.staged_device import StagedDevice

EXACT = 1e-5


def forward(model: Model) -> Sequence[Tensor]:
    row = engine_row(model)
    return list(Denoiser(Network(backbone=model.backbone)).predict([row]).noise.values())


def engine_row(model: Model):  # type: ignore[no-untyped-def]
    engine = Engine(model, EngineLimits())
    return sample_job(engine.model, DeviceClock(engine.model.runtime)).requests[0].rows()[0]


def test_compiled_blocks_compute_the_same_and_those_with_hooks_as_they_are(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = torch_options._regions
    # Blocks of both kinds. Each one takes a fifth of a second; that all are compiled is seen below.
    few = {type(module): module for module in regions(model)}
    monkeypatch.setattr(torch_options, "_regions", lambda _: iter(few.values()))
    compiling = RegionalCompile(backend="eager")
    assert compiling.unsupported(model) == ""
    (before,) = forward(model)
    compiling.enable(model)
    try:
        (compiled,) = forward(model)
        assert (compiled - before).abs().max() < EXACT
        layer = few[BasicTransformerBlock].get_submodule("attn1.to_v")
        assert isinstance(layer, nn.Linear)
        handle = layer.register_forward_hook(lambda _module, _inputs, output: output + 1.0)
        (hooked,) = forward(model)
        handle.remove()
        assert (hooked - before).abs().max() > 1e-3, "compiled code would not have seen it"
        (after_hook,) = forward(model)
        assert torch.equal(after_hook, compiled)
    finally:
        compiling.disable()
    (after,) = forward(model)
    assert torch.equal(after, before)
    assert not any("forward" in module.__dict__ for module in model.backbone.network.modules())


def test_blocks_of_an_engine_that_shows_signs_of_life_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(small_model())  # of its own: an engine's hooks stay
    ran: list[object] = []

    def compiled(forward: MethodType, *, backend: str) -> Callable[..., Any]:
        def run(*inputs: Any, **options: Any) -> Any:
            ran.append(forward.__self__)
            return forward(*inputs, **options)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    beats: list[None] = []
    heartbeat = Heartbeat()
    heartbeat.subscribe(lambda: beats.append(None))
    engine = Engine(model, EngineLimits(), heartbeat=heartbeat)
    compiling = RegionalCompile()
    compiling.enable(model)
    engine._denoiser.predict([sample_job(engine.model, DeviceClock(engine.model.runtime)).requests[0].rows()[0]])
    compiling.disable()
    blocks = (BasicTransformerBlock, ResnetBlock2D)
    assert set(ran) == {module for module in model.backbone.network.modules() if isinstance(module, blocks)}
    assert len(beats) > len(ran)  # the text encoders' as well


LARGE = replace(SPEC, num_inference_steps=3, width=128, height=128)
# At this size masks leave tokens out of every transformer, and tiles out of every level of convolutions.
EDITS = [
    masked_order(replace(LARGE, prompt=prompt, seed=seed), LEFT.resize((128, 128)), image=IMAGE.resize((128, 128)))
    for prompt, seed in (("a small green circle", 5), ("a red star", 6))
]


@pytest.mark.parametrize("sparse", [False, True], ids=["in full", "sparse"])
def test_the_network_has_its_channels_last_for_a_while_and_edits_stay(sparse: bool) -> None:
    plain, last = (EditDesk(load(small_model(layers_per_block=2)), sparse=sparse) for _ in range(2))
    network = last.engine.model.backbone.network
    kept = {name: (tensor.clone(), tensor.stride()) for name, tensor in network.state_dict().items()}
    laid_out = ChannelsLast("unet")
    with torch.inference_mode():  # as in a check
        laid_out.enable(last.engine.model)
    assert network.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert not network.conv_in.weight.is_contiguous()
    assert not any(parameter.is_inference() for parameter in network.parameters()), "LoRAs could not be written"
    for number, order in enumerate(EDITS):
        drawings = last.draw(order), plain.draw(order)
        (ours,), (theirs,) = (drawing.latents for drawing in drawings)
        assert (ours - theirs).abs().max() < 1e-4
        reused = [drawing.record.provenance.blocks_reused for drawing in drawings]
        assert reused[0] == reused[1]
        assert reused[0] > 0 or number == 0, "the first one records"
    laid_out.disable()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, kept[name][0])
        assert tensor.stride() == kept[name][1]


def ways_on() -> set[SDPBackend]:
    cuda: Any = torch.backends.cuda
    switches = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
        SDPBackend.MATH: cuda.math_sdp_enabled,
    }
    return {way for way, is_on in switches.items() if is_on()}


@pytest.mark.parametrize(
    ("way", "first"),
    [
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ],
)
def test_a_way_of_attention_comes_first_and_others_stay_for_heads_that_it_cannot_do(
    model: Model, monkeypatch: pytest.MonkeyPatch, way: str, first: SDPBackend
) -> None:
    seen: list[tuple[list[int], set[SDPBackend]]] = []
    plain = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append((torch._C._get_sdp_priority_order(), ways_on()))
        return plain(query, key, value)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    of_a_vae = torch.randn(1, 1, 16, 512)
    functional.scaled_dot_product_attention(of_a_vae, of_a_vae, of_a_vae)
    backend = AttentionBackend(way)
    backend.enable(model)
    try:
        functional.scaled_dot_product_attention(of_a_vae, of_a_vae, of_a_vae)
    finally:
        backend.disable()
    functional.scaled_dot_product_attention(of_a_vae, of_a_vae, of_a_vae)
    before, during, after = seen
    assert after == before
    order, on = during
    assert on == before[1]
    assert SDPBackend.EFFICIENT_ATTENTION in on, "a VAE's attention would be quadratic in memory"
    assert order == [first.value, *(other for other in before[0] if other != first.value)]
    assert "CUDA" in backend.unsupported(model)


def test_flash_attention_gets_what_it_can_do_in_its_own_order_of_dimensions() -> None:
    seen: list[tuple[int, ...]] = []

    def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(tuple(query.shape))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    plain = functional.scaled_dot_product_attention
    faked = torch_options._flash(plain, flash)
    query, key, value = (torch.randn(2, 3, length, 8, dtype=torch.bfloat16) for length in (5, 7, 7))
    as_diffusers: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    assert torch.equal(faked(query, key, value, **as_diffusers), plain(query, key, value))
    assert seen == [(2, 5, 3, 8)]
    mask = torch.zeros(5, 7, dtype=torch.bfloat16)
    more: list[dict[str, Any]] = [{"attn_mask": mask}, {"is_causal": True}, {"scale": 0.5}]
    for options in more:
        assert torch.equal(faked(query, key, value, **options), plain(query, key, value, **options))
    full = (query.float(), key.float(), value.float())
    assert torch.equal(faked(*full), plain(*full))
    assert len(seen) == 1


def test_every_probe_gives_the_same_twice_and_leaves_the_model_as_it_was(model: Model) -> None:
    before = {name: weight.clone() for name, weight in model.backbone.network.state_dict().items()}
    engine = Engine(model, EngineLimits())
    request = sample_job(engine.model, DeviceClock(engine.model.runtime)).requests[0]
    forward = Denoiser(Network(backbone=model.backbone)).forward
    of_addons = {"masked": masked_probe(model), "patch": patch_probe(model)}
    probes = {**engine_probes(model, forward, request.rows(), request.latent), **of_addons}
    assert {each.probe for each in all_accelerations()} <= probes.keys()
    with torch.inference_mode():
        for name, probe in probes.items():
            first, second = ([tensor.clone() for tensor in probe()] for _ in range(2))
            assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)), name
            assert first, name
    after = model.backbone.network.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_what_is_tried_follows_the_configuration(model: Model) -> None:
    assert candidates("auto", model) == []
    assert candidates("off", model) == []
    (chosen,) = candidates(["channels_last.vae"], model)
    assert chosen.name == "channels_last.vae"
    with pytest.raises(ConfigError, match=r"unknown warp_drive; use auto, off, or names of: .*channels_last\.vae"):
        candidates(["warp_drive"], model)


class Probing(EngineAddOn):
    """It computes something of its own."""

    kind = "probing"
    probes: Mapping[str, Callable[[Model], Probe]] = MappingProxyType({"own": lambda _: lambda: [torch.ones(1)]})


@pytest.mark.parametrize("addons", [[Probing()], []], ids=["with", "without"])
def test_an_acceleration_of_an_add_on_is_tried_where_the_engine_has_that(
    model: Model, addons: list[EngineAddOn]
) -> None:
    engine, acceleration = Engine(model, EngineLimits(), addons=addons), ChannelsLast("vae")
    acceleration.probe = "own"
    engine.check_accelerations([acceleration], deadline_s=60.0)
    (result,) = engine.accelerations
    assert (result.speedup > 0) == bool(addons)
    assert ("nothing on this worker uses it" in result.reason) == (not addons)
    acceleration.disable()


def test_what_needs_a_cuda_device_says_so_on_a_cpu(model: Model) -> None:
    of_cuda = [each for each in all_accelerations() if not each.name.startswith(("channels_last.", "compile"))]
    assert of_cuda
    assert all("cpu" in each.unsupported(model) for each in of_cuda)


class CudaModel:
    """A model on a device that a test describes."""

    device = torch.device("cuda:0")
    dtype, dtype_name = torch.bfloat16, "bfloat16"


def test_float8_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = CudaModel()
    capability, installed = (8, 6), False
    monkeypatch.setattr(torch_options, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert Float8Weights().unsupported(model).startswith("torchao is not installed: pip install")
    installed = True
    assert Float8Weights().unsupported(model) == "it needs a device of compute capability 8.9, and this one has 8.6"
    capability = (8, 9)
    assert Float8Weights().unsupported(model) == ""
    model.dtype, model.dtype_name = torch.float32, "float32"
    assert Float8Weights().unsupported(model) == "it is for float16 and bfloat16, and the model is float32"


def test_weights_are_in_float8_for_a_while_and_afterwards_as_they_were() -> None:
    pytest.importorskip("torchao", reason="it is optional")
    model = load(small_model(), dtype=torch.bfloat16)
    model.memory.reserve("model", 1 << 30)
    kept = {name: tensor.clone() for name, tensor in model.backbone.network.state_dict().items()}
    layers = [module for module in model.backbone.network.modules() if type(module) is nn.Linear]
    (before,) = forward(model)
    float8 = Float8Weights()
    with torch.inference_mode():  # as in a check
        float8.enable(model)
    assert model.memory.reserved["model"] == (1 << 30) - sum(layer.weight.numel() for layer in layers)
    was_stock = model.is_as_stock
    assert model.memory.on_host[float8.name] == 2 * sum(layer.weight.numel() for layer in layers)
    assert LoraPatch().unsupported(model).startswith("weights.float8 is used")
    (rounded,) = forward(model)
    assert not was_stock
    assert 0 < (rounded - before).abs().max() / before.abs().max() < float8.tolerance
    float8.disable()
    float8.disable()
    assert (model.memory.reserved["model"], dict(model.memory.on_host)) == (1 << 30, {})
    assert model.is_as_stock
    after = model.backbone.network.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in kept.items())
    assert not any(parameter.is_inference() for parameter in model.backbone.network.parameters())
    assert torch.equal(forward(model)[0], before)


def test_float8_is_tried_only_by_name(model: Model) -> None:
    there: Any = CudaModel()
    assert Float8Weights.name not in [each.name for each in candidates("auto", there)]
    assert [each.name for each in candidates([Float8Weights.name], model)] == [Float8Weights.name]


def test_copies_go_through_pinned_memory_but_while_it_is_enabled(model: Model) -> None:
    device = StagedDevice()
    there = replace(model, runtime=device)
    copies = PageableCopies()
    assert copies.unsupported(there) == ""
    host = torch.arange(5)
    staged = []
    steps: list[Callable[[], None]] = [lambda: None, lambda: copies.enable(there), copies.disable, copies.disable]
    for step in steps:
        step()
        before = device.staged
        assert torch.equal(device.to_device(host), host)
        staged.append(device.staged - before)
    assert staged == [1, 0, 1, 1]
