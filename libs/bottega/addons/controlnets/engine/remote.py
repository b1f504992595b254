"""The ControlNets of a job of another worker: the message that names them, and sessions of this engine with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, TypeAdapter
from torch import Tensor

from bottega.addons.controlnets.engine.provider import (
    ControlHosts,
    ControlInput,
    ControlModes,
    ControlNetProvider,
    ControlServer,
    ImageScales,
    LatentScaling,
    check_images,
    check_pixels_or_latent,
    shared_images,
)
from bottega.engine.addon import JobAddOn
from bottega.engine.parallel.remote_rows import OffloadedPart
from bottega.fair_order import Share
from bottega.model.rows import Embeds, Half, Row

# Servers in a message, best first. A follower that finds none of them refuses, and the leader computes the rows itself.
_MAX_SERVERS = 8
_MAX_CONTROLS = 8
MAX_SESSIONS = 31
"""Maximum number of sessions of a job whose rows another worker may compute; `JobAddOn.active_in` has one bit each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Control:
    """A ControlNet of a job in the message to a second worker, without image and conditions. See ControlInput.

    It has no field for stale residuals, because a second worker always waits for the residuals of its own step.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    height: Annotated[int, Field(ge=1, le=1 << 14)]
    width: Annotated[int, Field(ge=1, le=1 << 14)]
    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    scale: Annotated[float, Field(allow_inf_nan=False)]
    guess_mode: bool
    digest: Annotated[str, Field(max_length=128)]
    servers: Annotated[tuple[tuple[str, str], ...], Field(max_length=_MAX_SERVERS)]
    tenant: Annotated[str, Field(max_length=200)]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    images: Annotated[int, Field(ge=1, le=_MAX_CONTROLS)] = 1
    images_of: Annotated[int, Field(ge=0, lt=MAX_SESSIONS)] | None = None
    """Index of the control in the message whose images this one uses; None if it has its own."""
    modes: ControlModes = ()
    image_scales: ImageScales = ()
    latent_scaling: LatentScaling = None

    def __post_init__(self) -> None:
        check_images(self.images, self.modes, self.image_scales)


_CONTROLS = TypeAdapter(Annotated[tuple[_Control, ...], Field(min_length=1, max_length=MAX_SESSIONS)])


class RemoteControls(JobAddOn):
    """The sessions of this engine with the ControlNets of a job of another worker."""

    def __init__(self, provider: ControlNetProvider, controls: Sequence[ControlInput]) -> None:
        self._provider = provider
        self._handles = provider.open(controls)

    def ready(self, now_s: float) -> bool:
        return self._provider.opened(self._handles)

    def activate(self, row: Row, active: int) -> Row:
        if active >> len(self._handles):
            raise ValueError("a row has a ControlNet that its job does not have")
        return replace(row, controls=tuple(handle for place, handle in enumerate(self._handles) if active >> place & 1))

    def close(self) -> None:
        self._provider.close(self._handles)


def controls_part(controls: Sequence[ControlInput]) -> OffloadedPart:
    """Return the message about these controls for a second worker."""
    images_of = shared_images(controls)
    messages = tuple(
        _Control(
            name=control.name,
            height=control.height,
            width=control.width,
            halves=tuple(control.halves),
            scale=control.scale,
            guess_mode=control.guess_mode,
            digest=control.hosts.digest,
            servers=tuple((server.name, server.address) for server in _servers_of_second(control.hosts)),
            tenant=control.share.tenant,
            weight=control.share.weight,
            images=len(control.images),
            images_of=images_of[place],
            modes=control.modes,
            image_scales=control.image_scales,
            latent_scaling=control.latent_scaling,
        )
        for place, control in enumerate(controls)
    )
    images = {
        f"{place}.{index}": image
        for place, control in enumerate(controls)
        if images_of[place] is None
        for index, image in enumerate(control.images)
    }
    return OffloadedPart(header=_CONTROLS.dump_json(messages), tensors=images)


def _servers_of_second(hosts: ControlHosts) -> list[ControlServer]:
    """Return the servers for the rows that the second worker computes, best first."""
    return sorted(hosts.servers[:_MAX_SERVERS], key=lambda server: server.name != hosts.pair_server)


def read_controls(part: OffloadedPart, halves: Mapping[Half, Embeds]) -> tuple[ControlInput, ...]:
    """Return the controls in a message.

    Args:
        halves: Prompt embeddings of the job's conditional and unconditional rows.
    """
    messages = _CONTROLS.validate_json(part.header)
    return tuple(
        _control(
            message,
            [
                part.tensors.get(f"{place if message.images_of is None else message.images_of}.{index}")
                for index in range(message.images)
            ],
            halves,
        )
        for place, message in enumerate(messages)
    )


def _control(message: _Control, tensors: Sequence[Tensor | None], halves: Mapping[Half, Embeds]) -> ControlInput:
    images = tuple(check_pixels_or_latent(message.name, image, message.latent_scaling) for image in tensors)
    if not set(message.halves) <= set(halves):
        raise ValueError(f"ControlNet {message.name} controls a half of guidance whose conditions are missing")
    servers = tuple(ControlServer(name=name, address=address) for name, address in message.servers)
    return ControlInput(
        name=message.name,
        images=images,
        modes=message.modes,
        image_scales=message.image_scales,
        height=message.height,
        width=message.width,
        halves={half: halves[half] for half in message.halves},
        scale=message.scale,
        guess_mode=message.guess_mode,
        latent_scaling=message.latent_scaling,
        hosts=ControlHosts(digest=message.digest, servers=servers),
        share=Share(tenant=message.tenant, weight=message.weight),
    )
