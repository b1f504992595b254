"""LoRAs without a low-rank form draw what stock Diffusers draws with changed weights, merged or not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bottega.addons.loras.engine import Layers, LoraAtScale, LoraLayer, WholeLayer, make_layer, make_set
from bottega.addons.loras.engine.addon import EngineLoras
from bottega.addons.loras.engine.lora import weight_difference
from bottega.device import devices
from bottega.device.memory_plan import MemoryPlan
from bottega.engine.events import JobFailed, JobStarted
from bottega.engine.job import EngineOrder
from bottega.errors import LoraUnusable, TooLarge
from bottega.fair_order import Share
from bottega.model.model import Model
from bottega.model_files.family_names import UNET
from tests.samples.engine_loras import LorasByHand, random_layers
from tests.samples.small_model import small_model
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.stock import assert_close, latent_of, load_stock
from tests.unit.addons.loras.engine.test_exact import SPEC, styled_order

_RESERVED = "LoRAs without a low-rank form"
_UNET_TARGETS = ("attn1.to_q", "attn2.to_out.0", "conv1", "ff.net.2", "downsamplers.0.conv")


def _parts(weight: Tensor, place: int) -> dict[str, Tensor]:
    """Return the tensors of a change, of another kind for each place."""
    generator = torch.Generator().manual_seed(place)
    out, inputs, *kernel = weight.shape

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    ones = [1] * len(kernel)
    product = {"down": draw(3, inputs, *kernel), "up": draw(out, 3, *ones)}
    norms = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
    kinds: list[dict[str, Tensor]] = [
        {**product, "down2": draw(2, inputs, *kernel), "up2": draw(out, 2, *ones)},
        {"kron": draw(2, 4), "full": draw(out // 2, inputs // 4, *kernel)},
        {"kron": draw(4, 2), "down": draw(3, inputs // 2, *kernel), "up": draw(out // 4, 3, *ones)},
        {"full": draw(out, inputs, *kernel) * 0.2},
        {**product, "magnitude": norms * 1.1},
        {**product, "dora_scale": norms * 0.9},
    ]
    return kinds[place % len(kinds)]


def _layers(network: nn.Module, targets: tuple[str, ...]) -> Layers:
    layers = {}
    paths = [path for path, module in network.named_modules() if path.endswith(targets)]
    for place, path in enumerate(paths):
        module: Any = network.get_submodule(path)
        parts = _parts(module.weight.detach(), place)
        if module.bias is not None:
            parts["bias"] = torch.full_like(module.bias, 0.05).detach()
        layers[path] = make_layer(parts, 0.5)
    assert any(isinstance(layer, WholeLayer) for layer in layers.values())
    return layers


@pytest.fixture
def components(model: Model) -> dict[str, Layers]:
    targets = {UNET: _UNET_TARGETS, "text_encoder": ("q_proj", "fc1"), "text_encoder_2": ("fc2",)}
    return {name: _layers(model.networks[name], paths) for name, paths in targets.items()}


def _changed(stock: Any, components: Mapping[str, Layers], strength: float) -> Any:
    """Return stock Diffusers with weights to which the LoRA has been added."""
    changed = copy.copy(stock)
    for name, layers in components.items():
        network = copy.deepcopy(getattr(stock, name))
        changed.register_modules(**{name: network})
        for path, layer in layers.items():
            module: Any = network.get_submodule(path)
            if isinstance(layer, WholeLayer):
                added, bias = weight_difference(layer, strength, module.weight.detach()), layer.parts.get("bias")
            else:
                product = layer.up.flatten(1) @ layer.down.flatten(1)
                added, bias = strength * layer.scale * product.view_as(module.weight), layer.bias
            assert added is not None
            module.weight.data += added
            if bias is not None:
                module.bias.data += strength * bias
    return changed


@pytest.mark.parametrize("patches", [False, True], ids=["beside", "inside"])
def test_a_set_draws_what_stock_draws_with_the_changed_weights(
    model: Model, components: dict[str, Layers], patches: bool
) -> None:
    stock = load_stock(small_model())
    low_rank = {UNET: random_layers(model.backbone.network, 3)}
    source = LorasByHand.of({"whole": components, "low": low_rank})
    engine = make_engine(model, TOGETHER, loras=source)
    weights = lora_weights(engine)
    weights.costs = FixedCosts(pays=patches)
    before = {name: value.clone() for name, value in model.backbone.network.state_dict().items()}
    try:
        easel = ManualEngine(engine)
        drawing = easel.draw(styled_order({"whole": 0.7}))
        assert_close(drawing.latents[0], latent_of(_changed(stock, components, 0.7), SPEC))
        assert (weights.patched is not None) == patches
        assert drawing.record.exact
        # A LoRA that is merged must not change what the next one's norms are computed from.
        both = easel.draw(styled_order({"whole": 0.7, "low": 1.2}))
        twice = _changed(_changed(stock, components, 0.7), low_rank, 1.2)
        assert_close(both.latents[0], latent_of(twice, SPEC))
        mixed = [
            styled_order({"whole": 0.7}, key="a"),
            styled_order({"low": 1.2}, replace(SPEC, seed=2), key="b"),
            styled_order({}, replace(SPEC, seed=3), key="c"),
        ]
        drawn = easel.run({0: mixed})
        assert drawn["b"].record.provenance.mean_group_requests > 2
        assert_close(drawn["a"].latents[0], drawing.latents[0])
        assert_close(drawn["c"].latents[0], latent_of(stock, replace(SPEC, seed=3)))
    finally:
        weights.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.network.state_dict().items())


@pytest.mark.parametrize("patches", [False, True], ids=["beside", "inside"])
def test_changed_norms_draw_what_stock_draws_and_share_steps_among_themselves(model: Model, patches: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    targets = {UNET: ("norm1", "norm3", ".norm", "conv_norm_out"), "text_encoder": ("layer_norm1",)}
    components: dict[str, Layers] = {}
    for name, endings in targets.items():
        norms = {path: norm for path, norm in model.networks[name].named_modules() if path.endswith(endings)}
        components[name] = {
            path: make_layer(
                {part: torch.randn(norm.weight.shape, generator=generator) * 0.2 for part in ("norm", "bias")}, 1.0
            )
            for path, norm in norms.items()
        }
    stock = load_stock(small_model())
    engine = make_engine(model, TOGETHER, loras=LorasByHand.of({"norms": components}))
    weights = lora_weights(engine)
    weights.costs = FixedCosts(pays=patches)
    changed = _changed(stock, components, 0.7)
    try:
        easel = ManualEngine(engine)
        drawing = easel.draw(styled_order({"norms": 0.7}))
        assert_close(drawing.latents[0], latent_of(changed, SPEC))
        assert (drawing.latents[0] - latent_of(stock, SPEC)).abs().max() > 0.05
        mixed = [
            styled_order({"norms": 0.7}, key="a"),
            styled_order({"norms": 0.7}, replace(SPEC, seed=2), key="b"),
            styled_order({}, replace(SPEC, seed=3), key="c"),
        ]
        drawn = easel.run({0: mixed})
        for order, pipeline in zip(mixed, (changed, changed, stock), strict=True):
            assert_close(drawn[order.key].latents[0], latent_of(pipeline, order.spec))
        assert drawn["b"].record.provenance.mean_group_requests > 1
    finally:
        weights.restore()


def test_in_half_precision_a_set_says_that_it_is_not_exact(components: dict[str, Layers]) -> None:
    model = load(small_model(), dtype=torch.bfloat16)
    engine = make_engine(model, TOGETHER, loras=LorasByHand.of({"whole": components}))
    drawing = ManualEngine(engine).draw(styled_order({"whole": 0.7}, replace(SPEC, num_inference_steps=2)))
    assert not drawing.record.exact
    assert [use.rounded_otherwise for use in drawing.record.provenance.loras] == [True]


@dataclass
class _Ticking:
    """A clock that goes on by a second whenever it is read."""

    now_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def _submit_running(model: Model, source: LorasByHand) -> tuple[ManualEngine, Drawing, EngineLoras]:
    """Return an engine with a job that makes steps, and its add-on. In a turn, one piece of a set is made."""
    easel = ManualEngine(make_engine(model, TOGETHER, loras=source, clock=_Ticking()))
    running = easel.submit(EngineOrder(key="running", spec=replace(SPEC, num_inference_steps=200)))
    easel.turn()
    (addon,) = (addon for addon in easel.engine.addons if isinstance(addon, EngineLoras))
    return easel, running, addon


def _turn_until_started(easel: ManualEngine, drawings: Sequence[Drawing]) -> int:
    """Return the number of turns until all jobs have started."""
    turns = 0
    while not all(drawing.all(JobStarted) for drawing in drawings):
        easel.turn()
        turns += 1
        assert not any(drawing.all(JobFailed) for drawing in drawings)
    return turns


def test_other_jobs_make_steps_while_a_set_is_made(model: Model, components: dict[str, Layers]) -> None:
    easel, running, addon = _submit_running(model, LorasByHand.of({"whole": components}))
    late = easel.submit(styled_order({"whole": 0.7}, key="late"))
    assert running.job is not None
    made = running.job.steps_done
    turns = _turn_until_started(easel, [late])
    layers = sum(map(len, components.values())) // 2
    assert turns > layers, "a turn changes one layer, or two"
    assert running.job.steps_done > made + layers
    easel.engine.cancel("late")
    easel.engine.cancel("running")
    assert not addon._making


def _held_bytes(addon: EngineLoras, plan: MemoryPlan, layers: Mapping[str, Layers]) -> int:
    """Return what is reserved for a set of these layers while it is used; it is not used any more."""
    use = LoraAtScale(digest="a", scale=1.0, layers=layers)
    made = addon.weights.denoiser_set([use]) if UNET in layers else addon.weights.text_set([use])
    held = plan.reserved[_RESERVED]
    del made
    gc.collect()
    addon.weights.enter([None])
    addon.weights.leave()
    return held


def test_a_set_that_several_jobs_use_is_made_once_and_outlives_the_first_of_them(
    model: Model, components: dict[str, Layers]
) -> None:
    plan = MemoryPlan(64 << 20)
    source = LorasByHand.of({"whole": {UNET: components[UNET]}})
    easel, _, addon = _submit_running(replace(model, memory=plan), source)
    others = (64 << 20) - _held_bytes(addon, plan, components) - sum(plan.reserved.values())
    plan.reserve("others", others - others % 4096)
    first = easel.submit(styled_order({"whole": 0.7}, key="first"))
    late = [easel.submit(styled_order({"whole": 0.7}, key=str(number))) for number in range(3)]
    while not addon._making or len(easel.engine.jobs) < 5:
        easel.turn()
        assert not any(drawing.all(JobFailed) for drawing in (first, *late))
    easel.engine.cancel("first")
    turns = _turn_until_started(easel, late)
    assert turns <= len(components[UNET])
    assert len({job.requests[0].loras for job in easel.engine.jobs.values() if job.key != "running"}) == 1


def test_all_jobs_that_use_a_set_fail_if_there_is_no_memory_for_it(model: Model, components: dict[str, Layers]) -> None:
    plan = MemoryPlan(64 << 20)
    source = LorasByHand.of({"whole": {UNET: components[UNET]}})
    easel, _, addon = _submit_running(replace(model, memory=plan), source)
    plan.reserve("others", (64 << 20) - sum(plan.reserved.values()))
    late = [easel.submit(styled_order({"whole": 0.7}, key=str(number))) for number in range(2)]
    while not all(drawing.ended for drawing in late):
        easel.turn()
    assert all(isinstance(drawing.error, TooLarge) for drawing in late)
    assert not addon.weights._making_bytes


def test_text_sets_of_several_tenants_take_the_memory_of_one(model: Model, components: dict[str, Layers]) -> None:
    plan = MemoryPlan(64 << 20)
    text = {name: layers for name, layers in components.items() if name != UNET}
    easel, _, addon = _submit_running(replace(model, memory=plan), LorasByHand.of({"whole": text}))
    held = _held_bytes(addon, plan, text)
    plan.reserve("others", (64 << 20) - sum(plan.reserved.values()) - held * 3 // 2)
    late = [
        easel.submit(replace(styled_order({"whole": scale}, key=str(scale)), share=Share(tenant=str(scale))))
        for scale in (0.5, 0.7, 0.9)
    ]
    _turn_until_started(easel, late)


def test_a_tenant_is_charged_for_making_its_sets(
    model: Model, components: dict[str, Layers], monkeypatch: pytest.MonkeyPatch
) -> None:
    easel, _, _ = _submit_running(model, LorasByHand.of({"whole": components}))
    monkeypatch.setattr(devices, "perf_counter", _Ticking())
    late = easel.submit(replace(styled_order({"whole": 0.7}, key="late"), share=Share(tenant="late")))
    used_s = easel.engine._batcher.used("late")
    easel.turn()
    assert easel.engine._batcher.used("late") > used_s
    used: list[float] = []
    while not late.all(JobStarted):
        easel.turn()
        used += [job.device_s for job in easel.engine.jobs.values() if job.key == "late"]
    assert len(used) > len(components[UNET]) // 2
    assert len(set(used)) > len(used) - 3, "it is charged in each turn"


def test_memory_is_reserved_while_a_set_is_used_or_merged(model: Model, components: dict[str, Layers]) -> None:
    plan = MemoryPlan(64 << 20)
    engine = make_engine(replace(model, memory=plan), TOGETHER, loras=LorasByHand.of({"whole": components}))
    weights = lora_weights(engine)
    use = LoraAtScale(digest="a", scale=1.0, layers=components)
    for merged in (False, True):
        made = weights.denoiser_set([use])
        held = plan.reserved[_RESERVED]
        assert held >= sum(each.size_bytes for each in made.differences_of(UNET).values()) > 0
        plan.reserve("others", (64 << 20) - held)
        with pytest.raises(TooLarge, match=f"{_RESERVED} would take"):
            weights.denoiser_set([replace(use, scale=2.0)])
        if merged:
            weights.put_in_denoiser(made)
        else:
            weights.enter([made])
            weights.leave()
        del made
        gc.collect()
        assert weights.denoiser_set([replace(use, scale=2.0)]).differences_of(UNET), (
            "one that is kept for later gives way"
        )
        weights.restore()
        weights.enter([None])
        weights.leave()
        plan.release("others")


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (
            WholeLayer(parts={"full": torch.zeros(8, 9)}, scale=1.0),
            "a LoRA does not fit unet.0: it changes a weight of the shape (8, 9), and the weight has (8, 8)",
        ),
        (
            LoraLayer(down=torch.zeros(2, 8), up=torch.zeros(8, 2), scale=1.0, bias=torch.zeros(8)),
            "a LoRA does not fit unet.0: it changes a bias of 8 values, which the module does not have",
        ),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_with_the_reason(layer: LoraLayer | WholeLayer, says: str) -> None:
    network = nn.Sequential(nn.Linear(8, 8, bias=False))
    use = LoraAtScale(digest="a", scale=1.0, layers={UNET: {"0": layer}})
    with pytest.raises(LoraUnusable) as refused:
        make_set([use], {UNET: network}, [UNET])
    assert refused.value.message == f"{says}; add it for this model"
