"""Brings offers of links from other services to the engine, which speaks no gRPC. Tensors never come this way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import grpc

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, Forbidden, ModelMismatch, QueueFull, Unavailable
from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error, to_job_error, was_answered
from bottega.v1 import link_pb2_grpc
from bottega.v1.engine_pb2 import EngineCommand
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.image_pb2 import Model
from bottega.v1.link_pb2 import LinkResult, OpenLinkRequest, OpenLinkResponse, OutgoingLinkRequest
from bottega.worker.config import EngineConfig

_log = logging.getLogger(__name__)

# A server answers at once; the engine waits a little longer than this.
_DEADLINE_S = 4.0
# Servers of a fleet ask for a link each, once.
_MOST_AT_ONCE = 256


class LinkResolver:
    """channels: of the worker's process. worker: name that servers are told.

    names: by address, of services that are not found in the fleet.
    """

    def __init__(
        self, send: Callable[[EngineCommand], None], channels: Channels, *, worker: str, names: Mapping[str, str]
    ) -> None:
        self._send = send
        self._channels = channels
        self._known = names
        self._names: dict[str, str] = {}
        self._worker = worker
        self._tasks = BackgroundTasks("asking for links", max_tasks=_MOST_AT_ONCE)

    def note_services(self, services: Iterable[ServiceAddress]) -> None:
        """These are in the fleet now: who answers at an address of theirs must have that name."""
        self._names = {service.address: service.name for service in services}

    def request(self, request: OutgoingLinkRequest) -> None:
        """The engine needs a link; it is answered in any case."""
        try:
            self._tasks.start(self._bring(request))
        except QueueFull:
            self._answer(request.request, Unavailable("the worker asks too many servers for links at once"))

    async def stop(self) -> None:
        """Asks no more."""
        await self._tasks.cancel()

    async def _bring(self, request: OutgoingLinkRequest) -> None:
        try:
            response = await self._ask(request)
        except grpc.aio.AioRpcError as error:
            _log.info("no link was offered", extra={"address": request.address, "text": error.details()})
            self._answer(request.request, _typed(error))
        else:
            self._answer(request.request, response)

    async def _ask(self, request: OutgoingLinkRequest) -> OpenLinkResponse:
        wanted = OpenLinkRequest()
        wanted.CopyFrom(request.open)
        wanted.worker = self._worker
        name = self._names.get(request.address) or self._known.get(request.address, "")
        channel = self._channels.open(Target(address=request.address, role=request.open.kind, name=name))
        try:
            stub: link_pb2_grpc.LinkServiceAsyncStub = link_pb2_grpc.LinkServiceStub(channel)
            return await stub.OpenLink(wanted, timeout=_DEADLINE_S)
        finally:
            await channel.close()

    def _answer(self, number: int, outcome: OpenLinkResponse | BottegaError) -> None:
        result = LinkResult(request=number)
        if isinstance(outcome, BottegaError):
            result.error.CopyFrom(to_job_error(outcome))
        else:
            result.opened.CopyFrom(outcome)
        try:
            self._send(EngineCommand(link_result=result))
        except BottegaError:
            return  # the engine that asked is gone


def _typed(failure: grpc.aio.AioRpcError) -> BottegaError:
    """gRPC's own texts name hosts, and this error may reach callers of the gateway."""
    error = from_rpc_error(failure)
    return error if was_answered(failure) else type(error)(f"the call for a link failed: {failure.code().name}")


def check_peer(request: OpenLinkRequest, config: EngineConfig, *, worker: str, model: Model | None) -> None:
    """worker: the name of this one. model: that it has loaded; None while it has none.

    Raises Forbidden for a worker that is not the peer; ModelMismatch where the two have different models; Unavailable
    where this one has no peer or no model yet.
    """
    peer = request.worker
    if not config.peer or peer == worker:
        why = "names itself as its peer" if peer == worker else f"has no peer; engine.peer must name {peer}"
        raise Unavailable(f"worker {worker} {why}")
    if config.peer_name and peer != config.peer_name:
        raise Forbidden(f"worker {worker} forms a pair with {config.peer_name}, and not with {peer}")
    if model is None:
        raise Unavailable(f"worker {worker} has not loaded its model yet")
    ours = {"model_hash": model.model_hash, "dtype": model.dtype}
    theirs = {term.name: term.value for term in request.terms}
    if ours != theirs:
        raise ModelMismatch(
            f"workers {peer} and {worker} cannot be a pair: {peer} draws with {_drawn_with(theirs)}, "
            f"{worker} with {_drawn_with(ours)}; give both the same model, or take engine.peer out of their "
            "configurations",
            metadata={peer: theirs.get("model_hash", ""), worker: ours["model_hash"]},
        )


def _drawn_with(terms: Mapping[str, str]) -> str:
    return f"model {terms.get('model_hash', 'unknown')} in {terms.get('dtype', 'an unknown type')}"
