"""The images that come with an attempt: decoded for the engine, and of an edit what its pictures are put into.

Knows bytes and the engine's first message; does not know when an attempt begins or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bottega.codec import Crop, MaskOrder, Overlay
from bottega.v1 import engine_pb2
from bottega.v1.generation_pb2 import GenerationSpec, MaskUse, Provenance
from bottega.worker.image_codec import ImageCodec


class InputImages:
    """image: source of image-to-image, mask: of an edit of it, encoded, or empty. control_images: encoded.

    spec: of the attempt. overlay: what drawn pictures are put into before they are encoded, None where they are as they
    were drawn: only for it are image and mask, encoded, kept until the attempt ends.
    """

    def __init__(self, spec: GenerationSpec, image: bytes, mask: bytes, control_images: Sequence[bytes]) -> None:
        self.overlay: Overlay | None = None
        self._spec = spec
        self._image, self._mask, self._control_images = image, mask, tuple(control_images)
        self._digest = ""
        self._use: MaskUse | None = None

    @property
    def decoded_bytes(self) -> int:
        """That those take, once decoded, which have not been yet."""
        images = bool(self._image) + len(self._control_images)
        return self._spec.width * self._spec.height * (3 * images + bool(self._mask))

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
            self._digest = start.image_digest = decoded.digest
            await decoded.write_to(start.image)
        for image in self._control_images:
            decoded = await codec.decode(image, self._spec, crop)
            note_time(decoded.seconds)
            await decoded.write_to(start.control_images.add(digest=decoded.digest).pixels)
        self._image = self._mask = b""
        self._control_images = ()

    def report(self, provenance: Provenance) -> None:
        """Adds what they were to the provenance; what the engine has said of a mask stays in it."""
        provenance.image_digest = self._digest
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
        self._digest = start.image_digest = edit.image_digest
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


def _mask_order(spec: GenerationSpec) -> MaskOrder:
    return MaskOrder(
        width=spec.width,
        height=spec.height,
        latent_scale=1,  # that something is left of it in the latent, the gateway has seen
        alpha=spec.mask_alpha,
        padding=spec.padding_mask_crop if spec.HasField("padding_mask_crop") else None,
    )
