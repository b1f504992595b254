"""The VAE's decoder: the same picture in half precision, about the same in tiles; what draws another is not taken."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from bottega.model.decode import decode_image
from bottega.model.model import Model
from bottega.model.vae import LEAST_PSNR_DB, VaeDecoder, VaeSettings, encode_dtype, make_decoder, psnr_db
from tests.support.manual_engine import load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole() -> Model:
    """The embedded model, trained, in float32."""
    return load()


@pytest.fixture(scope="module")
def latent(whole: Model) -> Tensor:
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(5))
    return torch.nn.functional.interpolate(noise[:, :, ::4, ::4], size=(16, 16), mode="bilinear")


def drawn(decoder: VaeDecoder, latent: Tensor) -> Tensor:
    with torch.inference_mode():
        return (decoder.decode(latent)[0].float() / 2 + 0.5).clamp(0, 1)


def decoder_in(model: Model, dtype: str, *, vae: AutoencoderKL | None = None) -> VaeDecoder:
    vae = vae or copy.deepcopy(model.vae)
    return make_decoder(vae, device=CPU, dtype=torch.float32, settings=VaeSettings(dtype=dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_draws_what_float32_does(whole: Model, latent: Tensor, dtype: str) -> None:
    decoder = decoder_in(whole, dtype)
    assert decoder.dtype == decoder.vae.decoder.conv_in.weight.dtype == getattr(torch, dtype)
    assert encode_dtype(decoder.vae) == torch.float32
    assert psnr_db(drawn(decoder, latent), drawn(whole.decoder, latent)) >= LEAST_PSNR_DB


def overflowing(vae: AutoencoderKL) -> AutoencoderKL:
    """Draws the same, but what its blocks add up is beyond float16, as SDXL's is."""
    large = copy.deepcopy(vae)
    factor = 2.0**15
    with torch.no_grad():
        large.decoder.conv_in.weight *= factor
        large.decoder.conv_in.bias *= factor
    return large


def test_a_decoder_whose_sums_overflow_in_float16_draws_what_float32_does(whole: Model, latent: Tensor) -> None:
    vae = overflowing(whole.vae)
    reference = drawn(replace(whole.decoder, vae=vae), latent)
    plain = copy.deepcopy(vae)
    plain.decoder.half()
    plain.post_quant_conv.half()
    assert not torch.isfinite(drawn(replace(whole.decoder, vae=plain, dtype=torch.float16), latent)).all()
    decoder = decoder_in(whole, "float16", vae=vae)
    assert decoder.dtype == torch.float16
    assert psnr_db(drawn(decoder, latent), reference) >= LEAST_PSNR_DB


def test_an_element_type_in_which_a_decoder_draws_something_else_is_refused(whole: Model) -> None:
    vae = overflowing(overflowing(whole.vae))  # too much for any fraction
    with pytest.raises(ValueError, match=r"vae\.dtype float16: with it this VAE draws something else than in float32"):
        decoder_in(whole, "float16", vae=vae)


def test_a_picture_above_the_size_is_decoded_in_tiles_which_show_little(whole: Model) -> None:
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(6))
    large = torch.nn.functional.interpolate(noise, size=(32, 32), mode="bilinear")
    tiled = replace(whole, decoder=replace(whole.decoder, max_area=16 * 16))
    tiles: list[torch.Size] = []
    hook = whole.vae.decoder.register_forward_pre_hook(lambda _, inputs: tiles.append(inputs[0].shape[-2:]))
    try:
        pixels = decode_image(tiled, large).pixels
    finally:
        hook.remove()
    assert max(height * width for height, width in tiles) == tiled.decoded_area(32 * 32) == 16 * 16
    reference = decode_image(whole, large).pixels
    assert pixels.shape == reference.shape == (128, 128, 3)
    assert psnr_db(pixels / 255, reference / 255) > 20
    assert torch.equal(
        decode_image(tiled, large[:, :, :16, :16]).pixels, decode_image(whole, large[:, :, :16, :16]).pixels
    )
