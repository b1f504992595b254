"""The edge between gRPC and our code: the outermost interceptor of every server.

Turns a BottegaError into its status and anything unexpected into a plain INTERNAL, so that no text
of a library reaches a caller; logs failures once; counts; gives unary calls a deadline. Requests are received and
parsed in here as well: not before there is room for them, and bytes that are none end like any other wrong request.
Responses are packed and streamed in here, so that no caller that does not read them is waited for without end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from bottega.errors import DeadlinePassed, InvalidRequest, MethodNotServed, QueueFull, TooLarge
from bottega.process import copied
from bottega.rpc.interceptor.calls import CallGuard, CallLimits, CallTracker, Context
from bottega.rpc.interceptor.memory_quota import MemoryQuota, QuotaShare
from bottega.rpc.interceptor.response_flow import CallResponses, ResponseFlowControl
from bottega.rpc.operation.audit import AuditLog
from bottega.rpc.operation.metrics import CallMetrics
from bottega.rpc.peers import Peer, peer_of
from bottega.rpc.security.caller import CallAuthenticator

# Of one message of a caller that streams them. A conversation of the fleet has small ones: the longest registration,
# and the longest load, are well below a MiB. An upload has chunks of at most 4 MiB, and a head of little over 3 MiB.
_CONVERSATION_BYTES = 2 << 20
_UPLOAD_BYTES = 5 << 20
# Requests of health and reflection are small and few: slow ones delay neither each other nor the fleet.
_OF_GRPC_BYTES = 64 << 10
_OF_GRPC_AT_ONCE = 16

_Handler = Any  # grpc.RpcMethodHandler, whose stubs know only blocking methods.
# None where the handler takes bytes.
_Parse = Callable[[bytes], object] | None
# None where the handler gives bytes.
_Pack = Callable[[Any], bytes] | None
_Raw = AsyncIterator[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RequestLimits:
    """How the messages of one kind of caller come in. most_bytes: of one of them.

    each: they all count towards the quota, and not the first alone.
    """

    quota: MemoryQuota
    most_bytes: int
    each: bool = False


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of every service.

    default_deadline_s: of unary calls whose caller set none.
    requests: the quota of requests that are one message. A method that streams its answers holds nothing of a large
    request from its first answer on.
    streamed: the quota of first messages of callers that stream them, which are the suite's own and must get through
    when others cannot. Their later messages are refused by size when they are here, and are as many as the services let
    callers in. Every message to gRPC's own services counts towards a small quota of their own.
    responses: of all calls. limits: of calls that are served at once. authenticator: says who calls, gRPC's own
    services aside, which are open to all. audit: where calls that change something are noted, if anywhere.
    """

    def __init__(
        self,
        metrics: CallMetrics,
        default_deadline_s: float,
        *,
        requests: MemoryQuota,
        streamed: MemoryQuota,
        responses: ResponseFlowControl,
        limits: CallLimits,
        authenticator: CallAuthenticator,
        audit: AuditLog | None = None,
    ) -> None:
        self._default_deadline_s = default_deadline_s
        self._requests = requests
        self._responses = responses
        self._wrapped: dict[str, _Handler] = {}
        self.calls = CallTracker(metrics, responses, limits, audit)
        self._limits = limits
        self._authenticator = authenticator
        self._conversations = _RequestLimits(quota=streamed, most_bytes=_CONVERSATION_BYTES)
        self._uploads = _RequestLimits(quota=streamed, most_bytes=_UPLOAD_BYTES)
        self._grpcs = _RequestLimits(quota=_small(), most_bytes=_OF_GRPC_BYTES, each=True)
        self._unknown = self._refusing()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """The handler of a method, wrapped; each method is wrapped once."""
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
        parse, pack = _translators(handler)

        async def call(_: _Raw, context: Context) -> bytes | None:
            async with CallGuard(self.calls, self._limits.short, method, context) as guard, self._deadline(context):
                with await self._reserve(guard) as share:
                    request = await self._receive(context, parse, share)
                    guard.received(request)
                    answer = await handler.unary_unary(request, context)
                    del request  # it may be large, and the answer may take long to be read
                return guard.responses.admit(_packed(answer, pack))
            return None  # it was refused, and gRPC knows

        return _taking_streams(grpc.stream_unary_rpc_method_handler, call)

    def _watch(self, handler: _Handler, method: str) -> _Handler:
        parse, pack = _translators(handler)

        async def call(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.streams, method, context) as guard:
                with await self._reserve(guard) as share:
                    request = await self._receive(context, parse, share)
                    guard.received(request)
                    responses = handler.unary_stream(request, context)
                    del request
                    await _send_all(responses, pack, guard.responses, context.write, share)

        return _taking_streams(grpc.stream_stream_rpc_method_handler, call)

    def _upload(self, handler: _Handler, method: str) -> _Handler:
        parse, pack = _translators(handler)

        async def call(_: _Raw, context: Context) -> bytes | None:
            async with CallGuard(self.calls, self._limits.streamed, method, context) as guard, self._deadline(context):
                guard.acquire_slot()
                await guard.authenticate(self._authenticator)
                requests = self._messages(context, parse, self._uploads)
                return guard.responses.admit(_packed(await handler.stream_unary(requests, context), pack))
            return None

        return _taking_streams(grpc.stream_unary_rpc_method_handler, call)

    def _conversation(self, handler: _Handler, method: str) -> _Handler:
        parse, pack = _translators(handler)

        async def call(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.streamed, method, context) as guard:
                guard.acquire_slot()
                await guard.authenticate(self._authenticator)
                requests = self._messages(context, parse, self._conversations)
                await _send_all(handler.stream_stream(requests, context), pack, guard.responses, context.write)

        return _taking_streams(grpc.stream_stream_rpc_method_handler, call)

    def _refusing(self) -> _Handler:
        """Serves all unknown methods, under one name: a caller may invent any number of names."""

        async def call(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.short, "unknown", context):
                raise MethodNotServed("the service has no such method")

        return _taking_streams(grpc.stream_stream_rpc_method_handler, call)

    def _of_grpc(self, handler: _Handler, method: str) -> _Handler:
        """Their answers are their own; only their requests are received here."""
        parse = handler.request_deserializer

        async def unary(_: _Raw, context: Context) -> object:
            async with CallGuard(self.calls, self._limits.of_grpc, method, context) as guard:
                guard.acquire_slot()
                return await handler.unary_unary(await self._only_message(context, parse), context)
            return None

        async def watch(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.of_grpc_streams, method, context) as guard:
                guard.acquire_slot()
                await handler.unary_stream(await self._only_message(context, parse), context)

        async def conversation(_: _Raw, context: Context) -> None:
            async with CallGuard(self.calls, self._limits.of_grpc_streams, method, context) as guard:
                guard.acquire_slot()
                async for response in handler.stream_stream(self._messages(context, parse, self._grpcs), context):
                    await context.write(response)

        if not handler.response_streaming:
            return _taking_streams(grpc.stream_unary_rpc_method_handler, unary, handler.response_serializer)
        call = conversation if handler.request_streaming else watch
        return _taking_streams(grpc.stream_stream_rpc_method_handler, call, handler.response_serializer)

    async def _reserve(self, guard: CallGuard) -> QuotaShare:
        try:
            guard.acquire_slot()
            await guard.authenticate(self._authenticator)
            return await self._requests.reserve(guard.peer)
        except QueueFull:
            self._responses.shorten_waits()
            raise

    async def _receive(self, context: Context, parse: _Parse, share: QuotaShare) -> object:
        raw = _within(self._requests.message_bytes, await self._requests.receive(context.read))
        if raw is grpc.aio.EOF:
            raise InvalidRequest("the call carries no request")
        share.shrink(len(raw))
        return await _parsed(raw, parse)

    async def _only_message(self, context: Context, parse: _Parse) -> object:
        async with contextlib.aclosing(self._messages(context, parse, self._grpcs)) as messages:
            async for request in messages:
                return request
        raise InvalidRequest("the call carries no request")

    async def _messages(self, context: Context, parse: _Parse, limits: _RequestLimits) -> AsyncGenerator[object, None]:
        """All messages of a caller. The first of them may be large before it is refused.

        Reads by the context: gRPC's stream of requests, once begun, is a cycle of its own where it is not read out.
        """
        peer = peer_of(context.peer())
        raw = _within(limits.most_bytes, await _within_quota(limits, context, peer))
        while raw is not grpc.aio.EOF:
            yield await _parsed(raw, parse)
            reading = _within_quota(limits, context, peer) if limits.each else context.read()
            raw = _within(limits.most_bytes, await reading)

    def _deadline(self, context: Context) -> contextlib.AbstractAsyncContextManager[None]:
        # gRPC itself ends a call whose caller set a deadline.
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


def _small() -> MemoryQuota:
    """For gRPC's own services. Each message may come in as large as any, before it is refused."""
    most_bytes = _OF_GRPC_AT_ONCE * _OF_GRPC_BYTES
    return MemoryQuota(max_bytes=most_bytes, message_bytes=_OF_GRPC_BYTES)


async def _within_quota(limits: _RequestLimits, context: Context, peer: Peer) -> Any:
    with await limits.quota.reserve(peer):
        return await limits.quota.receive(context.read)


def _taking_streams(make: Any, call: Callable[[_Raw, Context], object], pack: _Pack = None) -> _Handler:
    """A handler whose messages come when it asks for them, also where there is only one: gRPC would not wait."""
    return make(call, None, pack)


def _translators(handler: _Handler) -> tuple[_Parse, _Pack]:
    return handler.request_deserializer, handler.response_serializer


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
    """share: that of the request, which is not needed any more when there is an answer."""
    async with contextlib.aclosing(responses):
        async for response in responses:
            if share is not None:
                share.release()
            raw = _packed(response, pack)
            del response  # the next one may be long in coming, and this one in going
            await flow.send(raw, write)
            del raw


def _within(most_bytes: int, raw: Any) -> Any:
    """A message, or the end, as it is. Raises TooLarge."""
    if raw is not grpc.aio.EOF and len(raw) > most_bytes:
        limit = {"limit": "message", "bytes": str(most_bytes)}
        raise TooLarge(f"a message of this method has at most {most_bytes} bytes", metadata=limit)
    return raw


async def _parsed(raw: bytes, parse: _Parse) -> object:
    try:
        return await copied(len(raw), lambda: parse(raw)) if parse else raw
    except DecodeError:
        raise InvalidRequest("the request's bytes are not a message of this method") from None
