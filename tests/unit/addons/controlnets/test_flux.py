"""ControlNets of Flux.1: what stock Diffusers computes and draws with them, streamed block by block."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxControlNetModel, FluxPipeline, FluxTransformer2DModel
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
from bottega.engine import forward
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import encode_all_prompts
from bottega.engine.events import JobCheckpointed
from bottega.engine.forward import Network
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.parallel import pair
from bottega.engine.request import ActiveControl, Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ControlNetUnusable, InvalidRequest
from bottega.model.backbone import GUIDANCE, POOLED, Inputs
from bottega.model.backbones.flux import FluxBackbone
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row
from bottega.model.schedulers import SamplerKind
from bottega.model_files.controlnet_config import FluxNetworkConfig
from bottega.model_files.controlnet_folder import check_controlnet
from tests.samples.controlnets import control_image, control_spec, layout_of, save, shelf_of
from tests.samples.edits import box_mask, edit_order, template
from tests.samples.family_models import SIZE, FamilyStock, control_networks, family_model
from tests.samples.flux_controlnets import FLUX_SHAPE, flux_controlnet, spread
from tests.samples.sd3_controlnets import sd3_controlnet
from tests.support.controlled_engine import Desk, on
from tests.support.engines import TOGETHER, make_engine
from tests.support.linked_servers import LinkedServer, Offers, linked_server
from tests.support.manual_engine import ManualEngine, load
from tests.support.pair_follower import FollowerThread, led
from tests.support.stock import assert_close
from tests.support.torch_threads import torch_threads
from tests.unit.addons.controlnets.test_stable_diffusion_3 import Always, Uneven, a_step_late
from tests.unit.engine.test_exact import pixels_tensor

NAMES = ("edges", "depth", "short", "union")
# Not square, and stretched to the size of the picture.
IMAGES = {name: control_image(seed, 48, 64) for seed, name in enumerate(NAMES)}
SPEC = ResolvedSpec(
    prompt="a big red star on the left",
    num_inference_steps=4,
    guidance_scale=3.5,
    width=SIZE,
    height=SIZE,
    seed=3,
    sampler=SamplerKind.FLOW_MATCH_EULER,
)
TRUE_CFG: Mapping[str, Any] = {"negative_prompt": "a circle", "true_cfg_scale": 3.0}
WAIT_S = 20.0


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
    return load(family_model("Flux dev"))


@pytest.fixture(scope="module")
def stock() -> FamilyStock:
    return FamilyStock("Flux dev")


@pytest.fixture(scope="module")
def networks() -> Mapping[str, Any]:
    """Two that are alike, one without single blocks that reads no guidance scale, and a union."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        short = flux_controlnet(num_layers=1, num_single_layers=0)
        union = flux_controlnet(guidance_embeds=True, num_mode=3)
    return dict(zip(NAMES, (*control_networks("Flux dev"), short, union), strict=True))


@pytest.fixture(scope="module")
def folders(networks: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return save(networks, tmp_path_factory.mktemp("nets"))


@pytest.fixture(scope="module")
def server(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedServer]:
    with linked_server("server", folders, tmp_path_factory.mktemp("server")) as server:
        yield server


def controlled(key: str, *names: str, order: EngineOrder | None = None, **options: Any) -> EngineOrder:
    """Return an order with these ControlNets. The options are those of each; a union has the mode of its place."""
    order = order or EngineOrder(key=key, spec=SPEC)
    controls = tuple(
        control_spec(name, IMAGES[name], 0.9 - place / 4, **({"control_mode": place} if name == "union" else {}))
        for place, name in enumerate(names)
    )
    controls = tuple(replace(control, **options) for control in controls)
    spec = replace(order.spec, controlnets=controls)
    return replace(order, key=key, spec=spec, control_images=tuple(IMAGES[name] for name in names))


def _packed(latents: Tensor) -> Tensor:
    packed: Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return packed


KINDS: Mapping[str, Mapping[str, Any]] = {
    "with guidance": {"guidance_embeds": True},
    "joint blocks": {"num_single_layers": 0},
    "single blocks": {"num_layers": 0, "num_single_layers": 2},
    "a union": {"num_mode": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_are_those_of_diffusers_bit_for_bit(model: Model, tmp_path: Path, kind: str) -> None:
    network = flux_controlnet(**KINDS[kind])
    folder = save({"net": network}, tmp_path)["net"]
    assert check_controlnet("net", folder, layout_of(model)) == ""
    source = find_controlnet("net", folder, base=layout_of(model), dtype=torch.float32)
    check_weights(source)
    net, modes = load_controlnet(source, torch.device("cpu")), (3, 1) if kind == "a union" else ()
    halves = {
        half: Embeds(prompt=torch.randn(9, 96), added={POOLED: torch.randn(32), GUIDANCE: torch.tensor([4.5])})
        for half in Half
    }
    latent, samples, stacked = torch.randn(16, 8, 12), torch.randn(2, 16, 8, 12), Embeds.stack(list(halves.values()))
    with torch.inference_mode():
        # Two sessions of a union show two things in one forward pass.
        sessions = [
            ControlSession(
                net,
                ControlInput(
                    name="net",
                    images=(latent,),
                    height=32,
                    width=48,
                    halves=halves,
                    modes=modes[place : place + 1],
                    latent_scaling=(0.06, 1.5),
                ),
            )
            for place in range(2)
        ]
        ours = run_group(
            [
                ControlRow(session=session, half=half, sample=sample, timestep=torch.tensor(500.0))
                for session, half, sample in zip(sessions, halves, samples, strict=True)
            ]
        )
        doubles, singles = network(
            hidden_states=_packed(samples),
            controlnet_cond=_packed(((latent - 0.06) * 1.5).repeat(2, 1, 1, 1)),
            controlnet_mode=torch.tensor(modes)[:, None] if modes else None,
            encoder_hidden_states=stacked.prompt,
            pooled_projections=stacked.added[POOLED],
            timestep=torch.tensor([0.5, 0.5]),
            guidance=torch.tensor([4.5, 4.5]) if network.config.guidance_embeds else None,
            txt_ids=torch.zeros(9, 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32),
            return_dict=False,
        )
    theirs = [*(doubles or ()), *(singles or ())]
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("counts", [(3, 5), (2, 2), (1, 0), (0, 3)])
@torch.inference_mode()
def test_residuals_are_added_where_diffusers_adds_them(counts: tuple[int, int]) -> None:
    torch.manual_seed(0)
    network = FluxTransformer2DModel(num_layers=3, num_single_layers=5, **FLUX_SHAPE)
    sample, prompt, pooled = torch.randn(2, 16, 8, 8), torch.randn(2, 7, 96), torch.randn(2, 32)
    doubles, singles = ([torch.randn(2, 16, 32) for _ in range(count)] for count in counts)
    theirs = network(
        hidden_states=_packed(sample),
        timestep=torch.tensor([0.5, 0.5]),
        pooled_projections=pooled,
        encoder_hidden_states=prompt,
        txt_ids=torch.zeros(7, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32),
        controlnet_block_samples=doubles or None,
        controlnet_single_block_samples=singles or None,
        return_dict=False,
    )[0]
    backbone, residuals = FluxBackbone(network), [*doubles, *singles]
    inputs = Inputs(sample=sample, timestep=torch.tensor([500.0, 500.0]), prompt_embeds=prompt, added={POOLED: pooled})
    state = backbone.begin(inputs)
    for block in backbone.blocks:
        _add(backbone, state, block.needs, residuals, len(singles))
        block.run(state)
    _add(backbone, state, backbone.finish_needs, residuals, len(singles))
    assert torch.equal(backbone.finish(state), FluxPipeline._unpack_latents(theirs, 32, 32, 4))


def _add(backbone: FluxBackbone, state: Any, points: tuple[int, ...], residuals: list[Tensor], singles: int) -> None:
    for point in points:
        index = backbone.residual_at(point, len(residuals), singles)
        if index is not None:
            state.points[point] += residuals[index]


def test_every_way_of_drawing_in_one_batch(
    model: Model, stock: FamilyStock, server: LinkedServer, networks: Mapping[str, Any]
) -> None:
    image, mask = template(SIZE, SIZE), box_mask((4, 8, 20, 28), SIZE, SIZE)
    from_picture = EngineOrder(key="", spec=replace(SPEC, strength=0.5, seed=4), image=pixels_tensor(image))
    edit = edit_order(replace(SPEC, strength=1.0, seed=5), image, mask)
    orders = [
        controlled("some steps", "edges", "depth", control_guidance_start=0.25, control_guidance_end=0.75),
        controlled("true CFG", "edges", order=EngineOrder(key="", spec=replace(SPEC, **TRUE_CFG))),
        controlled("other depths", "edges", "short", order=EngineOrder(key="", spec=replace(SPEC, seed=7))),
        controlled("union", "union", "union", order=EngineOrder(key="", spec=replace(SPEC, seed=8))),
        controlled("from a picture", "depth", order=from_picture),
        controlled("edit", "edges", "union", "union", order=edit),
        EngineOrder(key="plain", spec=SPEC),
    ]
    desk = Desk(model, Offers(server), limits=TOGETHER)
    drawings = desk.easel.run({0: [on(order, server) for order in orders]})
    for order in orders:
        used = [networks[control.name] for control in order.spec.controlnets]
        theirs = stock.latent(
            order.spec,
            image=None if order.image is None else image,
            mask=None if order.mask is None else mask,
            networks=[spread(network, 2, 2) for network in used] if order.key == "other depths" else used,
            control_images=order.control_images,
        )
        assert_close(drawings[order.key].latents[0], theirs)
        assert drawings[order.key].record.provenance.mean_group_requests > 1


def test_each_image_of_a_job_draws_its_own_latents_of_control_images(
    model: Model, stock: FamilyStock, server: LinkedServer, networks: Mapping[str, Any]
) -> None:
    order = controlled("it", "edges", "depth", order=EngineOrder(key="", spec=replace(SPEC, num_images=2)))
    drawing = Desk(model, Offers(server), limits=TOGETHER).draw(on(order, server))
    for index, ours in enumerate(drawing.latents):
        spec = replace(order.spec, num_images=1, seed=SPEC.seed + index)
        used = [networks[name] for name in ("edges", "depth")]
        assert_close(ours, stock.latent(spec, networks=used, control_images=order.control_images))
    assert [list(use.servers) for use in drawing.record.provenance.controlnets] == [["server"], ["server"]]


def test_resumed_on_another_worker(
    model: Model, stock: FamilyStock, server: LinkedServer, networks: Mapping[str, Any]
) -> None:
    order = on(controlled("it", "edges"), server)
    limits = EngineLimits(checkpoint_interval_s=0.0, progress_interval_s=0.0)
    first = Desk(model, Offers(server), limits=limits).easel
    drawing = first.submit(order)
    while not drawing.all(JobCheckpointed):
        first.turn()
    left = drawing.all(JobCheckpointed)[-1]
    other = Desk(model, Offers(server), limits=limits).draw(replace(order, checkpoint=left.data))
    assert other.job is not None
    assert other.job.steps_resumed == left.steps_done > 0
    theirs = stock.latent(order.spec, networks=[networks["edges"]], control_images=order.control_images)
    assert_close(other.latents[0], theirs)


def test_a_single_block_begins_when_its_residual_has_come(model: Model, server: LinkedServer) -> None:
    """The ControlNet's single block waits until the model's first one has begun."""
    begun, waited = threading.Event(), list[bool]()
    name = f"edges@{server.digests['edges'][:12]} in float32"
    (net,) = server.registry.cache.borrow([name]).values.result(WAIT_S)

    def wait(*_: object) -> None:
        waited.append(begun.wait(WAIT_S))

    def begin(*_: object) -> None:
        begun.set()

    hooks = [
        net.network.single_transformer_blocks[0].register_forward_pre_hook(wait),
        model.backbone.network.single_transformer_blocks[0].register_forward_pre_hook(begin),
    ]
    try:
        spec = replace(SPEC, num_inference_steps=1)
        Desk(model, Offers(server)).draw(on(controlled("it", "edges", order=EngineOrder(key="", spec=spec)), server))
    finally:
        for hook in hooks:
            hook.remove()
    assert waited == [True]


def test_a_pair_draws_with_true_cfg_as_one_worker(
    monkeypatch: pytest.MonkeyPatch, model: Model, stock: FamilyStock, folders: Mapping[str, Path], networks: Any
) -> None:
    """Each worker computes the residuals of the prompt, which both halves of guidance get."""
    monkeypatch.setattr(pair, "rows_to_offload", lambda rows, able, **_: min(rows - 1, able, 1))
    order = controlled("it", "edges", order=EngineOrder(key="", spec=replace(SPEC, **TRUE_CFG)))
    with shelf_of(model, folders) as shelf:
        ours, theirs = (LocalControlNets(shelf, backbone=model.backbone) for _ in range(2))
        with FollowerThread(make_engine(model, TOGETHER, controlnets=theirs)) as follower:
            peer = led(follower)
            drawing = ManualEngine(make_engine(model, TOGETHER, controlnets=ours, peer=peer)).draw(order)
            peer.stop()
    assert drawing.record.provenance.pair.steps > 0
    expected = stock.latent(order.spec, networks=[networks["edges"]], control_images=order.control_images)
    assert_close(drawing.latents[0], expected)


def test_a_server_and_the_worker_itself_compute_the_same_bits(
    model: Model, server: LinkedServer, folders: Mapping[str, Path]
) -> None:
    order = controlled("it", "edges", "union", order=EngineOrder(key="", spec=replace(SPEC, **TRUE_CFG)))
    with shelf_of(model, folders) as shelf:
        local = LocalControlNets(shelf, backbone=model.backbone)
        here = ManualEngine(make_engine(model, TOGETHER, controlnets=local)).draw(order)
    there = Desk(model, Offers(server), limits=TOGETHER).draw(on(order, server))
    assert torch.equal(here.latents[0], there.latents[0])
    assert [list(use.servers) for use in there.record.provenance.controlnets] == [["server"], ["server"]]


def test_stale_residuals_are_those_of_the_step_before(
    model: Model, stock: FamilyStock, server: LinkedServer, networks: Mapping[str, Any]
) -> None:
    order = controlled("it", "edges", order=EngineOrder(key="", spec=replace(SPEC, **TRUE_CFG)))
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


def test_a_row_late_at_the_last_point_leaves_others_their_predictions(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    monkeypatch.setattr(forward, "STRAGGLER_S", 0.01)
    (conditions,) = encode_all_prompts(model, SPEC)
    requests = [Request(model, replace(SPEC, seed=seed), conditions) for seed in range(2)]
    for request in requests:
        request.controls = (ActiveControl(handle="net", first=0, last=4),)

    class LateAtTheEnd(Uneven):
        def ready(self, row: Row, points: tuple[int, ...]) -> bool:
            return row.owner is requests[0] or points != model.backbone.finish_needs

    def predicted(*owners: Request) -> Mapping[Row, Tensor]:
        rows = [row for owner in owners for row in owner.rows()]
        return Denoiser(Network(backbone=model.backbone, residuals=LateAtTheEnd())).predict(rows).noise

    alone, beside = predicted(requests[0]), predicted(*requests)
    assert {row.owner for row in beside} == {requests[0]}
    for one, other in zip(alone.values(), beside.values(), strict=True):
        assert_close(one, other)


def test_a_controlnet_that_reads_guidance_gets_it_also_from_schnell(server: LinkedServer, networks: Any) -> None:
    model = load(family_model("Flux schnell"))
    order = controlled("it", "edges", order=EngineOrder(key="", spec=replace(SPEC, num_inference_steps=2)))
    (ours,) = Desk(model, Offers(server)).draw(on(order, server)).latents
    theirs = FamilyStock("Flux schnell").latent(
        order.spec, networks=[networks["edges"]], control_images=order.control_images
    )
    assert_close(ours, theirs)


def test_every_field_of_a_configuration_has_diffusers_default() -> None:
    parameters = inspect.signature(FluxControlNetModel.__init__).parameters
    defaults = {name: each.default for name, each in parameters.items() if name != "self"}
    assert defaults.pop("conditioning_embedding_channels") is None, "no other value is served"
    assert FluxNetworkConfig().fields == defaults | {"axes_dims_rope": tuple(defaults["axes_dims_rope"])}


MISFITS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "another width": ({"num_attention_heads": 8}, r"its tokens are 64 wide, the model's 32 \(attention_head_dim, num"),
    "more joint blocks": ({"num_layers": 3}, r"it has 3 residuals, the model 2 blocks \(num_layers\)"),
    "more single blocks": ({"num_single_layers": 3}, r"it has 3 residuals of single blocks, the model 2 of these"),
    "another prompt": ({"joint_attention_dim": 64}, r"its context_width is 64, the model's 96 \(joint_attention_dim\)"),
    "another latent": ({"in_channels": 16}, "its latent_channels is 4, the model's 16"),
    "pixels": ({"conditioning_embedding_channels": 32}, "conditioning_embedding_channels .*reads pixels of its image"),
    "no residuals": (
        {"num_layers": 0, "num_single_layers": 0},
        "num_layers: plus num_single_layers must be 1 to 256, not 0",
    ),
    "many modes": ({"num_mode": 65}, "num_mode: must be less than or equal to 64"),
    "other axes": ({"axes_dims_rope": (2, 2, 2)}, "attention_head_dim: must be 6, the sum of axes_dims_rope, not 8"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_with_the_fields_that_differ(model: Model, tmp_path: Path, case: str) -> None:
    options, why = MISFITS[case]
    network = flux_controlnet(**{"num_layers": 1, **options})
    folder = save({"net": network}, tmp_path)["net"]
    with pytest.raises((ControlNetUnusable, InvalidRequest), match=rf"ControlNet net .*{why}"):
        find_controlnet("net", folder, base=layout_of(model), dtype=torch.float32)


def test_a_controlnet_of_stable_diffusion_3_is_refused(model: Model, tmp_path: Path) -> None:
    folder = save({"net": sd3_controlnet(num_layers=1)}, tmp_path)["net"]
    why = "it is made for a transformer of Stable Diffusion 3, and the model is a transformer of Flux.1"
    assert why in check_controlnet("net", folder, layout_of(model))
