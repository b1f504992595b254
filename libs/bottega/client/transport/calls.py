"""Calls to a gateway, with retries while it is UNAVAILABLE or busy, and the rules for them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc

from bottega.client.transport.credentials import VARIABLES, readable
from bottega.client.types.jobs import Interrupted
from bottega.client.types.messages import describe
from bottega.errors import (
    BottegaError,
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    JobCancelled,
    NoControlNet,
    NoWorker,
    QueueFull,
    Unavailable,
    Violation,
    WorkerLost,
)
from bottega.rpc.security.tls import find_tls_mismatch
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1.image_pb2 import GetImageRequest, GetImageResponse, Image, JobEvent

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
CarrierT_co = TypeVar("CarrierT_co", bound="EventCarrier", covariant=True)

# Thirty years. gRPC takes a much later moment for one that has passed.
_LONGEST_S = 1e9

# Twice what a gateway keeps of a whole job by default.
MAX_IMAGE_BYTES = 256 << 20
# gRPC's message about a certificate that is not trusted.
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_TLS_ADVICE = {
    False: f"name the authority of its certificate: {VARIABLES[0]}, or Client(tls=Tls(...))",
    True: f"call it without: unset {VARIABLES[0]}, or leave tls out of Client(...)",
}

# Seconds within which a gateway ends a call after the last event of its job.
_END_S = 1.0
# Seconds until a caller is warned that nothing answers; a restarting gateway is mostly back before.
UNREACHED_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The rules of retries while the gateway is UNAVAILABLE or busy; other errors are not retried."""

    patience_s: float = 30.0
    """Seconds without an answer after which to give up. A gateway and its workers restart within seconds."""
    reach_s: float = 30.0
    """Seconds after which to give up if the gateway has never answered. A command for people may use less than
    `patience_s`, because they may have forgotten to start a gateway."""
    first_wait_s: float = 0.1
    """Longest wait in seconds before the first retry; it doubles with every retry. Each wait is random, between half
    and all."""
    longest_wait_s: float = 2.0


class CallTimeout(DeadlinePassed):
    """The error that the caller's own time-out has passed. The job may go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDeadline:
    """The time at which a caller gives up on a call."""

    at_s: float
    """The deadline, on time.monotonic()."""
    allowed_s: float
    """Length of the time-out in seconds, for error messages."""

    @classmethod
    def after(cls, seconds: object, *, name: str = "timeout_s") -> CallDeadline:
        """Return the deadline that is `seconds` from now. Raise InvalidRequest if `seconds` is not a valid number.

        Args:
            seconds: The argument that a caller gave.
            name: The name of that argument.
        """
        if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_S:
            rule = f"must be a number of seconds above 0, at most {_LONGEST_S:g}; got {describe(seconds)}"
            raise InvalidRequest(f"{name} {rule}", violations=[Violation(field=name, description=rule)])
        return cls(at_s=time.monotonic() + seconds, allowed_s=seconds)

    def remaining_s(self) -> float:
        """Return the seconds that remain. Raise CallTimeout if none do."""
        remaining_s = self.at_s - time.monotonic()
        if remaining_s <= 0:
            raise self.passed()
        return remaining_s

    def passed(self) -> CallTimeout:
        return CallTimeout(f"not done within {self.allowed_s:g} s")


class Backoff:
    """Computes the waits between the tries of one call."""

    def __init__(
        self,
        policy: RetryPolicy,
        deadline: CallDeadline,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._policy = policy
        self._deadline = deadline
        self._clock = clock
        self._draw = draw
        self._tries = 0
        self._last_answer_s = self._clock()
        self._reached = False

    def reset(self) -> None:
        self._tries = 0
        self._last_answer_s = self._clock()
        self._reached = True

    def wait_s(self, error: BottegaError) -> float:
        """Return the seconds to wait before the next try, at least as many as the gateway asked for.

        Raises `error` if the patience or the deadline would end before that.
        """
        longest_s = min(self._policy.first_wait_s * 2**self._tries, self._policy.longest_wait_s)
        self._tries += 1
        wait_s = self._draw(longest_s / 2, longest_s)
        if error.retry_after_s is not None:
            # Plus a random time, so that callers that got the same number do not retry at the same moment.
            wait_s += error.retry_after_s
        self._reached |= type(error) is not Unavailable  # only a running gateway gives a reason
        patience_s = self._policy.patience_s if self._reached else min(self._policy.patience_s, self._policy.reach_s)
        after_s = self._clock() + wait_s
        if after_s > self._last_answer_s + patience_s or after_s >= self._deadline.at_s:
            raise error
        return wait_s


class TlsMismatch(Unavailable):
    """The error that only one end of a connection uses TLS, or a certificate is not trusted. Retries do not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """The server, the deadline and the retries of a call."""

    address: str
    """host:port of the server."""
    deadline: CallDeadline
    retry: RetryPolicy
    encrypted: bool = False
    """Whether the connection uses TLS."""
    fleet: bool = False
    """Whether the server is the gateway's listener for services."""
    report_unreached: Callable[[], None] = lambda: None
    """Called if there is no answer after UNREACHED_S. It logs a warning if the connection failed."""


class EventCarrier(Protocol):
    """The interface of the responses of Generate and WatchJob."""

    @property
    def event(self) -> JobEvent: ...


class EventStream(Protocol[CarrierT_co]):
    """The interface of a gRPC stream of a job's events."""

    def __aiter__(self) -> AsyncIterator[CarrierT_co]: ...
    def cancel(self) -> bool: ...
    async def code(self) -> grpc.StatusCode: ...


async def call_with_retries(
    method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
    request: RequestT,
    terms: CallTerms,
    *,
    before_try: Callable[[RequestT], None] = lambda _: None,
) -> ResponseT:
    """Return the response to a request, with retries as `terms` say. Raise the gateway's BottegaError.

    Args:
        before_try: Updates the fields of the request that depend on the time, or raises to end the retries.
    """
    backoff = Backoff(terms.retry, terms.deadline)
    with _unreached_timer(terms):
        while True:
            before_try(request)
            try:
                return readable(await method(request, timeout=terms.deadline.remaining_s()))
            except grpc.RpcError as error:
                failure = await _retryable(error, terms)
            await asyncio.sleep(backoff.wait_s(failure))


async def follow_events(
    attach: Callable[[float], EventStream[CarrierT_co]], terms: CallTerms
) -> AsyncGenerator[JobEvent | Interrupted, None]:
    """Yield a job's events until its last one. If a stream breaks, open another.

    Args:
        attach: Opens a stream that may last the given seconds. A stream of an existing job begins with its current
            state.
        terms: The terms of the call.

    Raises:
        BottegaError: The job failed, or the retries are used up.
    """
    with _unreached_timer(terms):
        async with contextlib.aclosing(_follow_events(attach, terms)) as items:
            async for item in items:
                yield item


async def _follow_events(
    attach: Callable[[float], EventStream[CarrierT_co]], terms: CallTerms
) -> AsyncGenerator[JobEvent | Interrupted, None]:
    backoff = Backoff(terms.retry, terms.deadline)
    while True:
        accepted = False
        call = attach(terms.deadline.remaining_s())
        try:
            async for response in call:
                backoff.reset()
                accepted = True
                last = response.event.WhichOneof("event") in ("completed", "failed")
                if last:
                    await _wait_for_end(call)
                yield response.event
                if last:
                    return
            failure: BottegaError = Unavailable("the gateway ended the stream before the job had ended")
        except grpc.RpcError as error:
            failure = await _retryable(error, terms, accepted=accepted)
        finally:
            call.cancel()
        if accepted:
            backoff.reset()  # the stream was fine until now, even if there was no event for a long time
        wait_s = backoff.wait_s(failure)
        yield Interrupted(error=failure, wait_s=wait_s)
        await asyncio.sleep(wait_s)


@contextlib.contextmanager
def _unreached_timer(terms: CallTerms) -> Iterator[None]:
    timer = asyncio.get_running_loop().call_later(UNREACHED_S, terms.report_unreached)
    try:
        yield
    finally:
        timer.cancel()


async def _wait_for_end(call: EventStream[CarrierT_co]) -> None:
    """Wait until the gateway ends the call. Cancelling it would count as a cancelled call in its metrics."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(call.code(), _END_S)


async def fetch_image(
    method: grpc.aio.UnaryStreamMultiCallable[GetImageRequest, GetImageResponse],
    request: GetImageRequest,
    terms: CallTerms,
    *,
    max_bytes: int = MAX_IMAGE_BYTES,
) -> tuple[Image, bytes]:
    """Return one finished image and its encoded bytes, of which there are none if the request is for a URL.

    Raises InternalError if the bytes do not match their digest, or are more than announced or than `max_bytes`.
    """
    backoff = Backoff(terms.retry, terms.deadline)
    with _unreached_timer(terms):
        while True:
            call = method(request, timeout=terms.deadline.remaining_s())
            try:
                return await _read_image(call, max_bytes, as_url=request.as_url)
            except grpc.RpcError as error:
                failure = await _retryable(error, terms)
            finally:
                call.cancel()
            await asyncio.sleep(backoff.wait_s(failure))


def check_digest(image: Image, digest: str) -> None:
    """Raise InternalError if received bytes do not match the image's digest."""
    if digest != image.digest:
        raise InternalError(f"the bytes of image {image.index} do not match their digest; fetch it again")


async def _read_image(
    call: grpc.aio.UnaryStreamCall[GetImageRequest, GetImageResponse], max_bytes: int, *, as_url: bool
) -> tuple[Image, bytes]:
    image, data, digest = Image(), bytearray(), hashlib.sha256()
    async for response in call:
        if response.HasField("image"):
            image = response.image
        bound = min(image.size_bytes, max_bytes)
        if len(data) + len(response.chunk) > bound:
            raise InternalError(
                f"image {image.index} has more than the {bound} bytes that were announced or are allowed"
            )
        data += response.chunk
        digest.update(response.chunk)
    if data or not as_url:
        check_digest(image, digest.hexdigest())
    return image, bytes(data)


async def _retryable(error: grpc.RpcError, terms: CallTerms, *, accepted: bool = False) -> Unavailable | QueueFull:
    """Return the gateway's error if a retry may help. Raise it otherwise."""
    failure: BottegaError = from_rpc_error(error)
    answered = was_answered(error)
    if isinstance(failure, DeadlinePassed) and not answered:
        raise terms.deadline.passed() from error  # gRPC's own message names its internal parts
    if isinstance(failure, JobCancelled) and not answered:
        # A stopping gateway cuts calls off like this. A cancelled job has a message of its own.
        failure = Unavailable("the gateway ended the call early")
    if isinstance(failure, QueueFull) and "limit" in failure.metadata:
        return failure  # the gateway is busy at the moment; its queue of jobs is not full
    if not isinstance(failure, Unavailable) or _ends_job(failure, accepted=accepted):
        raise failure from error
    if not answered:
        # gRPC's own message stays in the chain of causes.
        if mismatch := await find_tls_mismatch(terms.address, encrypted=terms.encrypted):
            raise TlsMismatch(f"{mismatch}; {_TLS_ADVICE[terms.encrypted]}") from error
        if terms.encrypted and any(_UNTRUSTED in note for note in getattr(failure, "__notes__", ())):
            raise TlsMismatch(
                f"{VARIABLES[0]} has not signed the certificate of a gateway at {terms.address}, or it has expired;"
                " bottega certs show lists certificates"
            ) from error
        failure = _unanswered(terms)
        failure.__cause__ = error
    return failure


def _unanswered(terms: CallTerms) -> Unavailable:
    if terms.fleet:
        return Unavailable(
            f"no gateway lists its fleet at {terms.address}; set BOTTEGA_FLEET to its fleet.listen, on its machine",
            metadata={"listener": "fleet"},
        )
    return Unavailable(f"no gateway answers at {terms.address}; start one (bottega up), or set BOTTEGA_ADDRESS")


def _ends_job(failure: BottegaError, *, accepted: bool) -> bool:
    # A job that ended so stays ended, and attaching to it would return the same error. A call that was refused because
    # there was no worker or ControlNet may be accepted later, such as when the gateway has just restarted.
    return isinstance(failure, WorkerLost) or (accepted and isinstance(failure, NoWorker | NoControlNet))
