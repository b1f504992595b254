"""`bottega doctor`: looks for what keeps the suite from running, and says what to do."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from bottega.client.cli.connection import address_option
from bottega.client.cli.state_option import state_option
from bottega.client.cli.terminal import say

if TYPE_CHECKING:
    from bottega.client.checkup.finding import Finding
    from bottega.client.suite.state import StateFolder

_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "red"}


@click.command("doctor")
@click.option("--model", default="miniature", show_default=True, help="Model to look at: miniature, or a folder.")
@state_option
@address_option
def command(*, model: str, state: StateFolder, address: str) -> None:
    """Look for what keeps the suite from running.

    Checks Python, packages, limits, disk, model and gateway; ends with status 1 when something fails.
    """
    from bottega.client.checkup.finding import Level

    levels = set()
    for finding in _findings(model, state, address):
        levels.add(finding.level)
        say(f"{click.style(f'{finding.level:<4}', fg=_COLOURS[finding.level])}  {finding.what}")
        if finding.todo:
            say(f"      {finding.todo}")
    raise SystemExit(1 if Level.FAIL in levels else 0)


def _findings(model: str, state: StateFolder, address: str) -> Iterator[Finding]:
    from bottega.client.checkup import gateway, machine
    from bottega.client.checkup.model import check_model

    yield from machine.check_python()
    yield from machine.check_packages(machine.installed_versions(), machine.pinned_versions())
    yield from machine.check_cores(len(os.sched_getaffinity(0)), os.environ.get("OMP_WAIT_POLICY", ""))
    yield from machine.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield from machine.check_disk(state.root.resolve())
    yield from check_model(model)
    yield from gateway.check_gateway(address)
