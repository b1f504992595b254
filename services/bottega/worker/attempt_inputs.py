"""The large inputs of an attempt before they are sent to the engine: encoded images, kept latents and a checkpoint.

Of these, only the overlay of an edit is kept until the attempt ends, because finished images are pasted into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bottega.codec import Crop, ImageFacts, MaskOrder, Overlay
from bottega.v1 import engine_pb2
from bottega.v1.generation_pb2 import IMAGE_FORMAT_JPEG, GenerationSpec, MaskUse, Provenance, SourceUse
from bottega.v1.worker_pb2 import RunAttemptRequest
from bottega.worker.image_codec import ImageCodec


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
            await decoded.write_to(start.image)
        for image in self._control_images:
            decoded = await codec.decode(image, start.request.spec, crop)
            note_time(decoded.seconds)
            self._controls[decoded.digest] = decoded.facts
            await decoded.write_to(start.control_images.add(digest=decoded.digest).pixels)
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
        await edit.write_to(start.image, start.mask)
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
