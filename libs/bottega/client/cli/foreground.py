"""A suite in the foreground: handles signals and prints what happens."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime

from bottega.client.addons.addon import LeftOutThing, left_out_of
from bottega.client.cli.terminal import Styled, note, say
from bottega.client.instance import StateFolder
from bottega.client.suite.plan import SuitePlan
from bottega.client.suite.service_log import ServiceLog
from bottega.client.suite.supervisor import Supervisor
from bottega.client.transport.address import DEFAULT_PORT
from bottega.state_folder import state_folder
from bottega.v1.fleet_pb2 import ListMembersResponse

FIRST_PROMPT = "a big red star on the left on a blue background"
"""What a newcomer may ask the embedded model for."""


def run_suite(plan: SuitePlan, state: StateFolder, *, in_background: bool) -> None:
    """Runs until SIGINT, SIGTERM or SIGHUP; a second one does not wait. Raises DoesNotStart."""
    with closing(ServiceLog(state.logs, "suite")) as log:
        address, fleet_address = plan.settings.address, plan.settings.fleet_address
        listener = TerminalListener(log, quiet=in_background)

        def on_ready(fleet: ListMembersResponse, seconds: float) -> None:
            for thing in left_out_of(fleet):
                listener.left_out(thing)
            say_ready(address, fleet_address, seconds, state)

        asyncio.run(_run(Supervisor(plan, state, listener), on_ready))


class TerminalListener:
    """A ServiceListener: a line each on the terminal, and in suite.log.

    quiet: only in suite.log, which is bounded, as what a background instance prints is not.
    """

    def __init__(self, log: ServiceLog, *, quiet: bool) -> None:
        self._log = log
        self._quiet = quiet

    def starting(self, name: str, progress: str) -> None:
        self._write("INFO", f"{name} starts", progress=progress)
        if not self._quiet:
            say(f"  {name:<12} {progress}")

    def serving(self, name: str, address: str) -> None:
        self._write("INFO", f"{name} serves", address=address)
        if not self._quiet:
            say(f"  {name:<12} serves at {address}")

    def died(self, name: str, how: str, wait_s: float) -> None:
        self._write("WARNING", f"{name} {how}", wait_s=wait_s)
        if not self._quiet:
            note(f"  {name:<12} {how}; starting it again in {wait_s:g} s (bottega logs {name} says why)")

    def left_out(self, thing: LeftOutThing) -> None:
        """Warn of something that lies where a service looks for what it hosts, and that no request can use."""
        self._write("WARNING", thing.sentence)
        if not self._quiet:
            note_left_out(thing)

    def _write(self, level: str, event: str, **facts: object) -> None:
        # As the services' own lines look, so that bottega logs can merge them.
        moment = f"{datetime.now():%Y-%m-%d %H:%M:%S,%f}"[:-3]  # noqa: DTZ005 - theirs is local time, too
        self._log.write(json.dumps({"time": moment, "level": level, "service": "suite", "event": event, **facts}))


def note_left_out(thing: LeftOutThing) -> None:
    """Warn of it on the terminal."""
    note(Styled(text="warning:", colour="yellow", bold=True), f" {thing.sentence}")


def say_ready(address: str, fleet_address: str, seconds: float, state: StateFolder) -> None:
    """The moment to draw something."""
    found = state.root == state_folder() or address == f"127.0.0.1:{DEFAULT_PORT}"
    say(f"Ready after {seconds:.1f} s. Draw something:")
    say(f'  {"" if found else f"BOTTEGA_ADDRESS={address} "}bottega generate "{FIRST_PROMPT}" -o star.png')
    if not found:
        say(f"Commands that ask for its services, such as bottega fleet, need BOTTEGA_FLEET={fleet_address} as well.")


async def _run(supervisor: Supervisor, on_ready: Callable[[ListMembersResponse, float], None]) -> None:
    stop = asyncio.Event()
    began_s = time.monotonic()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _on_signal(stop, supervisor))
    await supervisor.run(stop, lambda fleet: on_ready(fleet, time.monotonic() - began_s))


def _on_signal(stop: asyncio.Event, supervisor: Supervisor) -> Callable[[], None]:
    def stop_or_kill() -> None:
        if stop.is_set():
            supervisor.kill_all()
            return
        say()
        say("Stopping; Ctrl-C once more does not wait for what runs.")
        stop.set()

    return stop_or_kill
