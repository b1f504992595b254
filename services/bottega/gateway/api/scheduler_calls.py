"""Calls of a gateway that shares its jobs to the gateway that is the scheduler, which may be this one.

While there is no scheduler, calls wait for the next one. A call whose scheduler dies is repeated at the next one
where that cannot do something twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, Draining, JobCancelled, StorageUnavailable, Unavailable
from bottega.gateway.jobs.store import StaleGeneration
from bottega.gateway.scheduler_role import LeaseHolder, SchedulerRole
from bottega.rpc.channel import Channels, Target
from bottega.rpc.interceptor.calls import REQUEST_ID_KEY
from bottega.rpc.operation import logs
from bottega.rpc.security.caller import CALLER_HOST_KEY, CALLER_KEY, Role, caller, caller_host
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1 import fleet_pb2, fleet_pb2_grpc

# Seconds that a call waits for a scheduler, or for a connection to it: twice the longest takeover.
_WAIT_S = 10.0
# Seconds between two looks at the connections to the scheduler.
_LOOK_S = 1.0
# Seconds before a call is repeated if nothing is known to have changed.
_PAUSE_S = 0.2
# Seconds that the scheduler has to list its members, for a list of another gateway.
_LIST_S = 1.0
# Upper bound on channels to other gateways. Beyond it, the one that was opened first is closed.
_MAX_CHANNELS = 16
# Key of the metadata with which a gateway passes a call on. Its receiver passes it on no further.
_FORWARDED_KEY = "x-bottega-forwarded"
# Metadata of a caller that goes on to the scheduler: who the caller is, and to which trace the call belongs.
_KEPT_KEYS = frozenset({"authorization", "traceparent", "tracestate"})

# Seconds after which a caller may try again.
_RETRY_AFTER_S = 1.0

_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
StubOf = Callable[[LeaseHolder], Any]
"""Returns the stub of a service of the scheduler."""


@dataclass(slots=True, kw_only=True)
class _ForwardedCall:
    """A call to another gateway that has not ended."""

    scheduler: LeaseHolder
    call: Any
    is_stream: bool
    ended_here: bool = False
    """Whether this gateway has ended it, because the other one is not the scheduler any more, or this one stops."""

    def end(self) -> None:
        """End the call."""
        self.ended_here = True
        self.call.cancel()


class InterruptedCall(Exception):
    """A call that the scheduler did not answer, and that another one may.

    Args:
        error: The error for the caller if the call is not repeated.
        refused: Whether the call has certainly changed nothing.
    """

    def __init__(self, error: BottegaError, *, refused: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.refused = refused


class SchedulerCalls:
    """Calls the scheduler, as the callers of this gateway.

    Args:
        role: Who the scheduler is.
        channels: Opens channels to other gateways.
        max_message_mib: Upper bound on a message of the public port, in MiB.

    Attributes:
        draining: Whether this gateway stops, so that streams go on at another one.
        reaches_scheduler: Whether this gateway has had a connection to the scheduler in the last seconds, or needs
            none. Without one, calls are refused, so that their callers use another gateway.
    """

    def __init__(self, role: SchedulerRole, channels: Channels, *, max_message_mib: int) -> None:
        self._role = role
        self._channels = channels
        self._max_message_mib = max_message_mib
        self._channels_by_address: dict[str, grpc.aio.Channel] = {}
        self._forwarded: list[_ForwardedCall] = []
        self.draining = False
        self.reaches_scheduler = True
        self._watching = BackgroundTasks("watching the scheduler")

    def start(self) -> None:
        """Start to watch the connections to the scheduler, and to end calls to gateways that are it no more.

        One that is frozen ends none.
        """
        self._watching.start(self._end_stale_calls())
        self._watching.start(self._watch_connections())

    def drain(self) -> None:
        """End all streams, whose callers go on at another gateway. Other calls are still answered."""
        self.draining = True
        for forwarded in self._forwarded:
            if forwarded.is_stream:
                forwarded.end()

    async def close(self) -> None:
        """Close the channels to other gateways."""
        await self._watching.cancel()
        for channel in self._channels_by_address.values():
            await channel.close()

    async def unary(
        self, method: str, request: Any, context: _Context, *, local: Any, stub_of: StubOf, repeatable: bool = True
    ) -> Any:
        """Return the answer of the scheduler to a call.

        Args:
            local: The service of this gateway.
            stub_of: Returns a stub of the same service of another gateway.
            repeatable: Whether the next scheduler may be called if the first one may have done it.
        """
        while True:
            try:
                scheduler = await self._scheduler(context)
                if scheduler is None:
                    with self._interrupting():
                        return await getattr(local, method)(request, context)
                async with self._forward(scheduler, method, request, context, stub_of=stub_of) as call:
                    return await call
            except InterruptedCall as interruption:
                await self.retry(interruption, repeatable=repeatable or interruption.refused)

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, request: Any, context: _Context, *, local: Any, stub_of: StubOf
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """Yield the answers of the scheduler, which may be this gateway. The block may raise InterruptedCall."""
        scheduler = await self._scheduler(context)
        if scheduler is not None:
            async with self._forward(scheduler, method, request, context, stub_of=stub_of) as call:
                del request
                yield call
            return
        with self._interrupting():
            async with contextlib.aclosing(getattr(local, method)(request, context)) as answers:
                del request
                yield answers

    def follows(self, context: _Context) -> bool:
        """Return whether another gateway is the scheduler, so that calls may go on to it."""
        return self._role.other is not None and not _is_passed_on(context)

    async def retry(self, interruption: InterruptedCall, *, repeatable: bool) -> None:
        """Wait a moment, or for a new scheduler, before a call is repeated. Raise its error if it is not repeated."""
        self._check_reached()
        if not repeatable or self._role.lost:
            raise interruption.error.with_traceback(None) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await self._role.change()

    async def list_members(
        self, request: fleet_pb2.ListMembersRequest, context: _Context
    ) -> fleet_pb2.ListMembersResponse | None:
        """Return what the scheduler lists; None if it is this gateway, unknown, or does not answer soon."""
        scheduler = self._role.other
        if scheduler is None or _is_passed_on(context):
            return None
        with contextlib.suppress(InterruptedCall, BottegaError, TimeoutError):
            async with self._forward(scheduler, "ListMembers", request, context, stub_of=self._members_of) as call:
                answer: fleet_pb2.ListMembersResponse = await asyncio.wait_for(call, _LIST_S)
                return answer
        return None

    async def admit_jobs(
        self, scheduler: LeaseHolder, request: fleet_pb2.AdmitJobsRequest
    ) -> fleet_pb2.AdmitJobsResponse:
        """Tell a scheduler of jobs that this gateway stores. Raises BottegaError and InterruptedCall."""
        async with self._forward(scheduler, "AdmitJobs", request, None, stub_of=self._members_of) as call:
            answer: fleet_pb2.AdmitJobsResponse = await call
            return answer

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to another gateway, which stays open until `close`."""
        channel = self._channels_by_address.get(address)
        if channel is None:
            target = Target(address=address, role=Role.GATEWAY)
            channel = self._channels.open(target, max_message_mib=self._max_message_mib)
            self._channels_by_address[address] = channel
            if len(self._channels_by_address) > _MAX_CHANNELS:
                oldest = self._channels_by_address.pop(next(iter(self._channels_by_address)))
                self._watching.start(oldest.close())
        return channel

    def _members_of(self, scheduler: LeaseHolder) -> Any:
        return fleet_pb2_grpc.FleetServiceStub(self.channel(scheduler.fleet_address))

    @contextlib.contextmanager
    def _interrupting(self) -> Iterator[None]:
        """Raise InterruptedCall if a call in the block fails because this gateway stops being the scheduler."""
        try:
            yield
        except (Draining, StorageUnavailable) as error:
            if not (_is_for_another(error) or self._role.lost):
                raise
            raise InterruptedCall(error, refused=True) from None

    @contextlib.asynccontextmanager
    async def _forward(
        self, scheduler: LeaseHolder, method: str, request: Any, context: _Context | None, *, stub_of: StubOf
    ) -> AsyncIterator[Any]:
        """Yield a call to another gateway. Errors in the block are those of the other gateway, or InterruptedCall.

        Without a context, it is a call of this gateway itself.
        """
        timeout_s = _WAIT_S if context is None else context.time_remaining()
        metadata = None if context is None else self._metadata(context)
        call = getattr(stub_of(scheduler), method)(request, timeout=timeout_s, metadata=metadata)
        del request  # with images it is large
        forwarded = _ForwardedCall(scheduler=scheduler, call=call, is_stream=isinstance(call, grpc.aio.UnaryStreamCall))
        self._forwarded.append(forwarded)
        try:
            yield call
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error)
            # A gateway that ends cancels the calls that have reached it.
            if isinstance(typed, (Unavailable, JobCancelled)) and not was_answered(error):
                raise InterruptedCall(typed, refused=False) from None
            if _is_for_another(typed):
                raise InterruptedCall(typed, refused=True) from None
            raise typed from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not forwarded.ended_here or (task is not None and task.cancelling()):
                raise
            text = "the gateway is stopping" if self.draining else "another gateway has become the scheduler"
            raise InterruptedCall(Draining(f"{text}; retry", retry_after_s=_RETRY_AFTER_S), refused=False) from None
        finally:
            self._forwarded.remove(forwarded)
            call.cancel()

    async def _scheduler(self, context: _Context) -> LeaseHolder | None:
        """Wait until there is a scheduler, and return it; None if it is this gateway."""
        ends = asyncio.get_running_loop().time() + _WAIT_S
        while not self._role.lost:
            if self._role.serves:
                return None
            if self._role.other is not None:
                if _is_passed_on(context):
                    break  # the gateway that passed the call on knows the scheduler by now, or will soon
                self._check_reached()
                return self._role.other
            try:
                async with asyncio.timeout(ends - asyncio.get_running_loop().time()):
                    await self._role.change()
            except TimeoutError:
                text = "no gateway is the scheduler, because PostgreSQL cannot be reached or holds no lease; retry"
                if self._role.held:
                    text = "the scheduler cannot read the jobs and images yet, and its log says why; retry"
                raise Unavailable(text, retry_after_s=_RETRY_AFTER_S) from None
        raise Draining("this gateway is not the scheduler; retry, or use another one", retry_after_s=_RETRY_AFTER_S)

    async def _end_stale_calls(self) -> None:
        while True:
            await self._role.change()
            for forwarded in self._forwarded:
                if self._role.holder not in (None, forwarded.scheduler):
                    forwarded.end()

    def _check_reached(self) -> None:
        """Raise Unavailable if the scheduler could not be reached for a while."""
        if not self.reaches_scheduler:
            text = "this gateway cannot reach the one that is the scheduler; use another gateway, or retry"
            raise Unavailable(text, retry_after_s=_RETRY_AFTER_S) from None

    async def _watch_connections(self) -> None:
        now = asyncio.get_running_loop().time
        scheduler, reached_at = self._role.other, now()
        while True:
            known, scheduler = scheduler, self._role.other
            missing = [address for address in _addresses(scheduler) if not self._is_connected(address)]
            if scheduler != known or not missing:
                reached_at = now()
            reaches = now() - reached_at < _WAIT_S
            if reaches is not self.reaches_scheduler:
                self.reaches_scheduler = reaches
                if reaches:
                    _log.info("the scheduler can be reached again, or is another gateway")
                else:
                    text = "the scheduler cannot be reached at its addresses; calls are refused until this ends"
                    _log.error(text, extra={"addresses": missing, "scheduler": scheduler.name if scheduler else ""})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._role.change()

    def _is_connected(self, address: str) -> bool:
        """Return whether there is a connection to another gateway; begin to connect if there is none."""
        return self.channel(address).get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    def _metadata(self, context: _Context) -> list[tuple[str, str | bytes]]:
        """Return the metadata of a forwarded call: the caller's identity and the ID and trace of the call."""
        known, request_id = caller(), logs.bound().get("request_id")
        kept = [(key, value) for key, value in context.invocation_metadata() or () if key in _KEPT_KEYS]
        named = [(CALLER_KEY, f"{known.role}/{known.name}")] if known.role in (Role.TENANT, Role.OPERATOR) else []
        named += [(CALLER_HOST_KEY, caller_host())] if caller_host() else []
        return [*kept, *named, *([(REQUEST_ID_KEY, request_id)] if request_id else []), (_FORWARDED_KEY, "1")]


def _addresses(scheduler: LeaseHolder | None) -> tuple[str, ...]:
    """Return the addresses to which calls go on."""
    return (scheduler.address, scheduler.fleet_address) if scheduler else ()


def _is_passed_on(context: _Context) -> bool:
    """Return whether another gateway has passed a call on."""
    return any(key == _FORWARDED_KEY for key, _ in context.invocation_metadata() or ())


def _is_for_another(error: BottegaError) -> bool:
    """Return whether a gateway refused a call, and changed nothing, because another one is or becomes the scheduler."""
    return isinstance(error, Draining) or error.metadata.get("cause") == StaleGeneration.CAUSE
