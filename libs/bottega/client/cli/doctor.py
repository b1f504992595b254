"""`bottega doctor`: looks for problems that keep the suite from running, and gives advice."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import click

from bottega.client.cli.options import address_option, fleet_option, gateway_choice, state_option
from bottega.client.cli.terminal import Styled, say
from bottega.client.instance import StateFolder
from bottega.client.transport.connection import default_fleet_address
from bottega.client.types.checks import CheckResult, Level

_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "red"}


@click.command("doctor")
@click.option("--model", default="miniature", show_default=True, help="Model: miniature, a folder or a single file.")
@state_option
@address_option
@fleet_option
def command(*, model: str, state: StateFolder, address: str) -> None:
    """Look for problems that keep the suite from running.

    This checks Python, packages, limits, disk, model and gateway. The exit status is 1 if a check fails.
    """
    fleet_address = gateway_choice(click.get_current_context()).fleet_address or default_fleet_address(address)
    levels = set()
    for result in _results(model, state, address, fleet_address):
        levels.add(result.level)
        say(Styled(text=f"{result.level:<4}", colour=_COLOURS[result.level]), f"  {result.what}")
        if result.todo:
            say(f"      {result.todo}")
    raise SystemExit(1 if Level.FAIL in levels else 0)


def _results(model: str, state: StateFolder, address: str, fleet_address: str) -> Iterator[CheckResult]:
    from bottega.client.checkup import gateway, machine
    from bottega.client.checkup.machine import check_model, check_own_controlnets

    yield from machine.check_python()
    yield from machine.check_packages(machine.installed_versions(), machine.pinned_versions())
    yield from machine.check_cores(len(os.sched_getaffinity(0)), os.environ.get("OMP_WAIT_POLICY", ""))
    yield from machine.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield from machine.check_disk(state.root.resolve())
    yield from machine.check_unit_disks()
    yield from check_model(model)
    yield from check_own_controlnets(model)
    yield from gateway.check_gateway(address, fleet_address)
