"""ControlNets of Stable Diffusion 3: what stock Diffusers computes and draws with them, streamed block by block."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.controlnets.engine import (
    ControlRow,
    ControlSession,
    LocalControlNets,
    check_weights,
    find_controlnet,
    load_controlnet,
    run_group,
)
from bottega.addons.controlnets.engine.provider import ControlInput
from bottega.addons.controlnets.engine.remote import controls_part, read_controls
from bottega.addons.controlnets.worker import StalenessPolicy
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import encode_all_prompts
from bottega.engine.forward import Network
from bottega.engine.job import EngineOrder
from bottega.engine.parallel import pair
from bottega.engine.request import ActiveControl, Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import NotFinite
from bottega.model.backbone import POOLED
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row
from bottega.model.schedulers import SamplerKind
from bottega.model_files.controlnet_folder import check_controlnet
from tests.samples.controlnets import control_image, control_spec, layout_of, save, shelf_of
from tests.samples.edits import box_mask, edit_order, template
from tests.samples.family_models import SIZE, FamilyStock, control_networks, family_model
from tests.samples.sd3_controlnets import SD3_CONTROLNETS, sd3_controlnet
from tests.support.controlled_engine import Desk, on
from tests.support.engines import TOGETHER, make_engine
from tests.support.linked_servers import LinkedServer, Offers, linked_server
from tests.support.manual_engine import ManualEngine, load
from tests.support.pair_follower import FollowerThread, led
from tests.support.stock import assert_close
from tests.support.torch_threads import torch_threads
from tests.unit.addons.controlnets.engine.test_late_residuals import Residuals
from tests.unit.engine.test_exact import pixels_tensor

NAMES = ("edges", "depth", "short")
# Not square, and stretched to the size of the picture.
IMAGES = {name: control_image(seed, 48, 64) for seed, name in enumerate(NAMES)}
SPEC = ResolvedSpec(
    prompt="a big red star on the left",
    num_inference_steps=4,
    width=SIZE,
    height=SIZE,
    seed=3,
    sampler=SamplerKind.FLOW_MATCH_EULER,
)
WAIT_S = 20.0
SILENCE_S = 0.3


@pytest.fixture(scope="module", autouse=True)
def _a_thread_each() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(autouse=True)
def _no_links_left() -> Iterator[None]:
    with Desk.closing():
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    return load(family_model("SD 3"))


@pytest.fixture(scope="module")
def stock() -> FamilyStock:
    return FamilyStock("SD 3")


@pytest.fixture(scope="module")
def networks() -> Mapping[str, Any]:
    """Two that are alike, and one with fewer blocks that reads pooled prompts and shifted latents."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        short = sd3_controlnet(num_layers=2, force_zeros_for_pooled_projection=False)
    return dict(zip(NAMES, (*control_networks("SD 3"), short), strict=True))


@pytest.fixture(scope="module")
def folders(networks: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return save(networks, tmp_path_factory.mktemp("nets"))


@pytest.fixture(scope="module")
def server(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedServer]:
    with linked_server("server", folders, tmp_path_factory.mktemp("server")) as server:
        yield server


def controlled(key: str, *names: str, order: EngineOrder | None = None, **options: Any) -> EngineOrder:
    """Return an order with these ControlNets. The options are those of each."""
    order = order or EngineOrder(key=key, spec=SPEC)
    controls = tuple(control_spec(name, IMAGES[name], 0.9 - place / 4, **options) for place, name in enumerate(names))
    spec = replace(order.spec, controlnets=controls)
    return replace(order, key=key, spec=spec, control_images=tuple(IMAGES[name] for name in names))


@pytest.mark.parametrize("family", sorted(SD3_CONTROLNETS))
def test_residuals_are_those_of_diffusers_bit_for_bit(family: str, tmp_path: Path) -> None:
    network, base = control_networks(family)[0], load(family_model(family))
    folder = save({"net": network}, tmp_path)["net"]
    assert check_controlnet("net", folder, layout_of(base)) == ""
    source = find_controlnet("net", folder, base=layout_of(base), dtype=torch.float32)
    check_weights(source)
    net, backbone = load_controlnet(source, torch.device("cpu")), base.backbone
    assert isinstance(backbone, Sd3Backbone)
    halves = {half: Embeds(prompt=torch.randn(9, 96), added={POOLED: torch.randn(64)}) for half in Half}
    latent, samples = torch.randn(16, 8, 12), torch.randn(16, 8, 12).repeat(2, 1, 1, 1)
    control = ControlInput(name="net", images=(latent,), height=32, width=48, halves=halves, latent_scaling=(0.06, 1.5))
    stacked, zeros = Embeds.stack(list(halves.values())), network.config.force_zeros_for_pooled_projection
    own = copy.deepcopy(network)
    if net.reads_tokens:
        own.pos_embed = own._get_pos_embed_from_transformer(backbone.network)
    with torch.inference_mode():
        session, inputs = ControlSession(net, control), backbone.tokens(samples) if net.reads_tokens else samples
        ours = run_group(
            [
                ControlRow(session=session, half=half, sample=inputs[0], timestep=torch.tensor(500.0))
                for half in session.halves
            ]
        )
        (theirs,) = own(
            hidden_states=samples,
            controlnet_cond=((latent - (0.0 if zeros else 0.06)) * 1.5).repeat(2, 1, 1, 1),
            encoder_hidden_states=None if net.reads_tokens else stacked.prompt,
            pooled_projections=stacked.added[POOLED] * (0.0 if zeros else 1.0),
            timestep=torch.tensor([500.0, 500.0]),
            return_dict=False,
        )
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_every_way_of_drawing_in_one_batch(
    model: Model, stock: FamilyStock, server: LinkedServer, networks: Mapping[str, Any]
) -> None:
    """Diffusers has a pipeline for the first one. For the others, its plain pipelines get residuals."""
    image, mask = template(SIZE, SIZE), box_mask((4, 8, 20, 28), SIZE, SIZE)
    from_picture = EngineOrder(key="", spec=replace(SPEC, strength=0.5, seed=4), image=pixels_tensor(image))
    edit = edit_order(replace(SPEC, strength=1.0, seed=5), image, mask)
    orders = [
        controlled("some steps", "edges", "depth", control_guidance_start=0.25, control_guidance_end=0.75),
        controlled("other depths", "edges", "short", order=EngineOrder(key="", spec=replace(SPEC, seed=7))),
        controlled("from a picture", "depth", order=from_picture),
        controlled("edit", "edges", order=edit),
        EngineOrder(key="plain", spec=replace(SPEC, guidance_scale=1.0)),
    ]
    desk = Desk(model, Offers(server), limits=TOGETHER)
    drawings = desk.easel.run({0: [on(order, server) for order in orders]})
    for order in orders:
        theirs = stock.latent(
            order.spec,
            image=None if order.image is None else image,
            mask=None if order.mask is None else mask,
            networks=[networks[control.name] for control in order.spec.controlnets],
            control_images=order.control_images,
            by_hand=order.key == "other depths",
        )
        assert_close(drawings[order.key].latents[0], theirs)
        assert drawings[order.key].record.provenance.mean_group_requests > 1


@pytest.mark.parametrize("remote", [True, False], ids=["on a server", "in the worker"])
def test_a_controlnet_without_embedding_reads_the_models_tokens(remote: bool, tmp_path: Path) -> None:
    model, networks = load(family_model("SD 3.5")), control_networks("SD 3.5")
    folders = save({"edges": networks[0]}, tmp_path)
    order = controlled("it", "edges")
    if remote:
        with linked_server("large", folders, tmp_path) as large:
            (ours,) = Desk(model, Offers(large)).draw(on(order, large)).latents
    else:
        with shelf_of(model, folders) as shelf:
            local = LocalControlNets(shelf, backbone=model.backbone)
            (ours,) = ManualEngine(make_engine(model, TOGETHER, controlnets=local)).draw(order).latents
    theirs = FamilyStock("SD 3.5").latent(order.spec, networks=networks[:1], control_images=[IMAGES["edges"]])
    assert_close(ours, theirs)


def test_tokens_for_controlnets_are_embedded_without_loras() -> None:
    backbone, sample = load(family_model("SD 3.5")).backbone, torch.randn(2, 16, 8, 8)
    assert isinstance(backbone, Sd3Backbone)
    layer = backbone.network.pos_embed.proj
    with torch.inference_mode():
        before = backbone.tokens(sample)
        assert torch.equal(before, backbone.network.pos_embed(sample)), "the model's own, before a LoRA is merged"
        hook = layer.register_forward_hook(lambda _module, _given, output: output + 1.0)
        layer.weight.data *= 2.0
        try:
            assert torch.equal(backbone.tokens(sample), before)
        finally:
            layer.weight.data /= 2.0
            hook.remove()


def test_latents_of_a_control_image_that_are_no_numbers_fail_the_job_at_once(
    model: Model, server: LinkedServer
) -> None:
    steps: list[object] = []
    hooks = [
        model.vae.encoder.conv_out.register_forward_hook(lambda _module, _given, output: output * float("inf")),
        model.backbone.network.transformer_blocks[0].register_forward_pre_hook(lambda *given: steps.append(given)),
    ]
    try:
        drawing = Desk(model, Offers(server)).draw(on(controlled("it", "edges"), server))
    finally:
        for hook in hooks:
            hook.remove()
    assert isinstance(drawing.error, NotFinite)
    assert "the VAE encoded a control image to values that are not numbers" in drawing.error.message
    assert not steps


def test_a_block_begins_when_its_residual_has_come(model: Model, server: LinkedServer) -> None:
    """The ControlNet's second block waits until the model's second one has begun."""
    begun, waited = threading.Event(), list[bool]()
    (net,) = server.registry.cache.borrow([_cached(server, "edges")]).values.result(WAIT_S)

    def wait(*_: object) -> None:
        waited.append(begun.wait(WAIT_S))

    def begin(*_: object) -> None:
        begun.set()

    hooks = [
        net.network.transformer_blocks[1].register_forward_pre_hook(wait),
        model.backbone.network.transformer_blocks[1].register_forward_pre_hook(begin),
    ]
    try:
        spec = replace(SPEC, num_inference_steps=1)
        Desk(model, Offers(server)).draw(on(controlled("it", "edges", order=EngineOrder(key="", spec=spec)), server))
    finally:
        for hook in hooks:
            hook.remove()
    assert waited == [True]


def test_a_server_in_a_long_block_is_not_taken_for_dead(model: Model, server: LinkedServer) -> None:
    """It answers no pings while it sends residuals."""
    (net,) = server.registry.cache.borrow([_cached(server, "depth")]).values.result(WAIT_S)
    hook = net.network.transformer_blocks[1].register_forward_pre_hook(lambda *_: time.sleep(4 * SILENCE_S))
    try:
        spec = replace(SPEC, num_inference_steps=1)
        order = on(controlled("it", "depth", order=EngineOrder(key="", spec=spec)), server)
        drawing = Desk(model, Offers(server), silence_s=SILENCE_S).draw(order)
    finally:
        hook.remove()
    assert list(drawing.record.provenance.controlnets[0].servers) == ["server"]


def _cached(server: LinkedServer, name: str) -> str:
    """Return the name by which a server's cache knows a ControlNet."""
    return f"{name}@{server.digests[name][:12]} in float32"


def test_a_failure_midway_moves_the_session_and_keeps_the_link(
    model: Model, stock: FamilyStock, server: LinkedServer, folders: Mapping[str, Path], tmp_path: Path, networks: Any
) -> None:
    order, left = controlled("it", "edges"), [1]
    with linked_server("failing", folders, tmp_path) as failing:
        (net,) = failing.registry.cache.borrow([_cached(failing, "edges")]).values.result(WAIT_S)

        def fail(*_: object) -> None:
            if left and left.pop():
                raise RuntimeError("this block does not work")

        net.network.transformer_blocks[1].register_forward_pre_hook(fail)
        desk = Desk(model, Offers(failing, server))
        drawing = desk.draw(on(order, failing, server))
        assert sorted(desk.controlnets.servers) == ["failing", "server"]
    assert not left
    (use,) = drawing.record.provenance.controlnets
    assert list(use.servers) == ["failing", "server"]
    theirs = stock.latent(order.spec, networks=[networks["edges"]], control_images=[IMAGES["edges"]])
    assert_close(drawing.latents[0], theirs)


def test_a_pair_draws_as_one_worker(
    monkeypatch: pytest.MonkeyPatch, model: Model, stock: FamilyStock, folders: Mapping[str, Path], networks: Any
) -> None:
    monkeypatch.setattr(pair, "rows_to_offload", lambda rows, able, **_: min(rows - 1, able, 1))
    order = controlled("it", "edges")
    with shelf_of(model, folders) as shelf:
        ours, theirs = (LocalControlNets(shelf, backbone=model.backbone) for _ in range(2))
        with FollowerThread(make_engine(model, TOGETHER, controlnets=theirs)) as follower:
            peer = led(follower)
            drawing = ManualEngine(make_engine(model, TOGETHER, controlnets=ours, peer=peer)).draw(order)
            peer.stop()
    assert drawing.record.provenance.pair.steps > 0
    expected = stock.latent(order.spec, networks=[networks["edges"]], control_images=[IMAGES["edges"]])
    assert_close(drawing.latents[0], expected)


class Uneven(Residuals):
    """Adds another number to each channel: norms take away one that is added to all."""

    def take(self, row: Row, point: int) -> list[Tensor]:
        return [torch.linspace(-1.0, 1.0, 32)]


def test_a_row_that_is_late_leaves_the_others_their_residuals(model: Model) -> None:
    (conditions,) = encode_all_prompts(model, SPEC)
    requests = [Request(model, replace(SPEC, seed=seed), conditions) for seed in range(2)]
    for request in requests:
        request.controls = (ActiveControl(handle="net", first=0, last=4),)

    def predicted(count: int, residuals: Residuals) -> Mapping[Row, Tensor]:
        rows = [row for request in requests[:count] for row in request.rows()]
        return Denoiser(Network(backbone=model.backbone, residuals=residuals)).predict(rows).noise

    alone, beside = predicted(1, Uneven()), predicted(2, Uneven(late={requests[1]: None}))
    assert {row.owner for row in beside} == {requests[0]}
    for one, other in zip(alone.values(), beside.values(), strict=True):
        assert_close(one, other)


class Always(StalenessPolicy):
    """Lets every step use the residuals of the step before."""

    def allows(self, *_: object, **__: object) -> bool:
        return True


def a_step_late(network: Any) -> Any:
    """Return a ControlNet that gives each step what it made for the step before, and the first one its own."""
    late, before = copy.deepcopy(network), list[Any]()

    def give(_: object, __: object, made: Any) -> Any:
        before.append(made)
        return before[max(0, len(before) - 2)]

    late.register_forward_hook(give)
    return late


def test_stale_residuals_are_those_of_the_step_before(
    model: Model, stock: FamilyStock, server: LinkedServer, networks: Mapping[str, Any]
) -> None:
    order = controlled("it", "edges")
    drawing = Desk(model, Offers(server), staleness=Always()).draw(on(order, server))
    (use,) = drawing.record.provenance.controlnets
    assert use.stale_steps == SPEC.num_inference_steps - 1
    assert not drawing.record.exact
    late, in_time = (
        stock.latent(order.spec, networks=[network], control_images=order.control_images)
        for network in (a_step_late(networks["edges"]), networks["edges"])
    )
    assert_close(drawing.latents[0], late)
    assert (late - in_time).abs().max() > 1e-3


def test_a_second_worker_gets_the_latents_of_control_images() -> None:
    halves = {Half.CONDITIONAL: Embeds(prompt=torch.zeros(3, 4))}
    control = ControlInput(
        name="edges", images=(torch.randn(16, 4, 4),), height=16, width=16, halves=halves, latent_scaling=(0.1, 2.0)
    )
    (read,) = read_controls(controls_part([control]), halves)
    assert read.latent_scaling == control.latent_scaling
    assert torch.equal(read.images[0], control.images[0])
