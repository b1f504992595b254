"""The place of one codec process: keeps one in it, serves calls with it, and finds out whose fault a loss was.

A process that spent the processor time of a call, or that died twice in it, has an image to blame. One that stood
still has not: it was stopped, or the machine was busy with everything else, and the same image may be served by another
process a moment later. This module decodes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import time
from collections.abc import Callable

from bottega.codec.calls import CodecQueue, CodecRequest
from bottega.codec.limits import ADDRESS_SPACE_BYTES
from bottega.errors import BottegaError, InternalError, Unavailable
from bottega.process import ChildProcess, copied, sandbox_status
from bottega.process.cpu_time import CpuTime
from bottega.v1 import codec_pb2

_log = logging.getLogger(__name__)

# An interpreter that imports Pillow takes .3 s; this is for a machine that is busy with everything else.
_START_S = 60.0
_STOP_S = 2.0
_LIMITS = {resource.RLIMIT_AS: ADDRESS_SPACE_BYTES, resource.RLIMIT_CORE: 0}
# Of a call that is lost by no fault of its own.
_ATTEMPTS = 2


class ProcessSlot:
    """large: whether it serves large calls too. took_s: told how long each call took."""

    def __init__(self, calls: CodecQueue, *, deadline_s: float, large: bool, took_s: Callable[[float], None]) -> None:
        self._calls = calls
        self._deadline_s = deadline_s
        self._large = large
        self._took_s = took_s
        self.child: ChildProcess | None = None

    async def run(self) -> None:
        """Serves until cancelled."""
        while True:
            await self._serve_next()  # which keeps nothing of an image while it waits for another

    async def fill(self) -> ChildProcess:
        """The process of this seat, a new one where there is none or it died. Raises InternalError."""
        if self.child and self.child.exit_code is None:
            return self.child
        await self.empty()
        self.child = child = await ChildProcess.start("bottega.codec.process", limits=_LIMITS, confined="reads")
        try:
            async with asyncio.timeout(_START_S):
                ready = await child.channel.recv()
        except TimeoutError:
            ready = None
        if ready is None:
            await self.empty()
            raise InternalError("a codec process did not start")
        sandbox_status.tell(child.pid)
        return child

    async def empty(self) -> None:
        """Ends the process of this seat."""
        if self.child:
            child, self.child = self.child, None
            await child.stop(_STOP_S)

    async def _serve_next(self) -> None:
        call = await self._calls.get(large=self._large)
        if call.result.done():
            return  # nobody waits any more
        call.begun, began_s = True, time.monotonic()
        try:
            await self._serve(call)
        except BottegaError as error:
            call.fail(error)
        except asyncio.CancelledError:
            call.fail(Unavailable("the service is stopping"))
            raise
        except Exception:  # noqa: BLE001 - the seat must go on serving; the caller gets a fault of ours
            _log.exception("codec call failed")
            call.fail(InternalError("an image could not be decoded or encoded"))
        finally:
            self._took_s(time.monotonic() - began_s)

    async def _serve(self, call: CodecRequest) -> None:
        frame = await copied(call.size_bytes, lambda: call.build().SerializeToString())
        for attempt in range(_ATTEMPTS):
            try:
                answered = await self._exchange(call, frame)
                break
            except _LostError as lost:
                if attempt == _ATTEMPTS - 1:
                    raise lost.error from None
        answer = await copied(len(answered), lambda: codec_pb2.CodecAnswer.FromString(answered))
        if not call.result.done():
            call.result.set_result(answer)

    async def _exchange(self, call: CodecRequest, frame: bytes) -> bytes:
        """The answer to a frame. Raises `call.blame` where the image is to blame, _LostError where it may not be."""
        child = await self.fill()
        spent = CpuTime(child.pid)
        try:
            async with asyncio.timeout(self._deadline_s):
                await child.channel.send(frame)
                answer = await child.channel.recv()
        except TimeoutError:
            late = self._late(call, spent)
            child.kill()
            await self._replace(child, "took too long")
            raise late from None
        except Unavailable:
            answer = None
        if answer is None:
            await self._replace(child, "died")
            raise _death(call, child.exit_code)
        return answer

    def _late(self, call: CodecRequest, spent: CpuTime) -> Exception:
        if not spent.stood_still(self._deadline_s):
            return call.blame(f"the image took more than {self._deadline_s:g} s to decode or encode")
        stood_still = f"no codec process was done with the image within {self._deadline_s:g} s; the machine may be busy"
        return _LostError(Unavailable(stood_still, retry_after_s=1.0))

    async def _replace(self, child: ChildProcess, why: str) -> None:
        await self.empty()  # of a process that died by itself, killing it would hide how
        _log.warning("codec process replaced", extra={"pid": child.pid, "why": why, "exit_code": child.exit_code})


class _LostError(Exception):
    """The process is gone, and perhaps not by its image. error: what the call hears if it happens again."""

    def __init__(self, error: BottegaError) -> None:
        super().__init__(error.message)
        self.error = error


def _death(call: CodecRequest, exit_code: int | None) -> Exception:
    if exit_code == -signal.SIGPROF:
        return call.blame("the image needs more processor time than decoding or encoding one may take")
    # A process may have died since its last call: that is not this call's fault, so it gets a second one.
    return _LostError(call.blame("the image made its decoder or encoder fail"))
