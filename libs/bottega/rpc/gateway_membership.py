"""Membership of a service at one gateway: a Join stream, which is reopened whenever it ends."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from bottega.background_tasks import BackgroundTasks
from bottega.clocks import seconds_until_tick
from bottega.errors import BottegaError, InternalError, JobCancelled, MethodNotServed, Unavailable
from bottega.rpc.channel import Channels, Target
from bottega.rpc.security.caller import Role
from bottega.rpc.security.tls import find_tls_mismatch
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1 import fleet_pb2, fleet_pb2_grpc

# The gateway's lease is 1.5 s; three reports fit into it. While there are no jobs it asks for fewer reports.
REPORT_INTERVAL_S = 0.5
# Bounds on the time between two regular reports, whatever the gateway asks for. At rest it asks for 5 s. A member that
# was silent for longer would miss its lease.
_MIN_REPORT_INTERVAL_S, _MAX_REPORT_INTERVAL_S = 0.05, 10.0
# Changes within this time are reported together.
_COALESCE_S = 0.01
_FIRST_BACK_OFF_S = 0.1
_MAX_BACK_OFF_S = 1.0
# Longest back-off of a service that the gateway refuses, which only changes when somebody fixes it.
_REFUSED_BACK_OFF_S = 5.0
# A refusal, or a gateway that does not answer, is logged again after this time.
_REPEAT_LOG_S = 60.0
# A gateway that was started at the same time answers within this time; otherwise its absence is logged.
_SILENCE_S = 5.0

_log = logging.getLogger(__name__)


class GatewayMembership:
    """A service's membership at one gateway. FleetMembership documents most arguments.

    Args:
        address: host:port of the gateway's fleet listener.
        registration: Registration with an instance.
        on_change: Called after each response, and when the stream has ended.
    """

    def __init__(
        self,
        address: str,
        registration: fleet_pb2.Registration,
        *,
        load: Callable[[], fleet_pb2.Load],
        on_change: Callable[[], None],
        channels: Channels,
    ) -> None:
        self.address = address
        self._channels = channels
        self._registration = registration
        self._load = load
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._report_every_s = REPORT_INTERVAL_S
        self._tasks = BackgroundTasks("fleet membership", max_tasks=1)
        self._refusal: str | None = None
        self._logged: dict[str, float] = {}  # refusals by the time at which they were logged
        self._retry_after_s: float | None = None
        self._log_absence_s = 0.0  # when the gateway's absence is logged next
        self.joined = False
        """Whether the service is a member."""
        self.heard_s = 0.0
        """Time of the last response, on time.monotonic()."""
        self.backlog = 0
        self.generation = 0
        """Generation of the scheduler's lease; 0 if nobody has it."""
        self.shares_jobs = False
        """Whether the gateway has its jobs in common with others, so that one of them schedules."""
        self.services: Sequence[fleet_pb2.ServiceAddress] = ()
        self.targets: Sequence[fleet_pb2.PoolTarget] = ()

    def start(self) -> None:
        """Join in the background."""
        if not self._tasks:
            self._log_absence_s = time.monotonic() + _SILENCE_S
            self._tasks.start(self._run())

    def report_soon(self) -> None:
        """Report the changed load without waiting for the next regular report."""
        self._changed.set()

    async def stop(self) -> None:
        """Leave the gateway's fleet."""
        await self._tasks.cancel()

    async def _run(self) -> None:
        back_off_s = _FIRST_BACK_OFF_S
        while True:
            was_joined = await self._join_once()
            most_s = _MAX_BACK_OFF_S if self._refusal is None else _REFUSED_BACK_OFF_S
            back_off_s = _FIRST_BACK_OFF_S if was_joined else min(2 * back_off_s, most_s)
            wait_s = back_off_s * random.uniform(0.5, 1.0)
            if self._retry_after_s is not None:  # the gateway knows what it waits for
                wait_s = min(self._retry_after_s, _REFUSED_BACK_OFF_S) + _COALESCE_S * random.random()
            await asyncio.sleep(wait_s)

    async def _join_once(self) -> bool:
        """Join, and stay until the stream ends. Return whether the gateway had answered.

        Each attempt opens a new channel, so that a renewed certificate is used.
        """
        self._retry_after_s = None
        self._report_every_s = REPORT_INTERVAL_S
        channel = self._channels.open(Target(address=self.address, role=Role.GATEWAY, probes_bandwidth=False))
        answered = asyncio.Event()
        call = fleet_pb2_grpc.FleetServiceStub(channel).Join(self._reports(answered))
        try:
            async for response in call:
                self._on_response(response)
                answered.set()
        except grpc.aio.AioRpcError as error:
            await self._on_failure(from_rpc_error(error), answered=was_answered(error))
        finally:
            call.cancel()
            was_joined, self.joined = self.joined, False
            self.backlog = 0
            answered.set()
            self._on_change()
            await channel.close()
        return was_joined

    async def _on_failure(self, error: BottegaError, *, answered: bool) -> None:
        """Handle the failure of the stream.

        Args:
            answered: Whether the gateway sent the error. Otherwise the connection failed.
        """
        self._retry_after_s = error.retry_after_s
        text = self._not_the_fleet() if isinstance(error, MethodNotServed) else error.message
        facts = {"gateway": self.address, "reason": error.reason_name, "text": text}
        if isinstance(error, Unavailable | JobCancelled) or (isinstance(error, InternalError) and not answered):
            self._refusal = None
            await self._log_unreachable(facts)
            return
        now = time.monotonic()
        self._logged = {logged: at for logged, at in self._logged.items() if at > now - _REPEAT_LOG_S}
        if text not in self._logged:
            _log.warning("the fleet refuses this service", extra=facts)
            self._logged[text] = now
        self._refusal = text

    async def _log_unreachable(self, facts: dict[str, str]) -> None:
        """Log that the gateway cannot be reached: once when it is lost, and again from time to time."""
        now = time.monotonic()
        if self.joined:
            _log.warning("the gateway's fleet listener cannot be reached", extra=facts)
            self._log_absence_s = now + _REPEAT_LOG_S
        elif now >= self._log_absence_s:
            mismatch = await find_tls_mismatch(self.address, encrypted=self._channels.encrypted)
            todo = mismatch or "is a gateway running, and is that its fleet.listen?"
            todo += "; this service gets no work from a gateway that it has not joined"
            _log.warning("the gateway's fleet listener cannot be reached", extra=facts | {"todo": todo})
            self._log_absence_s = now + _REPEAT_LOG_S

    def _not_the_fleet(self) -> str:
        return (
            f"{self.address} does not serve the fleet: it is the gateway's public port, or no gateway. Set `gateway`"
            " in this service's configuration to the address of the gateway's fleet.listen, 127.0.0.1:8472 by default"
        )

    def _on_response(self, response: fleet_pb2.JoinResponse) -> None:
        if not self.joined:
            _log.info("joined the fleet", extra={"gateway": self.address})
            self._refusal = None
            self.joined = True
        asked_s = response.report_every_s or REPORT_INTERVAL_S
        every_s = max(_MIN_REPORT_INTERVAL_S, min(_MAX_REPORT_INTERVAL_S, asked_s))  # in this order for NaN
        if every_s < self._report_every_s:
            self.report_soon()
        self._report_every_s = every_s
        self.heard_s = time.monotonic()
        self.backlog, self.services = response.backlog, response.services
        self.generation, self.shares_jobs = response.scheduler.generation, response.HasField("scheduler")
        self.targets = response.targets
        self._on_change()

    async def _reports(self, answered: asyncio.Event) -> AsyncIterator[fleet_pb2.JoinRequest]:
        """Yield the registration, and then load reports.

        Args:
            answered: Set with the first response, and at the end of the stream.
        """
        yield fleet_pb2.JoinRequest(registration=self._registration)
        await answered.wait()  # a report that is written while the gateway refuses would hide its reason
        if not self.joined:
            return
        reported: fleet_pb2.Load | None = None
        while True:
            self._changed.clear()
            load = self._load()
            # An attempt under way is reported each time: the gateway compares it with its own view.
            if reported is None or load.running or load != reported:
                reported = fleet_pb2.Load()
                reported.CopyFrom(load)
                yield fleet_pb2.JoinRequest(load=load)
            else:
                yield fleet_pb2.JoinRequest()
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_COALESCE_S)

    def _pause_s(self) -> float:
        """Return the seconds until the next regular report. At rest, all members of a machine report together."""
        every_s = self._report_every_s
        return every_s if every_s <= REPORT_INTERVAL_S else seconds_until_tick(every_s, least_share=0.0)
