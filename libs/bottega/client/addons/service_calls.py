"""Calls to an add-on service of the fleet, and what all of them share: typed errors, and lists that come in pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc

from bottega.client.addons.addon import ClientAddOn
from bottega.errors import InternalError, Unavailable
from bottega.rpc.channel import open_channel
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1.fleet_pb2 import Registration

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
RequestT = TypeVar("RequestT", bound=PageRequest)
PageT = TypeVar("PageT", bound=Page)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCalls(Generic[StubT]):
    """How the services of one kind are called, and what is raised where that fails.

    add_on: its kind stands as "service" in the metadata of what they refuse. stub: makes their methods of a channel.
    unavailable: raised where one does not answer.
    """

    add_on: ClientAddOn
    stub: Callable[[grpc.aio.Channel], StubT]
    unavailable: type[Unavailable]

    @asynccontextmanager
    async def open(self, service: Registration) -> AsyncIterator[StubT]:
        """The methods of one of them, as long as the block lasts. Raises as `errors`."""
        async with open_channel(service.address) as channel:
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
