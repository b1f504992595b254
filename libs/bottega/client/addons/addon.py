"""An add-on service as people meet it in `bottega fleet` and `bottega doctor`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bottega.client.addons import add_on_names
from bottega.client.types.checks import CheckResult
from bottega.v1.fleet_pb2 import ListMembersResponse, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAddOn:
    """What the client knows of the services of one kind."""

    kind: str
    """The kind with which they join the fleet."""
    title: str
    """The title of one service."""
    hosted_title: str
    """The title of several things that they host."""
    check_fleet: Callable[[ListMembersResponse], Iterator[CheckResult]] | None = None
    """Yields what the doctor says of them; without it they are counted."""
    misfits: Callable[[ListMembersResponse], Iterator[LeftOutThing]] | None = None
    """Yields what they host and no model that is served can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutThing:
    """Something that no request can use, though it lies where a service looks for what it hosts."""

    service: str
    """Name of the service."""
    name: str
    """Its name, or that of its file."""
    reason: str
    """Why, and what to do."""

    @property
    def sentence(self) -> str:
        """Return what to tell a person."""
        return f"{self.service} leaves out {self.name}: {self.reason}"


def left_out_of(fleet: ListMembersResponse) -> list[LeftOutThing]:
    """Return what the services of a fleet do not host, and what they host that fits no model that is served."""
    things = [
        LeftOutThing(service=member.registration.name, name=item.name, reason=item.reason)
        for member in fleet.members
        for item in member.load.left_out
    ]
    if any(member.registration.models for member in fleet.members):  # else nothing fits, for now
        misfits = (add_on.misfits(fleet) for add_on in add_ons_by_kind().values() if add_on.misfits is not None)
        things += [thing for found in misfits for thing in found]
    return things


def refusals_of(fleet: ListMembersResponse) -> Iterator[tuple[Member, str]]:
    """Yield each worker that ended because it cannot serve its model, with the reason."""
    for member in fleet.refused:
        for item in member.load.left_out:
            yield member, item.reason


def add_ons_by_kind() -> dict[str, ClientAddOn]:
    """Of all packages of add-ons."""
    found: list[ClientAddOn] = [
        importlib.import_module(f"bottega.client.addons.{name}.addon").ADD_ON for name in add_on_names()
    ]
    return {add_on.kind: add_on for add_on in found}
