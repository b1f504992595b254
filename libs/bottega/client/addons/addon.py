"""The add-on services of a fleet: how `bottega fleet` describes and `bottega doctor` checks them, and calls to them."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import grpc

from bottega.client.addons import add_ons_by_command
from bottega.client.transport.connection import service_channels
from bottega.client.types.fleet import FleetMember, FleetStatus
from bottega.errors import BottegaError, InternalError, Unavailable
from bottega.rpc.channel import Target
from bottega.rpc.status import from_rpc_error, was_answered


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAddOn:
    """Titles and checks of one kind of add-on service, for `bottega fleet` and `bottega doctor`."""

    kind: str
    """Kind of the services in the fleet, such as "loras"."""
    title: str
    """What one service is called, such as "LoRA store"."""
    hosted_title: str
    """What the items that the services host are called, in the plural, such as "LoRAs"."""
    check_fleet: Callable[[FleetStatus], Iterator[CheckResult]] | None = None
    """Yields the findings of `bottega doctor` about the services; None if it only counts them."""
    misfits: Callable[[FleetStatus], Iterator[LeftOutThing]] | None = None
    """Yields hosted items that no served model can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutThing:
    """A file or folder that a service found but does not host, or that no served model can use."""

    service: str
    """Name of the service."""
    name: str
    """Name of the item or of its file."""
    reason: str
    """Why the item cannot be used, and what to do about that."""

    @property
    def sentence(self) -> str:
        """The service, the name and the reason as one line of text."""
        return f"{self.service} does not serve {self.name}: {self.reason}"


def left_out_of(fleet: FleetStatus) -> list[LeftOutThing]:
    """Return the items that services found but do not host, and hosted items that no served model can use."""
    things = [
        LeftOutThing(service=member.name, name=item.name, reason=item.reason)
        for member in fleet.members
        for item in member.load.left_out
    ]
    if any(member.models for member in fleet.members):  # without models nothing fits yet
        misfits = (add_on.misfits(fleet) for add_on in add_ons_by_kind().values() if add_on.misfits is not None)
        things += [thing for found in misfits for thing in found]
    return things


def refusals_of(fleet: FleetStatus) -> Iterator[tuple[FleetMember, str]]:
    """Yield each worker that has ended because it cannot serve its model, with the reason."""
    for member in fleet.refused:
        for item in member.load.left_out:
            yield member, item.reason


def add_ons_by_kind() -> dict[str, ClientAddOn]:
    """Return the descriptions of all add-ons, by the kind of their services."""
    found: list[ClientAddOn] = [
        importlib.import_module(f"{package}.sdk").ADD_ON for package in add_ons_by_command().values()
    ]
    return {add_on.kind: add_on for add_on in found}


_MAX_PAGES = 200


class PageRequest(Protocol):
    """The interface of a request for one page of a list."""

    page_size: int
    page_token: str


class Page(Protocol):
    """The interface of one page of a list."""

    @property
    def next_page_token(self) -> str: ...


StubT = TypeVar("StubT")
AnswerT = TypeVar("AnswerT")
RequestT = TypeVar("RequestT", bound=PageRequest)
PageT = TypeVar("PageT", bound=Page)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCalls(Generic[StubT]):
    """Calls to the services of one kind."""

    kind: str
    """Kind of the services in the fleet, and the value of `metadata["service"]` in their errors."""
    title: str
    """What one service is called in error messages."""
    stub: Callable[[grpc.aio.Channel], StubT]
    """Makes a stub on a channel."""
    unavailable: type[Unavailable]
    """Class of the error that is raised if no service has joined, or if one does not answer."""

    def joined(self, fleet: FleetStatus) -> Sequence[FleetMember]:
        """Return the services that have joined, in the gateway's order, draining ones last.

        Raises `unavailable` if there are none.
        """
        members = fleet.of_kind(self.kind)
        if not members:
            raise self.unavailable(f"no {self.title} has joined; bottega fleet shows who has")
        return sorted(members, key=lambda member: member.load.draining)

    async def call_owner(
        self,
        services: Sequence[FleetMember],
        call: Callable[[StubT], Awaitable[AnswerT]],
        *,
        missing: BottegaError,
    ) -> tuple[FleetMember, AnswerT]:
        """Call services in turn until one has the requested item. Return that service and its response.

        Args:
            services: The services to ask, in this order.
            call: Calls one service. It raises an error of the class of `missing` if that service lacks the item.
            missing: Raised if no service has it.

        Raises:
            Unavailable: A service that may have it does not answer.
        """
        failure = missing
        for service in services:
            try:
                async with self.open(service) as stub:
                    return service, await call(stub)
            except type(missing):
                continue
            except self.unavailable as error:
                failure = error
        raise failure

    async def call_all(
        self, services: Sequence[FleetMember], call: Callable[[StubT], Awaitable[AnswerT]]
    ) -> Sequence[AnswerT | BottegaError]:
        """Call all services at once. Return the response or the error of each; see `answered` and `present`."""

        async def one(service: FleetMember) -> AnswerT | BottegaError:
            try:
                async with self.open(service) as stub:
                    return await call(stub)
            except BottegaError as error:
                return error

        return await asyncio.gather(*map(one, services))

    @asynccontextmanager
    async def open(self, service: FleetMember) -> AsyncIterator[StubT]:
        """Open a channel to one service for the `with` block, and yield its stub. Convert errors as `errors` does."""
        target = Target(address=service.address, role=service.kind, name=service.name)
        async with service_channels().open(target) as channel:
            with self.errors(service):
                yield self.stub(channel)

    @contextmanager
    def errors(self, service: FleetMember) -> Iterator[None]:
        """Convert errors of gRPC calls in the `with` block to BottegaError."""
        try:
            yield
        except grpc.RpcError as error:
            if not was_answered(error):
                raise self.unavailable(f"{self.title} {service.name} does not answer at {service.address}") from None
            failure = from_rpc_error(error)
            failure.metadata["service"] = self.kind
            raise failure from None


def answered(answers: Sequence[AnswerT | BottegaError]) -> Sequence[AnswerT]:
    """Return the responses. Raise the first error among them."""
    for answer in answers:
        if isinstance(answer, BottegaError):
            raise answer
    return present(answers)


def present(answers: Sequence[AnswerT | BottegaError]) -> Sequence[AnswerT]:
    """Return the responses without the errors. Raise the first error if no service answered."""
    found = [answer for answer in answers if not isinstance(answer, BottegaError)]
    failed = [answer for answer in answers if isinstance(answer, BottegaError)]
    if failed and not found:
        raise failed[0]
    return found


async def all_pages(
    method: grpc.aio.UnaryUnaryMultiCallable[RequestT, PageT], request: RequestT, *, timeout_s: float, what: str
) -> AsyncIterator[PageT]:
    """Yield the pages of a list, from the first to the last. Raise InternalError if the list does not end.

    Args:
        timeout_s: Seconds that each page may take.
        what: Who lists, for the error message.
    """
    for _ in range(_MAX_PAGES):
        page = await method(request, timeout=timeout_s)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token
    raise InternalError(f"{what} lists more than {_MAX_PAGES * request.page_size} entries, or its list does not end")


class Level(StrEnum):
    """The severity of a result."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    level: Level
    what: str
    """The finding, in words."""
    todo: str = ""
    """Advice for the user; empty if nothing has to be done."""


def ok(what: str) -> CheckResult:
    """Return a result without a problem."""
    return CheckResult(Level.OK, what)


def warn(what: str, todo: str) -> CheckResult:
    """Return a result about a problem that affects only some uses."""
    return CheckResult(Level.WARN, what, todo)


def fail(what: str, todo: str) -> CheckResult:
    """Return a result about a problem that must be solved first."""
    return CheckResult(Level.FAIL, what, todo)
