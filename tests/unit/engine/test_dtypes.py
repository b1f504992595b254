"""Half precision and devices: the engine draws as stock Diffusers does in the same element type, on the same device."""

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
from bottega.model.model import Model
from bottega.model.schedulers import KARRAS, SamplerKind
from tests.samples.edits import box_mask, edit_order
from tests.samples.small_model import small_model
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.schedulers import BASIC
from tests.support.stock import Stock, assert_close, assert_same_image, deviation

# float16 is slow on a CPU. Three steps are the fewest that show what DPM++ remembers.
PLAIN = ResolvedSpec(prompt="a big red star on a blue background", num_inference_steps=3, width=32, height=32, seed=1)
MASK = box_mask((4, 8, 20, 28), 32, 32)
SAMPLERS = [*((kind, False) for kind in BASIC), *((kind, True) for kind in BASIC if kind in KARRAS)]
TOGETHER = EngineLimits(max_wait_turns=0)
# In half precision, how far from stock, as a share of how far stock itself is from float32. A sum over a group of
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
def half(request: pytest.FixtureRequest) -> Half:
    return Half(model=load(small_model(), dtype=request.param), stock=Stock(small_model(), dtype=request.param))


@pytest.fixture(scope="module")
def whole() -> Stock:
    """Stock in float32."""
    return Stock(small_model())


@pytest.fixture(scope="module")
def source(whole: Stock) -> PIL.Image.Image:
    return PIL.Image.fromarray(whole.reference(PLAIN).pixels)


@pytest.mark.parametrize(
    ("half", "kind", "karras"),
    [
        *((torch.bfloat16, kind, False) for kind in BASIC),
        (torch.float16, SamplerKind.EULER_ANCESTRAL, False),
        (torch.float16, SamplerKind.DPMPP_2M, True),
    ],
    indirect=["half"],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_request_alone_is_equal_to_stock_in_the_same_element_type(
    half: Half, kind: SamplerKind, karras: bool
) -> None:
    spec = replace(PLAIN, sampler=kind, use_karras_sigmas=karras)
    drawing = ManualEngine(make_engine(half.model, EngineLimits())).draw(EngineOrder(key=1, spec=spec))
    theirs = half.stock.reference(spec)
    assert drawing.latents[0].dtype == theirs.latent.dtype == half.model.dtype
    assert torch.equal(drawing.latents[0], theirs.latent)
    assert (drawing.pixels[0] == theirs.pixels).all()


def test_a_request_from_a_picture_is_equal_to_stock_in_the_same_element_type(
    half: Half, source: PIL.Image.Image
) -> None:
    spec = replace(PLAIN, strength=0.7)
    pixels = torch.frombuffer(bytearray(source.tobytes()), dtype=torch.uint8).reshape(32, 32, 3)
    drawing = ManualEngine(make_engine(half.model, EngineLimits())).draw(EngineOrder(key=1, spec=spec, image=pixels))
    theirs = half.stock.reference(spec, image=source, layout=torch.contiguous_format)
    assert torch.equal(drawing.latents[0], theirs.latent)
    assert (drawing.pixels[0] == theirs.pixels).all()


def test_an_edit_is_equal_to_stock_in_the_same_element_type(half: Half, source: PIL.Image.Image) -> None:
    spec = replace(PLAIN, strength=0.9999, sampler=SamplerKind.EULER_ANCESTRAL)
    drawing = ManualEngine(make_engine(half.model, EngineLimits())).draw(edit_order(spec, source, MASK))
    theirs = half.stock.edit(spec, source, MASK)
    assert drawing.latents[0].dtype == theirs.latent.dtype == half.model.dtype
    assert torch.equal(drawing.latents[0], theirs.latent)
    assert (drawing.pixels[0] == theirs.pixels).all()


def test_a_request_beside_others_strays_little_further_than_the_element_type_does(half: Half, whole: Stock) -> None:
    specs = [PLAIN, replace(PLAIN, sampler=SamplerKind.EULER_ANCESTRAL, guidance_scale=1.0, seed=2)]
    drawings = ManualEngine(make_engine(half.model, TOGETHER)).run(
        {0: [EngineOrder(key=key, spec=spec) for key, spec in enumerate(specs)]}
    )
    for key, spec in enumerate(specs):
        assert drawings[key].record.provenance.mean_group_requests > 1.5
        theirs, exact = half.stock.reference(spec).latent.float(), whole.reference(spec).latent
        assert 0 < deviation(theirs, exact) < 0.1
        assert deviation(drawings[key].latents[0].float(), theirs) <= STRAY * deviation(theirs, exact)


def test_auto_is_the_first_cuda_device_or_else_the_cpu() -> None:
    assert pick_device("auto") == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == torch.device("cpu")


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
def test_float32_on_a_gpu_is_the_image_of_stock_there() -> None:
    easel, stock = ManualEngine(make_engine(load(device="cuda:0"), EngineLimits())), Stock(device="cuda:0")
    for kind, karras in SAMPLERS:
        spec = replace(PLAIN, num_inference_steps=8, sampler=kind, use_karras_sigmas=karras)
        drawing, theirs = easel.draw(EngineOrder(key=1, spec=spec)), stock.reference(spec)
        assert drawing.latents[0].device == torch.device("cuda:0")
        assert_close(drawing.latents[0], theirs.latent)
        assert_same_image(drawing.pixels[0], theirs.pixels)


@pytest.mark.gpu
def test_an_edit_on_a_gpu_is_the_image_of_stock_there(source: PIL.Image.Image) -> None:
    easel, stock = ManualEngine(make_engine(load(device="cuda:0"), EngineLimits())), Stock(device="cuda:0")
    for kind, karras in SAMPLERS:
        spec = replace(PLAIN, num_inference_steps=8, sampler=kind, use_karras_sigmas=karras, strength=0.9999)
        drawing, theirs = easel.draw(edit_order(spec, source, MASK)), stock.edit(spec, source, MASK)
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
