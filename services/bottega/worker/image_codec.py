"""Decodes input images for the engine, and encodes finished images with their parameters, in the codec processes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf import json_format

from bottega.background_tasks import copied
from bottega.codec import CodecPool, Crop, DecodedEdit, EncodedImage, ImageFacts, MaskOrder, Overlay, Pixels
from bottega.codec.metadata import PARAMETERS_KEYWORD, SUMMARY_KEYWORD
from bottega.fair_order import Share
from bottega.v1 import generation_pb2, tensor_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Lora, Sampler
from bottega.v1.tensor_pb2 import Tensor

# The names of samplers in AUTOMATIC1111's web UI, and the lengths of its hashes.
SAMPLER_TITLES = {
    Sampler.SAMPLER_EULER: "Euler",
    Sampler.SAMPLER_EULER_ANCESTRAL: "Euler a",
    Sampler.SAMPLER_DDIM: "DDIM",
    Sampler.SAMPLER_DPMPP_2M: "DPM++ 2M",
    Sampler.SAMPLER_DPMPP_2M_SDE: "DPM++ 2M SDE",
    Sampler.SAMPLER_DPMPP_2S: "DPM++ 2S",
    Sampler.SAMPLER_DDPM: "DDPM",
    Sampler.SAMPLER_DEIS: "DEIS",
    Sampler.SAMPLER_UNIPC: "UniPC",
    Sampler.SAMPLER_LMS: "LMS",
    Sampler.SAMPLER_LCM: "LCM",
    Sampler.SAMPLER_TCD: "TCD",
    Sampler.SAMPLER_EDM_EULER: "Euler EDM",
    Sampler.SAMPLER_EDM_DPMPP_2M: "DPM++ 2M EDM",
    Sampler.SAMPLER_PNDM: "PLMS",
    Sampler.SAMPLER_HEUN: "Heun",
    Sampler.SAMPLER_KDPM2: "DPM2",
    Sampler.SAMPLER_KDPM2_ANCESTRAL: "DPM2 a",
}
"""The samplers by the names of AUTOMATIC1111's web UI, or by names in its manner where it has none."""

_SCHEDULE_TYPES = {
    "use_karras_sigmas": "Karras",
    "use_exponential_sigmas": "Exponential",
    "use_beta_sigmas": "Beta",
}
_MODEL_HASH_LETTERS = 10
_LORA_HASH_LETTERS = 12

_PREVIEW_QUALITY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImageInput:
    """A decoded input image."""

    pixels: Pixels
    facts: ImageFacts
    digest: str
    """SHA-256 of the encoded bytes, in hex."""
    seconds: float
    """Seconds that decoding took."""

    async def write_to(self, target: Tensor) -> None:
        """Write the image to a message as uint8 [height, width, 3]."""
        await _write(target, self.pixels.data, self.pixels.height, self.pixels.width, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedEditInput:
    """The decoded image and mask of an edit."""

    decoded: DecodedEdit
    image_digest: str
    """SHA-256 of the encoded image, in hex."""
    mask_digest: str
    """SHA-256 of the encoded mask, in hex."""
    seconds: float
    """Seconds that decoding took."""

    async def write_to(self, image: Tensor, mask: Tensor) -> None:
        """Write image and mask to messages as uint8 [height, width, 3] and [height, width]."""
        pixels = self.decoded.pixels
        await _write(image, pixels.data, pixels.height, pixels.width, 3)
        await _write(mask, self.decoded.mask, pixels.height, pixels.width)


class ImageCodec:
    """Decodes and encodes one tenant's images with a pool of codec processes.

    Args:
        pool: The processes, which all tenants share.
        share: The tenant and its weight when tenants compete for the processes.
    """

    def __init__(self, pool: CodecPool, share: Share) -> None:
        self._pool = pool
        self._share = share

    async def decode(self, image: bytes, spec: GenerationSpec, crop: Crop | None = None) -> DecodedImageInput:
        """Decode an image, or a crop of it, and resize it to the spec's size. Raises BadImage."""
        began_s = time.monotonic()
        digest = await _digest(image)
        decoded = await self._pool.decode(image, spec.width, spec.height, crop=crop, share=self._share)
        seconds = time.monotonic() - began_s
        return DecodedImageInput(pixels=decoded.pixels, facts=decoded.facts, digest=digest, seconds=seconds)

    async def decode_edit(self, image: bytes, mask: bytes, order: MaskOrder) -> DecodedEditInput:
        """Decode image and mask of an edit at the size in which it is drawn. Raises BadImage."""
        began_s = time.monotonic()
        image_digest, mask_digest = await _digest(image), await _digest(mask)
        return DecodedEditInput(
            decoded=await self._pool.decode_edit(image, mask, order, share=self._share),
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
        model_hash: str,
        overlay: Overlay | None = None,
        icc_profile: bytes = b"",
    ) -> EncodedImage:
        """Encode image `index` of the spec in the spec's format.

        The parameters that draw it again are written into the file, unless the spec says no.

        Args:
            model_hash: Hash of the model that drew it, in hex.
            overlay: Image into which it is pasted first; None for none.
            icc_profile: Colour profile of its values; used only without an overlay.
        """
        height, width, _channels = tensor.shape
        pixels = await copied(height * width * 3, lambda: Pixels(width=width, height=height, data=tensor.data))
        text = inscription(spec, index, model_hash) if metadata_of(spec) else {}
        return await self._pool.encode(
            pixels,
            spec.format,
            spec.quality,
            text,
            overlay=overlay,
            icc_profile=icc_profile,
            share=self._share,
        )

    async def preview(self, tensor: Tensor) -> bytes:
        """Return a small JPEG."""
        height, width, _channels = tensor.shape
        pixels = Pixels(width=width, height=height, data=tensor.data)
        encoded = await self._pool.encode(
            pixels, generation_pb2.IMAGE_FORMAT_JPEG, _PREVIEW_QUALITY, {}, share=self._share
        )
        return encoded.data


async def _digest(data: bytes) -> str:
    return await copied(len(data), lambda: hashlib.sha256(data).hexdigest())


async def _write(target: Tensor, data: bytes, *shape: int) -> None:
    target.data_type = tensor_pb2.DATA_TYPE_UINT8
    target.shape.extend(shape)
    await copied(len(data), lambda: setattr(target, "data", data))


def inscription(spec: GenerationSpec, index: int, model_hash: str) -> Mapping[str, str]:
    """Return the texts to write into image `index`: the spec that draws it, as JSON, and a summary for other tools.

    The texts do not depend on the run (worker, times, attempts): drawing the spec again gives the same bytes.

    Args:
        spec: The spec of the request without its input images.
        index: Index of the image in the request.
        model_hash: Hash of the model's weights and configuration, in hex.
    """
    single = GenerationSpec()
    single.CopyFrom(spec)
    single.seed = spec.seed + index
    single.num_images = 1
    if spec.prompts:
        single.prompt = spec.prompts[index]
        single.ClearField("prompts")
    as_json = json_format.MessageToJson(single, preserving_proto_field_name=True, indent=None, ensure_ascii=False)
    return {PARAMETERS_KEYWORD: as_json, SUMMARY_KEYWORD: summary(single, model_hash)}


def metadata_of(spec: GenerationSpec) -> bool:
    """Return whether the pictures of a spec contain their parameters; yes if the spec leaves it open."""
    return spec.metadata or not spec.HasField("metadata")


def summary(spec: GenerationSpec, model_hash: str) -> str:
    """Return prompt, negative prompt and settings, one line each, in the format of AUTOMATIC1111's web UI.

    Without a negative prompt its line is absent. Line breaks are removed from prompts, so that a prompt cannot imitate
    another line.
    """
    loras = [lora for lora in spec.loras if not lora.token]
    tags = [f"<lora:{lora.name}:{_lora_scale(lora):g}>" for lora in loras]
    hashes = ", ".join(f"{lora.name}: {lora.digest[:_LORA_HASH_LETTERS]}" for lora in loras if lora.digest)
    embeddings = ", ".join(f"{lora.token}: {lora.digest[:_LORA_HASH_LETTERS]}" for lora in spec.loras if lora.token)
    settings = {
        "Steps": str(spec.num_inference_steps),
        "Sampler": SAMPLER_TITLES.get(spec.sampler, ""),
        "Schedule type": next((title for field, title in _SCHEDULE_TYPES.items() if getattr(spec, field)), ""),
        "CFG scale": f"{spec.guidance_scale:g}" if spec.HasField("guidance_scale") else "",
        "Seed": str(spec.seed),
        "Size": f"{spec.width}x{spec.height}",
        "Model hash": model_hash[:_MODEL_HASH_LETTERS],
        "Model": spec.model,
        "Denoising strength": f"{spec.strength:g}" if spec.HasField("strength") else "",
        "Clip skip": str(spec.clip_skip + 1) if spec.clip_skip else "",
        "Lora hashes": hashes,
        "TI hashes": embeddings,
    }
    lines = [" ".join([*spec.prompt.split(), *tags])]
    if spec.negative_prompt:
        lines.append(f"Negative prompt: {' '.join(spec.negative_prompt.split())}")
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in settings.items() if value))
    return "\n".join(lines)


def _lora_scale(lora: Lora) -> float:
    return lora.scale if lora.HasField("scale") else 1.0


def _quoted(value: str) -> str:
    """Return a value for the line of settings, in quotes if it contains a separator."""
    return json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ",:\n") else value
