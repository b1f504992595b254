"""Images decoded and encoded in a pool of codec processes: what they are sent, and whose fault a lost process was.

A process that spent the processor time of a call, or that died twice in it, has an image to blame. One that stood
still has not: it was stopped, or the machine was busy with everything else. This module decodes nothing itself.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from bottega.codec import structure
from bottega.codec.limits import ADDRESS_SPACE_BYTES, LARGE_PIXELS
from bottega.codec.pixels import Crop, DecodedEdit, DecodedImage, ImageFacts, ImageSize, MaskOrder, Overlay, Pixels
from bottega.errors import BadImage, BottegaError, InternalError, Unavailable
from bottega.process import Loss, PoolLimits, PreparedCall, ProcessLost, ProcessPool, ProcessSpec, copied
from bottega.v1 import codec_pb2, tensor_pb2
from bottega.v1.generation_pb2 import ImageFormat, MaskUse

_LIMITS = {resource.RLIMIT_AS: ADDRESS_SPACE_BYTES, resource.RLIMIT_CORE: 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """An encoded image and how it came about.

    began_s: when a codec process began with it, CLOCK_MONOTONIC in seconds.
    seconds: that the process took.
    """

    data: bytes
    began_s: float
    seconds: float


class CodecPool(ProcessPool):
    """`processes` codec processes behind one queue. `start` before the first call, `stop` after the last.

    deadline_s: seconds that a process may take over one call. A call whose process stood still for so long, or died,
        gets a second one, and as long again.
    max_waiting: calls that may wait, half of them with large images; a further one raises QueueFull, with the time
        after which to ask again.
    max_wait_s: that one may wait for its turn; then it gets the same error. None: as long as its caller does.
    """

    def __init__(
        self, *, processes: int = 2, deadline_s: float = 10.0, max_waiting: int = 64, max_wait_s: float | None = None
    ) -> None:
        self._deadline_s = deadline_s
        spec = ProcessSpec(
            name="codec process",
            module="bottega.codec.process",
            deadline_s=deadline_s,
            limits=_LIMITS,
            sandbox="reads",
        )
        limits = PoolLimits(
            processes=processes,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            limit="codec_queue",
            waiting="images wait to be decoded or encoded",
        )
        super().__init__(spec, limits)

    async def inspect(self, image: bytes) -> ImageSize:
        """Decodes the image completely and says its size. Raises BadImage, QueueFull, Unavailable."""
        answer = await self._ask(
            lambda: _inspect_call(image), len(image), large=structure.is_large(image), blame=BadImage
        )
        return ImageSize(width=answer.width, height=answer.height)

    async def inspect_mask(self, mask: bytes, order: MaskOrder) -> MaskUse:
        """Decodes the mask of an edit and says what it redraws, without its digest.

        Raises BadImage, for a mask that redraws nothing too; QueueFull, Unavailable.
        """
        large = structure.is_large(mask) or order.width * order.height > LARGE_PIXELS
        answer = await self._ask(lambda: _inspect_mask_call(mask, order), len(mask), large=large, blame=BadImage)
        return answer.mask_use

    async def decode(self, image: bytes, width: int = 0, height: int = 0, *, crop: Crop | None = None) -> DecodedImage:
        """Decodes the image, or a part of it, and resizes it; 0 and 0 keep its size. crop: needs a size.

        Raises BadImage, QueueFull, Unavailable.
        """
        large = structure.is_large(image) or width * height > LARGE_PIXELS
        call = partial(_decode_call, image, width, height, crop)
        answer = await self._ask(call, len(image), large=large, blame=BadImage)
        return await copied(answer.width * answer.height * 3, lambda: _decoded(answer))

    async def decode_edit(self, image: bytes, mask: bytes, order: MaskOrder) -> DecodedEdit:
        """Decodes an edit's image and mask to what is drawn. order: its image_size is not looked at.

        Raises BadImage, for a mask that redraws nothing too; QueueFull, Unavailable.
        """
        large = any(map(structure.is_large, (image, mask))) or order.width * order.height > LARGE_PIXELS
        size_bytes = len(image) + len(mask)
        answer = await self._ask(lambda: _decode_edit_call(image, mask, order), size_bytes, large=large, blame=BadImage)
        return await copied(order.width * order.height * 4, lambda: _decoded_edit(answer))

    async def encode(
        self,
        pixels: Pixels,
        image_format: ImageFormat.ValueType,
        quality: int,
        text: Mapping[str, str],
        *,
        overlay: Overlay | None = None,
        icc_profile: bytes = b"",
    ) -> EncodedImage:
        """Encode pixels, or the image that they are put into; see images.encode and edits.composed.

        Raises InternalError when that fails, QueueFull, Unavailable.

        Args:
            icc_profile: Of the result; with an overlay its image's own counts.
        """
        beside = () if overlay is None else (overlay.image, overlay.mask)
        answer = await self._ask(
            lambda: _encode_call(pixels, image_format, quality, text, overlay=overlay, icc_profile=icc_profile),
            len(pixels.data) + len(icc_profile) + sum(map(len, beside)),
            large=pixels.width * pixels.height > LARGE_PIXELS or any(map(structure.is_large, beside)),
            blame=InternalError,
        )
        return await copied(len(pixels.data), lambda: _encoded(answer))

    async def _ask(
        self, build: Callable[[], codec_pb2.CodecCall], size_bytes: int, *, large: bool, blame: type[BottegaError]
    ) -> codec_pb2.CodecAnswer:
        async def prepare() -> PreparedCall:
            return PreparedCall(frame=await copied(size_bytes, lambda: build().SerializeToString()))

        try:
            answered = await self.call(prepare, large=large)
        except ProcessLost as lost:
            raise self._error(lost.loss, blame) from None
        answer = await copied(len(answered), lambda: codec_pb2.CodecAnswer.FromString(answered))
        if answer.refusal:
            raise blame(answer.refusal)
        return answer

    def _error(self, loss: Loss, blame: type[BottegaError]) -> BottegaError:
        match loss:
            case Loss.STALLED:
                late = f"no codec process was done with the image within {self._deadline_s:g} s"
                return Unavailable(f"{late}; the machine may be busy", retry_after_s=1.0)
            case Loss.OVERTIME:
                return blame(f"the image took more than {self._deadline_s:g} s to decode or encode")
            case Loss.CPU_LIMIT:
                return blame("the image needs more processor time than decoding or encoding one may take")
            case Loss.DIED:
                return blame("the image made its decoder or encoder fail")


def _inspect_call(image: bytes) -> codec_pb2.CodecCall:
    return codec_pb2.CodecCall(inspect=codec_pb2.CodecInspect(image=image))


def _inspect_mask_call(mask: bytes, order: MaskOrder) -> codec_pb2.CodecCall:
    return codec_pb2.CodecCall(inspect_mask=codec_pb2.CodecInspectMask(mask=mask, order=mask_order_to_wire(order)))


def mask_order_to_wire(order: MaskOrder) -> codec_pb2.MaskOrder:
    """As a call of a codec process carries it."""
    size = order.image_size or ImageSize(width=0, height=0)
    return codec_pb2.MaskOrder(
        width=order.width,
        height=order.height,
        latent_scale=order.latent_scale,
        alpha=order.alpha,
        padding_mask_crop=order.padding,
        image_width=size.width,
        image_height=size.height,
        token_elements=order.token,
        margin_tokens=order.margin,
    )


def _decode_call(image: bytes, width: int, height: int, crop: Crop | None) -> codec_pb2.CodecCall:
    decode = codec_pb2.CodecDecode(image=image, width=width, height=height)
    if crop is not None:
        decode.crop.x, decode.crop.y = crop.x, crop.y
        decode.crop.width, decode.crop.height = crop.width, crop.height
        decode.crop.image_width, decode.crop.image_height = crop.image_size.width, crop.image_size.height
    return codec_pb2.CodecCall(decode=decode)


def _decode_edit_call(image: bytes, mask: bytes, order: MaskOrder) -> codec_pb2.CodecCall:
    decode = codec_pb2.CodecDecodeEdit(image=image, mask=mask, order=mask_order_to_wire(order))
    return codec_pb2.CodecCall(decode_edit=decode)


def _decoded_edit(answer: codec_pb2.CodecAnswer) -> DecodedEdit:
    return DecodedEdit(
        pixels=_pixels(answer.pixels),
        mask=answer.mask.data,
        use=answer.mask_use,
        facts=_facts(answer.facts),
    )


def _decoded(answer: codec_pb2.CodecAnswer) -> DecodedImage:
    return DecodedImage(pixels=_pixels(answer.pixels), facts=_facts(answer.facts))


def _facts(said: codec_pb2.ImageFacts) -> ImageFacts:
    return ImageFacts(
        size=ImageSize(width=said.width, height=said.height),
        transparent=said.transparent,
        scaled_from_16_bits=said.scaled_from_16_bits,
        icc_profile=said.icc_profile,
    )


def _pixels(tensor: tensor_pb2.Tensor) -> Pixels:
    height, width, _channels = tensor.shape
    return Pixels(width=width, height=height, data=tensor.data)


def _encoded(answer: codec_pb2.CodecAnswer) -> EncodedImage:
    return EncodedImage(data=answer.image, began_s=answer.began_s, seconds=answer.seconds)


def _encode_call(
    pixels: Pixels,
    image_format: ImageFormat.ValueType,
    quality: int,
    text: Mapping[str, str],
    *,
    overlay: Overlay | None,
    icc_profile: bytes,
) -> codec_pb2.CodecCall:
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_UINT8, shape=(pixels.height, pixels.width, 3), data=pixels.data
    )
    encode = codec_pb2.CodecEncode(
        pixels=tensor, format=image_format, quality=quality, text=text, icc_profile=icc_profile
    )
    if overlay is not None:
        encode.overlay.CopyFrom(_overlay_to_wire(overlay))
    return codec_pb2.CodecCall(encode=encode)


def _overlay_to_wire(overlay: Overlay) -> codec_pb2.CodecOverlay:
    return codec_pb2.CodecOverlay(
        image=overlay.image,
        mask=overlay.mask,
        order=mask_order_to_wire(overlay.order),
        keep_unmasked=overlay.keep_unmasked,
        mask_feather=overlay.feather,
    )
