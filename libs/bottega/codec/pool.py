"""Codec processes and the queue before them.

Every process serves one call at a time, within a deadline. One that hangs is killed, one that died is
replaced, and nothing but the call that did it fails. One of several processes never serves large images, so that
small ones always get on, whatever is sent beside them. This module decodes nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bottega.codec import structure
from bottega.codec.calls import CodecQueue, CodecRequest
from bottega.codec.limits import LARGE_PIXELS
from bottega.codec.pixels import ImageSize, Pixels
from bottega.codec.process_slot import ProcessSlot
from bottega.errors import BadImage, BottegaError, InternalError, QueueFull, Unavailable
from bottega.process import copied
from bottega.v1 import codec_pb2, tensor_pb2
from bottega.v1.generation_pb2 import ImageFormat

# Calls over which the time of one is measured.
_PACE_CALLS = 16
_MIN_RETRY_S = 0.5
# A caller that comes back after this share of the queue has gone finds room beside the others who wait.
_RETRY_SHARE = 0.1
# Longest time that is asked for, over the shortest: who was refused together shall not come back together.
_SPREAD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """An encoded image and how it came about.

    began_s: when a codec process began with it, CLOCK_MONOTONIC in seconds.
    seconds: that the process took.
    """

    data: bytes
    began_s: float
    seconds: float


class CodecPool:
    """`processes` codec processes behind one queue. `start` before the first call, `stop` after the last.

    deadline_s: seconds that a process may take over one call. A call whose process stood still for so long, or died,
        gets a second one, and as long again.
    max_waiting: calls that may wait, half of them with large images; a further one raises QueueFull, with the time
        after which to ask again.
    max_wait_s: that one may wait for its turn; then it hears the same. None: as long as its caller does.
    """

    def __init__(
        self, *, processes: int = 2, deadline_s: float = 10.0, max_waiting: int = 64, max_wait_s: float | None = None
    ) -> None:
        self._deadline_s = deadline_s
        self._max_wait_s = max_wait_s
        self._waiting = CodecQueue(max_waiting)
        self._took_s: deque[float] = deque(maxlen=_PACE_CALLS)
        self._seats = [
            ProcessSlot(
                self._waiting, deadline_s=deadline_s, large=number > 0 or processes == 1, took_s=self._took_s.append
            )
            for number in range(processes)
        ]
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
        for call in self._waiting.get_all():
            call.fail(Unavailable("the service is stopping"))
        await asyncio.gather(*(seat.empty() for seat in self._seats))

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return [seat.child.pid for seat in self._seats if seat.child]

    async def inspect(self, image: bytes) -> ImageSize:
        """Decodes the image completely and says its size. Raises BadImage, QueueFull, Unavailable."""
        answer = await self._ask(
            lambda: _inspect_call(image), len(image), large=structure.is_large(image), blame=BadImage
        )
        return ImageSize(width=answer.width, height=answer.height)

    async def decode(self, image: bytes, width: int = 0, height: int = 0) -> Pixels:
        """Decodes the image and resizes it; 0 and 0 keep its size. Raises BadImage, QueueFull, Unavailable."""
        large = structure.is_large(image) or width * height > LARGE_PIXELS
        answer = await self._ask(lambda: _decode_call(image, width, height), len(image), large=large, blame=BadImage)
        return await copied(answer.width * answer.height * 3, lambda: _pixels(answer))

    async def encode(
        self, pixels: Pixels, image_format: ImageFormat.ValueType, quality: int, text: Mapping[str, str]
    ) -> EncodedImage:
        """Encodes pixels; see images.encode. Raises InternalError when that fails, QueueFull, Unavailable."""
        answer = await self._ask(
            lambda: _encode_call(pixels, image_format, quality, text),
            len(pixels.data),
            large=pixels.width * pixels.height > LARGE_PIXELS,
            blame=InternalError,
        )
        return await copied(len(pixels.data), lambda: _encoded(answer))

    async def _ask(
        self, build: Callable[[], codec_pb2.CodecCall], size_bytes: int, *, large: bool, blame: type[BottegaError]
    ) -> codec_pb2.CodecAnswer:
        call = CodecRequest(build=build, size_bytes=size_bytes, large=large, blame=blame)
        if not self._waiting.put(call):
            raise self._full()
        with self._turned_away_if_late(call):
            answer = await call.result
        if answer.refusal:
            raise blame(answer.refusal)
        return answer

    @contextlib.contextmanager
    def _turned_away_if_late(self, call: CodecRequest) -> Iterator[None]:
        """In the block, the call fails when no process has begun with it in time."""
        if self._max_wait_s is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._turn_away, call)
        try:
            yield
        finally:
            timer.cancel()

    def _turn_away(self, call: CodecRequest) -> None:
        if not call.begun:
            call.fail(self._full())

    def _full(self) -> QueueFull:
        """What a call hears for which there is no room, or not in time."""
        return QueueFull(
            "too many images wait to be decoded or encoded; ask again",
            metadata={"limit": "codec_queue"},
            retry_after_s=random.uniform(1.0, _SPREAD) * self._due_s(),
        )

    def _due_s(self) -> float:
        """Seconds until about a tenth of what waits will have been served, by what the last calls took."""
        call_s = sum(self._took_s) / len(self._took_s) if self._took_s else self._deadline_s
        calls = max(1.0, _RETRY_SHARE * len(self._waiting))
        return min(max(calls * call_s / max(1, len(self._seats)), _MIN_RETRY_S), self._deadline_s)


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
