"""Approximate caches, as people meet them."""

from __future__ import annotations

from collections.abc import Iterator

from bottega import kinds
from bottega.client.addons.addon import ClientAddOn
from bottega.client.types.checks import CheckResult
from bottega.v1.fleet_pb2 import ListMembersResponse


def _check_fleet(fleet: ListMembersResponse) -> Iterator[CheckResult]:
    from bottega.client.addons.cache.checkup import check_caches  # it calls them, by this add-on's name

    return check_caches(fleet)


ADD_ON = ClientAddOn(
    kind=kinds.CACHE, title="approximate cache", hosted_title="cached models", check_fleet=_check_fleet
)
