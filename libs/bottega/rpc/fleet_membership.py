"""How a service stays in the gateway's fleet: one Join stream, opened again for ever.

It does not know what the service does; load, backlog and other services' addresses cross by callbacks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, InternalError, JobCancelled, MethodNotServed, Unavailable
from bottega.rpc.channel import PLAINTEXT, Channels, Target
from bottega.rpc.security.caller import Role
from bottega.rpc.security.identity import Identity
from bottega.rpc.security.tls_probe import find_tls_mismatch
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1 import fleet_pb2, fleet_pb2_grpc

# The gateway's lease is 1.5 s; three reports fit into it.
REPORT_INTERVAL_S = 0.5
# Changes within this time travel together.
_COALESCE_S = 0.01
_FIRST_BACK_OFF_S = 0.1
_MAX_BACK_OFF_S = 1.0
# Of a service that the gateway refuses: that changes only when somebody does something about it.
_REFUSED_BACK_OFF_S = 5.0
# A refusal, or a gateway that still does not answer, is logged again after this time.
_REPEAT_LOG_S = 60.0
# A gateway that was started at the same moment answers by then; one that is not there at all is worth a line.
_SILENCE_S = 5.0
_INSTANCE_BYTES = 16

_log = logging.getLogger(__name__)


class Listening(Protocol):
    """The server of a service, as far as a registration says it: host:port of each, once it has started."""

    @property
    def channels(self) -> Channels:
        """Opens those of its process."""

    @property
    def identity(self) -> Identity | None:
        """Whom its certificate names; None without TLS."""

    @property
    def address(self) -> str:
        """Of its calls."""

    @property
    def metrics_address(self) -> str:
        """Of its metrics."""


class StartingServer(Listening, Protocol):
    """The server of a service that takes long to start."""

    async def set_serving(self, serving: bool) -> None:
        """Tell the service's health whether new work is welcome."""

    def extend_start(self, status: str, *, within_s: float) -> None:
        """Tell systemd how far the start is, and that the next word comes within so many seconds."""


def _with_instance(registration: fleet_pb2.Registration) -> fleet_pb2.Registration:
    """With an instance that tells this process from any other of its name, and that cannot be guessed."""
    whole = fleet_pb2.Registration(instance=secrets.token_hex(_INSTANCE_BYTES))
    whole.MergeFrom(registration)
    return whole


def _ignore(_: object) -> None:
    """For services that do not use it."""


class FleetMembership:
    """Joins the fleet, reports load on change and twice a second, rejoins with back-off when cut off.

    gateway: host:port of its fleet listener. registration: of this service; sent first on every stream, with an
    instance of its own where it has none.
    load: called in the event loop for every report; must be quick.
    on_backlog: called in the event loop with the number of requests that wait for this service.
    on_services: called in the event loop with the services of the kinds that it uses, again and again.
    channels: opens those of its process.
    """

    def __init__(
        self,
        gateway: str,
        registration: fleet_pb2.Registration,
        *,
        load: Callable[[], fleet_pb2.Load],
        on_backlog: Callable[[int], None] = _ignore,
        on_services: Callable[[Sequence[fleet_pb2.ServiceAddress]], None] = _ignore,
        channels: Channels = PLAINTEXT,
    ) -> None:
        self._gateway = gateway
        self._channels = channels
        self._registration = _with_instance(registration)
        self._load = load
        self._on_backlog = on_backlog
        self._on_services = on_services
        self._changed = asyncio.Event()
        self._tasks = BackgroundTasks("fleet membership", max_tasks=1)
        self._refusal: str | None = None
        self._logged: dict[str, float] = {}  # refusals that were logged, and when
        self._retry_after_s: float | None = None
        self._log_absence_s = 0.0  # when an absence of the gateway is logged next
        self.joined = asyncio.Event()
        self.backlog = 0

    def start(self) -> None:
        """Joins in the background; `joined` is set while the gateway knows this service."""
        if not self._tasks:
            self._log_absence_s = time.monotonic() + _SILENCE_S
            self._tasks.start(self._run())

    def report_soon(self) -> None:
        """Reports the load, which has changed, without waiting for the next regular report."""
        self._changed.set()

    async def stop(self) -> None:
        """Leaves the fleet. Harmless when not started."""
        await self._tasks.cancel()

    async def _run(self) -> None:
        back_off_s = _FIRST_BACK_OFF_S
        while True:
            was_joined = await self._join_once()
            most_s = _MAX_BACK_OFF_S if self._refusal is None else _REFUSED_BACK_OFF_S
            back_off_s = _FIRST_BACK_OFF_S if was_joined else min(2 * back_off_s, most_s)
            wait_s = back_off_s * random.uniform(0.5, 1.0)
            if self._retry_after_s is not None:  # said by the gateway, which knows what is waited for
                wait_s = min(self._retry_after_s, _REFUSED_BACK_OFF_S) + _COALESCE_S * random.random()
            await asyncio.sleep(wait_s)

    async def _join_once(self) -> bool:
        """Stays until the stream ends; whether the gateway had answered on it.

        The channel is a new one each time, so that a certificate that was renewed is shown.
        """
        self._retry_after_s = None
        channel = self._channels.open(Target(address=self._gateway, role=Role.GATEWAY))
        answered = asyncio.Event()
        call = fleet_pb2_grpc.FleetServiceStub(channel).Join(self._reports(answered))
        try:
            async for response in call:
                self._on_response(response)
                answered.set()
        except grpc.aio.AioRpcError as error:
            await self._on_failure(from_rpc_error(error), said=was_answered(error))
        finally:
            call.cancel()
            was_joined = self.joined.is_set()
            self.joined.clear()
            answered.set()
            await channel.close()
        return was_joined

    async def _on_failure(self, error: BottegaError, *, said: bool) -> None:
        """Handle the end of the stream. `said` tells whether the gateway gave the reason, which gRPC may lose."""
        self._retry_after_s = error.retry_after_s
        text = self._not_the_fleet() if isinstance(error, MethodNotServed) else error.message
        facts = {"gateway": self._gateway, "reason": error.reason_name, "text": text}
        if isinstance(error, Unavailable | JobCancelled) or (isinstance(error, InternalError) and not said):
            self._refusal = None
            await self._log_unreachable(facts)
            return
        now = time.monotonic()
        self._logged = {said: at for said, at in self._logged.items() if at > now - _REPEAT_LOG_S}
        if text not in self._logged:
            _log.warning("the fleet refuses this service", extra=facts)
            self._logged[text] = now
        self._refusal = text

    async def _log_unreachable(self, facts: dict[str, str]) -> None:
        """Log a loss once; then, or from the start, an absence that lasts, again and again."""
        now = time.monotonic()
        if self.joined.is_set():
            _log.warning("fleet cannot be reached", extra=facts)
            self._log_absence_s = now + _REPEAT_LOG_S
        elif now >= self._log_absence_s:
            mismatch = await find_tls_mismatch(self._gateway, encrypted=self._channels.encrypted)
            todo = mismatch or "is a gateway running, and is that its fleet.listen?"
            todo += "; this service serves nobody until it has joined"
            _log.warning("fleet cannot be reached", extra=facts | {"todo": todo})
            self._log_absence_s = now + _REPEAT_LOG_S

    def _not_the_fleet(self) -> str:
        return (
            f"{self._gateway} does not serve the fleet: it is the gateway's public port, or no gateway. Set `gateway`"
            " in this service's configuration to the address of the gateway's fleet.listen, 127.0.0.1:8472 by default"
        )

    def _on_response(self, response: fleet_pb2.JoinResponse) -> None:
        if not self.joined.is_set():
            _log.info("joined the fleet", extra={"gateway": self._gateway})
            self._refusal = None
            self.joined.set()
        self.backlog = response.backlog
        self._on_backlog(response.backlog)
        self._on_services(response.services)

    async def _reports(self, answered: asyncio.Event) -> AsyncIterator[fleet_pb2.JoinRequest]:
        """answered: set with the first response, and at the end of the stream."""
        yield fleet_pb2.JoinRequest(registration=self._registration)
        await answered.wait()  # a report that is written while the gateway refuses would hide why it does
        if not self.joined.is_set():
            return
        reported = fleet_pb2.Load()
        is_first = True
        while True:
            self._changed.clear()
            load = self._load()
            # An attempt under way is reported each time: the gateway compares it with its own view.
            if is_first or load.running or load != reported:
                reported.CopyFrom(load)
                is_first = False
                yield fleet_pb2.JoinRequest(load=load)
            else:
                yield fleet_pb2.JoinRequest()
            await asyncio.sleep(_COALESCE_S)
            try:
                await asyncio.wait_for(self._changed.wait(), REPORT_INTERVAL_S - _COALESCE_S)
            except TimeoutError:
                continue
