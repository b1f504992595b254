"""An add-on service as people meet it in `bottega fleet` and `bottega doctor`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bottega.client.addons import add_on_names
from bottega.client.types.checks import CheckResult
from bottega.v1.fleet_pb2 import ListMembersResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAddOn:
    """What the client knows of the services of one kind.

    kind: with which they join the fleet. title: of one of them. hosted_title: of several things that they host.
    check_fleet: what the doctor says of them; without it they are counted.
    """

    kind: str
    title: str
    hosted_title: str
    check_fleet: Callable[[ListMembersResponse], Iterator[CheckResult]] | None = None


def add_ons_by_kind() -> dict[str, ClientAddOn]:
    """Of all packages of add-ons."""
    found: list[ClientAddOn] = [
        importlib.import_module(f"bottega.client.addons.{name}.addon").ADD_ON for name in add_on_names()
    ]
    return {add_on.kind: add_on for add_on in found}
