"""Steps that reuse blocks of earlier ones: the same ones whatever is drawn beside, and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from bottega import rules
from bottega.device.memory_plan import MemoryPlan
from bottega.engine import checkpoint
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import encode_prompts
from bottega.engine.events import JobCheckpointed
from bottega.engine.forward import Network
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.request import ActiveControl, Request
from bottega.engine.spec import ResolvedSpec
from bottega.model import step_cache
from bottega.model.model import Model
from bottega.model.packed import mixed_backbone
from bottega.model.rows import LoraSet
from bottega.model.schedulers import SamplerKind
from bottega.planning import PackedTimes
from tests.samples.edits import box_mask, edit_order, template
from tests.samples.family_models import SIZE, Z_IMAGE, FamilyStock, family_model
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.stock import assert_close
from tests.support.torch_threads import torch_threads

FAMILY = "SD 3.5"
SPEC = ResolvedSpec(
    prompt="a big red star on the left",
    num_inference_steps=10,
    width=SIZE,
    height=SIZE,
    seed=3,
    sampler=SamplerKind.FLOW_MATCH_EULER,
    step_caching=True,
)
BLOCKS = 3
# Of a random network, with which some steps are reused and some are not.
THRESHOLD = 0.3


@pytest.fixture(scope="module")
def model() -> Model:
    return load(family_model(FAMILY))


@pytest.fixture(autouse=True)
def threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cache, "THRESHOLD", THRESHOLD)


@dataclass(slots=True)
class Reuse:
    """What stock blocks computed last, by row, and how often a row reused it."""

    steps: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    first: tuple[Tensor, Tensor] | None = None
    reused: int = 0

    def after_first(self, _: nn.Module, __: Any, arguments: dict[str, Tensor], output: tuple[Tensor, Tensor]) -> None:
        self.first = arguments["hidden_states"], output[1]

    def after_last(self, _: nn.Module, __: Any, output: tuple[None, Tensor]) -> tuple[None, Tensor]:
        assert self.first is not None
        made = []
        for row, (before, after, hidden) in enumerate(zip(*self.first, output[1], strict=True)):
            residual, known = after - before, self.steps.get(row)
            if known and (residual - known[0]).abs().mean() <= THRESHOLD * known[0].abs().mean():
                self.reused += 1
                made.append(after + known[1])
            else:
                self.steps[row] = residual, hidden - after
                made.append(hidden)
        return None, torch.stack(made)


@contextmanager
def reusing(network: Any) -> Iterator[Reuse]:
    """Let the blocks of stock's transformer compute every step, and replace what they return for reused ones."""
    reuse, blocks = Reuse(), network.transformer_blocks
    hooks = [
        blocks[0].register_forward_hook(reuse.after_first, with_kwargs=True),
        blocks[-1].register_forward_hook(reuse.after_last),
    ]
    yield reuse
    for hook in hooks:
        hook.remove()


def draw(model: Model, order: EngineOrder, limits: EngineLimits = TOGETHER) -> Drawing:
    return ManualEngine(make_engine(model, limits)).draw(order)


def reused_blocks(drawing: Drawing) -> int:
    return drawing.record.provenance.blocks_reused


def test_steps_are_reused_as_stock_blocks_show(model: Model) -> None:
    stock = FamilyStock(FAMILY)
    drawing = draw(model, EngineOrder(key="it", spec=SPEC))
    with reusing(stock.text.transformer) as reuse:
        theirs = stock.latent(SPEC)
    rows = 2 * SPEC.num_inference_steps
    assert 0 < reuse.reused < rows - 2
    assert_close(drawing.latents[0], theirs)
    record = drawing.record
    assert record.provenance.blocks_reused == reuse.reused * (BLOCKS - 1)
    assert record.provenance.blocks_total == rows * BLOCKS
    assert not record.exact


def test_neighbours_change_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other sizes, without guidance and without reuse, in the same turns."""
    monkeypatch.setattr(PackedTimes, "ratio", 0.0)
    specs = [
        SPEC,
        replace(SPEC, seed=5, width=2 * SIZE),
        replace(SPEC, seed=6, guidance_scale=1.0, num_inference_steps=14),
        replace(SPEC, seed=7, height=SIZE // 2, step_caching=False),
    ]
    orders = [EngineOrder(key=spec.seed, spec=spec) for spec in specs]
    together = ManualEngine(make_engine(model, TOGETHER)).run({0: orders[:2], 2: orders[2:]})
    for order in orders:
        alone, drawing = draw(model, order), together[order.key]
        assert drawing.record.provenance.mean_group_requests > 1
        assert reused_blocks(drawing) == reused_blocks(alone)
        assert (reused_blocks(drawing) > 0) is order.spec.step_caching
        assert drawing.record.exact is not order.spec.step_caching
        assert_close(drawing.latents[0], alone.latents[0])


def test_a_neighbour_with_a_longer_prompt_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the shorter prompt are padded while the neighbour is there, which is for some steps only."""
    monkeypatch.setattr(step_cache, "THRESHOLD", 0.5)
    model = load(family_model(Z_IMAGE))
    spec = replace(SPEC, guidance_scale=0.0)
    longer = replace(spec, prompt=" ".join([SPEC.prompt] * 9), num_inference_steps=6, seed=5)
    orders = [EngineOrder(key=each.seed, spec=each) for each in (spec, longer)]
    lengths = {len(encode_prompts(model, order.spec).conditional.prompt) // 32 for order in orders}
    assert len(lengths) == 2
    together = ManualEngine(make_engine(model, TOGETHER)).run({0: orders[:1], 2: orders[1:]})
    for order in orders:
        alone, drawing = draw(model, order), together[order.key]
        assert drawing.record.provenance.mean_group_requests > 1
        assert reused_blocks(drawing) == reused_blocks(alone) > 0
        assert_close(drawing.latents[0], alone.latents[0])


def test_a_resumed_request_reuses_the_same_steps(model: Model) -> None:
    order = EngineOrder(key="it", spec=SPEC)
    often = EngineLimits(max_rows=2, checkpoint_interval_s=0.0)
    unbroken, other = draw(model, order, often), load(family_model(FAMILY))
    for left in unbroken.all(JobCheckpointed)[1:-1:3]:
        resumed = draw(other, replace(order, checkpoint=left.data), often)
        assert torch.equal(resumed.latents[0], unbroken.latents[0])
        assert not resumed.record.exact, "the steps before may have reused others"
        assert resumed.record.provenance.blocks_total == 2 * BLOCKS * (SPEC.num_inference_steps - left.steps_done)


def test_a_checkpoint_has_no_step_caches_that_are_too_large_for_it(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order = EngineOrder(key="it", spec=SPEC)
    often = EngineLimits(max_rows=2, checkpoint_interval_s=0.0)
    unbroken = draw(model, order, often)
    tensors = safetensors.torch.load(unbroken.all(JobCheckpointed)[4].data)
    caches = {name for name in tensors if "step_cache" in name}
    assert len(caches) == 4
    least_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name not in caches)
    monkeypatch.setattr(rules, "MAX_CHECKPOINT_BYTES", least_bytes + checkpoint._HEADER_BYTES)
    left = draw(model, order, often).all(JobCheckpointed)[4]
    assert set(safetensors.torch.load(left.data)) == set(tensors) - caches
    resumed = draw(model, replace(order, checkpoint=left.data), often)
    assert resumed.record.provenance.blocks_total == 2 * BLOCKS * (SPEC.num_inference_steps - left.steps_done)
    assert torch.isfinite(resumed.latents[0]).all()

    monkeypatch.setattr(rules, "MAX_CHECKPOINT_BYTES", 1000)
    without = draw(model, order, often)
    assert not without.all(JobCheckpointed)
    assert torch.equal(without.latents[0], unbroken.latents[0])
    assert sum("too large for a checkpoint" in record.message for record in caplog.records) == 1


def open_request(model: Model, seed: int = 3) -> Request:
    spec = replace(SPEC, seed=seed)
    return Request(model, spec, encode_prompts(model, spec))


def test_other_loras_or_controlnets_make_steps_stale(model: Model) -> None:
    denoiser, request = Denoiser(Network(backbone=model.backbone)), open_request(model)

    def kept(of: Request) -> list[bool]:
        return [bool(row.step_cache and row.step_cache.first is not None) for row in of.rows()]

    def resumed() -> Request:
        made = Request(model, SPEC, encode_prompts(model, SPEC), resume=request.state())
        made.loras, made.loras_from = request.loras, request.loras_from
        return made

    def step() -> None:
        request.advance({row.half: noise for row, noise in denoiser.predict(request.rows()).noise.items()})

    assert kept(request) == [False, False]
    step()
    assert kept(request) == kept(request) == [True, True]
    request.loras, request.loras_from = LoraSet(key=(), components={}), request.step
    assert kept(resumed()) == [False, False]
    assert kept(request) == [False, False]
    step()
    assert kept(request) == [True, True]
    assert kept(resumed()) == [True, True]
    at = request.evaluation
    request.controls = (ActiveControl(handle="net", first=at, last=at + 1),)
    request.rows()
    request.controls = ()
    assert kept(request) == [False, False]


def test_step_caches_have_a_bound_and_end_with_their_request(model: Model) -> None:
    plan = MemoryPlan(0)
    measured = step_cache.StepCacheMemory()
    first, second = open_request(model), open_request(model, 4)
    Denoiser(Network(backbone=model.backbone, step_caches=measured)).predict(first.rows())
    pair_bytes = sum(row.step_cache.size_bytes for row in first.rows() if row.step_cache)
    assert pair_bytes > 0
    first.forget_steps()
    plan.budget_bytes = 8 * pair_bytes + 7
    denoiser = Denoiser(Network(backbone=model.backbone, step_caches=step_cache.StepCacheMemory(plan)))
    for request, reused in ((first, 2), (second, 0)):
        denoiser.predict(request.rows())
        assert len(denoiser.predict(request.rows()).reused) == reused
        assert plan.reserved["step caches"] == pair_bytes
    first.forget_steps()
    denoiser.predict(second.rows())
    assert len(denoiser.predict(second.rows()).reused) == 2
    second.forget_steps()
    denoiser.predict(open_request(model, 5).rows()[:1])
    assert plan.reserved["step caches"] == pair_bytes // 2


def test_where_steps_cannot_be_reused_they_are_computed(model: Model) -> None:
    """Edits, and fixed rows; UNets change the shape of what their blocks pass on."""
    edit = edit_order(replace(SPEC, strength=1.0), template(SIZE, SIZE), box_mask((4, 8, 20, 28), SIZE, SIZE))
    unet = EngineOrder(key="it", spec=replace(SPEC, sampler=SamplerKind.EULER))
    cases = [
        (model, edit, TOGETHER),
        (model, EngineOrder(key="it", spec=SPEC), EngineLimits(fixed_rows=4)),
        (load(family_model("SD 1")), unet, TOGETHER),
    ]
    for drawn_by, order, limits in cases:
        with torch_threads(2):
            plain = draw(drawn_by, replace(order, spec=replace(order.spec, step_caching=False)), limits)
            cached = draw(drawn_by, order, limits)
        assert torch.equal(cached.latents[0], plain.latents[0])
        assert cached.record.exact
        assert not reused_blocks(cached)


def test_the_time_of_reused_steps_says_nothing_about_others(model: Model) -> None:
    request = Request(model, SPEC, encode_prompts(model, SPEC))
    denoiser = Denoiser(Network(backbone=model.backbone, packed=mixed_backbone(model.backbone)))
    for turns, reused in ((1, 0), (1, 2)):
        prediction = denoiser.predict(request.rows())
        assert (denoiser.step_times.turns, len(prediction.reused)) == (turns, reused)
