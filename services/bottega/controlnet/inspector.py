"""Checks a ControlNet that a caller adds in a process with limits, before the engine opens it.

The process stays for a while, for callers that add several, because its libraries take seconds to import. This module
opens no untrusted file itself.
"""

from __future__ import annotations

import resource
from pathlib import Path

from bottega.errors import ControlNetUnusable, Unavailable
from bottega.process import Loss, PoolLimits, PreparedCall, ProcessLost, ProcessPool, ProcessSpec
from bottega.rpc.status import from_job_error
from bottega.v1 import controlnet_engine_pb2 as pb

MODULE = "bottega.controlnet.inspection_process"

# Seconds for one check. The process itself limits its processor time.
_DEADLINE_S = 60.0
# Seconds without a call after which the process ends.
_IDLE_S = 60.0
_MAX_WAITING = 64
# One torch thread is enough for the little that it computes.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class ControlNetInspector(ProcessPool):
    """A pool of one inspection process. Call `stop` after the last call.

    Args:
        idle_s: Seconds without a call after which the process ends.
        deadline_s: Upper bound on the seconds of a call.
    """

    def __init__(self, *, idle_s: float = _IDLE_S, deadline_s: float = _DEADLINE_S) -> None:
        spec = ProcessSpec(
            name="inspection process",
            module=MODULE,
            deadline_s=deadline_s,
            limits={resource.RLIMIT_CORE: 0},
            environment=_ENVIRONMENT,
        )
        super().__init__(
            spec,
            PoolLimits(
                processes=1,
                max_waiting=_MAX_WAITING,
                limit="inspections",
                waiting="too many ControlNets wait to be checked",
                attempts=1,
                idle_s=idle_s,
            ),
        )

    async def inspect(self, name: str, folder: Path, root: Path | None) -> None:
        """Raise an error if the ControlNet cannot be hosted, judging by its configuration and file headers.

        Raises InvalidRequest, ControlNetUnusable, Unavailable, and InternalError if the process does not start.

        Args:
            root: Folder that must contain all its files; None allows any place.
        """

        async def prepare() -> PreparedCall:
            call = pb.ControlNetEngineHost(name=name, folder=str(folder), root=str(root or ""))
            return PreparedCall(frame=call.SerializeToString())

        try:
            answer = pb.ControlNetEngineHosted.FromString(await self.call(prepare))
        except ProcessLost as lost:
            if lost.loss is Loss.STALLED:
                late = f"ControlNet {name} was not checked in time; the server's machine may be busy"
                raise Unavailable(late, retry_after_s=1.0) from None
            raise ControlNetUnusable(
                f"ControlNet {name} cannot be used: checking it takes more memory or time than allowed"
            ) from None
        if answer.HasField("error"):
            raise from_job_error(answer.error)
