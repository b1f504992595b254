"""The links of the engine: where workers come in, and what they have open together. Knows no wire."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bottega.controlnet.batch_executor import BatchExecutor
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.controlnet.model_registry import ModelRegistry
from bottega.controlnet.worker_link import ControlNetWorkerLink
from bottega.rpc.address import split
from bottega.transport import TOKEN_S, Endpoints, Limits, LinkCounters, LinkListener, LinkServer, TcpEndpoint

# Taken only as messages need it: eight control images of four megapixels are 96 MiB.
_LIMITS = Limits(slots=8, slot_bytes=128 << 20)


class ControlNetLinks(LinkServer[ControlNetWorkerLink]):
    """See LinkServer. counters: of all. Raises ConfigError when an address cannot be bound."""

    def __init__(self, config: ControlNetEngineConfig, *, hosts: ModelRegistry, forwards: BatchExecutor) -> None:
        self.counters = LinkCounters()
        listener = LinkListener(_doors(config), limits=_LIMITS, counters=self.counters, token_s=TOKEN_S)
        super().__init__(
            listener,
            service="the ControlNet server",
            serve=lambda offer, worker, on_end: ControlNetWorkerLink(
                listener,
                offer,
                worker=worker,
                hosts=hosts,
                forwards=forwards,
                draining=lambda: self.draining,
                on_end=on_end,
            ),
            advertised=_endpoint(config.links_advertised) if config.links_advertised else None,
        )

    @property
    def sessions(self) -> Counter[str]:
        """Sessions of all links, by ControlNet."""
        return sum((link.sessions for link in self.open), Counter[str]())


def _endpoint(address: str) -> TcpEndpoint:
    host, port = split(address)
    return TcpEndpoint(host=host, port=port)


def _doors(config: ControlNetEngineConfig) -> Endpoints:
    tcp = split(config.links_listen) if config.links_listen else None
    unix_path = Path(config.links_socket) if config.links_socket else None
    return Endpoints(tcp=tcp, unix_path=unix_path)
