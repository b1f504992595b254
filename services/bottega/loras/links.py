"""The links of the store: where workers come in."""

from __future__ import annotations

from pathlib import Path

from bottega.caching import TieredCache
from bottega.loras.config import LinksConfig
from bottega.loras.worker_link import LoraWorkerLink
from bottega.rpc.link_service import link_endpoints, tcp_endpoint
from bottega.transport import Connection, Limits, LinkServer, LinkServerSettings, default_socket_path

# What workers say is short; what they are sent, their own limits bound.
_LIMITS = Limits(slots=8, slot_bytes=1 << 20)


class LoraLinks(LinkServer[LoraWorkerLink]):
    """Raises ConfigError when an address cannot be bound."""

    def __init__(self, config: LinksConfig, *, cache: TieredCache) -> None:
        self._cache = cache
        self._bytes_per_s = config.bytes_per_s
        super().__init__(
            link_endpoints(config.listen, _socket(config.socket)),
            service="the LoRA store",
            settings=LinkServerSettings(limits=_LIMITS),
            advertised=tcp_endpoint(config.advertised),
        )

    def new_handler(self, connection: Connection) -> LoraWorkerLink:
        """What serves one worker."""
        return LoraWorkerLink(connection, cache=self._cache, bytes_per_s=self._bytes_per_s)


def _socket(configured: str | None) -> str | Path | None:
    return default_socket_path("loras") if configured == "" else configured
