"""Activation stores and the templates of edits that they keep, as people meet them."""

from __future__ import annotations

from collections.abc import Iterator

from bottega import kinds
from bottega.client.addons.addon import ClientAddOn
from bottega.client.types.checks import CheckResult
from bottega.v1.fleet_pb2 import ListMembersResponse


def _check_fleet(fleet: ListMembersResponse) -> Iterator[CheckResult]:
    from bottega.client.addons.templates.checkup import check_templates  # it calls them, by this add-on's name

    return check_templates(fleet)


ADD_ON = ClientAddOn(
    kind=kinds.ACTIVATIONS, title="activation store", hosted_title="templates of edits", check_fleet=_check_fleet
)
