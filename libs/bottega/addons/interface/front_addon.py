"""The interface of add-ons in a worker's front: the process that serves the worker's RPCs and imports no torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from bottega.errors import ConfigError
from bottega.manifest import load_object, read_services
from bottega.rpc.server import Server
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import RunAttemptRequest

Ask = Callable[[bytes, float], Awaitable[bytes]]
"""Sends a query to the add-on of the same kind in the engine process (`EngineAddOn.answer`), and returns its response.

The second argument is the time-out in seconds."""


class FrontAddOn:
    """A feature in the front process of a worker. Methods that are not overridden do nothing."""

    kind: ClassVar[str]
    """Key of the feature in `RunAttemptRequest.addons` and in decisions; also the kind of the services that it uses."""

    def add_rpcs(self, server: Server, ask: Ask) -> None:
        """Register the feature's own RPCs at the worker's server."""

    def pin(self, spec: GenerationSpec, index: int | None, request: RunAttemptRequest, decision: bytes | None) -> None:
        """Write a decision of the engine's add-on into parameters, so that they draw the same picture again.

        Args:
            spec: Parameters to change: of one picture, or of all pictures of the attempt.
            index: The picture's place in the attempt; None for the parameters of all pictures.
            request: The attempt's request, without its images.
            decision: A serialized message; None if the add-on decided nothing. Empty bytes are a message whose fields
                have their default values.
        """


def load_front_addons() -> tuple[FrontAddOn, ...]:
    """Return the front add-ons of the manifest's services. Raise ConfigError if a named object is not a FrontAddOn."""
    addons = []
    for service in read_services():
        if not service.front_add_on:
            continue
        addon = load_object(service.front_add_on)()
        if not isinstance(addon, FrontAddOn) or addon.kind != service.kind:
            raise ConfigError(f"{service.front_add_on} is not a FrontAddOn of kind {service.kind}")
        addons.append(addon)
    return tuple(addons)
