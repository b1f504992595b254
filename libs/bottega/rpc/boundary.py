"""The edge between gRPC and our code: the outermost interceptor of every server.

Turns a BottegaError into its status and anything unexpected into a plain INTERNAL, so that no text
of a library reaches a caller; logs failures once; counts; gives unary calls a deadline. Requests are received and
parsed in here as well: not before there is room for them, and bytes that are none end like any other wrong request.
Answers are packed and streamed in here, so that no caller that does not read them is waited for without end.
It knows no service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from bottega.errors import BottegaError, Code, DeadlinePassed, InternalError, InvalidRequest, QueueFull
from bottega.process import copied
from bottega.rpc import logs
from bottega.rpc.answers import AnswerBudget, Answers
from bottega.rpc.budget import RequestBudget, Share
from bottega.rpc.metrics import CallMetrics
from bottega.rpc.refusals import RefusalLog
from bottega.rpc.status import to_grpc_status

REQUEST_ID_KEY = "x-request-id"

MAX_REQUEST_ID_CHARACTERS = 128

_log = logging.getLogger(__name__)

_Handler = Any  # grpc.RpcMethodHandler, whose stubs know only blocking methods.
_Context = grpc.aio.ServicerContext[Any, Any]
# None where the handler takes bytes.
_Parse = Callable[[bytes], object] | None
# None where the handler gives bytes.
_Pack = Callable[[Any], bytes] | None
_Raw = AsyncIterator[bytes]


class CallBoundary(grpc.aio.ServerInterceptor):
    """Wraps every method of every service.

    default_deadline_s: of unary calls whose caller set none. budget: of all calls but those that stream their requests,
    which are the suite's own and must get through when others cannot. A method that streams its answers holds nothing
    of a large request from its first answer on. answers: of all calls.
    """

    def __init__(
        self, metrics: CallMetrics, default_deadline_s: float, *, budget: RequestBudget, answers: AnswerBudget
    ) -> None:
        self._metrics = metrics
        self._default_deadline_s = default_deadline_s
        self._budget = budget
        self._answers = answers
        self._active = 0
        self._open = 0
        metrics.watch_in_flight(lambda: self._active)
        self.refusals = RefusalLog()
        self._wrapped: dict[str, _Handler] = {}
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
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)  # methods are never added to a server that has started
        if wrapped is not None:
            return wrapped
        handler: _Handler = await continuation(handler_call_details)
        if handler is None or method.startswith("/grpc."):
            return handler
        wrap = self._streaming if handler.response_streaming else self._unary
        wrapped = self._wrapped[method] = wrap(handler, method)
        return wrapped

    def _unary(self, handler: _Handler, method: str) -> _Handler:
        parse: _Parse = handler.request_deserializer
        pack: _Pack = handler.response_serializer

        async def call(_: _Raw, context: _Context) -> bytes | None:
            async with self._guard(method, context) as answers, self._deadline(context):
                if handler.request_streaming:
                    answer = await handler.stream_unary(_parsed_all(context, parse), context)
                else:
                    with await self._share() as share:
                        answer = await handler.unary_unary(await self._received(context, parse, share), context)
                return answers.admit(_packed(answer, pack))
            return None  # it was refused, and gRPC knows

        return _taking_streams(grpc.stream_unary_rpc_method_handler, call)

    def _streaming(self, handler: _Handler, method: str) -> _Handler:
        parse: _Parse = handler.request_deserializer
        pack: _Pack = handler.response_serializer

        async def all_asked(_: _Raw, context: _Context) -> None:
            async with self._guard(method, context) as answers:
                responses = handler.stream_stream(_parsed_all(context, parse), context)
                await _send_all(responses, pack, answers, context.write)

        async def one_asked(_: _Raw, context: _Context) -> None:
            async with self._guard(method, context) as answers:
                with await self._share() as share:
                    responses = handler.unary_stream(await self._received(context, parse, share), context)
                    await _send_all(responses, pack, answers, context.write, share)

        call = all_asked if handler.request_streaming else one_asked
        return _taking_streams(grpc.stream_stream_rpc_method_handler, call)

    async def _share(self) -> Share:
        # Of a call that has ended but is not read out gRPC has some memory still: it counts half.
        try:
            return await self._budget.share(calls=max(self._active, self._open // 2))
        except QueueFull:
            self._answers.hurry()
            raise

    async def _received(self, context: _Context, parse: _Parse, share: Share) -> object:
        raw = await self._budget.received(context.read)
        if raw is grpc.aio.EOF:
            raise InvalidRequest("the call carries no request")
        share.shrink(len(raw))
        return await _parsed(raw, parse)

    def _guard(self, method: str, context: _Context) -> _Guard:
        return _Guard(self, method, context)

    def _deadline(self, context: _Context) -> contextlib.AbstractAsyncContextManager[None]:
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

    def enter(self, context: _Context) -> Answers:
        """A call begins."""
        # Every call runs in a task of its own, so what is bound here is bound for this call only. It ends when gRPC has
        # sent all that was answered, or the caller has gone.
        answers, task = Answers(self._answers), asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._close(answers))
        answers.bind()
        logs.bind(**_request_id(context))
        self._open += 1
        self._active += 1
        self._idle.clear()
        return answers

    def leave(self, method: str, code: Code | None, seconds: float) -> None:
        """It has ended, but for what its caller has not read. code: None is OK."""
        self._active -= 1
        if not self._active:
            self._idle.set()
        self._metrics.observe(method, code.name if code else "OK", seconds)

    def _close(self, answers: Answers) -> None:
        self._open -= 1
        answers.release()


class _Guard:
    """Around one call: whatever it raises ends it with a status.

    gRPC keeps the exception of an abort with the call's context, and raises it again when the method has returned. One
    that led to the frames of the call, which hold context and request, would be a cycle of some MiB perhaps, until the
    collector comes by: so it ends here, without a traceback.
    """

    def __init__(self, boundary: CallBoundary, method: str, context: _Context) -> None:
        self._boundary = boundary
        self._method = method
        self._context = context
        self._began = time.perf_counter()

    async def __aenter__(self) -> Answers:
        return self._boundary.enter(self._context)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        del kind, trace
        # An InternalError of gRPC's is how a write fails when the caller has gone.
        refused = error if isinstance(error, Exception) and not isinstance(error, grpc.aio.InternalError) else None
        ours = _told(self._method, refused, self._boundary.refusals) if refused else None
        code = Code.CANCELLED if error is not None else None
        # Before the caller hears: one that does not read, does not hear either.
        self._boundary.leave(self._method, ours.code if ours else code, time.perf_counter() - self._began)
        if ours is None:
            return False
        try:
            await self._context.abort_with_status(to_grpc_status(ours))
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = aborted.__context__ = None
        return True


def _taking_streams(make: Any, call: Callable[[_Raw, _Context], object]) -> _Handler:
    """A handler whose messages come when it asks for them, also where there is only one: gRPC would not wait."""
    return make(call, None, None)


def _packed(answer: Any, pack: _Pack) -> bytes:
    packed: bytes = pack(answer) if pack else answer
    return packed


async def _send_all(
    responses: AsyncGenerator[object, None],
    pack: _Pack,
    answers: Answers,
    write: Callable[[bytes], Awaitable[None]],
    share: Share | None = None,
) -> None:
    """share: that of the request, which nobody needs any more when there is an answer."""
    async with contextlib.aclosing(responses):
        async for response in responses:
            if share is not None:
                share.release()
            raw = _packed(response, pack)
            del response  # the next one may be long in coming, and this one in going
            await answers.send(raw, write)
            del raw


async def _parsed_all(context: _Context, parse: _Parse) -> AsyncIterator[object]:
    """Reads by the context: gRPC's stream of requests, once begun, is a cycle of its own where it is not read out."""
    while (raw := await context.read()) is not grpc.aio.EOF:
        yield await _parsed(raw, parse)


async def _parsed(raw: bytes, parse: _Parse) -> object:
    try:
        return await copied(len(raw), lambda: parse(raw)) if parse else raw
    except DecodeError:
        raise InvalidRequest("the request's bytes are not a message of this method") from None


def _request_id(context: _Context) -> dict[str, str]:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY:
            return {"request_id": str(value)[:MAX_REQUEST_ID_CHARACTERS]}
    return {}


def _told(method: str, error: Exception, refusals: RefusalLog) -> BottegaError:
    """What the caller is told. It is logged here, once, and forgets where it was raised."""
    told = error if isinstance(error, BottegaError) else _plain_internal()
    if told is not error:
        _log.error("call failed unexpectedly", exc_info=error, extra={"method": method})
    elif isinstance(error, InternalError):
        _log.error("call failed", exc_info=error, extra={"method": method})
    else:
        refusals.tell(method, told.reason_name, told.message)
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return told


def _plain_internal() -> InternalError:
    return InternalError("an internal fault; the service's log says more under the same request_id")
