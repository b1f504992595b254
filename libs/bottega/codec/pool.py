"""Codec processes and the queue before them.

Every process serves one call at a time, within a deadline. One that hangs is killed, one that died is
replaced, and nothing but the call that did it fails. This module decodes nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
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


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A call that waits or is served.

    build: makes the message, copying `size_bytes`.
    blame: the error for a call that took its process along.
    begun: whether a process has it.
    """

    build: Callable[[], codec_pb2.CodecCall]
    size_bytes: int
    blame: type[BottegaError]
    result: asyncio.Future[codec_pb2.CodecAnswer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    begun: bool = False


class CodecPool:
    """`processes` codec processes behind one queue. `start` before the first call, `stop` after the last.

    deadline_s: seconds that a process may take over one call.
    max_waiting: calls that may wait; a further one raises QueueFull, with the time after which to ask again.
    max_wait_s: that one may wait for its turn; then it hears the same. None: as long as its caller does.
    """

    def __init__(
        self, *, processes: int = 1, deadline_s: float = 20.0, max_waiting: int = 64, max_wait_s: float | None = None
    ) -> None:
        self._deadline_s = deadline_s
        self._max_wait_s = max_wait_s
        self._waiting: asyncio.Queue[_Call] = asyncio.Queue(max_waiting)
        self._took_s: deque[float] = deque(maxlen=_PACE_CALLS)
        self._seats = [_Seat(self._waiting, deadline_s, self._took_s.append) for _ in range(processes)]
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
            raise self._full() from None
        with self._turned_away_if_late(call):
            answer = await call.result
        if answer.refusal:
            raise blame(answer.refusal)
        return answer

    @contextlib.contextmanager
    def _turned_away_if_late(self, call: _Call) -> Iterator[None]:
        """In the block, the call fails when no process has begun with it in time."""
        if self._max_wait_s is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._turn_away, call)
        try:
            yield
        finally:
            timer.cancel()

    def _turn_away(self, call: _Call) -> None:
        if not call.begun:
            _fail(call, self._full())

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
        calls = max(1.0, _RETRY_SHARE * self._waiting.qsize())
        return min(max(calls * call_s / max(1, len(self._seats)), _MIN_RETRY_S), self._deadline_s)


class _Seat:
    """The place of one process: keeps one in it and serves calls with it. took_s: told how long each took."""

    def __init__(self, waiting: asyncio.Queue[_Call], deadline_s: float, took_s: Callable[[float], None]) -> None:
        self._waiting = waiting
        self._deadline_s = deadline_s
        self._took_s = took_s
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
        if call.result.done():
            return  # nobody waits any more
        call.begun, began_s = True, time.monotonic()
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
        finally:
            self._took_s(time.monotonic() - began_s)

    async def _serve(self, call: _Call) -> None:
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
