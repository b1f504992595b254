"""The edge between gRPC and our code: the outermost interceptor of every server.

Turns a BottegaError into its status and anything unexpected into a plain INTERNAL, so that no text
of a library reaches a caller; logs failures once; counts; gives unary calls a deadline. Requests are parsed
in here as well, so that bytes that are none end like any other wrong request. It knows no service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from bottega.errors import BottegaError, Code, DeadlinePassed, InternalError, InvalidRequest
from bottega.rpc import logs
from bottega.rpc.metrics import CallMetrics
from bottega.rpc.status import to_grpc_status

REQUEST_ID_KEY = "x-request-id"

MAX_REQUEST_ID_CHARACTERS = 128

_log = logging.getLogger(__name__)

_Handler = Any  # grpc.RpcMethodHandler, whose stubs know only blocking methods.
_Context = grpc.aio.ServicerContext[Any, Any]
# None where the handler takes bytes.
_Parse = Callable[[bytes], object] | None


class CallBoundary(grpc.aio.ServerInterceptor):
    """Wraps every method of every service.

    default_deadline_s: of unary calls whose caller set none.
    """

    def __init__(self, metrics: CallMetrics, default_deadline_s: float) -> None:
        self._metrics = metrics
        self._default_deadline_s = default_deadline_s
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no call is being served, those of gRPC's own services aside."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """See grpc.aio.ServerInterceptor."""
        handler: _Handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        if handler.response_streaming:
            return self._streaming(handler, method)
        return self._unary(handler, method)

    def _unary(self, handler: _Handler, method: str) -> _Handler:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        read = _reader(handler)

        async def call(raw: Any, context: _Context) -> object:
            async with self._guard(method, context), self._deadline(context):
                return await inner(read(raw), context)

        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return cast(Any, make)(call, None, handler.response_serializer)

    def _streaming(self, handler: _Handler, method: str) -> _Handler:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        read = _reader(handler)

        async def call(raw: Any, context: _Context) -> AsyncGenerator[object, None]:
            async with self._guard(method, context), contextlib.aclosing(inner(read(raw), context)) as responses:
                async for response in responses:
                    yield response

        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return cast(Any, make)(call, None, handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _guard(self, method: str, context: _Context) -> AsyncIterator[None]:
        began = time.perf_counter()
        code = Code.CANCELLED.name
        self._enter(context)
        try:
            yield
            code = "OK"
        except BottegaError as error:
            code = error.code.name
            _report(method, error)
            await context.abort_with_status(to_grpc_status(error))
        except Exception as error:
            code = Code.INTERNAL.name
            _log.exception("call failed unexpectedly", extra={"method": method})
            await context.abort_with_status(to_grpc_status(_plain_internal()))
            raise AssertionError("unreachable: abort raises") from error
        finally:
            self._leave()
            self._metrics.observe(method, code, time.perf_counter() - began)

    @contextlib.asynccontextmanager
    async def _deadline(self, context: _Context) -> AsyncIterator[None]:
        # gRPC itself ends a call whose caller set a deadline.
        timeout = self._default_deadline_s if context.time_remaining() is None else None
        try:
            async with asyncio.timeout(timeout) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlinePassed(f"no deadline was set and the default of {timeout:g} s passed") from None

    def _enter(self, context: _Context) -> None:
        # Every call runs in a task of its own, so what is bound here is bound for this call only.
        logs.bind(**_request_id(context))
        self._active += 1
        self._idle.clear()
        self._metrics.in_flight.inc()

    def _leave(self) -> None:
        self._active -= 1
        self._metrics.in_flight.dec()
        if not self._active:
            self._idle.set()


def _reader(handler: _Handler) -> Callable[[Any], object]:
    """What makes the handler's request, or its stream of requests, of the bytes that came."""
    parse: _Parse = handler.request_deserializer
    if handler.request_streaming:
        return lambda stream: _parsed_all(stream, parse)
    return lambda raw: _parsed(raw, parse)


async def _parsed_all(stream: AsyncIterator[bytes], parse: _Parse) -> AsyncIterator[object]:
    async for raw in stream:
        yield _parsed(raw, parse)


def _parsed(raw: bytes, parse: _Parse) -> object:
    try:
        return parse(raw) if parse else raw
    except DecodeError:
        raise InvalidRequest("the request's bytes are not a message of this method") from None


def _request_id(context: _Context) -> dict[str, str]:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY:
            return {"request_id": str(value)[:MAX_REQUEST_ID_CHARACTERS]}
    return {}


def _report(method: str, error: BottegaError) -> None:
    if isinstance(error, InternalError):
        _log.error("call failed", exc_info=error, extra={"method": method})
    else:
        _log.info("call refused", extra={"method": method, "reason": error.reason_name, "text": error.message})


def _plain_internal() -> InternalError:
    return InternalError("an internal fault; the service's log says more under the same request_id")
