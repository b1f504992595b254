"""The calls that a server is serving: a tracker of all of them, and a guard around each one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import grpc

from bottega.errors import BottegaError, Code, InternalError, QuotaExceeded, TooManyOpenFiles, Unauthenticated
from bottega.process import open_files
from bottega.rpc.address import host_of_address, peer_of
from bottega.rpc.interceptor.call_limits import CallLimit, CallResponses, CallSlot, ResponseFlowControl
from bottega.rpc.interceptor.connection_ledger import ConnectionLedger
from bottega.rpc.operation import logs
from bottega.rpc.operation.audit import AuditLog, about
from bottega.rpc.operation.metrics import CallMetrics
from bottega.rpc.security.caller import (
    AUDITED,
    CallAuthenticator,
    Caller,
    Role,
    bind_caller,
    caller_in,
    caller_uris,
    check_method,
    passed_on_host,
)
from bottega.rpc.status import to_grpc_status
from bottega.sampled_log import SampledLog

REQUEST_ID_KEY = "x-request-id"
# Fields bound for the log lines of a call that its audit line has too.
_AUDITED_FIELDS = ("job_id", "request_id")

# Errors of gRPC's: a write fails because the caller is gone; a method of gRPC's own services ends itself.
_OF_GRPC = (grpc.aio.InternalError, grpc.aio.AbortError)

Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits on simultaneous calls. Each kind of call has a limit of its own."""

    short: CallLimit
    """Calls with one request and one answer."""
    streams: CallLimit
    """Calls with one request and a stream of answers."""
    streamed: CallLimit
    """Calls with a stream of requests."""
    of_grpc: CallLimit
    """Unary calls of gRPC's own services. A drain does not wait for them."""
    of_grpc_streams: CallLimit
    """Streams of gRPC's own services. A drain does not wait for them."""

    def connections(self) -> frozenset[str]:
        """Return the connections that have calls, as in Peer.connection."""
        limits = (self.short, self.streams, self.streamed, self.of_grpc, self.of_grpc_streams)
        return frozenset(connection for limit in limits for connection in limit.connections())


class CallTracker:
    """Tracks all calls of a server.

    Args:
        ledger: Counts, for each connection, the bytes that its calls explain.
        audit: Log of the calls that change something; None for none.
    """

    def __init__(
        self,
        metrics: CallMetrics,
        responses: ResponseFlowControl,
        limits: CallLimits,
        ledger: ConnectionLedger,
        audit: AuditLog | None = None,
    ) -> None:
        self.audit = audit
        self.ledger = ledger
        self._limits = limits
        self.errors = CallErrorLog()
        self.of_tenants = TenantCalls()
        self._metrics = metrics
        self._responses = responses
        self._active = 0  # without gRPC's own
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no call is being served, except for gRPC's own services."""
        await self._idle.wait()

    def enter(self, limit: CallLimit, context: Context) -> CallResponses:
        """Record the start of a call, and return an object for its responses."""
        # Every call has a task of its own, so that values are bound for this call only. The task ends when gRPC has
        # sent all answers, or the caller is gone.
        responses = CallResponses(self._responses)
        at_end(responses.release)
        responses.bind()
        logs.bind(**_request_id(context))
        if not self._is_of_grpc(limit):
            self._active += 1
            self._idle.clear()
            self._metrics.on_start()
        return responses

    def leave(self, limit: CallLimit, method: str, code: Code | None, seconds: float) -> None:
        """Record the end of a call, although its caller may not have read all responses. `code` None means OK."""
        if self._is_of_grpc(limit):
            return
        self._active -= 1
        if not self._active:
            self._idle.set()
        self._metrics.on_end(method, code.name if code else "OK", seconds)

    def is_stream(self, limit: CallLimit) -> bool:
        """Return whether a limit is the one on calls that stream answers."""
        return limit is self._limits.streams

    def _is_of_grpc(self, limit: CallLimit) -> bool:
        return limit in (self._limits.of_grpc, self._limits.of_grpc_streams)


class CallGuard:
    """A context manager around one call. Any error in its block ends the call with a status.

    gRPC keeps the exception of an abort with the call's context, and raises it again when the method has returned. If
    it had a traceback, it would be a reference cycle with context and request, perhaps some MiB, until the garbage
    collector runs. So the guard removes the traceback.

    Attributes:
        peer: The client, from gRPC.
        account: The peer to which limits on the call apply: the tenant, whose calls may all come through one proxy, or
            the host if there are no tenants. If another gateway passes the call on, that is the host of its caller.
    """

    def __init__(self, calls: CallTracker, limit: CallLimit, method: str, context: Context) -> None:
        self._calls = calls
        self._limit = limit
        self._slot: CallSlot | None = None
        self._method = method
        self._context = context
        self._began = time.perf_counter()
        self._known: Caller | None = None
        self._about: Mapping[str, str] = {}

    async def __aenter__(self) -> CallGuard:
        self.peer = self.account = peer_of(self._context.peer())
        self.connection = self._calls.ledger.account(self.peer)
        if self._calls.ledger.drops_calls(self.peer):
            # gRPC still delivers the queued calls of a flood before those of others.
            raise asyncio.CancelledError
        self._identities = _identities(self._context)
        self._metadata = tuple(self._context.invocation_metadata() or ())
        host = host_of_address(passed_on_host(self._identities, self._metadata, method=self._method))
        if host:
            self.account = replace(self.peer, host=host)
        self._host = self.account.host
        self.responses = self._calls.enter(self._limit, self._context)
        return self

    def acquire_slot(self) -> None:
        """Reserve a place for the call before its messages are received. Raises QueueFull."""
        self._slot = self._limit.acquire(self.account)
        at_end(self._slot.release)

    async def authenticate(self, authenticator: CallAuthenticator) -> None:
        """Identify the caller before a message is read, and bind it to this task.

        Raises Unauthenticated, Forbidden if the caller may not call the method, or QuotaExceeded.
        """
        identities = caller_uris(self._identities, self._metadata, method=self._method)
        try:
            known = self._known = await authenticator.authenticate(identities, self._metadata)
        except Unauthenticated:
            relay = caller_in(identities)
            if relay is not None and relay.role is Role.HTTP:
                # A door passes on calls of strangers and of tenants over one connection, which is not a flood's.
                self._calls.ledger.recognized(self.peer)
            else:
                self._calls.ledger.refused(self.peer)
            raise
        self._calls.ledger.recognized(self.peer)
        if known.tenant:
            self.account = replace(self.peer, host=f"tenant {known.tenant}")
        check_method(self._method, known)
        at_end(self._calls.of_tenants.take(known, streams=self._calls.is_stream(self._limit)))
        bind_caller(known, host=self._host)

    @contextlib.contextmanager
    def reading(self, message_bytes: int) -> Iterator[Callable[[Any], Any]]:
        """Account for the bytes that arrive in the block. Yield a function through which the message has to pass.

        Args:
            message_bytes: Bytes to account for if no message arrives, because part of one may have been received.
        """
        self.connection.reading += 1
        size_bytes = message_bytes

        def arrived(raw: Any) -> Any:
            nonlocal size_bytes
            size_bytes = len(raw) + len(raw) // 16 if isinstance(raw, bytes) else 0
            return raw

        try:
            yield arrived
        finally:
            self.connection.reading -= 1
            self.connection.explained_bytes += size_bytes

    def received(self, request: object) -> None:
        """Record what the audit log needs to know about the request."""
        if self._calls.audit is not None and self._method in AUDITED:
            self._about = about(request)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        del kind, trace
        refused = error if isinstance(error, Exception) and not isinstance(error, _OF_GRPC) else None
        # Release the slot before the answer is sent, which a caller that does not read would delay.
        seconds = time.perf_counter() - self._began
        if self._slot is not None:
            self._slot.end_serving()
        ours = None
        try:
            ours = _for_caller(self._method, refused, self._calls.errors) if refused else None
        finally:
            code = Code.CANCELLED if error is not None else None
            self._calls.leave(self._limit, self._method, ours.code if ours else code, seconds)
            self._note(ours.code if ours else code, seconds)
        if ours is None:
            return False
        try:
            await self._context.abort_with_status(to_grpc_status(ours))
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = aborted.__context__ = None
        return True

    def _note(self, code: Code | None, seconds: float) -> None:
        """Add a line to the audit log. `code` None means OK."""
        if self._calls.audit is None or self._method not in AUDITED:
            return
        bound = {name: logs.bound()[name] for name in _AUDITED_FIELDS if name in logs.bound()}
        self._calls.audit.note(
            self._method,
            self._known,
            self._host,
            about={**self._about, **bound},
            outcome=code.name if code else "OK",
            seconds=seconds,
        )


def at_end(do: Callable[[], None]) -> None:
    """Call `do` when the current call is over and its responses were read, or its caller has disconnected."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: do())


def _request_id(context: Context) -> dict[str, str]:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY:
            found = logs.request_id_from(str(value))
            return {"request_id": found} if found else {}
    return {}


def _for_caller(method: str, error: Exception, log: CallErrorLog) -> BottegaError:
    """Log an error, remove its tracebacks, and convert it for the caller."""
    shown = error if isinstance(error, BottegaError) else _of_library(error)
    if isinstance(shown, TooManyOpenFiles):
        log.refused(method, shown.reason_name, shown.message)
    elif shown is not error:
        log.failed(method, error, expected=False)
    elif isinstance(error, InternalError):
        log.failed(method, error, expected=True)
    else:
        log.refused(method, shown.reason_name, shown.message)
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return shown


def _of_library(error: Exception) -> BottegaError:
    if isinstance(error, OSError) and open_files.is_cause(error):
        return open_files.too_many(error)
    return InternalError("an internal error; the service's log has the details under the same request_id")


class CallErrorLog:
    """A sampled log of refused and failed calls. It logs sums by itself; call `sum_up` at the end."""

    def __init__(self) -> None:
        self._refusals = SampledLog(_log, "call refused", more="more calls were refused", counted="calls")
        self._unexpected = _faults("a call failed with an unexpected error")
        self._expected = _faults("call failed")

    def refused(self, method: str, reason: str, text: str) -> None:
        """Log a refused call. The log is sampled, because callers can repeat such calls."""
        self._refusals.log_event({"method": method, "reason": reason}, {"text": text})

    def failed(self, method: str, error: Exception, *, expected: bool) -> None:
        """Log a call that failed because of a fault in the suite.

        The log is sampled, because callers can repeat such calls.

        Args:
            expected: Whether the suite raised the error on purpose.
        """
        (self._expected if expected else self._unexpected).log_event({"method": method}, error=error)

    def sum_up(self) -> None:
        """Log how many calls were not logged since the last time, in a line for each kind."""
        for lines in (self._refusals, self._unexpected, self._expected):
            lines.sum_up()


def _faults(event: str) -> SampledLog:
    return SampledLog(_log, event, more=f"more times: {event}", counted="calls", level=logging.ERROR)


class TenantCalls:
    """Counts the calls that are being served, for tenants with a limit on them; see Caller."""

    def __init__(self) -> None:
        self._served = Counter[tuple[str, str]]()

    def take(self, known: Caller, *, streams: bool) -> Callable[[], None]:
        """Count a call, and return a function to call at its end. Raises QuotaExceeded."""
        quota, most = ("streams", known.max_streams) if streams else ("calls", known.max_calls)
        key = known.tenant, quota
        if most and self._served[key] >= most:
            raise QuotaExceeded(
                f"tenant {known.tenant} has reached its quota of concurrent {quota}: {most}",
                metadata={"quota": quota, "most": str(most)},
                retry_after_s=1.0,
            )
        self._served[key] += 1
        return lambda: self._release(key)

    def _release(self, key: tuple[str, str]) -> None:
        self._served[key] -= 1
        if not self._served[key]:
            del self._served[key]


def _identities(context: Context) -> Sequence[str]:
    """Return the URIs in the peer's certificate; () without one.

    Its DNS names are not used, because one may look like a URI of Bottega.
    """
    return [name.decode(errors="replace") for name in context.auth_context().get("peer_uri", ())]
