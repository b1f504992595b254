"""Who asks for links: opened while they are wanted, opened again when they are lost, and closed for good."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import BottegaError, EngineStarting, LinkClosed, PeerDead, TooLarge, Unavailable
from bottega.transport import (
    BytesMessage,
    Connection,
    DType,
    Incoming,
    Layout,
    Limits,
    LinkClient,
    LinkClientHandler,
    LinkClientSettings,
    LinkCounters,
    ServiceOffer,
    TensorSpec,
    number_message,
    read_number,
)
from tests.support.echo_links import EchoServer
from tests.support.offers import OffersAtOnce
from tests.support.waiting import wait_until

RETRY_S = 0.1


class Worker(OffersAtOnce, LinkClientHandler):
    """A worker's end. away: why the service makes no offers."""

    def __init__(self, server: EchoServer) -> None:
        super().__init__()
        self.wanted = False
        self.away: BottegaError | None = None
        self.epochs: list[int] = []
        self.heard: list[int] = []
        self.ended: list[BottegaError] = []
        self._server = server
        settings = LinkClientSettings(silence_s=2.0, limits=Limits(), retry_s=RETRY_S)
        self.client = LinkClient(
            self,
            peer="the server",
            request=lambda link_id: self.request("echo", "", link_id),
            settings=settings,
            counters=LinkCounters(),
        )
        self.client.start()

    @property
    def wants_link(self) -> bool:
        return self.wanted

    def want(self) -> None:
        self.wanted = True
        self.client.wake()

    def on_open(self, connection: Connection) -> None:
        assert connection.link is not None
        self.epochs.append(connection.link.epoch)
        connection.send(number_message("echo", len(self.epochs)))

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        with incoming:
            self.heard.append(read_number(incoming.layout, connection.wait_all(incoming)))

    def on_end(self, cause: BottegaError) -> None:
        self.ended.append(cause)

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        if self.away is not None:
            raise self.away
        return ServiceOffer(offer=self._server.offer("w", link_id, caller=""), service="echo")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EchoServer]:
    server = EchoServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def worker(server: EchoServer) -> Iterator[Worker]:
    worker = Worker(server)
    yield worker
    worker.client.close()


@pytest.fixture
def linked(worker: Worker) -> Worker:
    worker.want()
    wait_until(lambda: worker.heard == [1], "an echo")
    return worker


def test_no_link_is_asked_for_until_one_is_wanted(worker: Worker) -> None:
    time.sleep(2 * RETRY_S)
    assert not worker.asked
    worker.want()
    wait_until(lambda: worker.heard == [1], "an echo")
    assert worker.client.service == "echo"


def test_a_link_that_is_lost_is_opened_again_with_the_next_epoch(server: EchoServer, linked: Worker) -> None:
    linked.client.connection.close(PeerDead("cut off"))
    wait_until(lambda: linked.heard == [1, 2], "an echo of the next link")
    assert linked.epochs == [1, 2]
    assert linked.asked == [("", ""), ("", linked.client.link_id)]
    assert [error.message for error in linked.ended] == ["cut off"]
    wait_until(lambda: len(server.handlers) == 1, "the lost one to be forgotten")


def test_one_that_is_not_wanted_any_more_is_not_opened_again(linked: Worker) -> None:
    linked.wanted = False
    linked.client.connection.close(PeerDead("cut off"))
    wait_until(lambda: bool(linked.ended), "the link to end")
    time.sleep(3 * RETRY_S)
    assert linked.epochs == [1]


def test_a_service_that_is_away_is_asked_again_until_it_is_there(worker: Worker) -> None:
    worker.away = Unavailable("the service is away")
    worker.want()
    wait_until(lambda: len(worker.ended) >= 2, "a second attempt")
    worker.away = None
    wait_until(lambda: worker.heard == [1], "an echo")
    assert {error.message for error in worker.ended} == {"the service is away"}


def test_a_service_whose_engine_starts_is_waited_for_longer_than_one_that_is_away(worker: Worker) -> None:
    """Else what waits for the link would be told that it is lost, and would go elsewhere."""
    worker.client._settings = replace(worker.client._settings, connect_s=0.2, start_s=30.0)
    worker.away = EngineStarting("the service is starting its engine", retry_after_s=0.05)
    began = time.monotonic()
    worker.want()
    wait_until(lambda: len(worker.asked) >= 3 and time.monotonic() - began > 0.5, "further tries")
    worker.away = None
    wait_until(lambda: worker.heard == [1], "an echo")
    assert not worker.ended


def test_a_client_that_is_closed_while_an_engine_starts_asks_no_more(worker: Worker) -> None:
    worker.away = EngineStarting("the service is starting its engine", retry_after_s=0.05)
    worker.want()
    wait_until(lambda: len(worker.asked) >= 2, "a second try")
    worker.client.close()
    wait_until(lambda: bool(worker.ended), "the client to end")
    asked = len(worker.asked)
    time.sleep(3 * RETRY_S)
    assert len(worker.asked) == asked


def test_a_message_that_cannot_be_sent_is_told_and_the_link_lives(linked: Worker) -> None:
    size = Limits().slot_bytes + 64
    layout = Layout.of(TensorSpec(name="large", dtype=DType.UINT8, shape=(size,)))
    failures: list[BottegaError] = []
    connection = linked.client.connection
    connection.send(BytesMessage(layout=layout, buffers=(bytes(size),)), on_failure=failures.append)
    connection.send(number_message("echo", 9))
    wait_until(lambda: linked.heard == [1, 9], "an echo behind it")
    assert [type(error) for error in failures] == [TooLarge]


def test_a_client_that_is_closed_ends_its_link_and_opens_none(server: EchoServer, linked: Worker) -> None:
    handler = server.handlers[0]
    linked.client.close()
    linked.client.join()
    wait_until(lambda: isinstance(handler.ended, LinkClosed), "the service to hear of it")
    time.sleep(2 * RETRY_S)
    assert len(linked.asked) == 1
    assert not linked.client.connection.send(number_message("echo", 3))
