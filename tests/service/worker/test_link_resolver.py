"""What the engine is told of links that nobody offers: as much as those who want pictures may hear."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bottega.v1 import engine_pb2, error_pb2
from bottega.v1.worker_pb2 import PeerTerms
from bottega.worker.link_resolver import LinkResolver
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.waiting import eventually

NOBODY = "127.0.0.1:1"
MODEL = PeerTerms(model_hash="ab", dtype="float32")


class Engine:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[engine_pb2.EngineLinkOffer] = []

    def send(self, command: engine_pb2.EngineCommand, size_bytes: int = 0) -> None:
        self.told.append(command.link_offer)


Ask = Callable[[engine_pb2.EngineLinkRequest], Awaitable[error_pb2.JobError]]


@pytest.fixture
async def refused() -> AsyncIterator[Ask]:
    """Asks for a link; what the engine is told is an error."""
    engine = Engine()
    broker = LinkResolver(engine, worker="w")

    async def ask(request: engine_pb2.EngineLinkRequest) -> error_pb2.JobError:
        broker.request(request)
        await eventually(lambda: bool(engine.told))
        assert engine.told[0].WhichOneof("outcome") == "error"
        return engine.told[0].error

    yield ask
    await broker.stop()


@pytest.mark.parametrize("wanted", [{}, {"lora_store": True}, {"peer": MODEL}])
async def test_of_one_that_cannot_be_reached_no_address_and_no_word_of_grpc_is_told(
    refused: Ask, wanted: dict[str, object]
) -> None:
    request = engine_pb2.EngineLinkRequest(request=1, address=NOBODY, **wanted)  # type: ignore[arg-type]
    error = await refused(request)
    assert (error.code, error.message) == (14, "the call for a link failed: UNAVAILABLE")


async def test_what_the_other_side_refuses_with_is_told_as_it_is(refused: Ask) -> None:
    other = ScriptedWorker("other", gateway="")
    await other.listen()
    error = await refused(engine_pb2.EngineLinkRequest(request=1, address=other.address, peer=MODEL))
    assert (error.code, error.message) == (14, "a scripted worker has no peer")
    await other.die()
