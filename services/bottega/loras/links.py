"""The links of the store: where workers come in. Knows no wire."""

from __future__ import annotations

from pathlib import Path

from bottega.caching import TieredCache
from bottega.loras.config import LinksConfig
from bottega.loras.worker_link import LoraWorkerLink
from bottega.rpc.address import split
from bottega.transport import (
    TOKEN_S,
    Endpoints,
    Limits,
    LinkCounters,
    LinkListener,
    LinkServer,
    TcpEndpoint,
    default_socket_path,
)

# What workers say is short; what they are sent, their own limits bound.
_LIMITS = Limits(slots=8, slot_bytes=1 << 20)
_SERVICE = "the LoRA store"


class LoraLinks(LinkServer[LoraWorkerLink]):
    """See LinkServer. counters: of all. Raises ConfigError when an address cannot be bound."""

    def __init__(self, config: LinksConfig, *, tiers: TieredCache) -> None:
        self.counters = LinkCounters()
        listener = LinkListener(_doors(config), limits=_LIMITS, counters=self.counters, token_s=TOKEN_S)
        super().__init__(
            listener,
            service=_SERVICE,
            serve=lambda offer, worker, on_end: LoraWorkerLink(
                listener,
                offer,
                service=_SERVICE,
                worker=worker,
                tiers=tiers,
                bytes_per_s=config.bytes_per_s,
                on_end=on_end,
            ),
            advertised=_endpoint(config.advertised) if config.advertised else None,
        )


def _endpoint(address: str) -> TcpEndpoint:
    host, port = split(address)
    return TcpEndpoint(host=host, port=port)


def _doors(config: LinksConfig) -> Endpoints:
    tcp = split(config.listen) if config.listen else None
    return Endpoints(tcp=tcp, unix_path=_socket(config.socket))


def _socket(configured: str | None) -> Path | None:
    if configured == "":
        return default_socket_path("loras")
    return Path(configured) if configured is not None else None
