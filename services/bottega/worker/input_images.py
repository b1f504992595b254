"""The images that come with an attempt: decoded for the engine, and of an edit what its pictures are put into.

Knows bytes and the engine's first message; does not know when an attempt begins or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bottega.codec import Crop, ImageFacts, MaskOrder, Overlay
from bottega.v1 import engine_pb2
from bottega.v1.generation_pb2 import IMAGE_FORMAT_JPEG, GenerationSpec, MaskUse, Provenance, SourceUse
from bottega.worker.image_codec import ImageCodec


class InputImages:
    """The images of one attempt.

    Attributes:
        overlay: What drawn pictures are put into before they are encoded; None where they are as they were drawn. Only
            for it are image and mask, encoded, kept until the attempt ends.

    Args:
        spec: Of the attempt.
        image: Source of image-to-image, encoded, or empty.
        mask: Of an edit of it, encoded, or empty.
        control_images: Encoded.
    """

    def __init__(self, spec: GenerationSpec, image: bytes, mask: bytes, control_images: Sequence[bytes]) -> None:
        self.overlay: Overlay | None = None
        self._spec = spec
        self._image, self._mask, self._control_images = image, mask, tuple(control_images)
        self._digest = ""
        self._source: ImageFacts | None = None
        self._controls: dict[str, ImageFacts] = {}  # by the digest of a control image
        self._use: MaskUse | None = None

    @property
    def decoded_bytes(self) -> int:
        """That those take, once decoded, which have not been yet."""
        images = bool(self._image) + len(self._control_images)
        return self._spec.width * self._spec.height * (3 * images + bool(self._mask))

    @property
    def icc_profile(self) -> bytes:
        """The colour profile of the source, which its pictures have, too; empty where there is none."""
        return b"" if self._source is None else self._source.icc_profile

    async def decode_into(
        self, start: engine_pb2.EngineStart, codec: ImageCodec, note_time: Callable[[float], None]
    ) -> None:
        """Adds all of them to the engine's first message, and drops them.

        note_time: is told the seconds of each. Raises BadImage.
        """
        crop = None
        if self._mask:
            crop = await self._decode_edit(start, codec, note_time)
        elif self._image:
            decoded = await codec.decode(self._image, self._spec)
            note_time(decoded.seconds)
            self._digest, self._source = decoded.digest, decoded.facts
            start.image_digest = decoded.digest
            await decoded.write_to(start.image)
        for image in self._control_images:
            decoded = await codec.decode(image, self._spec, crop)
            note_time(decoded.seconds)
            self._controls[decoded.digest] = decoded.facts
            await decoded.write_to(start.control_images.add(digest=decoded.digest).pixels)
        self._image = self._mask = b""
        self._control_images = ()

    def report(self, provenance: Provenance) -> None:
        """Adds what they were to the provenance; what the engine has said of a mask stays in it."""
        provenance.image_digest = self._digest
        if self._source is not None:
            provenance.source.CopyFrom(_source_use(self._source, self._spec))
        for use in provenance.controlnets:
            if (facts := self._controls.get(use.image_digest)) is not None:
                use.transparency_unread = facts.transparent
                use.scaled_from_16_bits = facts.scaled_from_16_bits
        if self._use is not None:
            said = MaskUse()
            said.CopyFrom(provenance.mask)
            provenance.mask.CopyFrom(self._use)
            provenance.mask.MergeFrom(said)

    async def _decode_edit(
        self, start: engine_pb2.EngineStart, codec: ImageCodec, note_time: Callable[[float], None]
    ) -> Crop | None:
        """Returns the part of the image that is drawn, where that is not all of it."""
        spec, order = self._spec, _mask_order(self._spec)
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
    own = source.size
    keeps_transparency = spec.keep_unmasked and spec.format != IMAGE_FORMAT_JPEG
    return SourceUse(
        width=own.width,
        height=own.height,
        resized=(own.width, own.height) != (spec.width, spec.height) and not spec.HasField("padding_mask_crop"),
        transparency_unread=source.transparent and not keeps_transparency,
        scaled_from_16_bits=source.scaled_from_16_bits,
    )


def _mask_order(spec: GenerationSpec) -> MaskOrder:
    return MaskOrder(
        width=spec.width,
        height=spec.height,
        latent_scale=1,  # that something is left of it in the latent, the gateway has seen
        alpha=spec.mask_alpha,
        padding=spec.padding_mask_crop if spec.HasField("padding_mask_crop") else None,
    )
