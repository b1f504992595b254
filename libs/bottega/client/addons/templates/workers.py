"""The workers of a fleet, as those that record templates of edits, and how they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.client.addons.addon import ClientAddOn
from bottega.client.addons.service_calls import ServiceCalls
from bottega.errors import NoWorker
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration
from bottega.v1.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from bottega.v1.worker_pb2_grpc import WorkerServiceAsyncStub

# The engine process answers between two of its turns.
CALL_S = 20.0
WORKERS: ServiceCalls[WorkerServiceAsyncStub] = ServiceCalls(
    add_on=ClientAddOn(kind=kinds.WORKER, title="worker", hosted_title=""),
    stub=WorkerServiceStub,
    unavailable=NoWorker,
)


def workers_of(fleet: ListMembersResponse) -> Sequence[Registration]:
    """Return the workers that are ready, in the gateway's order; those whose engines start have no templates."""
    found = (member.registration for member in fleet.members if member.registration.kind == kinds.WORKER)
    return [registration for registration in found if registration.models]
