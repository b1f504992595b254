"""ControlNets of a job whose rows are computed by the other worker of a pair: the message, and the sessions there.

Messages are checked here, and raise ValueError if they break a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from bottega.diffusion.controlnets.provider import ControlHosts, ControlInput, ControlNetProvider, ControlServer
from bottega.diffusion.parallel.offload import OffloadedPart
from bottega.diffusion.rows import Embeds, Half, Row
from bottega.fair_order import Share

# The best servers. A follower that finds none of them refuses, and the leader computes the rows itself.
_MOST_SERVERS = 8
_MOST_CONTROLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Control:
    """A ControlNet of a job, without its image and conditions. See ControlInput.

    It does not say whether residuals may be stale: a follower always waits for its own, which is exact.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    height: Annotated[int, Field(ge=1, le=1 << 14)]
    width: Annotated[int, Field(ge=1, le=1 << 14)]
    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    scale: Annotated[float, Field(allow_inf_nan=False)]
    guess_mode: bool
    digest: Annotated[str, Field(max_length=128)]
    servers: Annotated[tuple[tuple[str, str], ...], Field(max_length=_MOST_SERVERS)]
    tenant: Annotated[str, Field(max_length=200)]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]


_CONTROLS = TypeAdapter(Annotated[tuple[_Control, ...], Field(min_length=1, max_length=_MOST_CONTROLS)])


class RemoteControls:
    """This engine's sessions with the ControlNets of a job of the other worker. A RemoteAddOn."""

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
    """Return the message about these controls for the other worker."""
    messages = tuple(
        _Control(
            name=control.name,
            height=control.height,
            width=control.width,
            halves=tuple(control.halves),
            scale=control.scale,
            guess_mode=control.guess_mode,
            digest=control.hosts.digest,
            servers=tuple((server.name, server.address) for server in control.hosts.servers[:_MOST_SERVERS]),
            tenant=control.share.tenant,
            weight=control.share.weight,
        )
        for control in controls
    )
    images = {str(place): control.image for place, control in enumerate(controls)}
    return OffloadedPart(header=_CONTROLS.dump_json(messages), tensors=images)


def read_controls(part: OffloadedPart, halves: Mapping[Half, Embeds]) -> tuple[ControlInput, ...]:
    """Return the controls of a message.

    Args:
        halves: The job's conditions.
    """
    messages = _CONTROLS.validate_json(part.header)
    return tuple(_control(message, part.tensors.get(str(place)), halves) for place, message in enumerate(messages))


def _control(message: _Control, image: Tensor | None, halves: Mapping[Half, Embeds]) -> ControlInput:
    if image is None or image.dtype != torch.uint8 or image.dim() != 3 or image.shape[2] != 3:
        raise ValueError(f"the image of ControlNet {message.name} is not uint8 [height, width, 3]")
    if not set(message.halves) <= set(halves):
        raise ValueError(f"ControlNet {message.name} controls a half whose conditions are not there")
    servers = tuple(ControlServer(name=name, address=address) for name, address in message.servers)
    return ControlInput(
        name=message.name,
        image=image,
        height=message.height,
        width=message.width,
        halves={half: halves[half] for half in message.halves},
        scale=message.scale,
        guess_mode=message.guess_mode,
        hosts=ControlHosts(digest=message.digest, servers=servers),
        share=Share(tenant=message.tenant, weight=message.weight),
    )
