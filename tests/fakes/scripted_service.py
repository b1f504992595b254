"""A service that says each turn of its life on stdout and fails where its configuration says: for tests of its boot.

`python -m tests.fakes.scripted_service --config FILE`. Started with KEPT_MIB it keeps so much memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict

from bottega.errors import BottegaError, ConfigError, Unavailable
from bottega.process import memory
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.strict import STRICT

KEPT_VARIABLE = "KEPT_MIB"
FREED_MIB = 96
# Of a service that looks every _LOOK_S whether it is at rest.
_LOOK_S = 0.2
_REST_S = 1.5
_ERRORS = {"ConfigError": ConfigError, "Unavailable": Unavailable, "RuntimeError": RuntimeError}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedConfig:
    """fails_at: the turn that raises this error; "served" is when it serves. frees: whether it frees much memory and
    rests before it serves."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    server: ServerConfig = field(default_factory=ServerConfig)
    fails_at: Literal["", "made", "entered", "warm", "served", "finished"] = ""
    error: Literal["ConfigError", "Unavailable", "RuntimeError"] = "Unavailable"
    frees: bool = False


class Script:
    """What a turn does."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config

    def turn(self, name: str) -> None:
        if name == self._config.fails_at:
            raise _ERRORS[self._config.error](f"{name} it cannot be")
        print(name, flush=True)

    async def warm_up(self) -> None:
        if self._config.frees:
            print(_resident_mib(), end=" ")
            pieces = [b"1" * 2**20 for _ in range(FREED_MIB)]
            del pieces
            await asyncio.sleep(_REST_S)
            print(_resident_mib(), gc.get_threshold()[0], gc.get_freeze_count())
        self.turn("warm")

    def failed(self) -> asyncio.Future[BottegaError]:
        """Has a result at once where it fails as soon as it serves."""
        failed: asyncio.Future[BottegaError] = asyncio.get_running_loop().create_future()
        if self._config.fails_at == "served":
            failed.set_result(Unavailable("served it cannot be"))
        return failed

    async def finish(self) -> None:
        self.turn("finished")

    async def shut_down(self) -> None:
        self.turn("shut down")


def _resident_mib() -> int:
    return memory.resident_bytes([os.getpid()]) >> 20


def lifespan_of(config: ScriptedConfig) -> AbstractAsyncContextManager[ServiceHooks]:
    script = Script(config)
    script.turn("made")
    return lifespan(config, script)


@contextlib.asynccontextmanager
async def lifespan(config: ScriptedConfig, script: Script) -> AsyncIterator[ServiceHooks]:
    script.turn("entered")
    try:
        server = Server("scripted", config.server)
        yield ServiceHooks(
            server=server,
            warm_up=script.warm_up,
            failed=script.failed(),
            finish=script.finish,
            shut_down=script.shut_down,
        )
    finally:
        script.turn("left")


def main() -> int:
    kept_bytes = int(os.environ.get(KEPT_VARIABLE, "0")) << 20
    return boot(
        "scripted",
        ScriptedConfig,
        lifespan_of,
        description="A service that is scripted",
        kept_bytes=lambda _: kept_bytes,
    )


if __name__ == "__main__":
    memory._REST_S = _LOOK_S
    sys.exit(main())
