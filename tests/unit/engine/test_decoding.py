"""Pictures are decoded as stock Diffusers does or say that they are not; what is no number becomes an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import PIL.Image
import pytest
import torch
from torch import nn

from bottega.device.memory_plan import MemoryPlan
from bottega.engine.encode import LatentPreview
from bottega.engine.events import ImageDrawn, JobFinished
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.errors import NotFinite, TooLarge
from bottega.model.model import Model
from bottega.model.vae import VaeSettings, make_decoder
from tests.samples.edits import box_mask, edit_order
from tests.samples.small_model import SIZE, small_model
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.memory_device import MemoryDevice, taking
from tests.support.stock import Stock, assert_same_image

SPEC = ResolvedSpec(prompt="a red star", num_inference_steps=2, width=SIZE, height=SIZE, seed=3)
# More than four times the model's own pixels: 34 x 32 latent elements of its 8 x 8.
LARGE = replace(SPEC, width=136, height=128)
# Itself: tests beside this one fit a model's preview once.
FIT = LatentPreview.fit
NO_LIMIT = EngineLimits(max_pixels=1 << 20)


def draw(model: Model, spec: ResolvedSpec = SPEC) -> Drawing:
    return ManualEngine(make_engine(model, NO_LIMIT)).draw(EngineOrder(key=1, spec=spec))


def test_a_picture_of_many_times_the_models_own_size_is_the_one_of_stock(model: Model, stock: Stock) -> None:
    drawing = draw(model, LARGE)
    assert_same_image(drawing.pixels[0], stock.reference(LARGE).pixels)
    assert drawing.record.decoded_as_stock
    assert not drawing.record.provenance.vae_tiled
    assert drawing.record.provenance.vae_dtype == "float32"


# The small model's latents have 8 x 8 elements; a decoding takes 16 KiB of a device for each element so.
DECODING_BYTES = 16 << 10
OWN_DECODING = 64 * DECODING_BYTES
GIB = 1 << 30


@pytest.mark.parametrize("measured", [True, False], ids=["as the warm-up measured", "as the allocator says"])
def test_what_the_device_has_no_memory_for_is_decoded_in_tiles_which_is_said(model: Model, measured: bool) -> None:
    device = MemoryDevice(2 * OWN_DECODING)
    plan = MemoryPlan(2 * OWN_DECODING if measured else None)
    easel = ManualEngine(make_engine(replace(model, runtime=device, memory=plan), NO_LIMIT))
    with taking(device, model, row_bytes=1, decoding_bytes=DECODING_BYTES):
        if measured:
            easel.engine.warm_up()
        drawing = easel.draw(EngineOrder(key=1, spec=LARGE))
        own = easel.draw(EngineOrder(key=2, spec=SPEC))
    assert isinstance(drawing.events[-1], JobFinished)
    assert drawing.record.provenance.vae_tiled
    assert not drawing.record.decoded_as_stock
    assert own.record.decoded_as_stock


def cpu_with(model: Model, available: list[int]) -> ManualEngine:
    """An engine on a CPU of whose memory the process can have so much: decoding takes 1 GiB at the model's own size."""
    plan = MemoryPlan(available=lambda: available[0])
    plan.observe_decoding(64, GIB)
    return ManualEngine(make_engine(replace(model, memory=plan), NO_LIMIT))


def test_what_a_cpu_has_no_memory_for_is_decoded_in_tiles_which_is_said(model: Model, stock: Stock) -> None:
    easel = cpu_with(model, [2 * GIB])
    drawing = easel.draw(EngineOrder(key=1, spec=LARGE))
    assert drawing.record.provenance.vae_tiled
    assert not drawing.record.decoded_as_stock
    own = easel.draw(EngineOrder(key=2, spec=SPEC))
    assert own.record.decoded_as_stock
    assert_same_image(own.pixels[0], stock.reference(SPEC).pixels)


def test_what_a_cpu_has_no_memory_for_even_so_is_refused_when_it_comes_or_before_it_is_decoded(model: Model) -> None:
    available = [GIB // 2]
    easel = cpu_with(model, available)
    with pytest.raises(TooLarge, match="32x32 needs about 1024 MiB of memory, and 448 MiB are available"):
        easel.submit(EngineOrder(key=1, spec=SPEC))
    available[0] = 2 * GIB
    drawing = easel.submit(EngineOrder(key=2, spec=SPEC))
    available[0] = GIB // 2
    easel.run()
    assert isinstance(drawing.error, TooLarge)
    assert "does not have enough memory for 32x32" in drawing.error.message


def test_a_source_that_a_cpu_has_no_memory_to_encode_at_once_is_refused(model: Model) -> None:
    image = torch.zeros(LARGE.height, LARGE.width, 3, dtype=torch.uint8)
    with pytest.raises(TooLarge, match="136x128 needs about"):
        cpu_with(model, [2 * GIB]).submit(EngineOrder(key=1, spec=replace(LARGE, strength=0.5), image=image))


@pytest.mark.parametrize(
    ("dtype", "wanted", "as_stock"),
    [("float32", "float16", False), ("float16", "float32", True), ("bfloat16", "float32", False)],
)
def test_an_element_type_that_stock_would_not_decode_in_is_said(
    model: Model, dtype: str, wanted: str, as_stock: bool
) -> None:
    half = load(small_model(), dtype=getattr(torch, dtype))
    decoder = make_decoder(half.vae, device=half.device, dtype=half.dtype, settings=VaeSettings(dtype=wanted))
    drawing = draw(replace(half, decoder=decoder))
    assert drawing.record.provenance.vae_dtype == wanted
    assert drawing.record.decoded_as_stock == as_stock


@contextmanager
def broken(bias: torch.Tensor | None) -> Iterator[None]:
    """NaN in a bias, as a damaged file has it; finite weights are not enough for a finite picture."""
    assert bias is not None
    before = bias.detach().clone()
    with torch.inference_mode():
        bias[0] = torch.nan
    try:
        yield
    finally:
        with torch.inference_mode():
            bias.copy_(before)


def assert_no_picture(drawing: Drawing, *sentence: str) -> None:
    assert isinstance(drawing.error, NotFinite)
    for words in sentence:
        assert words in drawing.error.message
    assert not drawing.all(ImageDrawn)


def test_a_decoder_that_yields_nan_is_an_error_and_no_black_picture(model: Model) -> None:
    with broken(model.vae.decoder.conv_out.bias):
        assert_no_picture(draw(model), "the VAE decoded a latent to values that are not numbers, in float32")
    assert isinstance(draw(model).events[-1], JobFinished)


def source() -> PIL.Image.Image:
    return PIL.Image.new("RGB", (SIZE, SIZE), (200, 30, 60))


@pytest.mark.parametrize("edit", [False, True], ids=["image to image", "edit"])
def test_an_encoder_that_yields_nan_is_an_error_before_the_first_step(model: Model, edit: bool) -> None:
    order = edit_order(replace(SPEC, strength=0.6), source(), box_mask((4, 4, 20, 20), SIZE, SIZE))
    if not edit:
        order = replace(order, mask=None, spec=replace(SPEC, strength=0.6))
    with broken(model.vae.encoder.conv_out.bias):
        easel = ManualEngine(make_engine(model, NO_LIMIT))
        drawing = easel.draw(order)
        assert_no_picture(drawing, "the VAE encoded the image to values that are not numbers, in float32")
    assert easel.engine.turns == 0


def test_text_encoders_that_yield_nan_are_an_error_before_the_first_step(model: Model) -> None:
    encoder: nn.Module = model.text_encoders[0]
    bias = next(weights for name, weights in encoder.named_parameters() if name.endswith("fc1.bias"))
    with broken(bias):
        easel = ManualEngine(make_engine(model, NO_LIMIT))
        assert_no_picture(easel.draw(EngineOrder(key=1, spec=SPEC)), "the text encoders computed values")
    assert easel.engine.turns == 0


def test_a_vae_that_yields_nan_in_float16_says_to_decode_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As published VAEs do whose configuration says, wrongly, that they need no float32."""
    # In float16 a CPU takes seconds to encode what previews are fitted to, and none is drawn here.
    grey = LatentPreview(torch.zeros(5, 3))
    monkeypatch.setattr(LatentPreview, "fit", lambda _: grey)
    half = load(small_model(), dtype=torch.float16)
    decoder = make_decoder(half.vae, device=half.device, dtype=half.dtype, settings=VaeSettings(dtype="float16"))
    with broken(half.vae.decoder.conv_out.bias):
        drawing = draw(replace(half, decoder=decoder))
        assert_no_picture(drawing, "in float16", "set the worker's engine.vae.dtype to float32")


def test_previews_are_grey_where_the_encoder_yields_nan(model: Model) -> None:
    with broken(model.vae.encoder.conv_out.bias):
        preview = FIT(model)
    pixels = preview.draw(torch.randn(1, 4, 8, 8))
    assert (pixels == 128).all()
