"""The calls that a server is serving: how many there are, and what turns the errors of each into a status."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import grpc

from bottega.errors import BottegaError, Code, InternalError, QuotaExceeded, TooManyOpenFiles, Unauthenticated
from bottega.process import open_files
from bottega.rpc.interceptor.call_errors import CallErrorLog
from bottega.rpc.interceptor.call_limits import CallLimit, CallSlot
from bottega.rpc.interceptor.connection_ledger import ConnectionLedger
from bottega.rpc.interceptor.response_flow import CallResponses, ResponseFlowControl
from bottega.rpc.operation import logs
from bottega.rpc.operation.audit import AuditLog, about
from bottega.rpc.operation.metrics import CallMetrics
from bottega.rpc.peers import peer_of
from bottega.rpc.security.caller import CallAuthenticator, Caller, bind_caller
from bottega.rpc.security.method_roles import AUDITED, check_method
from bottega.rpc.status import to_grpc_status

REQUEST_ID_KEY = "x-request-id"
# Of what is bound for the log lines of a call, what its line in the audit log has too.
_TOLD = ("job_id", "request_id")

# How a write fails when the caller has gone, and how a method of gRPC's own ends itself.
_OF_GRPC = (grpc.aio.InternalError, grpc.aio.AbortError)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits by kind of call, so that none takes the room of another.

    short: of one request and one answer. streams: of one request and answers as they come. streamed: callers that
    stream their requests. of_grpc, of_grpc_streams: gRPC's own, which a drain does not wait for.
    """

    short: CallLimit
    streams: CallLimit
    streamed: CallLimit
    of_grpc: CallLimit
    of_grpc_streams: CallLimit

    def connections(self) -> frozenset[str]:
        """Connections that have calls, as in Peer.connection."""
        limits = (self.short, self.streams, self.streamed, self.of_grpc, self.of_grpc_streams)
        return frozenset(connection for limit in limits for connection in limit.connections())


class CallTracker:
    """A tracker of all calls.

    Args:
        ledger: Counts what the calls of each connection account for.
        audit: Log of the calls that change something, if there is one.
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
        """Returns when no call is being served, gRPC's own aside."""
        await self._idle.wait()

    def enter(self, limit: CallLimit, context: Context) -> CallResponses:
        """A call begins."""
        # Every call runs in a task of its own, so what is bound here is bound for this call only. It ends when gRPC has
        # sent all that was answered, or the caller has gone.
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
        """It has ended, but for what its caller has not read. code: None is OK."""
        if self._is_of_grpc(limit):
            return
        self._active -= 1
        if not self._active:
            self._idle.set()
        self._metrics.on_end(method, code.name if code else "OK", seconds)

    def is_stream(self, limit: CallLimit) -> bool:
        """Whether that is of calls which are answered as there is news."""
        return limit is self._limits.streams

    def _is_of_grpc(self, limit: CallLimit) -> bool:
        return limit in (self._limits.of_grpc, self._limits.of_grpc_streams)


class CallGuard:
    """A guard around one call: whatever that raises ends it with a status.

    `peer` is who calls, as gRPC knows it. `account` is who pays for what the call takes: its tenant, whose calls may
    all come through one proxy, or the host where nobody has a tenant.

    gRPC keeps the exception of an abort with the call's context, and raises it again when the method has returned. One
    that led to the frames of the call, which hold context and request, would be a cycle of some MiB perhaps, until the
    collector comes by: so it ends here, without a traceback.
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
        if self.connection.has_ended:
            # gRPC still hands out the calls that a flood has left behind, before those of others.
            raise asyncio.CancelledError
        self.responses = self._calls.enter(self._limit, self._context)
        return self

    def acquire_slot(self) -> None:
        """In the block, before anything is taken in. Raises QueueFull."""
        self._slot = self._limit.acquire(self.peer)
        at_end(self._slot.release)

    async def authenticate(self, authenticator: CallAuthenticator) -> None:
        """Identify the caller before a message is read, for all that this task does from then on.

        Raise Unauthenticated, Forbidden if the method is not for that caller, or QuotaExceeded.
        """
        metadata = tuple(self._context.invocation_metadata() or ())
        try:
            known = self._known = await authenticator.authenticate(_identities(self._context), metadata)
        except Unauthenticated:
            self._calls.ledger.refused(self.peer)
            raise
        self._calls.ledger.recognized(self.peer)
        if known.tenant:
            self.account = replace(self.peer, host=f"tenant {known.tenant}")
        check_method(self._method, known)
        at_end(self._calls.of_tenants.take(known, streams=self._calls.is_stream(self._limit)))
        bind_caller(known)

    @contextlib.contextmanager
    def reading(self, message_bytes: int) -> Iterator[Callable[[Any], Any]]:
        """Count what comes over the connection in the block. Yields a function to pass the message through.

        message_bytes: that may have come of a message that nobody waits for any more.
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
        """In the block: what is asked for."""
        if self._calls.audit is not None and self._method in AUDITED:
            self._about = about(request)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        del kind, trace
        refused = error if isinstance(error, Exception) and not isinstance(error, _OF_GRPC) else None
        # Before the answer is sent: a caller that does not read would hold it up.
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
        """In the audit log. code: None is OK."""
        if self._calls.audit is None or self._method not in AUDITED:
            return
        told = {name: logs.bound()[name] for name in _TOLD if name in logs.bound()}
        self._calls.audit.note(
            self._method,
            self._known,
            self.peer.host,
            about={**self._about, **told},
            outcome=code.name if code else "OK",
            seconds=seconds,
        )


def at_end(do: Callable[[], None]) -> None:
    """Does it when the call that is served in this task is over, for its caller as well."""
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
    """The error that the caller gets. It is logged here, once, and forgets where it was raised."""
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
    return InternalError("an internal fault; the service's log says more under the same request_id")


class TenantCalls:
    """Calls that are being served, by tenant, of those tenants that may have a bounded number. See Caller."""

    def __init__(self) -> None:
        self._served = Counter[tuple[str, str]]()

    def take(self, known: Caller, *, streams: bool) -> Callable[[], None]:
        """Counts a call in; what is returned counts it out. Raises QuotaExceeded."""
        quota, most = ("streams", known.max_streams) if streams else ("calls", known.max_calls)
        key = known.tenant, quota
        if most and self._served[key] >= most:
            raise QuotaExceeded(
                f"as many {quota} of tenant {known.tenant} are served as it may have at once: {most}",
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
    """Return the URIs of the certificate that the peer has shown; none without one.

    Its DNS names, which may read like a URI of ours, name nobody.
    """
    return [name.decode(errors="replace") for name in context.auth_context().get("peer_uri", ())]
