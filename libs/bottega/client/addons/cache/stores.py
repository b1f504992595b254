"""The approximate caches of a fleet, and how they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.client.addons.cache.addon import ADD_ON
from bottega.client.addons.service_calls import ServiceCalls
from bottega.errors import NoCache
from bottega.v1.cache_pb2_grpc import CacheServiceStub
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration

if TYPE_CHECKING:
    from bottega.v1.cache_pb2_grpc import CacheServiceAsyncStub

# A cache works its records off one after the other, and says so itself after 30 s.
CALL_S = 40.0
CACHES: ServiceCalls[CacheServiceAsyncStub] = ServiceCalls(add_on=ADD_ON, stub=CacheServiceStub, unavailable=NoCache)


def cache_services(fleet: ListMembersResponse) -> Sequence[Registration]:
    """In the gateway's order, those that drain last. Raises NoCache where there is none."""
    members = [member for member in fleet.members if member.registration.kind == kinds.CACHE]
    if not members:
        raise NoCache("no approximate cache has joined; bottega fleet shows who has")
    return [member.registration for member in sorted(members, key=lambda member: member.load.draining)]
