"""Asks other services for tensor connections on behalf of the engine, and checks the other worker of a pair.

The engine does not use gRPC, so the front process makes its calls. Tensors do not pass through here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import grpc

from bottega import kinds
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, Draining, Forbidden, ModelMismatch, QueueFull, Unavailable
from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error, to_job_error, was_answered
from bottega.v1 import link_pb2_grpc
from bottega.v1.engine_pb2 import EngineCommand
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.image_pb2 import Model
from bottega.v1.link_pb2 import LinkResult, OpenLinkRequest, OpenLinkResponse, OutgoingLinkRequest
from bottega.worker.config import EngineConfig

_log = logging.getLogger(__name__)

# Seconds to wait for a service, which answers at once. The engine waits a little longer.
_DEADLINE_S = 4.0
# Upper bound on simultaneous calls: one for each service of a fleet.
_MAX_CALLS = 256


class LinkResolver:
    """Asks other services for tensor connections, and passes their answers to the engine.

    Args:
        send: Sends a command to the engine.
        worker: Name of this worker, which is sent to the services.
        names: Names of services that are not in the fleet, by address.
    """

    def __init__(
        self, send: Callable[[EngineCommand], None], channels: Channels, *, worker: str, names: Mapping[str, str]
    ) -> None:
        self._send = send
        self._channels = channels
        self._known = names
        self._names: dict[str, str] = {}
        self._worker = worker
        self._tasks = BackgroundTasks("asking for connections", max_tasks=_MAX_CALLS)

    def note_services(self, services: Iterable[ServiceAddress]) -> None:
        """Update the fleet's services. The service at each address must prove its name."""
        self._names = {service.address: service.name for service in services}

    def request(self, request: OutgoingLinkRequest) -> None:
        """Ask for a connection on behalf of the engine. The engine always gets an answer: an offer or an error."""
        try:
            self._tasks.start(self._bring(request))
        except QueueFull:
            self._answer(request.request, Unavailable("the worker is asking too many services for connections at once"))

    async def stop(self) -> None:
        """Cancel all calls."""
        await self._tasks.cancel()

    async def _bring(self, request: OutgoingLinkRequest) -> None:
        try:
            response = await self._ask(request)
        except grpc.aio.AioRpcError as error:
            _log.info(
                "the service offered this worker no connection",
                extra={"address": request.address, "text": error.details()},
            )
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
            return  # the engine that needed the link is gone


def _typed(failure: grpc.aio.AioRpcError) -> BottegaError:
    """Convert a gRPC error. Omit gRPC's own text, which names hosts and might be shown to callers."""
    error = from_rpc_error(failure)
    return error if was_answered(failure) else type(error)(f"the call for a connection failed: {failure.code().name}")


def check_opener(
    request: OpenLinkRequest, config: EngineConfig, *, worker: str, model: Model | None, draining: bool
) -> None:
    """Check that another worker may connect to this one: to form a pair, or because this one has a role that it lacks.

    Args:
        worker: Name of this worker.
        model: Model of this worker; None while it is not loaded.
        draining: Whether this worker is stopping.

    Raises:
        Draining: This worker has one role, and is stopping.
        Forbidden: The caller is not the configured peer.
        ModelMismatch: The two workers have different models.
        Unavailable: This worker has no peer or no model yet.
    """
    if config.kind == kinds.WORKER:
        _check_peer(request, config, worker=worker, model=model)
    elif draining:
        raise Draining("the worker is stopping")
    else:
        _check_asker(request, config.kind, worker=worker, model=model)


def _check_peer(request: OpenLinkRequest, config: EngineConfig, *, worker: str, model: Model | None) -> None:
    peer = request.worker
    if not config.peer.address or peer == worker:
        why = (
            "is configured as its own peer" if peer == worker else f"has no peer; engine.peer.address must name {peer}"
        )
        raise Unavailable(f"worker {worker} {why}")
    if config.peer.name and peer != config.peer.name:
        raise Forbidden(f"worker {worker} forms a pair with {config.peer.name}, not with {peer}")
    if model is None:
        raise Unavailable(f"worker {worker} has not loaded its model yet")
    ours = {"model_hash": model.model_hash, "dtype": model.dtype}
    theirs = {term.name: term.value for term in request.terms}
    if ours != theirs:
        raise ModelMismatch(
            f"workers {peer} and {worker} cannot be a pair: {peer} draws with {_drawn_with(theirs)}, "
            f"{worker} with {_drawn_with(ours)}; give both the same model, or remove engine.peer.address out of their "
            "configurations",
            metadata={peer: theirs.get("model_hash", ""), worker: ours["model_hash"]},
        )


def _check_asker(request: OpenLinkRequest, role: str, *, worker: str, model: Model | None) -> None:
    if model is None:
        raise Unavailable(f"worker {worker} has not loaded its model yet")
    ours = {"model_hash": model.model_hash, "dtype": model.dtype}
    theirs = {term.name: term.value for term in request.terms}
    if ours != theirs:
        raise ModelMismatch(
            f"worker {worker} cannot {role} for {request.worker}: {request.worker} draws with {_drawn_with(theirs)}, "
            f"{worker} with {_drawn_with(ours)}; give both the same model and dtype",
            metadata={request.worker: theirs.get("model_hash", ""), worker: ours["model_hash"]},
        )


def _drawn_with(terms: Mapping[str, str]) -> str:
    return f"model {terms.get('model_hash', 'unknown')} in {terms.get('dtype', 'an unknown type')}"
