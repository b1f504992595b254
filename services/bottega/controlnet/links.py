"""The links of the engine: where workers come in, and what they have open together."""

from __future__ import annotations

from collections import Counter

from bottega.controlnet.batch_executor import BatchExecutor
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.controlnet.model_registry import ModelRegistry
from bottega.controlnet.worker_link import ControlNetWorkerLink
from bottega.rpc.link_service import link_endpoints, tcp_endpoint
from bottega.transport import Connection, Limits, LinkServer, LinkServerSettings

# Taken only as messages need it: eight control images of four megapixels are 96 MiB.
_LIMITS = Limits(slots=8, slot_bytes=128 << 20)


class ControlNetLinks(LinkServer[ControlNetWorkerLink]):
    """Raises ConfigError when an address cannot be bound."""

    def __init__(self, config: ControlNetEngineConfig, *, registry: ModelRegistry, executor: BatchExecutor) -> None:
        self._registry = registry
        self._executor = executor
        super().__init__(
            link_endpoints(config.links_listen, config.links_socket),
            service="the ControlNet server",
            settings=LinkServerSettings(limits=_LIMITS),
            advertised=tcp_endpoint(config.links_advertised),
        )

    def new_handler(self, connection: Connection) -> ControlNetWorkerLink:
        """What serves one worker."""
        return ControlNetWorkerLink(
            connection, registry=self._registry, executor=self._executor, draining=lambda: self.draining
        )

    @property
    def sessions(self) -> Counter[str]:
        """Sessions of all links, by ControlNet."""
        return sum((link.sessions for link in self.open), Counter[str]())
