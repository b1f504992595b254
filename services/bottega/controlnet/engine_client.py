"""The clients of the server's child processes: the engine, and the inspection of ControlNets that callers add.

They exchange controlnet_engine.proto messages. The inspection process has limits, and checks a ControlNet before the
engine opens it. It stays for a while, for callers that add several, because its libraries take seconds to import. This
module opens no untrusted file itself.
"""

from __future__ import annotations

import dataclasses
import json
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path

from bottega.controlnet.config import ControlNetEngineConfig
from bottega.errors import BottegaError, ControlNetUnusable, Unavailable
from bottega.process.engine_supervisor import EngineSupervisor, EngineTimeouts, PendingCalls
from bottega.process.limited_process import Loss, ProcessLost, ProcessSpec
from bottega.process.process_pool import PoolLimits, PreparedCall, ProcessPool
from bottega.rpc.status import from_job_error
from bottega.v1 import controlnet_engine_pb2 as pb
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, HOSTED_STATE_LOADING, Hosted
from bottega.v1.link_pb2 import IncomingLinkRequest, LinkOffer, LinkResult, OpenLinkRequest

_IN_MEMORY = frozenset({HOSTED_STATE_LOADED, HOSTED_STATE_LOADING})

ENGINE_MODULE = "bottega.controlnet.engine"

# Seconds to wait for an offer. A separate thread of the engine answers at once.
_OFFER_S = 5.0
MAX_HOSTING_S = 300.0
"""Seconds that hosting may take: all files of a ControlNet are read, perhaps from a slow disk."""


class ControlNetEngineClient(
    EngineSupervisor[pb.ControlNetEngineCommand, pb.ControlNetEngineEvent, pb.ControlNetEngineReady]
):
    """Supervises the engine process of a ControlNet server. Pass every event to `on_event`: some are answers."""

    def __init__(
        self, config: ControlNetEngineConfig, *, timeouts: EngineTimeouts, module: str = ENGINE_MODULE
    ) -> None:
        arguments = (
            *("--config-json", json.dumps(dataclasses.asdict(config))),
            *("--max-quiet-s", f"{timeouts.max_quiet_s:g}"),
        )
        super().__init__(module, *arguments, timeouts=timeouts, exclusive_cores=config.exclusive_cores)
        self._calls: PendingCalls[pb.ControlNetEngineHosted | LinkResult] = PendingCalls()

    def read(self, frame: bytes) -> pb.ControlNetEngineEvent:
        """Return the event in a frame. Raises DecodeError."""
        return pb.ControlNetEngineEvent.FromString(frame)

    def ready(self, event: pb.ControlNetEngineEvent) -> pb.ControlNetEngineReady | None:
        """Return the message that says that the engine is ready; None for other events."""
        return event.ready if event.HasField("ready") else None

    def turns(self, event: pb.ControlNetEngineEvent) -> int | None:
        """Return the number of forward passes in the heartbeat of an engine with work; None for other events."""
        return event.beat.turns if event.HasField("beat") and event.beat.busy else None

    def prefetch(self, names: Sequence[str], *, unneeded: Sequence[str] = (), retry: bool = False) -> None:
        """Tell the engine which ControlNets it will need soon, and which not. Raises Unavailable without an engine."""
        prefetch = pb.ControlNetEnginePrefetch(names=names, unneeded=unneeded, retry=retry)
        self.send(pb.ControlNetEngineCommand(prefetch=prefetch))

    def pin(self, names: Iterable[str]) -> None:
        """Tell the engine to keep these ControlNets, and no others, in memory. Raises Unavailable if there is none."""
        self.send(pb.ControlNetEngineCommand(pin=pb.ControlNetEnginePins(names=names)))

    def drain(self) -> None:
        """Tell the engine to open no more sessions. Raises Unavailable if there is no engine."""
        self.send(pb.ControlNetEngineCommand(drain=pb.ControlNetEngineDrain()))

    async def host(self, name: str, folder: Path, root: Path | None = None) -> Hosted:
        """Make the engine host a ControlNet.

        Raises InvalidRequest, ControlNetUnusable, and Unavailable if there is no engine.

        Args:
            root: Folder that must contain all its files; None allows any place.
        """
        host = pb.ControlNetEngineHost(name=name, folder=str(folder), root=str(root or ""))

        def send(number: int) -> None:
            host.request = number
            self.send(pb.ControlNetEngineCommand(host=host))

        answer = await self._calls.call(send, MAX_HOSTING_S)
        assert isinstance(answer, pb.ControlNetEngineHosted)
        return answer.controlnet

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Return the engine's offer of a connection for a worker, whose host is `caller`.

        Raises the error with which the engine refuses, and Unavailable if there is no engine.
        """
        incoming = IncomingLinkRequest(open=request, caller=caller)

        def send(number: int) -> None:
            incoming.request = number
            self.send(pb.ControlNetEngineCommand(open_link=incoming))

        answer = await self._calls.call(send, _OFFER_S)
        assert isinstance(answer, LinkResult)
        return answer.opened.offer

    def on_event(self, event: pb.ControlNetEngineEvent) -> None:
        """Complete the call that this event answers, if there is one."""
        kind = event.WhichOneof("event")
        if kind not in ("hosted", "link_result"):
            return
        answer = event.hosted if kind == "hosted" else event.link_result
        self._calls.answer(answer.request, from_job_error(answer.error) if answer.HasField("error") else answer)

    def fail_calls(self, error: BottegaError) -> None:
        """Fail all calls, because the engine was lost."""
        self._calls.fail_all(error)


INSPECTION_MODULE = "bottega.controlnet.inspection_process"

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
            module=INSPECTION_MODULE,
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


class CopiedControlNets:
    """The ControlNets that the engine loaded because other servers have too much to do with them."""

    def __init__(self) -> None:
        self._in_memory: dict[str, bool] = {}  # by name

    def add(self, names: Iterable[str], hosted: Iterable[Hosted]) -> None:
        """Add those of these ControlNets that the engine has to load.

        Args:
            hosted: The ControlNets in the engine's last report.
        """
        loaded = {net.name for net in hosted if net.state in _IN_MEMORY}
        self._in_memory.update(dict.fromkeys(set(names) - loaded, False))

    def keep(self, names: Iterable[str]) -> bool:
        """Record that these are wanted whatever other servers have to do. Return whether one was a copy."""
        copied = self._in_memory.keys() & set(names)
        for name in copied:
            del self._in_memory[name]
        return bool(copied)

    def update(self, net: Hosted) -> bool:
        """Record a ControlNet of a new report, and return whether it is such a copy in memory."""
        in_memory = net.state in _IN_MEMORY
        if not in_memory and (self._in_memory.get(net.name) or net.load_error):
            self._in_memory.pop(net.name, None)  # it was evicted, or cannot be loaded
        elif net.name in self._in_memory:
            self._in_memory[net.name] = in_memory
        return self._in_memory.get(net.name, False)
