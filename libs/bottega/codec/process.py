"""A codec process: `python -m bottega.codec.process --fd N` answers CodecCall frames until its pipe closes.

Untrusted files are decoded here, where a crash, a hang or a flood of memory takes only this process along.
Its parent sets the limit of memory and the deadline; the CPU seconds of a call are bounded here, so that
the bound holds without a parent too. The first answer, number 0, says that it is ready.
"""

from __future__ import annotations

import argparse
import signal
import time

from bottega.codec import images
from bottega.codec.limits import DECODE_CPU_S, ENCODE_CPU_S
from bottega.codec.pixels import Pixels
from bottega.errors import BadImage
from bottega.process import FramedPipe
from bottega.v1 import codec_pb2, tensor_pb2


def main() -> None:
    """Serves until the other end of the pipe closes."""
    parser = argparse.ArgumentParser(description="Bottega's codec process; started by its service")
    parser.add_argument("--fd", type=int, required=True)
    channel = FramedPipe.from_fd(parser.parse_args().fd)
    channel.send(codec_pb2.CodecAnswer().SerializeToString())
    while (frame := channel.recv()) is not None:
        channel.send(_answer(frame).SerializeToString())


def _answer(frame: bytes) -> codec_pb2.CodecAnswer:
    began_s = time.monotonic()
    call = codec_pb2.CodecCall.FromString(frame)
    signal.setitimer(signal.ITIMER_PROF, ENCODE_CPU_S if call.HasField("encode") else DECODE_CPU_S)  # SIGPROF ends it
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
            pixels = images.decode(call.decode.image, call.decode.width, call.decode.height)
            return _with_pixels(pixels)
        case "encode":
            return _encoded(call.encode)
    raise ValueError("a codec call names no operation")


def _encoded(call: codec_pb2.CodecEncode) -> codec_pb2.CodecAnswer:
    height, width, _channels = call.pixels.shape
    pixels = Pixels(width=width, height=height, data=call.pixels.data)
    image = images.encode(pixels, call.format, call.quality, call.text)
    return codec_pb2.CodecAnswer(width=width, height=height, image=image)


def _with_pixels(pixels: Pixels) -> codec_pb2.CodecAnswer:
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_UINT8, shape=(pixels.height, pixels.width, 3), data=pixels.data
    )
    return codec_pb2.CodecAnswer(width=pixels.width, height=pixels.height, pixels=tensor)


if __name__ == "__main__":
    main()
