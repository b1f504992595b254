"""A ControlNet server's engine in this process, and offers of links to it: for tests of both ends of a link.

Nothing of it is faked but the gRPC that carries offers; links go by shared memory or TCP as between processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from bottega.addons.controlnets.engine.provider import ControlHosts, ControlServer
from bottega.controlnet.batch_executor import BatchExecutor
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.controlnet.model_registry import ModelRegistry
from bottega.controlnet.worker_link import ControlNetLinks
from bottega.errors import Unavailable
from bottega.rpc.server_config import DeviceLinksConfig
from bottega.transport import Offer, ServiceOffer
from tests.support.offers import OffersAtOnce


class LinkedServer:
    """Hosts these folders. computes: whether it does; else steps wait. beats: signs of life from inside forwards.

    block_s: that every block of a network takes longer.
    """

    def __init__(
        self,
        name: str,
        folders: Mapping[str, Path],
        folder: Path,
        *,
        budget_bytes: int = 1 << 30,
        max_rows: int = 16,
        memfd: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.server = ControlServer(name=name, address=name)
        socket = str(folder / f"{name}.sock") if memfd else None
        config = ControlNetEngineConfig(
            budget_bytes=budget_bytes, max_rows=max_rows, links=DeviceLinksConfig(socket=socket)
        )
        self.beats = 0
        self.block_s = 0.0
        self.registry = ModelRegistry(
            budget_bytes=budget_bytes,
            device=torch.device("cpu"),
            dtype=dtype,
            alive=self._beat,
        )
        self.executor = BatchExecutor(max_rows=max_rows)
        self.links = ControlNetLinks(config, registry=self.registry, executor=self.executor)
        self.digests = {each: self.registry.add(each, path).digest for each, path in folders.items()}
        self.computes = threading.Event()
        self.computes.set()
        self._paused = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def at(self, net: str) -> ControlHosts:
        """Where an order finds a ControlNet."""
        return ControlHosts(digest=self.digests[net], servers=(self.server,))

    def offer(self, link_id: str) -> Offer:
        """As the server's front hands it on."""
        return self.links.offer("tester", link_id, caller="")

    def pause(self) -> None:
        """Steps that come from now on wait, until `computes` is set."""
        self.computes.clear()
        assert self._paused.wait(10), "a forward does not end"

    def close(self) -> None:
        """Takes no links and computes nothing any more."""
        self._stopped.set()
        self.computes.set()
        self._thread.join(10)
        self.links.close()
        self.registry.cache.close()

    def _beat(self) -> None:
        time.sleep(self.block_s)
        self.beats += 1
        self.executor.report_progress()

    def _compute(self) -> None:
        while not self._stopped.is_set():
            if not self.computes.is_set():
                self._paused.set()
            self.computes.wait()
            self._paused.clear()
            self.executor.run_batch(0.02)


class Offers(OffersAtOnce):
    """Of these servers, by address."""

    def __init__(self, *servers: LinkedServer) -> None:
        super().__init__()
        self._servers = {server.server.address: server for server in servers}

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        if address not in self._servers:
            raise Unavailable(f"nothing listens at {address}")
        return ServiceOffer(offer=self._servers[address].offer(link_id), service=address)


@contextmanager
def linked_server(
    name: str, folders: Mapping[str, Path], folder: Path, **options: int | bool | torch.dtype
) -> Iterator[LinkedServer]:
    """One that is closed at the end."""
    server = LinkedServer(name, folders, folder, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()
