"""A pool of codec processes: sends them images, and decides whether an image caused the loss of a process.

The image is the cause if the process used up the CPU time of a call, or died twice in it. If the process made no
progress, it was stopped or the machine was busy. This module decodes nothing itself.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bottega.background_tasks import copied
from bottega.codec import structure
from bottega.codec.pixels import Crop, DecodedEdit, DecodedImage, ImageFacts, ImageSize, MaskOrder, Overlay, Pixels
from bottega.codec.structure import ADDRESS_SPACE_BYTES, LARGE_PIXELS
from bottega.errors import BadImage, BottegaError, InternalError, Unavailable
from bottega.fair_order import Share
from bottega.process.limited_process import Loss, ProcessLost, ProcessSpec
from bottega.process.process_pool import CallNeed, PoolLimits, PreparedCall, ProcessPool
from bottega.v1 import codec_pb2, generation_pb2, tensor_pb2
from bottega.v1.generation_pb2 import ImageFormat, MaskUse

# Estimated seconds of calls on one x86-64 core. A tenant is charged the estimate when a call begins, and the actual
# seconds when it ends. Decoding takes 10 to 22 ns per pixel. A progressive JPEG counts four times: it may take that
# long.
_CALL_S = 0.002
_DECODED_PIXEL_S = 15e-9
_ENCODED_PIXEL_S: Mapping[ImageFormat.ValueType, float] = {
    generation_pb2.IMAGE_FORMAT_PNG: 60e-9,
    generation_pb2.IMAGE_FORMAT_WEBP: 200e-9,
}
_DEFAULT_SHARE = Share()

_LIMITS = {resource.RLIMIT_AS: ADDRESS_SPACE_BYTES, resource.RLIMIT_CORE: 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """An encoded image, and when it was encoded."""

    data: bytes
    began_s: float
    """Time on CLOCK_MONOTONIC when a codec process began to encode it."""
    seconds: float
    """Seconds that the process took."""


class CodecPool(ProcessPool):
    """A pool of codec processes, whose time tenants share.

    See `bottega.process.process_pool`. Call `start` before the first call and `stop` after the last. Each call gets the
    share of the tenant that owns the images.

    Args:
        processes: Number of codec processes.
        deadline_s: Seconds that a process may take for one call. A call whose process made no progress for so long, or
            died, gets a second process with the same deadline.
        max_waiting: Maximum number of waiting calls, half of them with large images. A further call raises QueueFull
            with the time after which to retry. The limit for one tenant may be lower, so that others can call, too.
        max_wait_s: Seconds after which a waiting call raises QueueFull; None lets it wait as long as its caller does.
        idle_s: See PoolLimits.
    """

    def __init__(
        self,
        *,
        processes: int = 2,
        deadline_s: float = 10.0,
        max_waiting: int = 64,
        max_wait_s: float | None = None,
        idle_s: float | None = None,
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
            idle_s=idle_s,
            limit="codec_queue",
            waiting="images wait to be decoded or encoded",
        )
        super().__init__(spec, limits)

    async def inspect(self, image: bytes, *, share: Share = _DEFAULT_SHARE) -> ImageSize:
        """Decode the image completely and return its size. Raise BadImage, QueueFull or Unavailable."""
        need = _decoding_need(share, image)
        answer = await self._ask(lambda: _inspect_call(image), len(image), need=need, blame=BadImage)
        return ImageSize(width=answer.width, height=answer.height)

    async def inspect_mask(self, mask: bytes, order: MaskOrder, *, share: Share = _DEFAULT_SHARE) -> MaskUse:
        """Decode the mask of an edit and return what it redraws, without its digest.

        Raises BadImage, also if the mask redraws nothing, QueueFull or Unavailable.
        """
        need = _decoding_need(share, mask, made_pixels=order.width * order.height)
        answer = await self._ask(lambda: _inspect_mask_call(mask, order), len(mask), need=need, blame=BadImage)
        return answer.mask_use

    async def decode(
        self,
        image: bytes,
        width: int = 0,
        height: int = 0,
        *,
        crop: Crop | None = None,
        share: Share = _DEFAULT_SHARE,
    ) -> DecodedImage:
        """Decode and resize an image or a part of it. Width and height 0 keep the size; a crop needs both.

        Raises BadImage, QueueFull or Unavailable.
        """
        need = _decoding_need(share, image, made_pixels=width * height)
        call = partial(_decode_call, image, width, height, crop)
        answer = await self._ask(call, len(image), need=need, blame=BadImage)
        return await copied(answer.width * answer.height * 3, lambda: _decoded(answer))

    async def decode_edit(
        self, image: bytes, mask: bytes, order: MaskOrder, *, share: Share = _DEFAULT_SHARE
    ) -> DecodedEdit:
        """Decode an edit's image and mask at the size at which it is drawn. `order.image_size` is ignored.

        Raises BadImage, also if the mask redraws nothing, QueueFull or Unavailable.
        """
        need = _decoding_need(share, image, mask, made_pixels=order.width * order.height)
        size_bytes = len(image) + len(mask)
        answer = await self._ask(lambda: _decode_edit_call(image, mask, order), size_bytes, need=need, blame=BadImage)
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
        share: Share = _DEFAULT_SHARE,
    ) -> EncodedImage:
        """Encode pixels, or the image into which they are pasted; see images.encode and edits.composed.

        Args:
            icc_profile: Colour profile of the result. With an overlay, that of the overlay's image is used instead.
            share: The share of the tenant that owns the picture.

        Raises:
            InternalError: Encoding failed.
            QueueFull: No further call may wait now.
            Unavailable: No process responded in time.
        """
        overlay_files = () if overlay is None else (overlay.image, overlay.mask)
        answer = await self._ask(
            lambda: _encode_call(pixels, image_format, quality, text, overlay=overlay, icc_profile=icc_profile),
            len(pixels.data) + len(icc_profile) + sum(map(len, overlay_files)),
            need=_encoding_need(share, pixels, image_format, overlay_files),
            blame=InternalError,
        )
        return await copied(len(pixels.data), lambda: _encoded(answer))

    async def _ask(
        self, build: Callable[[], codec_pb2.CodecCall], size_bytes: int, *, need: CallNeed, blame: type[BottegaError]
    ) -> codec_pb2.CodecAnswer:
        async def prepare() -> PreparedCall:
            return PreparedCall(frame=await copied(size_bytes, lambda: build().SerializeToString()))

        try:
            answered = await self.call(prepare, need=need)
        except ProcessLost as lost:
            raise self._error(lost.loss, blame) from None
        answer = await copied(len(answered), lambda: codec_pb2.CodecAnswer.FromString(answered))
        if answer.refusal:
            raise blame(answer.refusal)
        return answer

    def _error(self, loss: Loss, blame: type[BottegaError]) -> BottegaError:
        match loss:
            case Loss.STALLED:
                late = f"no codec process finished the image within {self._deadline_s:g} s"
                return Unavailable(f"{late}; the machine may be busy", retry_after_s=1.0)
            case Loss.OVERTIME:
                return blame(f"the image took more than {self._deadline_s:g} s to decode or encode")
            case Loss.CPU_LIMIT:
                return blame("the image needs more processor time than decoding or encoding may take")
            case Loss.DIED:
                return blame("the decoder or encoder crashed on the image")


def _decoding_need(share: Share, *images: bytes, made_pixels: int = 0) -> CallNeed:
    """Return the estimated cost of decoding images, from their headers.

    Args:
        made_pixels: Pixels of the result.
    """
    pixels = [*map(structure.claimed_pixels, images), made_pixels]
    return CallNeed(share=share, expected_s=_CALL_S + sum(pixels) * _DECODED_PIXEL_S, large=max(pixels) > LARGE_PIXELS)


def _encoding_need(
    share: Share, pixels: Pixels, image_format: ImageFormat.ValueType, overlay_files: Sequence[bytes]
) -> CallNeed:
    """Return the estimated cost of encoding pixels, and of decoding the files of an overlay."""
    decoding = _decoding_need(share, *overlay_files)
    made = pixels.width * pixels.height
    per_pixel_s = _ENCODED_PIXEL_S.get(image_format, _DECODED_PIXEL_S)
    return replace(
        decoding, expected_s=decoding.expected_s + made * per_pixel_s, large=decoding.large or made > LARGE_PIXELS
    )


def _inspect_call(image: bytes) -> codec_pb2.CodecCall:
    return codec_pb2.CodecCall(inspect=codec_pb2.CodecInspect(image=image))


def _inspect_mask_call(mask: bytes, order: MaskOrder) -> codec_pb2.CodecCall:
    return codec_pb2.CodecCall(inspect_mask=codec_pb2.CodecInspectMask(mask=mask, order=mask_order_to_wire(order)))


def mask_order_to_wire(order: MaskOrder) -> codec_pb2.MaskOrder:
    """Convert an order to the message of a codec call."""
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


def _facts(message: codec_pb2.ImageFacts) -> ImageFacts:
    return ImageFacts(
        size=ImageSize(width=message.width, height=message.height),
        transparent=message.transparent,
        scaled_from_16_bits=message.scaled_from_16_bits,
        icc_profile=message.icc_profile,
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
