"""Descriptions of the add-on services, for `bottega fleet` and `bottega doctor`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bottega.client.addons import add_ons_by_command
from bottega.client.types.checks import CheckResult
from bottega.client.types.fleet import FleetMember, FleetStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAddOn:
    """Titles and checks of one kind of add-on service, for `bottega fleet` and `bottega doctor`."""

    kind: str
    """Kind of the services in the fleet, such as "loras"."""
    title: str
    """What one service is called, such as "LoRA store"."""
    hosted_title: str
    """What the items that the services host are called, in the plural, such as "LoRAs"."""
    check_fleet: Callable[[FleetStatus], Iterator[CheckResult]] | None = None
    """Yields the findings of `bottega doctor` about the services; None if it only counts them."""
    misfits: Callable[[FleetStatus], Iterator[LeftOutThing]] | None = None
    """Yields hosted items that no served model can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutThing:
    """A file or folder that a service found but does not host, or that no served model can use."""

    service: str
    """Name of the service."""
    name: str
    """Name of the item or of its file."""
    reason: str
    """Why the item cannot be used, and what to do about that."""

    @property
    def sentence(self) -> str:
        """The service, the name and the reason as one line of text."""
        return f"{self.service} does not serve {self.name}: {self.reason}"


def left_out_of(fleet: FleetStatus) -> list[LeftOutThing]:
    """Return the items that services found but do not host, and hosted items that no served model can use."""
    things = [
        LeftOutThing(service=member.name, name=item.name, reason=item.reason)
        for member in fleet.members
        for item in member.load.left_out
    ]
    if any(member.models for member in fleet.members):  # without models nothing fits yet
        misfits = (add_on.misfits(fleet) for add_on in add_ons_by_kind().values() if add_on.misfits is not None)
        things += [thing for found in misfits for thing in found]
    return things


def refusals_of(fleet: FleetStatus) -> Iterator[tuple[FleetMember, str]]:
    """Yield each worker that has ended because it cannot serve its model, with the reason."""
    for member in fleet.refused:
        for item in member.load.left_out:
            yield member, item.reason


def add_ons_by_kind() -> dict[str, ClientAddOn]:
    """Return the descriptions of all add-ons, by the kind of their services."""
    found: list[ClientAddOn] = [
        importlib.import_module(f"{package}.sdk").ADD_ON for package in add_ons_by_command().values()
    ]
    return {add_on.kind: add_on for add_on in found}
