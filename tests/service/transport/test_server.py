"""How many links one host may have of a service, so that some are left for another one, and how all of them end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bottega.errors import BadFrame, DeadlineExceeded, Draining, LinkClosed, LinksFull
from bottega.transport import (
    DType,
    Layout,
    Link,
    TensorSpec,
    connect,
    kind_of,
    number_message,
    number_spec,
    read_number,
)
from tests.support.echo_links import EchoServer
from tests.support.transport_backends import patience
from tests.support.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EchoServer]:
    server = EchoServer(tmp_path)
    yield server
    server.close()


def link_to(server: EchoServer, *, caller: str = "10.0.0.1") -> Link:
    before = len(server.handlers)
    link = connect(server.offer("w", "", caller=caller), patience())
    wait_until(lambda: len(server.handlers) > before, "the link to be served")
    return link


def exchange(link: Link, kind: str, number: int) -> tuple[str, int]:
    message = number_message(kind, number)
    link.send(message.layout, message.buffers, patience())
    with link.recv(patience()) as incoming:
        incoming.wait_all(patience())
        return kind_of(incoming.layout), read_number(incoming.layout, [incoming.view(0)])


def test_messages_are_the_handlers_and_pings_are_answered_with_its_progress(server: EchoServer) -> None:
    with link_to(server) as link:
        assert exchange(link, "echo", 5) == ("echo", 5)
        assert exchange(link, "ping", 0) == ("pong", 7)


def test_one_host_leaves_links_for_another_one(server: EchoServer) -> None:
    with ExitStack() as links:
        for _ in range(4):
            links.enter_context(link_to(server))
        with pytest.raises(LinksFull, match="the server has links with 4 workers of your host"):
            server.offer("w", "", caller="10.0.0.1")
        links.enter_context(link_to(server, caller="10.0.0.2"))


def test_all_hosts_together_have_so_many_links_and_no_more(server: EchoServer) -> None:
    with ExitStack() as links:
        for number in range(6):
            links.enter_context(link_to(server, caller=f"10.0.0.{number}"))
        with pytest.raises(LinksFull, match="the server has links with 6 workers"):
            server.offer("w", "", caller="10.0.0.9")
    wait_until(lambda: not server.handlers, "the links to be forgotten")
    link_to(server, caller="10.0.0.9").close()


def test_a_server_that_drains_keeps_its_links_and_one_that_closes_ends_them(server: EchoServer) -> None:
    with link_to(server) as link:
        handler = server.handlers[0]
        server.drain()
        with pytest.raises(Draining):
            server.offer("w", "", caller="10.0.0.1")
        assert exchange(link, "echo", 1) == ("echo", 1)
        server.close()
        assert isinstance(handler.ended, LinkClosed)
        with pytest.raises(LinkClosed):
            link.recv(patience())


def test_a_worker_that_begins_a_message_and_stops_is_given_up(tmp_path: Path) -> None:
    server = EchoServer(tmp_path, receive_s=0.2)
    with closing(server), link_to(server) as link:
        layout = Layout.of(number_spec("echo"), TensorSpec(name="rest", dtype=DType.UINT8, shape=(8,)))
        outgoing = link.start_message(layout, patience())
        outgoing.ready(1)
        with pytest.raises(DeadlineExceeded):
            link.recv(patience())


def test_a_broken_rule_ends_one_link_and_no_other(server: EchoServer) -> None:
    with link_to(server) as good, link_to(server) as bad:
        layout = Layout.of(TensorSpec(name="echo", dtype=DType.UINT8, shape=(1,)))  # no number
        bad.send(layout, [b"1"], patience())
        with pytest.raises(BadFrame):
            bad.recv(patience())
        assert exchange(good, "echo", 2) == ("echo", 2)
