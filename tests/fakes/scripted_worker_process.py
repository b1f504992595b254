"""A scripted worker as a process: `python -m tests.fakes.scripted_worker_process --config FILE`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict

from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.server import Server
from bottega.rpc.server_config import MemberConfig, ServerConfig
from bottega.strict import STRICT
from tests.fakes.scripted_worker import ScriptedWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedConfig(MemberConfig):
    """What a scripted worker is told."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    start_s: float = 0.0
    """Seconds before it joins."""
    step_s: float = 0.05
    """Seconds of each step, whatever else runs."""
    server: ServerConfig = field(default_factory=ServerConfig)


@contextlib.asynccontextmanager
async def _lifespan(config: ScriptedConfig) -> AsyncIterator[ServiceHooks]:
    worker = ScriptedWorker(config.name, config.gateway, step_s={1: config.step_s, 2: 2 * config.step_s})
    worker.script.pace_s, worker.start_s = config.step_s, config.start_s
    server = Server("scripted", config.server)

    async def warm_up() -> None:
        await asyncio.sleep(config.start_s)
        await worker.start(join_timeout_s=60)

    async def finish() -> None:
        worker.draining = True
        assert worker.membership is not None
        worker.membership.report_soon()
        while worker._running:  # noqa: ASYNC110 - a scripted attempt has no event for its end
            await asyncio.sleep(0.02)

    yield ServiceHooks(server=server, warm_up=warm_up, finish=finish, shut_down=worker.die)


def main(arguments: Any = None) -> int:
    """Run the worker and return the exit status."""
    del arguments
    return boot("scripted", ScriptedConfig, _lifespan, description="A scripted worker")


if __name__ == "__main__":
    sys.exit(main())
