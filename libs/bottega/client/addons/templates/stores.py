"""The activation stores of a fleet, and how they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.client.addons.service_calls import ServiceCalls
from bottega.client.addons.templates.addon import ADD_ON
from bottega.errors import NoActivationStore
from bottega.v1.activations_pb2_grpc import ActivationServiceStub
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration

if TYPE_CHECKING:
    from bottega.v1.activations_pb2_grpc import ActivationServiceAsyncStub

# Records are worked off one after the other; deleting the files of many templates takes a while.
CALL_S = 40.0
MOST_LISTED = 1000
"""Templates that a store lists at once."""

STORES: ServiceCalls[ActivationServiceAsyncStub] = ServiceCalls(
    add_on=ADD_ON, stub=ActivationServiceStub, unavailable=NoActivationStore
)


def stores_of(fleet: ListMembersResponse) -> Sequence[Registration]:
    """In the gateway's order; none where none has joined."""
    return [member.registration for member in fleet.members if member.registration.kind == kinds.ACTIVATIONS]
