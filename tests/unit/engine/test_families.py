"""Every kind of model draws what stock Diffusers draws with it, in every way in which the suite draws.

The table in the engine's README is made of the parameters of these tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor, nn

from bottega.addons.edits.engine.masked.backbone import make_masked_backbone
from bottega.addons.edits.engine.masked.checks import unsupported
from bottega.engine.encode import encode_all_prompts
from bottega.engine.events import JobAdvanced, JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.parallel import pair
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.model import Model
from bottega.model.rows import Row
from bottega.model.schedulers import SamplerKind
from bottega.planning import PackedTimes
from tests.fakes.scripted_latents import Cached, cached, entry
from tests.samples.controlnets import control_image, control_spec, save
from tests.samples.edits import box_mask, edit_order, template
from tests.samples.engine_loras import LorasByHand, lora_spec, random_layers
from tests.samples.family_models import (
    FAMILIES,
    FLOWS,
    SIZE,
    WAYS,
    Z_IMAGE,
    FamilyStock,
    control_networks,
    family_model,
    family_table,
    reads_mask,
    sampler_of,
    takes_true_cfg,
)
from tests.samples.masked_networks import StepInMemory, box, denoiser_of, masked, recording
from tests.support.controlled_engine import Desk, on
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.linked_servers import Offers, linked_server
from tests.support.manual_engine import ManualEngine, load
from tests.support.pair_follower import FollowerThread, led
from tests.support.slow_cases import in_every_run
from tests.support.stock import Reference, assert_close, assert_same_image

ONE_BY_ONE = EngineLimits(max_rows=2, checkpoint_interval_s=0.0, progress_interval_s=0.0)
SPEC = ResolvedSpec(prompt="a big red star on the left", num_inference_steps=4, width=SIZE, height=SIZE, seed=3)
IMAGE, MASK = template(SIZE, SIZE), box_mask((6, 9, 21, 28), SIZE, SIZE)
README = Path(__file__).parents[3] / "libs" / "bottega" / "engine" / "README.md"
# A picture that starts from another one's latent after these steps makes the last of them again.
STARTED = 3
# Of predictions of about 1: recordings are float16.
FLOAT16 = 5e-3


def test_the_engines_readme_says_which_model_draws_in_which_way() -> None:
    assert family_table() in README.read_text()


# What a kind of model draws is seen in these ways; of the others, every run has kinds that differ most.
_ALL_KINDS = {"text to image", "edit"}
_SOME_KINDS = {"SD 1", "SDXL pruned", "SDXL inpainting", "SD 3", "Flux dev", Z_IMAGE}
# What makes a second row where the guidance scale is embedded.
_TRUE_CFG = {"true_cfg_scale": 3.0, "negative_prompt": "a circle"}


def families(way: str) -> pytest.MarkDecorator:
    """Run a test for each kind of model that draws in this way."""
    able = [family for family in FAMILIES if family in WAYS[way]]
    return pytest.mark.parametrize("family", in_every_run(able, able if way in _ALL_KINDS else _SOME_KINDS))


@functools.cache
def model_of(family: str) -> Model:
    return _loaded(family)


@functools.cache
def other_model_of(family: str) -> Model:
    """Return the model of another worker."""
    return _loaded(family)


def _loaded(family: str) -> Model:
    """Load a model. That of Flux would otherwise be warmed up with 128 latent elements a side, which is slow."""
    model = load(family_model(family))
    return replace(model, defaults=replace(model.defaults, width=SIZE, height=SIZE))


@functools.cache
def stock_of(family: str) -> FamilyStock:
    return FamilyStock(family)


def order_of(family: str, key: object = "it", **changes: Any) -> EngineOrder:
    """Return an order for a picture, or for an edit where the model draws nothing else."""
    spec = replace(SPEC, **{"sampler": sampler_of(family), **changes})
    if not reads_mask(family):
        return EngineOrder(key=key, spec=spec)
    return edit_order(replace(spec, strength=spec.strength or 1.0), IMAGE, MASK, key=key)


def expected(family: str, order: EngineOrder, **options: Any) -> Tensor:
    """Return the latent that stock makes of an order."""
    return reference(family, order, **options).latent


def reference(family: str, order: EngineOrder, **options: Any) -> Reference:
    """Return what stock makes of an order."""
    image = None if order.image is None else PIL.Image.fromarray(order.image.numpy())
    mask = None if order.mask is None else PIL.Image.fromarray(np.asarray(order.mask) * np.uint8(255))
    return stock_of(family).reference(order.spec, image=image, mask=mask, **options)


def pixels(image: PIL.Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB")))


def mixed_orders(family: str) -> Iterator[EngineOrder]:
    """Yield orders that share turns: of other samplers and guidance, from a picture, and an edit."""
    only: dict[str, Any] = {"sampler": sampler_of(family)} if family in FLOWS else {}
    yield order_of(family, "euler")
    yield order_of(family, "ancestral", **{"sampler": SamplerKind.EULER_ANCESTRAL, **only}, seed=4)
    yield order_of(family, "ddim", **{"sampler": SamplerKind.DDIM, **only}, guidance_scale=1.0, num_inference_steps=5)
    two_rows = _TRUE_CFG if takes_true_cfg(family) else {"negative_prompt": "a circle"}
    yield order_of(family, "dpm++", **{"sampler": SamplerKind.DPMPP_2M, **only}, **two_rows, seed=6)
    if not reads_mask(family):
        spec = replace(SPEC, **only)
        yield EngineOrder(key="from a picture", spec=replace(spec, strength=0.5, seed=7), image=pixels(IMAGE))
        yield edit_order(replace(spec, strength=1.0, seed=8), IMAGE, MASK, key="edit")


@families("text to image")
def test_text_to_image(family: str) -> None:
    order = replace(order_of(family, sampler=model_of(family).defaults.sampler), preview=True)
    engine = make_engine(model_of(family), ONE_BY_ONE)
    engine.warm_up()
    drawing = ManualEngine(engine).draw(order)
    theirs = reference(family, order)
    assert_close(drawing.latents[0], theirs.latent)
    assert_same_image(drawing.pixels[0], theirs.pixels)
    previews = [event.preview for event in drawing.all(JobAdvanced) if event.preview is not None]
    assert previews
    assert previews[-1].shape == (SIZE // 4, SIZE // 4, 3)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("SD 3.5", {"prompt_2": "a heart", "negative_prompt": "a circle", "negative_prompt_2": "dark", "clip_skip": 1}),
        ("SD 3.5", {"prompt": "star " * 100, "prompt_2": "heart " * 90, "negative_prompt": "circle " * 80}),
        ("SD 3.5", {"width": 2 * SIZE}),
        ("Flux dev", {"prompt_2": "a heart", "negative_prompt_2": "dark", "width": 2 * SIZE, **_TRUE_CFG}),
        ("Flux dev", {"prompt": "star " * 100, "prompt_2": "heart " * 100, "guidance_scale": 7.5}),
        ("Flux schnell", {"prompt": "star " * 100, "num_inference_steps": 1, **_TRUE_CFG}),
        (Z_IMAGE, {"prompt": "star " * 400, "negative_prompt": "a circle", "width": 2 * SIZE}),
        (Z_IMAGE, {"guidance_scale": 0.5, "max_sequence_length": 20}),
        (Z_IMAGE, {"guidance_scale": 0.0}),
        (Z_IMAGE, {"cfg_normalization": 0.9, "num_inference_steps": 4}),
        (Z_IMAGE, {"cfg_truncation": 0.3, "num_inference_steps": 4}),
    ],
)
def test_prompts_and_shifts_of_transformers(family: str, changes: dict[str, Any]) -> None:
    """T5 reads 256 tokens, or 512 with Flux dev, as Qwen3, and CLIP 77. Sigmas may depend on the picture's size."""
    order = order_of(family, **{"num_inference_steps": 2, **changes})
    drawing = ManualEngine(make_engine(model_of(family), TOGETHER)).draw(order)
    assert_close(drawing.latents[0], expected(family, order))
    cut = "prompt" in changes or "max_sequence_length" in changes
    assert bool(drawing.record.provenance.truncations) is cut


def test_flux_in_half_precision_has_the_bits_of_stock() -> None:
    """Timesteps and guidance are rounded to its element type as in Diffusers."""
    stock = FamilyStock("Flux dev")
    stock.text.to(torch.bfloat16)
    order = order_of("Flux dev", num_inference_steps=3, guidance_scale=3.3)
    model = load(family_model("Flux dev"), dtype=torch.bfloat16)
    drawing = ManualEngine(make_engine(model, TOGETHER)).draw(order)
    assert torch.equal(drawing.latents[0], stock.latent(order.spec))


def test_z_image_in_half_precision_has_the_bits_of_stock() -> None:
    """Prompts are padded for the text encoder, and latents are float32 between steps, as in Diffusers."""
    stock = FamilyStock(Z_IMAGE, torch.bfloat16)
    order = order_of(Z_IMAGE, num_inference_steps=4, guidance_scale=0.0)
    drawing = ManualEngine(make_engine(load(family_model(Z_IMAGE), dtype=torch.bfloat16), TOGETHER)).draw(order)
    assert torch.equal(drawing.latents[0], stock.latent(order.spec))


@pytest.mark.parametrize(
    ("family", "t5"), [("SD 3.5", "text_encoder_3"), ("SD 3 no T5", ""), ("Flux dev", "text_encoder_2")]
)
def test_t5_reads_as_many_tokens_as_each_request_of_a_batch_says(family: str, t5: str) -> None:
    """Requests of one length share turns, and those of others where the network can and it pays. Nothing is padded."""
    lengths = (77, 77, 8, None)
    orders = [
        order_of(family, key, num_inference_steps=3, prompt="a red star " * 5, seed=key, max_sequence_length=length)
        for key, length in enumerate(lengths)
    ]
    drawings = ManualEngine(make_engine(model_of(family), TOGETHER)).run({0: orders})
    for order in orders:
        assert_close(drawings[order.key].latents[0], expected(family, order))
    shares = [drawings[key].record.provenance.mean_group_requests > 1 for key in range(4)]
    assert shares[:2] == [True, True]
    assert family in WAYS["mixed sizes"] or shares[2:] == [False, False]
    cuts = [
        {encoder for cut in drawings[key].record.provenance.truncations for encoder in cut.encoders} for key in (1, 2)
    ]
    assert [t5 in cut for cut in cuts] == [False, bool(t5)]


def test_prompts_of_all_lengths_share_turns() -> None:
    """What one is padded with changes no other, also when some have left. Halves of guidance differ in length, too."""
    lengths = (1, 20, 45, 90)
    orders = [
        order_of(Z_IMAGE, length, prompt="a" * length, negative_prompt="b" * (100 - length), num_inference_steps=steps)
        for length, steps in zip(lengths, (5, 4, 3, 2), strict=True)
    ]
    drawings = ManualEngine(make_engine(model_of(Z_IMAGE), TOGETHER)).run({0: orders})
    for order in orders:
        assert_close(drawings[order.key].latents[0], expected(Z_IMAGE, order))
        assert drawings[order.key].record.provenance.mean_group_requests > 1


@families("mixed batch")
def test_mixed_batch(family: str) -> None:
    orders = list(mixed_orders(family))
    drawings = ManualEngine(make_engine(model_of(family), TOGETHER)).run({0: orders[:2], 1: orders[2:]})
    for order in orders:
        assert_close(drawings[order.key].latents[0], expected(family, order))
        assert drawings[order.key].record.provenance.mean_group_requests > 1


def sized(family: str, order: EngineOrder, width: int, height: int) -> EngineOrder:
    """Return an order for a picture of another size; for an edit, with a quarter of it masked."""
    spec = replace(order.spec, width=width, height=height)
    if not reads_mask(family):
        return replace(order, spec=spec)
    mask = box_mask((0, 0, width // 2, height // 2), width, height)
    return edit_order(spec, template(width, height), mask, key=order.key)


@families("mixed sizes")
def test_mixed_sizes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share every turn, because sharing seems to take no time."""
    monkeypatch.setattr(PackedTimes, "ratio", 0.0)
    sizes = [(SIZE // 2, SIZE), (SIZE, 2 * SIZE), (3 * SIZE // 2, SIZE), (SIZE, SIZE)]
    orders = [
        sized(family, order, width, height) for order, (width, height) in zip(mixed_orders(family), sizes, strict=False)
    ]
    if not reads_mask(family):
        orders[-1] = replace(orders[-1], spec=replace(orders[-1].spec, strength=0.5), image=pixels(IMAGE))
    drawings = ManualEngine(make_engine(model_of(family), TOGETHER)).run({0: orders[:2], 1: orders[2:]})
    for order in orders:
        assert_close(drawings[order.key].latents[0], expected(family, order))
        assert drawings[order.key].record.provenance.mean_group_requests > 1


@families("LoRA")
def test_lora(family: str) -> None:
    """Beside the weights, and then in them."""
    stock = FamilyStock(family)
    components = {
        name: random_layers(network, seed, targets=("to_q", "to_v", "q_proj", "fc1", "SelfAttention.q"))
        for seed, (name, network) in enumerate(model_of(family).networks.items())
    }
    order = order_of(family, loras=(lora_spec("style", 0.8),))
    drawings = []
    for merged in (False, True):
        engine = make_engine(load(family_model(family)), TOGETHER, loras=LorasByHand.of({"style": components}))
        lora_weights(engine).costs = FixedCosts(pays=merged)
        drawings.append(ManualEngine(engine).draw(order))
    for name, layers in components.items():
        network: nn.Module = getattr(stock.text, name)
        for path, layer in layers.items():
            weight: Any = network.get_submodule(path).weight
            weight.data += 0.8 * layer.scale * (layer.up @ layer.down)
    image, mask = (IMAGE, MASK) if reads_mask(family) else (None, None)
    theirs = stock.latent(order.spec, image=image, mask=mask)
    for drawing in drawings:
        assert_close(drawing.latents[0], theirs)


@families("two ControlNets on servers")
def test_two_controlnets_on_servers(family: str, tmp_path: Path) -> None:
    networks, names = control_networks(family), ("edges", "depth")
    folders = save(dict(zip(names, networks, strict=True)), tmp_path)
    images = [control_image(seed, SIZE, SIZE) for seed in (1, 2)]
    controls = tuple(
        control_spec(name, image, scale) for name, image, scale in zip(names, images, (0.9, 0.4), strict=True)
    )
    order = replace(order_of(family, controlnets=controls), control_images=tuple(images))
    with linked_server("server", folders, tmp_path) as server, Desk.closing():
        drawing = Desk(model_of(family), Offers(server)).draw(on(order, server))
    assert_close(drawing.latents[0], expected(family, order, networks=networks, control_images=images))


def from_picture(family: str) -> EngineOrder:
    spec = replace(SPEC, strength=0.6, num_inference_steps=6, sampler=sampler_of(family))
    return EngineOrder(key="it", spec=spec, image=pixels(IMAGE))


@families("image to image")
def test_image_to_image(family: str) -> None:
    drawing = ManualEngine(make_engine(model_of(family), TOGETHER)).draw(from_picture(family))
    assert_close(drawing.latents[0], expected(family, from_picture(family)))


def test_a_model_that_reads_the_mask_takes_edits_alone_and_masks_no_block() -> None:
    model = model_of("SDXL inpainting")
    engine = make_engine(model, ONE_BY_ONE)
    engine.warm_up()
    for order in (EngineOrder(key="it", spec=SPEC), from_picture("SDXL inpainting")):
        with pytest.raises(InvalidRequest, match="must be set: this is an inpainting model, which only edits pictures"):
            engine.submit(order)
    assert unsupported(model.backbone.network) == "the network reads the mask itself"


@families("edit")
@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_exact_edit(family: str, strength: float) -> None:
    spec = replace(SPEC, strength=strength, num_inference_steps=6, sampler=sampler_of(family))
    order = edit_order(spec, IMAGE, MASK)
    drawing = ManualEngine(make_engine(model_of(family), TOGETHER)).draw(order)
    assert_close(drawing.latents[0], expected(family, order))


@families("edit with masked blocks")
def test_masked_blocks(family: str) -> None:
    """A row whose tokens outside a box come from its own recording gets nearly what it gets when computed."""
    model, spec = model_of(family), replace(SPEC, sampler=sampler_of(family))
    (conditions,) = encode_all_prompts(model, spec)
    row = Request(model, spec, conditions).rows()[-1]
    denoiser = denoiser_of(model.backbone.network, make_masked_backbone(model.backbone.network))
    recorded, computed = StepInMemory(), box(1, 2, 4, 4, size=(SIZE // 4, SIZE // 4))

    def noise(of: Row) -> Tensor:
        return denoiser.predict([of]).noise[of]

    plain = noise(row)
    assert_close(noise(recording(row, recorded)), plain)
    difference = (noise(masked(row, recorded, computed)) - plain).abs().max()
    assert recorded.reused
    assert float(difference) < FLOAT16


@families("resume on another worker")
def test_resumed_on_another_worker(family: str) -> None:
    sampler = sampler_of(family) if family in FLOWS else SamplerKind.EULER_ANCESTRAL
    order = order_of(family, sampler=sampler, num_inference_steps=6)
    first = ManualEngine(make_engine(other_model_of(family), ONE_BY_ONE))
    drawing = first.submit(order)
    while not drawing.all(JobCheckpointed):
        first.turn()
    left = drawing.all(JobCheckpointed)[-1]
    other = ManualEngine(make_engine(model_of(family), ONE_BY_ONE)).draw(replace(order, checkpoint=left.data))
    assert other.job is not None
    assert other.job.steps_resumed == left.steps_done > 0
    assert_close(other.latents[0], expected(family, order))


@families("pair of workers")
def test_pair(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(pair, "rows_to_offload", lambda rows, able, **_: min(rows - 1, able, 1))
    order = order_of(family, **(_TRUE_CFG if takes_true_cfg(family) else {}))
    with FollowerThread(make_engine(other_model_of(family), TOGETHER)) as follower:
        peer = led(follower)
        drawing = ManualEngine(make_engine(model_of(family), TOGETHER, peer=peer)).draw(order)
        peer.stop()
    assert_close(drawing.latents[0], expected(family, order))
    assert drawing.record.provenance.HasField("pair")
    assert drawing.record.provenance.pair.steps > 0


@families("cached start")
def test_cached_start(family: str) -> None:
    order = order_of(family)
    kept: dict[int, Tensor] = {}

    def keep(step: int, latent: Tensor) -> Tensor:
        kept[step] = latent.clone()
        return latent

    expected(family, order_of(family, prompt="a small green circle", seed=11), after_step=keep)
    recorded = kept[STARTED - 1]
    generator = torch.Generator("cpu").manual_seed(order.spec.seed)
    torch.randn(recorded.shape, generator=generator)
    fresh = torch.randn(recorded.shape, generator=generator)
    model = model_of(family)
    sampler = model.samplers.open(
        order.spec.sampling, steps=order.spec.num_inference_steps, tokens=model.tokens(SIZE, SIZE)
    )
    high, low = (sampler.noise_level(step) for step in (STARTED - 1, STARTED))
    scale, deviation = 1.0, math.sqrt(high**2 - low**2)
    if family in FLOWS:  # Latents are (1 - sigma) x0 + sigma n; levels are of a picture of factor 1.
        signal_before, signal = 1 / (1 + high), 1 / (1 + low)
        scale, deviation = signal_before / signal, signal_before * deviation
    noised = scale * recorded + deviation * fresh

    def start(step: int, latent: Tensor) -> Tensor:
        return noised if step == STARTED - 2 else latent

    easel = Cached(model_of(family), limits=ONE_BY_ONE)
    drawing = easel.draw(cached(order), hits=[(entry(1), STARTED, recorded[0])])
    assert_close(drawing.latents[0], expected(family, order, after_step=start))


def test_a_second_prompt_is_refused_where_there_is_one_text_encoder() -> None:
    engine = make_engine(model_of("SD 1"), TOGETHER)
    with pytest.raises(InvalidRequest, match=r"must be empty: Stable Diffusion 1 has one text encoder"):
        engine.submit(order_of("SD 1", prompt_2="a heart"))
