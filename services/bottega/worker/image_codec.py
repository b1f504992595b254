"""Images on their way in and out of the engine: decoded, encoded and inscribed, in the codec processes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf import json_format

from bottega.codec import CodecPool, Crop, DecodedEdit, EncodedImage, ImageFacts, MaskOrder, Overlay, Pixels
from bottega.process import copied
from bottega.v1 import generation_pb2, tensor_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Sampler
from bottega.v1.tensor_pb2 import Tensor

# The keyword under which `bottega generate --like` finds the parameters, and the one that other tools show.
SPEC_KEYWORD = "bottega"
SUMMARY_KEYWORD = "parameters"

_PREVIEW_QUALITY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImageInput:
    """An input image, its encoded bytes' SHA-256 (hex), and the seconds that decoding took."""

    pixels: Pixels
    facts: ImageFacts
    digest: str
    seconds: float

    async def write_to(self, target: Tensor) -> None:
        """Writes it as uint8 [height, width, 3]."""
        await _write(target, self.pixels.data, self.pixels.height, self.pixels.width, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedEditInput:
    """Image and mask of an edit, their encoded bytes' SHA-256 (hex), and the seconds that decoding took."""

    decoded: DecodedEdit
    image_digest: str
    mask_digest: str
    seconds: float

    async def write_to(self, image: Tensor, mask: Tensor) -> None:
        """Writes them as uint8 [height, width, 3] and [height, width]."""
        pixels = self.decoded.pixels
        await _write(image, pixels.data, pixels.height, pixels.width, 3)
        await _write(mask, self.decoded.mask, pixels.height, pixels.width)


class ImageCodec:
    """Decodes and encodes with a pool of codec processes."""

    def __init__(self, pool: CodecPool) -> None:
        self._pool = pool

    async def decode(self, image: bytes, spec: GenerationSpec, crop: Crop | None = None) -> DecodedImageInput:
        """The image, or a part of it, decoded and resized to the spec's size. Raises BadImage."""
        began_s = time.monotonic()
        digest = await _digest(image)
        decoded = await self._pool.decode(image, spec.width, spec.height, crop=crop)
        seconds = time.monotonic() - began_s
        return DecodedImageInput(pixels=decoded.pixels, facts=decoded.facts, digest=digest, seconds=seconds)

    async def decode_edit(self, image: bytes, mask: bytes, order: MaskOrder) -> DecodedEditInput:
        """Image and mask of an edit, as they are drawn. Raises BadImage."""
        began_s = time.monotonic()
        image_digest, mask_digest = await _digest(image), await _digest(mask)
        return DecodedEditInput(
            decoded=await self._pool.decode_edit(image, mask, order),
            image_digest=image_digest,
            mask_digest=mask_digest,
            seconds=time.monotonic() - began_s,
        )

    async def encode(
        self,
        tensor: Tensor,
        spec: GenerationSpec,
        index: int,
        *,
        overlay: Overlay | None = None,
        icc_profile: bytes = b"",
    ) -> EncodedImage:
        """Return image `index` of the spec in the spec's format, inscribed with what draws it again.

        Args:
            overlay: What it is put into before.
            icc_profile: Of its colours; counts without an overlay.
        """
        height, width, _channels = tensor.shape
        pixels = await copied(height * width * 3, lambda: Pixels(width=width, height=height, data=tensor.data))
        text = inscription(spec, index)
        return await self._pool.encode(
            pixels, spec.format, spec.quality, text, overlay=overlay, icc_profile=icc_profile
        )

    async def preview(self, tensor: Tensor) -> bytes:
        """A small JPEG."""
        height, width, _channels = tensor.shape
        pixels = Pixels(width=width, height=height, data=tensor.data)
        encoded = await self._pool.encode(pixels, generation_pb2.IMAGE_FORMAT_JPEG, _PREVIEW_QUALITY, {})
        return encoded.data


async def _digest(data: bytes) -> str:
    return await copied(len(data), lambda: hashlib.sha256(data).hexdigest())


async def _write(target: Tensor, data: bytes, *shape: int) -> None:
    target.data_type = tensor_pb2.DATA_TYPE_UINT8
    target.shape.extend(shape)
    await copied(len(data), lambda: setattr(target, "data", data))


def inscription(spec: GenerationSpec, index: int) -> Mapping[str, str]:
    """The text of image `index`: the spec that draws it alone, as JSON, and a line for people.

    Nothing of the run is in it (worker, times, attempts): drawing the spec again gives the same bytes.
    spec: without its input images.
    """
    single = GenerationSpec()
    single.CopyFrom(spec)
    single.seed = spec.seed + index
    single.num_images = 1
    as_json = json_format.MessageToJson(single, preserving_proto_field_name=True, indent=None, ensure_ascii=False)
    return {SPEC_KEYWORD: as_json, SUMMARY_KEYWORD: summary(single)}


def summary(spec: GenerationSpec) -> str:
    """One line for people, in the manner that galleries of pictures know."""
    facts = {
        "Negative prompt": spec.negative_prompt,
        "Steps": spec.num_inference_steps,
        "Sampler": Sampler.Name(spec.sampler).removeprefix("SAMPLER_") if spec.sampler else "",
        "CFG scale": f"{spec.guidance_scale:g}" if spec.HasField("guidance_scale") else "",
        "Seed": str(spec.seed),
        "Size": f"{spec.width}x{spec.height}",
        "Model": spec.model,
    }
    return ". ".join([spec.prompt, ", ".join(f"{name}: {value}" for name, value in facts.items() if value)])
