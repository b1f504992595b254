"""Codec processes and the queue before them.

Every process serves one call at a time, within a deadline. One that hangs is killed, one that died is
replaced, and nothing but the call that did it fails. This module decodes nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bottega.codec.limits import ADDRESS_SPACE_BYTES
from bottega.codec.pixels import ImageSize, Pixels
from bottega.errors import BadImage, BottegaError, InternalError, QueueFull, Unavailable
from bottega.process import Child, copied
from bottega.v1 import codec_pb2, tensor_pb2
from bottega.v1.generation_pb2 import ImageFormat

_log = logging.getLogger(__name__)

# An interpreter that imports Pillow takes .3 s; this is for a machine that is busy with everything else.
_START_S = 60.0
_STOP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """An encoded image and how it came about.

    began_s: when a codec process began with it, CLOCK_MONOTONIC in seconds.
    seconds: that the process took.
    """

    data: bytes
    began_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call that waits or is served.

    build: makes the message, copying `size_bytes`.
    blame: the error for a call that took its process along.
    """

    build: Callable[[], codec_pb2.CodecCall]
    size_bytes: int
    blame: type[BottegaError]
    result: asyncio.Future[codec_pb2.CodecAnswer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class CodecPool:
    """`processes` codec processes behind one queue. `start` before the first call, `stop` after the last.

    deadline_s: seconds that a process may take over one call.
    max_waiting: calls that may wait; a further one raises QueueFull.
    """

    def __init__(self, *, processes: int = 1, deadline_s: float = 20.0, max_waiting: int = 64) -> None:
        self._deadline_s = deadline_s
        self._waiting: asyncio.Queue[_Call] = asyncio.Queue(max_waiting)
        self._seats = [_Seat(self._waiting, deadline_s) for _ in range(processes)]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the processes and waits until they are ready. Raises InternalError when one does not start."""
        await asyncio.gather(*(seat.fill() for seat in self._seats))
        self._tasks = [asyncio.create_task(seat.run()) for seat in self._seats]

    async def stop(self) -> None:
        """Stops the processes; calls that wait or run fail with Unavailable."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._waiting.empty():
            _fail(self._waiting.get_nowait(), _stopping())
        await asyncio.gather(*(seat.empty() for seat in self._seats))

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return [seat.child.pid for seat in self._seats if seat.child]

    async def inspect(self, image: bytes) -> ImageSize:
        """Decodes the image completely and says its size. Raises BadImage, QueueFull."""
        answer = await self._ask(lambda: _inspect_call(image), len(image), BadImage)
        return ImageSize(width=answer.width, height=answer.height)

    async def decode(self, image: bytes, width: int = 0, height: int = 0) -> Pixels:
        """Decodes the image and resizes it; 0 and 0 keep its size. Raises BadImage, QueueFull."""
        answer = await self._ask(lambda: _decode_call(image, width, height), len(image), BadImage)
        return await copied(answer.width * answer.height * 3, lambda: _pixels(answer))

    async def encode(
        self, pixels: Pixels, image_format: ImageFormat.ValueType, quality: int, text: Mapping[str, str]
    ) -> EncodedImage:
        """Encodes pixels; see images.encode. Raises InternalError when that fails, QueueFull."""
        answer = await self._ask(
            lambda: _encode_call(pixels, image_format, quality, text), len(pixels.data), InternalError
        )
        return await copied(len(pixels.data), lambda: _encoded(answer))

    async def _ask(
        self, build: Callable[[], codec_pb2.CodecCall], size_bytes: int, blame: type[BottegaError]
    ) -> codec_pb2.CodecAnswer:
        call = _Call(build=build, size_bytes=size_bytes, blame=blame)
        try:
            self._waiting.put_nowait(call)
        except asyncio.QueueFull:
            raise QueueFull("too many images wait to be decoded or encoded", retry_after_s=1.0) from None
        answer = await call.result
        if answer.refusal:
            raise blame(answer.refusal)
        return answer


class _Seat:
    """The place of one process: keeps one in it and serves calls with it."""

    def __init__(self, waiting: asyncio.Queue[_Call], deadline_s: float) -> None:
        self._waiting = waiting
        self._deadline_s = deadline_s
        self.child: Child | None = None

    async def run(self) -> None:
        """Serves until cancelled."""
        while True:
            await self._serve_next()  # which keeps nothing of an image while it waits for another

    async def fill(self) -> Child:
        """The process of this seat, a new one where there is none or it died."""
        if self.child and self.child.exit_code is None:
            return self.child
        await self.empty()
        self.child = child = await Child.start(
            "bottega.codec.process", limits={resource.RLIMIT_AS: ADDRESS_SPACE_BYTES}
        )
        try:
            async with asyncio.timeout(_START_S):
                ready = await child.channel.recv()
        except TimeoutError:
            ready = None
        if ready is None:
            await self.empty()
            raise InternalError("a codec process did not start")
        return child

    async def empty(self) -> None:
        """Ends the process of this seat."""
        if self.child:
            child, self.child = self.child, None
            await child.stop(_STOP_S)

    async def _serve_next(self) -> None:
        call = await self._waiting.get()
        try:
            await self._serve(call)
        except BottegaError as error:
            _fail(call, error)
        except asyncio.CancelledError:
            _fail(call, _stopping())
            raise
        except Exception:  # noqa: BLE001 - the seat must go on serving; the caller gets a fault of ours
            _log.exception("codec call failed")
            _fail(call, InternalError("an image could not be decoded or encoded"))

    async def _serve(self, call: _Call) -> None:
        if call.result.done():
            return  # nobody waits any more
        frame = await copied(call.size_bytes, lambda: call.build().SerializeToString())
        # A process may have died since its last call: that is not this call's fault, so it gets a second one.
        answered = await self._exchange(call, frame) or await self._exchange(call, frame)
        if answered is None:
            raise call.blame("the image made its decoder or encoder fail")
        answer = await copied(len(answered), lambda: codec_pb2.CodecAnswer.FromString(answered))
        if not call.result.done():
            call.result.set_result(answer)

    async def _exchange(self, call: _Call, frame: bytes) -> bytes | None:
        """The answer to a frame; None when the process died of it. Raises `call.blame` when it takes too long."""
        child = await self.fill()
        try:
            async with asyncio.timeout(self._deadline_s):
                await child.channel.send(frame)
                answer = await child.channel.recv()
        except TimeoutError:
            await self._drop(child, "took too long")
            raise call.blame(f"the image took more than {self._deadline_s:g} s to decode or encode") from None
        except Unavailable:
            answer = None
        if answer is None:
            await self._drop(child, "died")
        return answer

    async def _drop(self, child: Child, why: str) -> None:
        child.kill()
        await self.empty()
        _log.warning("codec process replaced", extra={"pid": child.pid, "why": why, "exit_code": child.exit_code})


def _inspect_call(image: bytes) -> codec_pb2.CodecCall:
    return codec_pb2.CodecCall(inspect=codec_pb2.CodecInspect(image=image))


def _decode_call(image: bytes, width: int, height: int) -> codec_pb2.CodecCall:
    return codec_pb2.CodecCall(decode=codec_pb2.CodecDecode(image=image, width=width, height=height))


def _pixels(answer: codec_pb2.CodecAnswer) -> Pixels:
    return Pixels(width=answer.width, height=answer.height, data=answer.pixels.data)


def _encoded(answer: codec_pb2.CodecAnswer) -> EncodedImage:
    return EncodedImage(data=answer.image, began_s=answer.began_s, seconds=answer.seconds)


def _encode_call(
    pixels: Pixels, image_format: ImageFormat.ValueType, quality: int, text: Mapping[str, str]
) -> codec_pb2.CodecCall:
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_UINT8, shape=(pixels.height, pixels.width, 3), data=pixels.data
    )
    encode = codec_pb2.CodecEncode(pixels=tensor, format=image_format, quality=quality, text=text)
    return codec_pb2.CodecCall(encode=encode)


def _fail(call: _Call, error: BottegaError) -> None:
    if not call.result.done():
        call.result.set_exception(error)


def _stopping() -> Unavailable:
    return Unavailable("the service is stopping")
