"""Control images of every mode and size reach a ControlNet as those of Diffusers' pipelines do."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.ExifTags
import PIL.Image
import pytest
import torch
from diffusers import StableDiffusionXLControlNetPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import load_image
from torch import Tensor

from bottega.addons.controlnets.engine.sessions import process_image
from bottega.codec import images

_SCALE = 8


def _file(mode: str, width: int, height: int) -> bytes:
    """Return an encoded image of a mode: a JPEG for CMYK, which PNG does not have, else a PNG."""
    noise = np.random.default_rng(3).integers(0, 256, (height, width, 4), dtype=np.uint8)
    out = io.BytesIO()
    if mode.startswith("EXIF"):
        exif = PIL.Image.Exif()
        exif[PIL.ExifTags.Base.Orientation] = int(mode.rsplit(maxsplit=1)[-1])
        PIL.Image.fromarray(noise[..., :3]).save(out, "JPEG", quality=95, exif=exif)
        return out.getvalue()
    if mode == "CMYK":
        PIL.Image.fromarray(noise[..., :3]).convert("CMYK").save(out, "JPEG", quality=95)
        return out.getvalue()
    if mode == "I;16":
        # Levels that both scale and clip alike: see test_16_bit_grey_keeps_its_levels_and_it_is_said.
        image = PIL.Image.fromarray(np.where(noise[..., 0] > 127, 65535, 0).astype(np.uint16))
    else:
        image = PIL.Image.fromarray(noise, "RGBA").convert(mode)
    image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("size", [(37, 23), (150, 90)], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "RGBA", "P", "1", "I;16", "CMYK", "EXIF 6", "EXIF 7"])
def test_a_control_image_is_what_prepare_image_makes(mode: str, size: tuple[int, int]) -> None:
    data, (width, height) = _file(mode, *size), (64, 48)
    decoded = images.decode(data, width, height).pixels
    pixels = torch.frombuffer(bytearray(decoded.data), dtype=torch.uint8).view(height, width, 3)
    processor = VaeImageProcessor(vae_scale_factor=_SCALE, do_convert_rgb=True, do_normalize=False)
    prepare: Any = StableDiffusionXLControlNetPipeline.prepare_image
    theirs: Tensor = prepare(
        SimpleNamespace(control_image_processor=processor),
        load_image(PIL.Image.open(io.BytesIO(data))),
        width=width,
        height=height,
        batch_size=1,
        num_images_per_prompt=1,
        device="cpu",
        dtype=torch.float32,
    )
    assert torch.equal(process_image(pixels, height, width, _SCALE), theirs[0])
