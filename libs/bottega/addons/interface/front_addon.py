"""The interface of add-ons in the front of a worker: the process that serves its RPCs and imports no torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from bottega.errors import ConfigError
from bottega.manifest import load_object, read_services
from bottega.rpc.server import Server
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import RunAttemptRequest

Ask = Callable[[bytes, float], Awaitable[bytes]]
"""Sends a query to the engine's add-on of the same kind (`EngineAddOn.answer`), waits for at most the given number of
seconds, and returns the response."""


class FrontAddOn:
    """A feature in the front of a worker. Methods that are not overridden do nothing."""

    kind: ClassVar[str]
    """Key of its data in orders and decisions; also the kind of the services that it uses."""

    def add_rpcs(self, server: Server, ask: Ask) -> None:
        """Register the feature's own RPCs at the worker's server."""

    def pin(self, spec: GenerationSpec, index: int | None, request: RunAttemptRequest, decision: bytes | None) -> None:
        """Write the attempt's decision into parameters, so that they draw the same picture again.

        Args:
            spec: Parameters of one picture, or of all pictures of the attempt.
            index: The picture's place in the attempt; None for the parameters of all pictures.
            request: The attempt's request, without its images.
            decision: The decision of the add-on in the engine; None if there is none. Empty bytes are a decision: a
                message whose fields have their default values.
        """


def load_front_addons() -> tuple[FrontAddOn, ...]:
    """Return the add-ons of the manifest's services. Raises ConfigError if it names something that is not an add-on."""
    addons = []
    for service in read_services():
        if not service.front_add_on:
            continue
        addon = load_object(service.front_add_on)()
        if not isinstance(addon, FrontAddOn) or addon.kind != service.kind:
            raise ConfigError(f"{service.front_add_on} is not a FrontAddOn of kind {service.kind}")
        addons.append(addon)
    return tuple(addons)
