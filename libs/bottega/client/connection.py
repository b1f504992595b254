"""One gateway as the SDK's parts share it: where it is, how to ask it, and for how long. Knows no pictures."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from bottega.client.calls import RequestT, ResponseT, Terms, ask
from bottega.client.messages import UNSENDABLE, shown
from bottega.client.retry import Deadline, RetryPolicy
from bottega.errors import Violation
from bottega.rpc.channel import open_channel
from bottega.rules import refuse
from bottega.v1.fleet_pb2_grpc import FleetServiceStub
from bottega.v1.image_pb2_grpc import ImageServiceStub

# A call that draws nothing is answered in milliseconds; a gateway that takes longer than this hangs.
_SHORT_CALL_S = 30.0


class Connection:
    """A channel to the gateway at `address`, with its stubs. Made in a running event loop; close it.

    timeout_s: of every call that is given none. Raises InvalidRequest when that is no time to wait, or `address` none.
    """

    def __init__(self, address: str, *, timeout_s: float, retry: RetryPolicy) -> None:
        self.address = address
        self._timeout_s = Deadline.after(timeout_s).allowed_s
        self._retry = retry
        try:
            self._channel = open_channel(address)
        except (AttributeError, *UNSENDABLE):  # gRPC's own, for what is no text
            refuse([Violation(field="address", description=f"must be HOST:PORT; got {shown(address)}")])
        self.images = ImageServiceStub(self._channel)
        self.fleet = FleetServiceStub(self._channel)

    def terms(self, timeout_s: float | None) -> Terms:
        """Those of a call that may take so long; None is as long as the connection says."""
        deadline = Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        return Terms(address=self.address, deadline=deadline, retry=self._retry)

    async def ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        before_try: Callable[[RequestT], None] = lambda _: None,
    ) -> ResponseT:
        """The answer of a call that draws nothing. before_try: as in bottega.client.calls."""
        terms = self.terms(min(_SHORT_CALL_S, self._timeout_s))
        return await ask(method, request, terms, before_try=before_try)

    async def close(self) -> None:
        """Ends the channel."""
        await self._channel.close()
