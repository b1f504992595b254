"""The links of the store: where workers come in. Knows no wire."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bottega.loras.config import LinksConfig
from bottega.loras.tiers import Tiers
from bottega.loras.worker_link import WorkerLink
from bottega.rpc.address import split
from bottega.transport import Counters, Doors, Limits, Listener, ServedLinks, TcpEndpoint

# What workers say is short; what they are sent, their own limits bound.
_LIMITS = Limits(slots=8, slot_bytes=1 << 20)
_TOKEN_S = 10.0
# Workers may be other users: the socket's folder decides who finds it, and an offer's token who gets in.
_SOCKET_MODE = 0o666
# The folder that systemd makes for a unit's sockets, which other units can see.
_RUNTIME_VARIABLE = "RUNTIME_DIRECTORY"
_SERVICE = "the LoRA store"


class Links(ServedLinks[WorkerLink]):
    """See ServedLinks. counters: of all. Raises ConfigError when an address cannot be bound."""

    def __init__(self, config: LinksConfig, *, tiers: Tiers) -> None:
        self.counters = Counters()
        listener = Listener(_doors(config), limits=_LIMITS, counters=self.counters, token_s=_TOKEN_S)
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
    return Doors(tcp=tcp, unix_path=_socket(config.socket), unix_mode=_SOCKET_MODE)


def _socket(configured: str | None) -> Path | None:
    if configured is None or configured:
        return Path(configured) if configured else None
    if given := os.environ.get(_RUNTIME_VARIABLE, "").partition(":")[0]:
        return Path(given) / "links.sock"
    folder = Path(tempfile.gettempdir()) / f"bottega-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"loras-{os.getpid()}.sock"
