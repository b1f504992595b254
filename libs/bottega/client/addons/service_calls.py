"""Calls to the add-on services of a fleet: who they are, which of them has something, errors, lists in pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc

from bottega.client.addons.addon import ClientAddOn
from bottega.client.transport.connection import service_channels
from bottega.errors import BottegaError, InternalError, Unavailable
from bottega.rpc.channel import Target
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration

_MAX_PAGES = 200


class PageRequest(Protocol):
    """Asks for some of what there is."""

    page_size: int
    page_token: str


class Page(Protocol):
    """Some of what there is."""

    @property
    def next_page_token(self) -> str: ...


StubT = TypeVar("StubT")
AnswerT = TypeVar("AnswerT")
RequestT = TypeVar("RequestT", bound=PageRequest)
PageT = TypeVar("PageT", bound=Page)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCalls(Generic[StubT]):
    """How the services of one kind are called, and what is raised where that fails.

    add_on: its kind stands as "service" in the metadata of what they refuse. stub: makes their methods of a channel.
    unavailable: raised where one does not answer, or none is there.
    """

    add_on: ClientAddOn
    stub: Callable[[grpc.aio.Channel], StubT]
    unavailable: type[Unavailable]

    def joined(self, fleet: ListMembersResponse) -> Sequence[Registration]:
        """Those that have joined, in the gateway's order, those that drain last. Raises `unavailable` without any."""
        members = [member for member in fleet.members if member.registration.kind == self.add_on.kind]
        if not members:
            raise self.unavailable(f"no {self.add_on.title} has joined; bottega fleet shows who has")
        return [member.registration for member in sorted(members, key=lambda member: member.load.draining)]

    async def call_owner(
        self,
        services: Sequence[Registration],
        call: Callable[[StubT], Awaitable[AnswerT]],
        *,
        missing: BottegaError,
    ) -> tuple[Registration, AnswerT]:
        """The first service that has what `call` asks for, and its answer.

        missing: raised where none has it; each says so with an error of this class. Raises `unavailable` where one that
        may have it does not answer.
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

    @asynccontextmanager
    async def open(self, service: Registration) -> AsyncIterator[StubT]:
        """The methods of one of them, as long as the block lasts. Raises as `errors`."""
        target = Target(address=service.address, role=service.kind, name=service.name)
        async with service_channels().open(target) as channel:
            with self.errors(service):
                yield self.stub(channel)

    @contextmanager
    def errors(self, service: Registration) -> Iterator[None]:
        """Raises what goes wrong with calls in the block as a BottegaError."""
        try:
            yield
        except grpc.RpcError as error:
            if not was_answered(error):
                raise self.unavailable(
                    f"{self.add_on.title} {service.name} does not answer at {service.address}"
                ) from None
            failure = from_rpc_error(error)
            failure.metadata["service"] = self.add_on.kind
            raise failure from None


async def all_pages(
    method: grpc.aio.UnaryUnaryMultiCallable[RequestT, PageT], request: RequestT, *, timeout_s: float, what: str
) -> AsyncIterator[PageT]:
    """The pages of a list, from the first to the last, each within its own time-out.

    Raises InternalError for a list that does not end. what: whose it is, for that.
    """
    for _ in range(_MAX_PAGES):
        page = await method(request, timeout=timeout_s)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token
    raise InternalError(f"{what} lists more than {_MAX_PAGES * request.page_size} entries, or does not come to an end")
