"""Runs a service as a process: command line, memory, lifespan and exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bottega.config import ConfigT, load
from bottega.errors import BottegaError, ConfigError
from bottega.process import open_files
from bottega.process.memory import keep_freed_memory, trimmed_at_rest, tune_garbage_collector
from bottega.rpc import telemetry
from bottega.rpc.operation import logs
from bottega.rpc.operation.sd_notify import SystemdNotifier
from bottega.rpc.server import Step
from bottega.rpc.server_config import HttpServerConfig, ServerConfig
from bottega.state_folder import keep_files_private

_FAILED = 1
_STDIN = 0
# Bytes read at once from stdin, of which only the end matters.
_IGNORED_BYTES = 4096

_log = logging.getLogger(__name__)


class BootedServer(Protocol):
    """The interface of a server that `boot` runs: of gRPC (bottega.rpc.server.Server), or of HTTP."""

    @property
    def name(self) -> str:
        """Name of the service in messages to users."""

    @property
    def config(self) -> ServerConfig | HttpServerConfig:
        """The `server` section of the configuration."""

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of all listeners and of the metrics, by name, once started."""

    async def start(self) -> None:
        """Start to listen. Raise Unavailable if a port is in use, ConfigError if it must not be opened."""

    async def set_serving(self, serving: bool) -> None:
        """Set whether the health of the service is good."""

    async def drain(self, finish: Step | None = None) -> None:
        """End gracefully within the grace of the configuration, and call `finish` meanwhile."""

    async def stop(self) -> None:
        """End now. A second call does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHooks:
    """The server of a service, and the functions that `boot` calls to start and end the service."""

    server: BootedServer
    warm_up: Step
    """Prepares the service. Afterwards its health is SERVING. A stop signal cancels it."""
    failed: asyncio.Future[BottegaError] | None = None
    """Gets an error when the service cannot continue. The service then drains, and exits with that error."""
    finish: Step | None = None
    """Called while the server drains; see `Server.drain`. None: nothing to do."""
    shut_down: Step
    """Called last, also after an error."""
    answers_after_s: float | None = None
    """Seconds of `warm_up` after which systemd is told that the service has started, because it already answers calls.

    None: systemd is told at the end of `warm_up`.
    """


def boot(
    name: str,
    kind: type[ConfigT],
    lifespan: Callable[[ConfigT], AbstractAsyncContextManager[ServiceHooks]],
    *,
    description: str,
    kept_bytes: Callable[[ConfigT], int] = lambda _: 0,
) -> int:
    """Run the service `bottega.NAME` with its command line until SIGTERM or SIGINT, and return the exit status.

    The status is 0; 2 if the configuration cannot be used; 1 for any other BottegaError. Errors print a line on stderr.

    Args:
        kind: Class of the configuration.
        lifespan: Called before the event loop starts; the context is entered and left in the loop.
        kept_bytes: Returns how much memory to reserve at the start and to keep while idle, so that the first image is
            not
            slower. 0: freed memory is returned to the system whenever the service is idle.
    """
    arguments = _arguments(name, kind, description)
    open_files.raise_limit()  # before anything reads it; child processes inherit it
    keep_files_private()
    try:
        config = load(kind, arguments.config)
        hooks = lifespan(config)
        with telemetry.exporting(name):
            asyncio.run(_live(hooks, kept_bytes=kept_bytes(config), stop_with_stdin=arguments.stop_with_stdin))
    except BottegaError as error:
        logs.last_words(f"bottega.{name}: {error.message}")
        return error.exit_status if isinstance(error, ConfigError) else _FAILED
    return 0


def _arguments(name: str, kind: type[object], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m bottega.{name}", description=description)
    keys = f"YAML file; every key has a default, see {kind.__name__}"
    parser.add_argument("--config", type=Path, metavar="FILE", help=keys)
    parser.add_argument(
        "--stop-with-stdin",
        action="store_true",
        help="stop, as after SIGTERM, when the stdin pipe is closed",
    )
    return parser.parse_args()


async def _live(entering: AbstractAsyncContextManager[ServiceHooks], *, kept_bytes: int, stop_with_stdin: bool) -> None:
    keep_freed_memory(at_once_bytes=kept_bytes)
    tune_garbage_collector()
    async with contextlib.nullcontext() if kept_bytes else trimmed_at_rest(), entering as hooks:
        await _run(hooks, stop_with_stdin=stop_with_stdin)


async def _run(hooks: ServiceHooks, *, stop_with_stdin: bool) -> None:
    """Run the service, and tell systemd about each stage if systemd started it."""
    server = hooks.server
    logs.configure(server.name, server.config.log_level)
    open_files.warn_if_low()
    stopping = _stop_signal(stop_with_stdin)
    systemd = SystemdNotifier(os.environ)
    async with systemd.watchdog():
        try:
            await server.start()
            with systemd.ready_if_late(hooks.answers_after_s):
                is_warm = await _unless(stopping, hooks.warm_up())
            if is_warm:
                await server.set_serving(True)
                systemd.ready()
                _log.info("serving", extra=server.addresses)
                await _stopped_or_failed(stopping, hooks.failed)
            _log.info("draining")
            systemd.stopping()
            await server.drain(hooks.finish)
        finally:
            await server.stop()
            await hooks.shut_down()
    if hooks.failed and hooks.failed.done():
        raise hooks.failed.result()
    _log.info("stopped")


def _stop_signal(stop_with_stdin: bool) -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, and so does the end of stdin if `stop_with_stdin`."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    def listen() -> None:
        if not os.read(_STDIN, _IGNORED_BYTES):
            loop.remove_reader(_STDIN)
            stopping.set()

    if stop_with_stdin:
        loop.add_reader(_STDIN, listen)
    return stopping


async def _stopped_or_failed(stopping: asyncio.Event, failed: asyncio.Future[BottegaError] | None) -> None:
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        ends: list[asyncio.Future[Any]] = [waiting, *([failed] if failed else [])]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _unless(stopping: asyncio.Event, work: Awaitable[None]) -> bool:
    """Run `work`, but cancel it when the event is set. Return whether it completed."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            await tasks[0]
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
