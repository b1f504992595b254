"""What the engine is told of links that nobody offers: as much as those who want pictures may hear."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bottega import kinds
from bottega.rpc.channel import PLAINTEXT
from bottega.v1 import error_pb2
from bottega.v1.link_pb2 import LinkResult, OpenLinkRequest, OutgoingLinkRequest
from bottega.worker.link_resolver import LinkResolver
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.waiting import eventually

NOBODY = "127.0.0.1:1"


Ask = Callable[[OutgoingLinkRequest], Awaitable[error_pb2.JobError]]


@pytest.fixture
async def refused() -> AsyncIterator[Ask]:
    """Asks for a link; what the engine is told is an error."""
    sent: list[LinkResult] = []
    broker = LinkResolver(lambda command: sent.append(command.link_result), PLAINTEXT, worker="w", names={})

    async def ask(request: OutgoingLinkRequest) -> error_pb2.JobError:
        broker.request(request)
        await eventually(lambda: bool(sent))
        assert sent[0].WhichOneof("outcome") == "error"
        return sent[0].error

    yield ask
    await broker.stop()


async def test_of_one_that_cannot_be_reached_no_address_and_no_word_of_grpc_is_told(refused: Ask) -> None:
    error = await refused(OutgoingLinkRequest(request=1, address=NOBODY))
    assert (error.code, error.message) == (14, "the call for a connection failed: UNAVAILABLE")


async def test_what_the_other_side_refuses_with_is_told_as_it_is(refused: Ask) -> None:
    other = ScriptedWorker("other", gateway="")
    await other.listen()
    request = OutgoingLinkRequest(request=1, address=other.address, open=OpenLinkRequest(kind=kinds.WORKER))
    error = await refused(request)
    assert (error.code, error.message) == (14, "a scripted worker has no peer")
    await other.die()
