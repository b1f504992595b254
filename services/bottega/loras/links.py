"""The links of the store: where workers come in. Knows no wire."""

from __future__ import annotations

from pathlib import Path

from bottega.loras.config import LinksConfig
from bottega.loras.tiers import Tiers
from bottega.loras.worker_link import WorkerLink
from bottega.rpc.address import split
from bottega.transport import TOKEN_S, Counters, Doors, Limits, Listener, ServedLinks, TcpEndpoint, own_socket

# What workers say is short; what they are sent, their own limits bound.
_LIMITS = Limits(slots=8, slot_bytes=1 << 20)
_SERVICE = "the LoRA store"


class Links(ServedLinks[WorkerLink]):
    """See ServedLinks. counters: of all. Raises ConfigError when an address cannot be bound."""

    def __init__(self, config: LinksConfig, *, tiers: Tiers) -> None:
        self.counters = Counters()
        listener = Listener(_doors(config), limits=_LIMITS, counters=self.counters, token_s=TOKEN_S)
        super().__init__(
            listener,
            service=_SERVICE,
            serve=lambda offer, worker, on_end: WorkerLink(
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


def _doors(config: LinksConfig) -> Doors:
    tcp = split(config.listen) if config.listen else None
    return Doors(tcp=tcp, unix_path=_socket(config.socket))


def _socket(configured: str | None) -> Path | None:
    if configured == "":
        return own_socket("loras")
    return Path(configured) if configured is not None else None
