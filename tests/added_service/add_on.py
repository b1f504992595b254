"""What the gateway does for jobs with colours in their prompt: has them loaded before the jobs run, and says which."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import grpc

from bottega.addons.interface.gateway_addon import AddOn, AddOnContext, FleetView, PrefetchReason
from bottega.addons.interface.views import AddOnJob, Member
from bottega.background_tasks import BackgroundTasks
from bottega.errors import QueueFull
from bottega.rpc.channel import open_channel
from bottega.v1.hosted_pb2 import HOSTED_STATE_ON_DISK
from bottega.v1.worker_pb2 import RunAttemptRequest
from tests.added_service.calls import COLOURS, SERVICE, messages
from tests.added_service.service_spec import KIND

_DEADLINE_S = 2.0
_MOST_CALLS = 8

_log = logging.getLogger(__name__)


def create(context: AddOnContext) -> ColourAddOn:
    """The add-on that the manifest names."""
    return ColourAddOn(context.fleet)


class ColourAddOn(AddOn):
    """All stores of colours of a gateway."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._calls = BackgroundTasks("prefetching colours", max_tasks=_MOST_CALLS)

    def prefetch(self, jobs: Sequence[AddOnJob], reason: PrefetchReason) -> None:
        """Has the stores load the colours that these name and that are on the disk only.

        A job that has arrived counts too, because a worker may be free for it at once.
        """
        if reason is PrefetchReason.REFUSED:
            return
        wanted = {name for job in jobs for name in _named(job)}
        for store in self._fleet.services(KIND):
            cold = [item.name for item in store.hosts(KIND).items if item.state == HOSTED_STATE_ON_DISK]
            if names := wanted.intersection(cold):
                try:
                    self._calls.start(self._call(store.registration.address, names))
                except QueueFull:
                    return  # it loads them when they are needed

    def prepare_attempt(self, job: AddOnJob, worker: Member, request: RunAttemptRequest) -> None:
        """Says which colours the prompt names."""
        if names := _named(job):
            request.addons[KIND] = messages.ColourOrder(names=names).SerializeToString()

    async def close(self) -> None:
        await self._calls.cancel()

    async def _call(self, address: str, names: Iterable[str]) -> None:
        async with open_channel(address) as channel:
            prefetch = channel.unary_unary(
                f"/{SERVICE}/Prefetch",
                request_serializer=messages.PrefetchRequest.SerializeToString,
                response_deserializer=messages.PrefetchResponse.FromString,
            )
            try:
                await prefetch(messages.PrefetchRequest(names=names), timeout=_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                _log.info("colours are not prefetched", extra={"text": error.details()})


def _named(job: AddOnJob) -> list[str]:
    return [name for name in COLOURS if name in job.bare.prompt]
