"""Boots a gateway: `python -m bottega.gateway --config FILE`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

from bottega.gateway.config import GatewayConfig
from bottega.gateway.gateway import Gateway
from bottega.rpc.boot import ServiceHooks, boot

# Longer than any start with a usable disk. Callers that wait for the gateway meanwhile are not refused.
_ANSWERS_AFTER_S = 5.0


def main() -> int:
    """Run a gateway and return the exit status, see `boot`."""
    return boot("gateway", GatewayConfig, _lifespan, description="Bottega's gateway")


@contextlib.asynccontextmanager
async def _lifespan(config: GatewayConfig) -> AsyncIterator[ServiceHooks]:
    gateway = Gateway(config)
    yield ServiceHooks(
        server=gateway.server,
        warm_up=gateway.warm_up,
        failed=gateway.failed,
        finish=gateway.finish,
        shut_down=gateway.shut_down,
        answers_after_s=_ANSWERS_AFTER_S,
    )


if __name__ == "__main__":
    sys.exit(main())
