"""The codec process: `python -m bottega.codec.process --fd N` answers CodecCall frames until its pipe closes.

It decodes untrusted files, so that a crash, a hang or excessive memory affects only this process. The parent sets the
limit on memory and the deadline. The process itself limits the CPU seconds of a call, so that the limit holds even if
the parent has died. The first answer, with number 0, means that the process is ready.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Mapping

from PIL import Image

from bottega.codec import edits, images
from bottega.codec.pixels import Crop, DecodedImage, ImageFacts, ImageSize, MaskOrder, Overlay, Pixels
from bottega.codec.structure import DECODE_CPU_S, DECODE_EDIT_CPU_S, ENCODE_CPU_S
from bottega.errors import BadImage
from bottega.process.child import FramedPipe
from bottega.v1 import codec_pb2, tensor_pb2

# CPU seconds that a call may take, by kind; all other calls have those of decoding.
_CPU_S: Mapping[str | None, float] = {"encode": ENCODE_CPU_S, "decode_edit": DECODE_EDIT_CPU_S}


def main() -> None:
    """Answer calls until the other end of the pipe closes."""
    parser = argparse.ArgumentParser(description="Bottega's codec process; started by its service")
    parser.add_argument("--fd", type=int, required=True)
    channel = FramedPipe.from_fd(parser.parse_args().fd)
    channel.send(codec_pb2.CodecAnswer().SerializeToString())
    while (frame := channel.recv()) is not None:
        channel.send(_answer(frame).SerializeToString())


def _answer(frame: bytes) -> codec_pb2.CodecAnswer:
    began_s = time.monotonic()
    call = codec_pb2.CodecCall.FromString(frame)
    signal.setitimer(signal.ITIMER_PROF, _CPU_S.get(call.WhichOneof("call"), DECODE_CPU_S))  # SIGPROF ends the process
    try:
        answer = _done(call)
    except BadImage as refusal:
        answer = codec_pb2.CodecAnswer(refusal=refusal.message)
    except MemoryError:
        answer = codec_pb2.CodecAnswer(refusal="the image needs more memory than its decoder or encoder may have")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    answer.id = call.id
    answer.began_s = began_s
    answer.seconds = time.monotonic() - began_s
    return answer


def _done(call: codec_pb2.CodecCall) -> codec_pb2.CodecAnswer:
    match call.WhichOneof("call"):
        case "inspect":
            size = images.inspect(call.inspect.image)
            return codec_pb2.CodecAnswer(width=size.width, height=size.height)
        case "decode":
            decoded = _decoded(call.decode)
            return _with_pixels(decoded.pixels, decoded.facts)
        case "encode":
            return _encoded(call.encode)
        case "inspect_mask":
            use = edits.inspect(call.inspect_mask.mask, _mask_order(call.inspect_mask.order))
            return codec_pb2.CodecAnswer(mask_use=use)
        case "decode_edit":
            return _decoded_edit(call.decode_edit)
    raise ValueError("a codec call names no operation")


def _decoded(call: codec_pb2.CodecDecode) -> DecodedImage:
    if not call.HasField("crop"):
        return images.decode(call.image, call.width, call.height)
    crop = Crop(
        x=call.crop.x,
        y=call.crop.y,
        width=call.crop.width,
        height=call.crop.height,
        image_size=ImageSize(width=call.crop.image_width, height=call.crop.image_height),
    )
    return edits.decode_part(call.image, call.width, call.height, crop)


def _decoded_edit(call: codec_pb2.CodecDecodeEdit) -> codec_pb2.CodecAnswer:
    edit = edits.decode(call.image, call.mask, _mask_order(call.order))
    answer = _with_pixels(edit.pixels, edit.facts)
    answer.mask.data_type = tensor_pb2.DATA_TYPE_UINT8
    answer.mask.shape.extend((edit.pixels.height, edit.pixels.width))
    answer.mask.data = edit.mask
    answer.mask_use.CopyFrom(edit.use)
    return answer


def _mask_order(order: codec_pb2.MaskOrder) -> MaskOrder:
    cropped = order.HasField("padding_mask_crop")
    return MaskOrder(
        width=order.width,
        height=order.height,
        latent_scale=order.latent_scale,
        alpha=order.alpha,
        padding=order.padding_mask_crop if cropped else None,
        image_size=ImageSize(width=order.image_width, height=order.image_height) if cropped else None,
        token=order.token_elements,
        margin=order.margin_tokens,
    )


def _encoded(call: codec_pb2.CodecEncode) -> codec_pb2.CodecAnswer:
    height, width, _channels = call.pixels.shape
    image = Image.frombytes("RGB", (width, height), call.pixels.data)
    if call.HasField("overlay"):
        image = edits.composed(image, _overlay(call.overlay))
    elif call.icc_profile:
        image.info["icc_profile"] = call.icc_profile
    data = images.encode_image(image, call.format, call.quality, call.text)
    return codec_pb2.CodecAnswer(width=image.width, height=image.height, image=data)


def _overlay(overlay: codec_pb2.CodecOverlay) -> Overlay:
    return Overlay(
        image=overlay.image,
        mask=overlay.mask,
        order=_mask_order(overlay.order),
        keep_unmasked=overlay.keep_unmasked,
        feather=overlay.mask_feather,
    )


def _with_pixels(pixels: Pixels, facts: ImageFacts) -> codec_pb2.CodecAnswer:
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_UINT8, shape=(pixels.height, pixels.width, 3), data=pixels.data
    )
    image_facts = codec_pb2.ImageFacts(
        width=facts.size.width,
        height=facts.size.height,
        transparent=facts.transparent,
        scaled_from_16_bits=facts.scaled_from_16_bits,
        icc_profile=facts.icc_profile,
    )
    return codec_pb2.CodecAnswer(width=pixels.width, height=pixels.height, pixels=tensor, facts=image_facts)


if __name__ == "__main__":
    main()
