"""Recorded forwards against the network as it is, on a CPU that launches again what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from bottega.device.memory_plan import MemoryPlan
from bottega.engine.acceleration.graphs import (
    GraphedActivations,
    GraphedBackbone,
    Graphs,
    Key,
    RecordedForward,
    RecordedForwards,
)
from bottega.engine.denoiser import Denoiser
from bottega.engine.forward import Network, stack
from bottega.engine.spans import DeviceClock
from bottega.engine.warm_up import sample_job
from bottega.model.backbone import POOLED, Activations, Backbone, Inputs
from bottega.model.backbones.flux import FluxBackbone
from bottega.model.backbones.unet import UNetBackbone
from bottega.model.model import Model
from bottega.model.rows import Row
from tests.samples.flux_controlnets import FLUX_SHAPE
from tests.samples.masked_networks import plain_row, small_unet
from tests.support.replayed_capture import ReplayedCapture

EXACT = 1e-5
USES_BEFORE = 2


@pytest.fixture(scope="module")
def plain() -> UNetBackbone:
    return UNetBackbone(small_unet())


@pytest.fixture
def capture() -> ReplayedCapture:
    return ReplayedCapture()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def graphed(plain: UNetBackbone, capture: ReplayedCapture) -> GraphedBackbone:
    return GraphedBackbone(plain, RecordedForwards(budget_bytes=1 << 30), capture)


def inputs(*seeds: int, controlled: bool = False) -> Inputs:
    return replace(stack([plain_row(seed) for seed in seeds]), controlled=controlled)


def run(backbone: Backbone, given: Inputs, before_decoder: Callable[[Activations], None] = lambda _: None) -> Tensor:
    """A forward. before_decoder: once, where residuals are first needed."""
    activations = backbone.begin(given)
    done = False
    for block in backbone.blocks:
        if block.needs and not done:
            done = True
            before_decoder(activations)
        block.run(activations)
    return backbone.finish(activations)


def test_what_comes_often_is_recorded_and_computes_what_the_network_does(
    plain: UNetBackbone, capture: ReplayedCapture
) -> None:
    ours = graphed(plain, capture)
    made = []
    for number in range(USES_BEFORE + 3):
        given = inputs(number, number + 50)
        made.append((run(ours, given), run(plain, given)))
    assert all((one - other).abs().max() < EXACT for one, other in made), "nothing of an earlier forward is left"
    assert (capture.recorded, capture.launched) == (1, 3), "the whole network is one"
    assert (made[-1][0] - made[-2][0]).abs().max() > 0.1


def add(seed: int, row: int) -> Callable[[Activations], None]:
    """Residuals of one row, at each point."""

    def added(activations: Activations) -> None:
        generator = torch.Generator().manual_seed(seed)
        for point in sorted(activations.points):
            tensor = activations.points[point]
            tensor[row] += torch.randn(tensor.shape[1:], generator=generator)

    return added


def test_residuals_are_added_between_the_segments_and_are_not_there_the_next_time(
    plain: UNetBackbone, capture: ReplayedCapture
) -> None:
    ours = graphed(plain, capture)
    for number in range(USES_BEFORE + 3):
        given = inputs(1, 2, controlled=True)
        wanted, bare = run(plain, given, add(number, 1)), run(plain, given)
        made = run(ours, given, add(number, 1))
        assert (made - wanted).abs().max() < EXACT
        assert (made[1] - bare[1]).abs().max() > 1e-2
    decoders = sum(bool(block.needs) for block in plain.blocks)
    assert capture.recorded == 1 + decoders
    assert capture.launched == 3 * (1 + decoders)


def test_residuals_after_the_last_block_are_added_before_the_end(capture: ReplayedCapture) -> None:
    torch.manual_seed(0)
    flux = FluxBackbone(FluxTransformer2DModel(num_layers=1, num_single_layers=1, **FLUX_SHAPE))
    given = Inputs(
        sample=torch.randn(2, 16, 8, 8),
        timestep=torch.tensor([500.0, 20.0]),
        prompt_embeds=torch.randn(2, 5, 96),
        added={POOLED: torch.randn(2, 32)},
        controlled=True,
    )
    residuals = [torch.randn(2, 16, 32) for _ in flux.blocks]

    def draw(backbone: Backbone) -> Tensor:
        state = backbone.begin(given)
        for block in backbone.blocks:
            for point in block.needs:
                state.points[point] += residuals[point]
            block.run(state)
        for point in backbone.finish_needs:
            state.points[point] += residuals[point]
        return backbone.finish(state)

    ours = GraphedBackbone(flux, RecordedForwards(budget_bytes=1 << 30), capture)
    for _ in range(USES_BEFORE + 2):
        assert (draw(ours) - draw(flux)).abs().max() < EXACT
    assert (capture.recorded, capture.launched) == (3, 2 * 3)


def test_when_rows_leave_the_blocks_that_are_left_run_one_by_one(plain: UNetBackbone, capture: ReplayedCapture) -> None:
    ours = graphed(plain, capture)
    kept = [0, 2]
    launched = []
    for _ in range(USES_BEFORE + 2):

        def leave(activations: Activations) -> None:
            activations.select(kept, torch.tensor(kept))
            add(3, 1)(activations)

        given = inputs(4, 5, 6, controlled=True)
        assert (run(ours, given, leave) - run(plain, given, leave)).abs().max() < EXACT
        launched.append(capture.launched)
    assert launched == [0, 0, 1, 2], "the encoder alone"
    # What left has changed nothing for the next one of the same shape.
    given = inputs(7, 8, 9, controlled=True)
    assert (run(ours, given, add(1, 0)) - run(plain, given, add(1, 0))).abs().max() < EXACT


def test_a_prediction_stays_when_the_next_one_is_made(plain: UNetBackbone, capture: ReplayedCapture) -> None:
    ours = graphed(plain, capture)
    for _ in range(USES_BEFORE):
        run(ours, inputs(1))
    first = run(ours, inputs(1))
    copy = first.clone()
    run(ours, inputs(2))
    assert torch.equal(first, copy)


def test_loras_beside_the_weights_run_block_by_block_and_those_in_them_count(
    plain: UNetBackbone, capture: ReplayedCapture
) -> None:
    ours = graphed(plain, capture)
    for _ in range(USES_BEFORE + 1):
        run(ours, inputs(1))
    before, launched = run(ours, inputs(1)), capture.launched
    layer = plain.network.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_v")
    assert isinstance(layer, nn.Linear)
    handle = layer.register_forward_hook(lambda _module, _inputs, output: output * 3.0)
    beside = run(ours, inputs(1))
    assert torch.equal(beside, run(plain, inputs(1)))
    handle.remove()
    assert capture.launched == launched
    weight = layer.weight.detach().clone()
    layer.weight.mul_(3.0)
    patched = run(ours, inputs(1))
    assert (patched - run(plain, inputs(1))).abs().max() < EXACT
    layer.weight.copy_(weight)
    assert capture.launched == launched + 1
    assert (patched - beside).abs().max() < EXACT
    assert (patched - before).abs().max() > 1e-3


def test_shapes_are_recorded_by_themselves(plain: UNetBackbone, capture: ReplayedCapture) -> None:
    ours = graphed(plain, capture)
    shapes = [
        inputs(1),
        inputs(1, 2),
        stack([plain_row(1, size=(8, 24))]),
        replace(inputs(1), controlled=True),
        replace(inputs(1), prompt_embeds=inputs(1).prompt_embeds[:, :5]),
    ]
    for _ in range(USES_BEFORE + 1):
        for given in shapes:
            assert (run(ours, given) - run(plain, given)).abs().max() < EXACT
    assert isinstance(ours.begin(shapes[0]), GraphedActivations)
    assert capture.recorded == 4 + 1 + sum(bool(block.needs) for block in plain.blocks)


def key(number: int) -> Key:
    return (number, 4, 8, 8), (number, 7, 24), (), torch.float32, False


def made(size_bytes: int) -> RecordedForward:
    return RecordedForward(inputs(1), [], torch.zeros(1), size_bytes=size_bytes)


def often(store: RecordedForwards, number: int, size_bytes: int = 10) -> RecordedForward | None:
    for _ in range(USES_BEFORE):
        store.get(key(number), lambda: made(size_bytes))
    return store.get(key(number), lambda: made(size_bytes))


def test_the_shape_used_longest_ago_makes_room() -> None:
    store = RecordedForwards(budget_bytes=100, most=2)
    first, second = often(store, 1), often(store, 2)
    assert first is not None
    assert store.get(key(1), lambda: made(10)) is first
    often(store, 3)
    assert (len(store), store.used_bytes) == (2, 20)
    assert store.get(key(1), lambda: made(10)) is first
    assert store.get(key(2), lambda: made(10)) is not second
    by_bytes = RecordedForwards(budget_bytes=100, most=9)
    for number in range(1, 4):
        often(by_bytes, number, 40)
    assert (len(by_bytes), by_bytes.used_bytes) == (2, 80)


def test_what_cannot_be_recorded_or_is_too_large_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    store = RecordedForwards(budget_bytes=100)
    tried: list[int] = []

    def fail() -> RecordedForward:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    for _ in range(USES_BEFORE + 3):
        assert store.get(key(1), fail) is None
    assert len(tried) == 1
    assert "not permitted" in caplog.records[-1].__dict__["why"]
    assert often(store, 2, 101) is None
    assert "it needs 0 MiB" in caplog.records[-1].__dict__["why"]
    assert len(store) == 0


def test_recordings_have_their_place_in_the_budget_of_the_device(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryPlan(100)
    memory.reserve("model", 40)
    memory.observe_forward(64, 1, 2)
    store = RecordedForwards(budget_bytes=1000, memory=memory)
    assert often(store, 1, 30) is not None
    assert memory.reserved["graphs"] == 30
    assert often(store, 2, 40) is not None
    assert memory.reserved["graphs"] == 40, "the first one made room"
    assert often(store, 20, 30) is None, "forwards of twenty rows need what would be left"
    assert "forward passes need the memory that is left" in caplog.records[-1].__dict__["why"]
    assert memory.reserved["graphs"] == 0
    assert often(store, 3, 61) is None
    assert (len(store), memory.left_bytes) == (0, 60)
    often(store, 4, 30)
    store.clear()
    assert memory.left_bytes == 60


def test_an_engine_computes_by_graphs_until_they_are_taken_out(model: Model) -> None:
    capture = ReplayedCapture()
    graphs = Graphs(lambda _: capture)
    row = sample_job(model, DeviceClock(model.runtime)).requests[0].rows()[0]
    denoiser = Denoiser(Network(backbone=model.backbone, operations=model.operations))

    def noise(row: Row) -> Tensor:
        return next(iter(denoiser.predict([row]).noise.values()))

    before = noise(row)
    assert graphs.unsupported(model) == ""
    graphs.enable(model)
    for _ in range(USES_BEFORE + 2):
        during = noise(row)
    graphs.disable()
    assert capture.launched == 2
    assert (during - before).abs().max() < EXACT
    assert torch.equal(noise(row), before)
    assert capture.launched == 2
    assert "CUDA" in Graphs().unsupported(model)


def test_a_device_that_records_nothing_computes_as_it_did(plain: UNetBackbone) -> None:
    refusing = ReplayedCapture(refuses=torch.OutOfMemoryError("tried to allocate 2 GiB"))
    ours = graphed(plain, refusing)
    for number in range(USES_BEFORE + 2):
        assert torch.equal(run(ours, inputs(number)), run(plain, inputs(number)))
