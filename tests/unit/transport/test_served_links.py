"""How many links one host may have of a service, so that some are left for another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from bottega.errors import LinksFull
from bottega.transport.server import LinkServer


class Taken:
    """A link that its worker has taken up."""

    linked = True

    def start(self) -> None:
        """It needs no thread here."""


class Offering:
    def offer(self, link_id: str | None, *, caller: str) -> object:
        """Anything: nobody connects."""
        return object()


def _links() -> LinkServer[Any]:
    def serve(offer: object, worker: str, ended: Callable[..., None]) -> Taken:
        return Taken()

    return LinkServer(cast(Any, Offering()), service="the server", serve=cast(Any, serve))


def test_one_host_leaves_links_for_another_one() -> None:
    links = _links()
    for _ in range(192):
        links.offer("w", "", caller="10.0.0.1")
    with pytest.raises(LinksFull, match="192 workers of your host are linked"):
        links.offer("w", "", caller="10.0.0.1")
    assert len(links.open) == 192
    links.offer("w", "", caller="10.0.0.2")


def test_all_hosts_together_have_so_many_links_and_no_more() -> None:
    links = _links()
    for number in range(256):
        links.offer("w", "", caller=f"10.0.0.{number % 4}")
    with pytest.raises(LinksFull, match="256 workers are linked"):
        links.offer("w", "", caller="10.0.0.9")
    assert len(links.open) == 256
