"""The inputs of an attempt, decoded for the engine, and its finished images, encoded with their parameters.

Both is done in the codec processes. Of the inputs, only the overlay of an edit is kept until the attempt ends, because
finished images are pasted into it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf import json_format

from bottega.background_tasks import copied
from bottega.codec import Crop, DecodedEdit, ImageFacts, MaskOrder, Overlay, Pixels
from bottega.codec.metadata import PARAMETERS_KEYWORD, SUMMARY_KEYWORD
from bottega.codec.pool import CodecPool, EncodedImage
from bottega.fair_order import Share
from bottega.v1 import engine_pb2, generation_pb2, tensor_pb2
from bottega.v1.generation_pb2 import IMAGE_FORMAT_JPEG, GenerationSpec, MaskUse, Provenance, Sampler, SourceUse
from bottega.v1.tensor_pb2 import Tensor
from bottega.v1.worker_pb2 import RunAttemptRequest

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
    Sampler.SAMPLER_FLOW_MATCH_EULER: "Euler",
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

        The parameters that draw it again are written into the file, unless `spec.metadata` is false.

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


async def _write_pixels(target: Tensor, pixels: Pixels) -> None:
    """Write an image to a message as uint8 [height, width, 3]."""
    await _write(target, pixels.data, pixels.height, pixels.width, 3)


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
    tags = [f"<lora:{lora.name}:{lora.scale if lora.HasField('scale') else 1.0:g}>" for lora in loras]
    hashes = ", ".join(f"{lora.name}: {lora.digest[:_LORA_HASH_LETTERS]}" for lora in loras if lora.digest)
    embeddings = ", ".join(f"{lora.token}: {lora.digest[:_LORA_HASH_LETTERS]}" for lora in spec.loras if lora.token)
    # Where guidance is embedded, web UIs call its scale so, and the scale of both rows the usual name.
    distilled = spec.HasField("true_cfg_scale")
    cfg_scale = spec.true_cfg_scale if distilled else spec.guidance_scale
    # Web UIs count the scale from 1 with every model, so Z-Image's scale, which counts from 0, is increased.
    cfg_scale += spec.HasField("cfg_truncation")
    settings = {
        "Steps": str(spec.num_inference_steps),
        "Sampler": SAMPLER_TITLES.get(spec.sampler, ""),
        "Schedule type": next((title for field, title in _SCHEDULE_TYPES.items() if getattr(spec, field)), ""),
        "CFG scale": f"{cfg_scale:g}" if spec.HasField("guidance_scale") else "",
        "Distilled CFG Scale": f"{spec.guidance_scale:g}" if distilled else "",
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


def _quoted(value: str) -> str:
    """Return a value for the line of settings, in quotes if it contains a separator."""
    return json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ",:\n") else value


class AttemptInputs:
    """The large inputs of one attempt. `move_into` decodes them for the engine and drops them.

    Args:
        image: Encoded input image of image-to-image; b"" if there is none.
        mask: Encoded mask of an edit of `image`; b"" if there is none.
        control_images: Encoded control images, one for each ControlNet of the spec.
        kept: Serialized AttemptKept: data that was kept when `image` was drawn; b"" if there is none.
        checkpoint: Checkpoint to resume from; b"" to start from the first step.
    """

    def __init__(
        self,
        *,
        image: bytes = b"",
        mask: bytes = b"",
        control_images: Sequence[bytes] = (),
        kept: bytes = b"",
        checkpoint: bytes = b"",
    ) -> None:
        self.overlay: Overlay | None = None
        """Image and mask into which finished images are pasted before they are encoded; None if they are not pasted."""
        self._image, self._mask, self._control_images = image, mask, tuple(control_images)
        self._kept, self._checkpoint = kept, checkpoint
        self._digest = ""
        self._source: ImageFacts | None = None
        self._controls: dict[str, ImageFacts] = {}  # facts about control images, by digest
        self._use: MaskUse | None = None

    @classmethod
    def take_from(cls, request: RunAttemptRequest) -> AttemptInputs:
        """Move the large inputs out of a request: return them, and clear the fields of the request."""
        spec = request.spec
        inputs = cls(
            image=spec.image,
            mask=spec.mask_image,
            control_images=[net.image for net in spec.controlnets],
            kept=request.kept,
            checkpoint=request.checkpoint,
        )
        spec.ClearField("image")
        spec.ClearField("mask_image")
        for net in spec.controlnets:
            net.ClearField("image")
        request.ClearField("kept")
        request.ClearField("checkpoint")
        return inputs

    @property
    def icc_profile(self) -> bytes:
        """The colour profile of the input image, which finished images get, too; b"" if it has none."""
        return b"" if self._source is None else self._source.icc_profile

    def size_bytes(self, spec: GenerationSpec) -> int:
        """Return how many bytes `move_into` will add to a message. Images count with their decoded size."""
        images = bool(self._image) + len(self._control_images)
        decoded_bytes = spec.width * spec.height * (3 * images + bool(self._mask))
        return decoded_bytes + len(self._kept) + len(self._checkpoint)

    async def move_into(
        self, start: engine_pb2.EngineStart, codec: ImageCodec, note_time: Callable[[float], None]
    ) -> None:
        """Decode all inputs into the message that starts the attempt, which has the request, and drop them here.

        Args:
            start: The message.
            codec: Decodes the images.
            note_time: Called with the decoding time of each image, in seconds.

        Raises:
            BadImage: An image cannot be decoded.
        """
        start.request.checkpoint, start.request.kept = self._checkpoint, self._kept
        self._checkpoint = self._kept = b""
        crop = None
        if self._mask:
            crop = await self._decode_edit(start, codec, note_time)
        elif self._image:
            decoded = await codec.decode(self._image, start.request.spec)
            note_time(decoded.seconds)
            self._digest, self._source = decoded.digest, decoded.facts
            start.image_digest = decoded.digest
            await _write_pixels(start.image, decoded.pixels)
        for image in self._control_images:
            decoded = await codec.decode(image, start.request.spec, crop)
            note_time(decoded.seconds)
            self._controls[decoded.digest] = decoded.facts
            await _write_pixels(start.control_images.add(digest=decoded.digest).pixels, decoded.pixels)
        self._image = self._mask = b""
        self._control_images = ()

    def report(self, provenance: Provenance) -> None:
        """Add facts about the input images, such as their sizes, to a provenance that already has its parameters.

        Facts about the mask that the engine has added stay.
        """
        provenance.image_digest = self._digest
        if self._source is not None:
            provenance.source.CopyFrom(_source_use(self._source, provenance.parameters))
        for use in provenance.controlnets:
            if (facts := self._controls.get(use.image_digest)) is not None:
                use.transparency_unread = facts.transparent
                use.scaled_from_16_bits = facts.scaled_from_16_bits
        if self._use is not None:
            by_engine = MaskUse()
            by_engine.CopyFrom(provenance.mask)
            provenance.mask.CopyFrom(self._use)
            provenance.mask.MergeFrom(by_engine)

    async def _decode_edit(
        self, start: engine_pb2.EngineStart, codec: ImageCodec, note_time: Callable[[float], None]
    ) -> Crop | None:
        """Decode image and mask of an edit. Return the crop of the image that is drawn, or None if all of it is."""
        spec = start.request.spec
        order = _mask_order(spec)
        edit = await codec.decode_edit(self._image, self._mask, order)
        note_time(edit.seconds)
        self._digest, self._source = edit.image_digest, edit.decoded.facts
        start.image_digest = edit.image_digest
        start.mask_digest = edit.mask_digest
        pixels = edit.decoded.pixels
        await _write_pixels(start.image, pixels)
        await _write(start.mask, edit.decoded.mask, pixels.height, pixels.width)
        self._use = MaskUse()
        self._use.CopyFrom(edit.decoded.use)
        self._use.digest = edit.mask_digest
        if spec.keep_unmasked or spec.HasField("padding_mask_crop"):
            self.overlay = Overlay(
                image=self._image,
                mask=self._mask,
                order=order,
                keep_unmasked=spec.keep_unmasked,
                feather=spec.mask_feather,
            )
        return edit.decoded.crop


def _source_use(source: ImageFacts, spec: GenerationSpec) -> SourceUse:
    size = source.size
    keeps_transparency = spec.keep_unmasked and spec.format != IMAGE_FORMAT_JPEG
    return SourceUse(
        width=size.width,
        height=size.height,
        resized=(size.width, size.height) != (spec.width, spec.height) and not spec.HasField("padding_mask_crop"),
        transparency_unread=source.transparent and not keeps_transparency,
        scaled_from_16_bits=source.scaled_from_16_bits,
    )


def _mask_order(spec: GenerationSpec) -> MaskOrder:
    return MaskOrder(
        width=spec.width,
        height=spec.height,
        latent_scale=1,  # the gateway has checked that the mask covers an element of the latent
        alpha=spec.mask_alpha,
        padding=spec.padding_mask_crop if spec.HasField("padding_mask_crop") else None,
    )
