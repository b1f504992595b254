"""In half precision, pictures whose steps were not computed alone say so, and those that share no turns are stock's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bottega.device.memory_plan import MemoryPlan
from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.fair_order import Share
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.small_model import SIZE, small_model
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.stock import Stock
from tests.support.torch_threads import torch_threads

SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=4, width=SIZE, height=SIZE, seed=1
)
OTHER = replace(SPEC, prompt="a green circle", sampler=SamplerKind.EULER_ANCESTRAL, seed=2)
# All that may share a turn do.
TOGETHER = EngineLimits(max_wait_turns=0)


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.fixture(scope="module")
def half() -> Model:
    return load(small_model(), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock(small_model(), dtype=torch.bfloat16)


def assert_stock(drawing: Drawing, stock: Stock) -> None:
    """Every image is stock's to the last bit."""
    assert drawing.job is not None
    for index, (latent, pixels) in enumerate(zip(drawing.latents, drawing.pixels, strict=True)):
        theirs = stock.reference(drawing.job.order.spec, index=index)
        assert torch.equal(latent, theirs.latent)
        assert (pixels == theirs.pixels).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_pictures_of_shared_turns_say_so_in_half_precision_only(half: Model, model: Model, dtype: torch.dtype) -> None:
    easel = ManualEngine(make_engine(half if dtype == half.dtype else model, TOGETHER))
    drawings = easel.run({0: [EngineOrder(key="one", spec=SPEC), EngineOrder(key="other", spec=OTHER)]})
    assert [drawing.record.provenance.mean_group_requests > 1 for drawing in drawings.values()] == [True, True]
    shared = [drawing.record.shared_in_half_precision for drawing in drawings.values()]
    assert shared == [dtype == torch.bfloat16] * 2
    assert not easel.draw(EngineOrder(key="alone", spec=SPEC)).record.shared_in_half_precision


def test_beside_others_one_that_may_share_no_turns_is_stocks_to_the_last_bit(half: Model, stock: Stock) -> None:
    orders = [
        EngineOrder(key="one", spec=replace(SPEC, num_inference_steps=8)),
        EngineOrder(key="alone", spec=replace(SPEC, num_images=2, seed=5), shared_turns=False),
        EngineOrder(key="other", spec=OTHER),
    ]
    # Four images in three turns: two have a turn each, so that the others have to share one.
    drawings = ManualEngine(make_engine(half, EngineLimits(max_wait_turns=2))).run({0: orders})
    assert {key: drawing.record.shared_in_half_precision for key, drawing in drawings.items()} == {
        "one": True,
        "alone": False,
        "other": True,
    }
    assert drawings["alone"].record.provenance.mean_group_requests == 1
    assert_stock(drawings["alone"], stock)


@pytest.mark.parametrize("may_share", [True, False])
def test_a_step_is_split_for_another_tenant_only_if_it_may_be(half: Model, may_share: bool) -> None:
    easel = ManualEngine(make_engine(half, EngineLimits()))
    easel.engine.warm_up()
    easel.draw(EngineOrder(key="before", spec=SPEC, share=Share(tenant="light", weight=100.0)))
    large = replace(SPEC, width=4 * SIZE, height=4 * SIZE)
    order = EngineOrder(key="heavy", spec=large, share=Share(tenant="heavy"), shared_turns=may_share)
    heavy = easel.submit(order)
    easel.turn()
    assert heavy.job is not None
    assert heavy.job.steps_done == (0 if may_share else 1)
    easel.run()
    assert heavy.record.shared_in_half_precision == may_share


def test_padding_counts_as_company_and_one_that_may_share_no_turns_has_none(half: Model, stock: Stock) -> None:
    easel = ManualEngine(make_engine(half, EngineLimits(fixed_rows=8)))
    assert easel.draw(EngineOrder(key="padded", spec=SPEC)).record.shared_in_half_precision
    alone = easel.draw(EngineOrder(key="alone", spec=SPEC, shared_turns=False))
    assert not alone.record.shared_in_half_precision
    assert_stock(alone, stock)


def test_rows_that_find_no_memory_together_say_that_they_were_computed_apart(half: Model) -> None:
    easel = ManualEngine(make_engine(replace(half, memory=MemoryPlan()), TOGETHER))

    def refuse_two(_: object, inputs: object, arguments: dict[str, torch.Tensor]) -> None:
        if len(arguments["hidden_states"]) > 1:
            raise torch.OutOfMemoryError("none left")

    hook = half.backbone.unet.up_blocks[0].register_forward_pre_hook(refuse_two, with_kwargs=True)
    try:
        drawing = easel.draw(EngineOrder(key="large", spec=SPEC, shared_turns=False))
    finally:
        hook.remove()
    assert drawing.record.shared_in_half_precision


@pytest.mark.parametrize("company", [True, False])
def test_a_resumed_job_remembers_whether_its_turns_were_shared(half: Model, company: bool) -> None:
    order = EngineOrder(key="cut", spec=replace(SPEC, num_inference_steps=8))
    easel = ManualEngine(make_engine(half, TOGETHER))
    drawing = easel.submit(order)
    if company:
        easel.submit(EngineOrder(key="other", spec=OTHER))
    while len(drawing.all(JobCheckpointed)) < 4:
        easel.turn()
    left = drawing.all(JobCheckpointed)[-1]
    resumed = ManualEngine(make_engine(half, TOGETHER)).draw(replace(order, checkpoint=left.data))
    assert resumed.job is not None
    assert resumed.job.steps_resumed == left.steps_done > 0
    assert resumed.record.provenance.mean_group_requests == 1
    assert resumed.record.shared_in_half_precision == company
