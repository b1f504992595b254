"""In half precision the engine draws as stock does in the same element type; pictures of shared turns say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import PIL.Image
import pytest
import torch

from bottega.device.devices import pick_device
from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.fair_order import Share
from bottega.model.model import Model
from bottega.model.operations import Operations
from bottega.model.schedulers import KARRAS, SamplerKind
from tests.samples.edits import box_mask, edit_order
from tests.samples.small_model import SIZE, small_model
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.schedulers import BASIC
from tests.support.stock import Stock, assert_close, assert_same_image, deviation
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


def test_a_resumed_job_remembers_that_its_weights_were_rounded(half: Model) -> None:
    order = EngineOrder(key="cut", spec=SPEC)
    rounded = replace(half, operations=Operations(rounds_weights=True))
    left = ManualEngine(make_engine(rounded, TOGETHER)).draw(order).all(JobCheckpointed)[0]
    for data, as_stock in ((left.data, False), (b"", True)):
        resumed = ManualEngine(make_engine(half, TOGETHER)).draw(replace(order, checkpoint=data))
        assert resumed.record.denoised_as_stock == as_stock


# float16 is slow on a CPU. Three steps are the fewest that show what DPM++ remembers.
PLAIN = ResolvedSpec(prompt="a big red star on a blue background", num_inference_steps=3, width=32, height=32, seed=1)
MASK = box_mask((4, 8, 20, 28), 32, 32)
SAMPLERS = [*((kind, False) for kind in BASIC), *((kind, True) for kind in BASIC if kind in KARRAS)]
# In both precision, how far from stock, as a share of how far stock itself is from float32. A sum over a group of
# another size rounds differently, by as much as the element type does anyway: up to 1.1 was seen, most are equal.
STRAY = 3.0

# What Diffusers says whenever it decodes in float16 with a VAE that overflows there.
pytestmark = pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated:FutureWarning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The model and stock in the same element type."""

    model: Model
    stock: Stock


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def both(request: pytest.FixtureRequest) -> Half:
    return Half(model=load(small_model(), dtype=request.param), stock=Stock(small_model(), dtype=request.param))


@pytest.fixture(scope="module")
def whole() -> Stock:
    """Stock in float32."""
    return Stock(small_model())


@pytest.fixture(scope="module")
def source(whole: Stock) -> PIL.Image.Image:
    return PIL.Image.fromarray(whole.reference(PLAIN).pixels)


@pytest.mark.parametrize(
    ("both", "kind", "karras"),
    [
        (torch.bfloat16, SamplerKind.EULER_ANCESTRAL, False),
        (torch.bfloat16, SamplerKind.DDIM, False),
        (torch.float16, SamplerKind.DPMPP_2M, True),
    ],
    indirect=["both"],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_request_alone_is_equal_to_stock_in_the_same_element_type(
    both: Half, kind: SamplerKind, karras: bool
) -> None:
    spec = replace(PLAIN, sampler=kind, use_karras_sigmas=karras)
    drawing = ManualEngine(make_engine(both.model, EngineLimits())).draw(EngineOrder(key=1, spec=spec))
    theirs = both.stock.reference(spec)
    assert drawing.latents[0].dtype == theirs.latent.dtype == both.model.dtype
    assert torch.equal(drawing.latents[0], theirs.latent)
    assert (drawing.pixels[0] == theirs.pixels).all()


def test_an_edit_is_equal_to_stock_in_the_same_element_type(both: Half, source: PIL.Image.Image) -> None:
    spec = replace(PLAIN, strength=0.9999, sampler=SamplerKind.EULER_ANCESTRAL)
    drawing = ManualEngine(make_engine(both.model, EngineLimits())).draw(edit_order(spec, source, MASK))
    theirs = both.stock.edit(spec, source, MASK)
    assert drawing.latents[0].dtype == theirs.latent.dtype == both.model.dtype
    assert torch.equal(drawing.latents[0], theirs.latent)
    assert (drawing.pixels[0] == theirs.pixels).all()


def test_a_request_beside_others_strays_little_further_than_the_element_type_does(both: Half, whole: Stock) -> None:
    specs = [PLAIN, replace(PLAIN, sampler=SamplerKind.EULER_ANCESTRAL, guidance_scale=1.0, seed=2)]
    drawings = ManualEngine(make_engine(both.model, TOGETHER)).run(
        {0: [EngineOrder(key=key, spec=spec) for key, spec in enumerate(specs)]}
    )
    for key, spec in enumerate(specs):
        assert drawings[key].record.provenance.mean_group_requests > 1.5
        theirs, exact = both.stock.reference(spec).latent.float(), whole.reference(spec).latent
        assert 0 < deviation(theirs, exact) < 0.1
        assert deviation(drawings[key].latents[0].float(), theirs) <= STRAY * deviation(theirs, exact)


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    absent = f"cuda:{torch.cuda.device_count() + 7}"
    with pytest.raises(ValueError, match=rf"{absent}: this machine has {torch.cuda.device_count()} CUDA devices"):
        pick_device(absent)


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Without TF32, which rounds factors to 10 bits: a CPU does not."""
    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matrices.allow_tf32, convolutions.allow_tf32
    matrices.allow_tf32 = convolutions.allow_tf32 = False
    yield
    matrices.allow_tf32, convolutions.allow_tf32 = before


@pytest.mark.gpu
def test_float32_on_a_gpu_is_the_image_of_stock_there(source: PIL.Image.Image) -> None:
    easel, stock = ManualEngine(make_engine(load(device="cuda:0"), EngineLimits())), Stock(device="cuda:0")
    for kind, karras in SAMPLERS:
        spec = replace(PLAIN, num_inference_steps=8, sampler=kind, use_karras_sigmas=karras)
        edit = replace(spec, strength=0.9999)
        for order, theirs in (
            (EngineOrder(key=1, spec=spec), stock.reference(spec)),
            (edit_order(edit, source, MASK), stock.edit(edit, source, MASK)),
        ):
            drawing = easel.draw(order)
            assert drawing.latents[0].device == torch.device("cuda:0")
            assert_close(drawing.latents[0], theirs.latent)
            assert_same_image(drawing.pixels[0], theirs.pixels)


@pytest.mark.gpu
def test_float16_on_a_gpu_strays_little_further_than_float16_does() -> None:
    easel = ManualEngine(make_engine(load(dtype=torch.float16, device="cuda:0"), EngineLimits()))
    stock, whole = Stock(dtype=torch.float16, device="cuda:0"), Stock(device="cuda:0")
    for kind, karras in SAMPLERS:
        spec = replace(PLAIN, num_inference_steps=8, sampler=kind, use_karras_sigmas=karras)
        theirs, exact = stock.reference(spec).latent.float(), whole.reference(spec).latent
        ours = easel.draw(EngineOrder(key=1, spec=spec)).latents[0].float()
        assert deviation(ours, theirs) <= STRAY * deviation(theirs, exact)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("kind", [SamplerKind.EULER_ANCESTRAL, SamplerKind.DPMPP_2M], ids=["EULER_ANCESTRAL", "DPMPP"])
def test_a_checkpoint_from_the_cpu_is_resumed_on_a_gpu(kind: SamplerKind) -> None:
    spec = replace(PLAIN, num_inference_steps=8, sampler=kind)
    unbroken = ManualEngine(make_engine(load(), EngineLimits())).draw(EngineOrder(key=1, spec=spec))
    cut = unbroken.all(JobCheckpointed)[3]
    resumed = ManualEngine(make_engine(load(device="cuda:0"), EngineLimits())).draw(
        EngineOrder(key=1, spec=spec, checkpoint=cut.data)
    )
    assert resumed.job is not None
    assert resumed.job.steps_resumed == cut.steps_done
    # Another device sums in another order at every step.
    assert deviation(resumed.latents[0].cpu(), unbroken.latents[0]) < 1e-3
