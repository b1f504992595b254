"""The outermost interceptor of every server, between gRPC and Bottega's code.

It converts a BottegaError to its status, and any other error to a plain INTERNAL, so that no text of a library reaches
a caller. It logs failures once, counts calls, and gives unary calls a deadline. It receives and parses requests once
there is memory for them, and refuses bytes that are not a message. It serializes and streams responses, and does not
wait forever for a caller that does not read them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from bottega.background_tasks import copied
from bottega.errors import DeadlinePassed, InvalidRequest, MethodNotServed, QueueFull, TooLarge
from bottega.rpc.address import Peer
from bottega.rpc.interceptor.call_limits import CallResponses, ResponseFlowControl
from bottega.rpc.interceptor.calls import CallGuard, CallLimits, CallTracker, Context
from bottega.rpc.interceptor.connection_ledger import ConnectionLedger
from bottega.rpc.interceptor.memory_quota import MemoryQuota, QuotaShare
from bottega.rpc.interceptor.message_limits import (
    OF_GRPC,
    PLAIN_BYTES,
    MessageLimits,
    check_size,
    has_unknown_fields,
    limits_of,
)
from bottega.rpc.operation.audit import AuditLog
from bottega.rpc.operation.metrics import CallMetrics
from bottega.rpc.security.caller import CallAuthenticator

# Walking through a message with up to this many fields takes less time than copying its bytes; with more, a byte costs
# up to _WALK_COST times as much.
_FEW_FIELDS = 4096
_WALK_COST = 16
# Seconds for which a large, refused message keeps its memory reserved. A caller may have two or three of them.
_LARGE_REFUSED_S = 0.25

_Handler = Any  # grpc.RpcMethodHandler, whose type stubs have only blocking methods
# None if the handler takes bytes.
_Parse = Callable[[bytes], object] | None
# None if the handler returns bytes.
_Pack = Callable[[Any], bytes] | None
_Raw = AsyncIterator[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestQuotas:
    """Memory quotas for requests that are being received. Each kind of request has a quota of its own."""

    large: MemoryQuota
    """For methods whose requests have images. If answers are streamed, the first one releases the request."""
    small: MemoryQuota
    """For all other methods with a single request, which normally arrives at once."""
    streamed: MemoryQuota
    """For the first messages of streamed requests: they come from the suite's own services and must get through.

    The services limit the number of such callers, and so the number of later messages.
    """
    of_grpc: MemoryQuota
    """For messages to gRPC's own services (health and reflection)."""


class _Reader:
    """Reads and parses the messages of one method."""

    def __init__(self, quota: MemoryQuota, limits: MessageLimits, parse: _Parse) -> None:
        self._quota = quota
        self._limits = limits
        self._parse = parse
        self._descriptor: Descriptor | None = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)

    async def read_reserved(self, guard: CallGuard, context: Context, share: QuotaShare) -> object:
        """Read the only message of a call, for which memory is reserved. Raises InvalidRequest if there is none."""
        with guard.reading(self._quota.message_bytes) as arrived:
            raw = arrived(await self._quota.receive(context.read))
        if raw is grpc.aio.EOF:
            raise InvalidRequest("the call has no request message")
        size_bytes = len(raw)
        try:
            request = await self._parsed(raw)
        except (TooLarge, InvalidRequest):
            del raw
            if size_bytes > PLAIN_BYTES:
                # Receiving some MiB delays all other calls by milliseconds: this caller's next message has to wait.
                await asyncio.sleep(_LARGE_REFUSED_S)
            raise
        share.shrink(size_bytes)
        return request

    async def read_all(
        self, guard: CallGuard, context: Context, peer: Peer, *, each: bool
    ) -> AsyncGenerator[object, None]:
        """Yield the messages of a call.

        They are read through the context: gRPC's request iterator, once started, is a reference cycle unless it is
        exhausted.

        Args:
            each: Whether all messages count towards the quota. Otherwise only the first one does.
        """
        first = True
        while True:
            with guard.reading(self._quota.message_bytes) as arrived:
                raw = arrived(await (self._within_quota(context, peer) if first or each else context.read()))
            if raw is grpc.aio.EOF:
                return
            yield await self._parsed(raw)
            first = False

    async def reserve(self, peer: Peer) -> QuotaShare:
        """Reserve memory for one message. Raises QueueFull."""
        return await self._quota.reserve(peer)

    async def _within_quota(self, context: Context, peer: Peer) -> Any:
        with await self.reserve(peer):
            return await self._quota.receive(context.read)

    async def _parsed(self, raw: bytes) -> object:
        check_size(len(raw), self._limits)
        if self._parse is None:
            return raw
        cost = len(raw) if self._limits.max_fields <= _FEW_FIELDS else len(raw) * _WALK_COST
        try:
            return await copied(cost, lambda: self._message(raw))
        except DecodeError:
            raise InvalidRequest("the request's bytes are not a message of this method") from None

    def _message(self, raw: bytes) -> object:
        """Parse a message, and drop unknown fields, which would otherwise be stored with it."""
        assert self._parse is not None
        if self._descriptor is None:
            return self._parse(raw)
        unknown = has_unknown_fields(raw, self._descriptor, max_fields=self._limits.max_fields)
        message: Any = self._parse(raw)
        if not unknown:
            return message
        message.DiscardUnknownFields()
        # Parse again: a message keeps the memory of discarded fields for as long as it exists.
        return self._parse(message.SerializeToString())


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The interceptor that wraps every method of every service.

    Args:
        default_deadline_s: Deadline in seconds of unary calls whose caller set none.
        requests: Memory quotas for requests.
        responses: Flow control for the responses of all calls.
        limits: Limits on calls that are served at the same time.
        ledger: Accounts of the calls of each connection.
        authenticator: Identifies callers. It is not used for gRPC's own services, which are open to all.
        audit: Log of the calls that change something; None for none.
    """

    def __init__(
        self,
        metrics: CallMetrics,
        default_deadline_s: float,
        *,
        requests: RequestQuotas,
        responses: ResponseFlowControl,
        limits: CallLimits,
        ledger: ConnectionLedger,
        authenticator: CallAuthenticator,
        audit: AuditLog | None = None,
    ) -> None:
        self._default_deadline_s = default_deadline_s
        self._requests = requests
        self._responses = responses
        self._wrapped: dict[str, _Handler] = {}
        self.calls = CallTracker(metrics, responses, limits, ledger, audit)
        self._limits = limits
        self._authenticator = authenticator
        self._unknown = self._refusing()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the wrapped handler of a method. Each method is wrapped once."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)  # methods are never added to a server that has started
        if wrapped is not None:
            return wrapped
        handler: _Handler = await continuation(handler_call_details)
        if handler is None:
            return self._unknown
        wrap = self._of_grpc if method.startswith("/grpc.") else self._of_ours
        wrapped = self._wrapped[method] = wrap(handler, method)
        return wrapped

    def _of_ours(self, handler: _Handler, method: str) -> _Handler:
        if handler.request_streaming:
            return self._conversation(handler, method) if handler.response_streaming else self._upload(handler, method)
        return self._watch(handler, method) if handler.response_streaming else self._unary(handler, method)

    def _unary(self, handler: _Handler, method: str) -> _Handler:
        reader, pack = self._reader(handler, method), handler.response_serializer

        async def call(_: _Raw, context: Context) -> bytes | None:
            async with CallGuard(self.calls, self._limits.short, method, context) as guard, self._deadline(context):
                with await self._reserve(guard, reader) as share:
                    request = await reader.read_reserved(guard, context, share)
                    guard.received(request)
                    answer = await handler.unary_unary(request, context)
                    del request  # it may be large, and reading the answer may take long
                return guard.responses.admit(_packed(answer, pack))
            return None  # the call was refused, and gRPC has the status

        return _taking_streams(grpc.stream_unary_rpc_method_handler, call)

    def _watch(self, handler: _Handler, method: str) -> _Handler:
        reader, pack = self._reader(handler, method), handler.response_serializer

        async def call(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.streams, method, context) as guard:
                with await self._reserve(guard, reader) as share:
                    request = await reader.read_reserved(guard, context, share)
                    guard.received(request)
                    responses = handler.unary_stream(request, context)
                    del request
                    await _send_all(responses, pack, guard.responses, context.write, share)

        return _taking_streams(grpc.stream_stream_rpc_method_handler, call)

    def _upload(self, handler: _Handler, method: str) -> _Handler:
        reader, pack = self._reader(handler, method), handler.response_serializer

        async def call(_: _Raw, context: Context) -> bytes | None:
            async with CallGuard(self.calls, self._limits.streamed, method, context) as guard, self._deadline(context):
                guard.acquire_slot()
                await guard.authenticate(self._authenticator)
                requests = reader.read_all(guard, context, guard.account, each=False)
                return guard.responses.admit(_packed(await handler.stream_unary(requests, context), pack))
            return None

        return _taking_streams(grpc.stream_unary_rpc_method_handler, call)

    def _conversation(self, handler: _Handler, method: str) -> _Handler:
        reader, pack = self._reader(handler, method), handler.response_serializer

        async def call(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.streamed, method, context) as guard:
                guard.acquire_slot()
                await guard.authenticate(self._authenticator)
                requests = reader.read_all(guard, context, guard.account, each=False)
                await _send_all(handler.stream_stream(requests, context), pack, guard.responses, context.write)

        return _taking_streams(grpc.stream_stream_rpc_method_handler, call)

    def _refusing(self) -> _Handler:
        """Return the handler of unknown methods. In metrics they share one name, since callers invent them."""

        async def call(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.short, "unknown", context):
                raise MethodNotServed("the service has no such method")

        return _taking_streams(grpc.stream_stream_rpc_method_handler, call)

    def _of_grpc(self, handler: _Handler, method: str) -> _Handler:
        """Wrap a handler of gRPC's own services. Only the receiving of requests is limited."""
        reader = _Reader(self._requests.of_grpc, OF_GRPC, handler.request_deserializer)

        async def unary(_: _Raw, context: Context) -> object:
            async with CallGuard(self.calls, self._limits.of_grpc, method, context) as guard:
                guard.acquire_slot()
                return await handler.unary_unary(
                    await _only(reader.read_all(guard, context, guard.peer, each=True)), context
                )
            return None

        async def watch(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.of_grpc_streams, method, context) as guard:
                guard.acquire_slot()
                await handler.unary_stream(await _only(reader.read_all(guard, context, guard.peer, each=True)), context)

        async def conversation(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.of_grpc_streams, method, context) as guard:
                guard.acquire_slot()
                requests = reader.read_all(guard, context, guard.peer, each=True)
                async for response in handler.stream_stream(requests, context):
                    await context.write(response)

        if not handler.response_streaming:
            return _taking_streams(grpc.stream_unary_rpc_method_handler, unary, handler.response_serializer)
        call = conversation if handler.request_streaming else watch
        return _taking_streams(grpc.stream_stream_rpc_method_handler, call, handler.response_serializer)

    def _reader(self, handler: _Handler, method: str) -> _Reader:
        limits = limits_of(method, max_message_bytes=self._requests.large.message_bytes)
        quota = self._requests.small if limits.plain else self._requests.large
        if handler.request_streaming:
            quota = self._requests.streamed
        return _Reader(quota, limits, handler.request_deserializer)

    async def _reserve(self, guard: CallGuard, reader: _Reader) -> QuotaShare:
        try:
            guard.acquire_slot()
            await guard.authenticate(self._authenticator)
            return await reader.reserve(guard.account)
        except QueueFull:
            self._responses.shorten_waits()
            raise

    def _deadline(self, context: Context) -> contextlib.AbstractAsyncContextManager[None]:
        # gRPC itself ends calls whose caller set a deadline.
        return self._default_deadline() if context.time_remaining() is None else contextlib.nullcontext()

    @contextlib.asynccontextmanager
    async def _default_deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._default_deadline_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            why = f"no deadline was set and the default of {self._default_deadline_s:g} s passed"
            raise DeadlinePassed(why) from None


async def _only(messages: AsyncGenerator[object, None]) -> object:
    """Read the only message of a call to one of gRPC's own services."""
    async with contextlib.aclosing(messages):
        async for request in messages:
            return request
    raise InvalidRequest("the call has no request message")


def _taking_streams(make: Any, call: Callable[[_Raw, Context], object], pack: _Pack = None) -> _Handler:
    """Return a handler that receives its messages on request, even a single one: gRPC would not wait for memory."""
    return make(call, None, pack)


def _packed(answer: Any, pack: _Pack) -> bytes:
    packed: bytes = pack(answer) if pack else answer
    return packed


async def _send_all(
    responses: AsyncGenerator[object, None],
    pack: _Pack,
    flow: CallResponses,
    write: Callable[[bytes], Awaitable[None]],
    share: QuotaShare | None = None,
) -> None:
    """Send all responses of a call.

    Args:
        share: Quota share of the request, which is released with the first response; None if it is released already.
    """
    async with contextlib.aclosing(responses):
        async for response in responses:
            if share is not None:
                share.release()
            raw = _packed(response, pack)
            del response  # sending it, and waiting for the next one, may take long
            await flow.send(raw, write)
            del raw
