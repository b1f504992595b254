"""Real activation stores with real links, for workers' engines in the test's process: in this process, or in one that
can be killed.

`python -m tests.support.activation_hosts FOLDER WAY` is such a process: for each line of its stdin, the id of a
link, it prints an offer of one in its place, in base64; for the line "templates", the number of templates it has.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bottega.activations.server import ActivationLinks
from bottega.activations.store.settings import ActivationStoreSettings
from bottega.activations.store.store import ActivationStore
from bottega.errors import PeerDead
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.transport import Offer, ServiceOffer, offer_from_wire, offer_to_wire
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.link_pb2 import LinkOffer
from tests.support.forked_services import start_program
from tests.support.offers import OffersAtOnce

_MOST_TEMPLATES = 100
_TEMPLATES = "templates"


class Host(Protocol):
    """Offers links of a store."""

    def offer(self, link_id: str) -> Offer:
        """Raises PeerDead where it is away."""
        ...

    def templates(self) -> int:
        """Return how many templates the store has, so that it finds them from now on. Raises PeerDead."""
        ...


class StoreHost:
    """A store of this process. bytes_per_s: see LimitedLinksConfig; unix: whether workers are of its host."""

    def __init__(
        self,
        folder: Path,
        *,
        unix: bool = True,
        bytes_per_s: int = 0,
        memory_bytes: int = 64 << 20,
        template_bytes: int = 0,
    ) -> None:
        settings = ActivationStoreSettings(
            folder=folder / "state",
            disk_budget_bytes=1 << 30,
            memory_budget_bytes=memory_bytes,
            template_budget_bytes=template_bytes,
        )
        self.store = ActivationStore(settings)
        self.store.start()
        socket = str(folder / "links.sock") if unix else None
        listen = "" if unix else "127.0.0.1:0"
        config = LimitedLinksConfig(listen=listen, socket=socket, bytes_per_s=bytes_per_s)
        self.links = ActivationLinks(config, store=self.store)

    def offer(self, link_id: str) -> Offer:
        return self.links.offer("w", link_id, caller="")

    def templates(self) -> int:
        return len(self.store.templates(_MOST_TEMPLATES))

    def close(self) -> None:
        self.links.close()
        self.store.close()


class StoreProcess:
    """A store of another process."""

    def __init__(self, folder: Path, way: str = "unix") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._program = start_program("tests.support.activation_hosts", str(folder), way, service="activations")
        assert self._program.output.readline() == b"ready\n"
        self._lock = threading.Lock()

    def offer(self, link_id: str) -> Offer:
        return offer_from_wire(LinkOffer.FromString(base64.b64decode(self._ask(link_id))))

    def templates(self) -> int:
        return int(self._ask(_TEMPLATES))

    def kill(self) -> None:
        """As the system kills one that has taken too much memory."""
        self._program.kill()

    def close(self) -> None:
        """Kills it, where that was not done."""
        self._program.close()

    def _ask(self, line: str) -> bytes:
        said = b""
        with self._lock, contextlib.suppress(OSError):  # links ask in threads of their own
            self._program.stdin.write(f"{line}\n".encode())
            self._program.stdin.flush()
            said = self._program.output.readline()
        if not said:
            raise PeerDead("the store is away")
        return said


class HostOffers(OffersAtOnce):
    """Offers of stores by address; one may come in another's place."""

    def __init__(self, **hosts: Host) -> None:
        super().__init__()
        self.hosts = dict(hosts)

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        if address not in self.hosts:
            raise PeerDead(f"{address} is away")
        return ServiceOffer(offer=self.hosts[address].offer(link_id), service=address)

    def addresses(self) -> Sequence[ServiceAddress]:
        return [ServiceAddress(name=name, address=name) for name in self.hosts]


def main(folder: str, way: str) -> None:
    """Until stdin ends."""
    logging.getLogger().addHandler(logging.NullHandler())  # stderr may be the same pipe as stdout
    host = StoreHost(Path(folder), unix=way == "unix")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == _TEMPLATES:
            said = str(host.templates())
        else:
            packed = offer_to_wire(host.offer(line.strip())).SerializeToString()
            said = base64.b64encode(packed).decode()
        sys.stdout.write(said + "\n")
        sys.stdout.flush()
    host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
