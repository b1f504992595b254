"""Has a ControlNet that a caller adds looked at in a process with limits, before the engine hears of it.

The process stays for a while, for who adds several: its libraries take seconds to import. Opens no stranger's file
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from pathlib import Path

from bottega.errors import ControlNetUnusable, InternalError, Unavailable
from bottega.process import ChildProcess
from bottega.rpc.status import from_job_error
from bottega.v1 import controlnet_engine_pb2 as pb

_log = logging.getLogger(__name__)

MODULE = "bottega.controlnet.inspection_process"

# An interpreter that imports torch and Diffusers takes 4 s; this is for a machine that is busy with everything else.
_START_S = 60.0
# Of one look; the process itself bounds its time of a processor.
_DEADLINE_S = 60.0
_STOP_S = 2.0
# Without a call, after which the process ends.
_IDLE_S = 60.0
# One thread: what it computes is little.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class ControlNetInspector:
    """`stop` after the last call. idle_s: without a call, after which its process ends."""

    def __init__(self, *, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._child: ChildProcess | None = None
        self._one_at_a_time = asyncio.Lock()
        self._resting: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Of its process, while there is one."""
        return self._child.pid if self._child else None

    async def inspect(self, name: str, folder: Path, root: Path | None) -> None:
        """Returns where the ControlNet in the folder can be hosted, as far as its configuration and headers say.

        root: outside of which no file of it may be. Raises InvalidRequest, ControlNetUnusable, InternalError where the
        process does not start.
        """
        call = pb.ControlNetEngineHost(name=name, folder=str(folder), root=str(root or ""))
        async with self._one_at_a_time:
            if self._stopped:
                raise Unavailable("the ControlNet server is stopping")
            self._stay_awake()
            try:
                answer = await self._asked(await self._started(), call)
            finally:
                self._resting = asyncio.create_task(self._rest())
        if answer.HasField("error"):
            raise from_job_error(answer.error)

    async def stop(self) -> None:
        """Ends the process, if there is one, whatever it does."""
        self._stopped = True
        if self._child:
            self._child.kill()  # a call that waits for it ends at once
        async with self._one_at_a_time:
            self._stay_awake()
            await self._end()

    async def _asked(self, child: ChildProcess, call: pb.ControlNetEngineHost) -> pb.ControlNetEngineHosted:
        answered = None
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await child.channel.send(call.SerializeToString())
                answered = await child.channel.recv()
        except (TimeoutError, Unavailable):
            pass  # as if it had died: it is ended below
        except BaseException:
            await asyncio.shield(self._end())  # half a call means nothing to the next one
            raise
        if answered is None:
            child.kill()
            await self._end()
            _log.warning("an inspection process was ended", extra={"pid": child.pid, "exit_code": child.exit_code})
            raise ControlNetUnusable(
                f"ControlNet {call.name} cannot be used: to look at it takes more memory or time than it may"
            )
        return pb.ControlNetEngineHosted.FromString(answered)

    async def _started(self) -> ChildProcess:
        if self._child and self._child.exit_code is None:
            return self._child
        await self._end()
        self._child = await ChildProcess.start(MODULE, env=_ENVIRONMENT, limits={resource.RLIMIT_CORE: 0})
        try:
            async with asyncio.timeout(_START_S):
                ready = await self._child.channel.recv()
        except TimeoutError:
            ready = None
        except BaseException:
            await asyncio.shield(self._end())
            raise
        if ready is None:
            await self._end()
            raise InternalError("the process that looks at ControlNets did not start")
        return self._child

    def _stay_awake(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    async def _rest(self) -> None:
        await asyncio.sleep(self._idle_s)
        async with self._one_at_a_time:  # who has it by then cancels this
            await self._end()

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child:
            with contextlib.suppress(ProcessLookupError):
                await child.stop(_STOP_S)
