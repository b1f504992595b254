"""The VAE: layer by layer it is stock's, in half precision and tiles about so; what draws another is not taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from bottega.device.device import run_pieces
from bottega.model.decode import decode_image
from bottega.model.model import Model
from bottega.model.vae import (
    LEAST_PSNR_DB,
    VaeDecoder,
    VaeSettings,
    encode_dtype,
    encode_in_pieces,
    make_decoder,
    psnr_db,
)
from tests.support.manual_engine import load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole() -> Model:
    """The embedded model, trained, in float32."""
    return load()


@pytest.fixture(scope="module")
def latent(whole: Model) -> Tensor:
    noise = torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(5))
    return torch.nn.functional.interpolate(noise, size=(8, 8), mode="bilinear")


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
    hook = whole.vae.decoder.conv_in.register_forward_pre_hook(lambda _, inputs: tiles.append(inputs[0].shape[-2:]))
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


def with_attention() -> AutoencoderKL:
    """A VAE with blocks that only SDXL's relatives have, and without the layers before and after the latent."""
    torch.manual_seed(7)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 16),
        norm_num_groups=4,
        sample_size=16,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


def with_shift() -> AutoencoderKL:
    """A VAE as that of Stable Diffusion 3."""
    torch.manual_seed(9)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        sample_size=16,
        latent_channels=16,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


@pytest.mark.parametrize("other", [None, with_attention, with_shift], ids=["embedded", "other blocks", "16 channels"])
@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiles"])
@torch.inference_mode()
def test_decoding_layer_by_layer_is_stock_bit_for_bit(
    whole: Model, other: Callable[[], AutoencoderKL] | None, tiled: bool
) -> None:
    decoder = decoder_in(whole, "auto", vae=other and other())
    config = decoder.vae.config
    latent = torch.randn(1, config.latent_channels, 40, 24, generator=torch.Generator().manual_seed(8))
    stock = decoder.vae.tiled_decode if tiled else decoder.vae.decode
    expected = stock(latent / config.scaling_factor + (config.shift_factor or 0.0), return_dict=False)[0]
    pieces = decoder.decode_in_pieces(latent, tiled=tiled)
    for _ in range(len(decoder.vae.decoder.up_blocks) + 2):
        next(pieces)  # It has more layers than blocks.
    assert torch.equal(run_pieces(pieces), expected)


@pytest.mark.parametrize("other", [False, True], ids=["embedded", "other blocks"])
@torch.inference_mode()
def test_encoding_layer_by_layer_is_stock_bit_for_bit(whole: Model, other: bool) -> None:
    vae = with_attention() if other else whole.vae
    image = torch.rand(1, 3, 64, 48, generator=torch.Generator().manual_seed(9)) * 2 - 1
    expected = vae.encode(image, return_dict=False)[0]
    pieces = encode_in_pieces(vae, image)
    for _ in range(len(vae.encoder.down_blocks) + 2):
        next(pieces)
    found = run_pieces(pieces)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.std, expected.std)
