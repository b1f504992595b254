"""The ControlNets of a job whose rows the other worker of a pair computes: what it is told, and its sessions with them.

What comes is checked here; what breaks a rule raises ValueError.
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

# The best ones: a follower that finds none of these refuses, and the leader computes the rows itself.
_MOST_SERVERS = 8
_MOST_CONTROLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Control:
    """A ControlNet of a job, without its image and conditions. See ControlInput.

    Whether its residuals may be stale is not said: a follower always waits for its own, which is exact.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    height: Annotated[int, Field(ge=1, le=1 << 14)]
    width: Annotated[int, Field(ge=1, le=1 << 14)]
    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    scale: Annotated[float, Field(allow_inf_nan=False)]
    guess_mode: bool
    digest: Annotated[str, Field(max_length=128)]
    servers: Annotated[tuple[tuple[str, str], ...], Field(max_length=_MOST_SERVERS)]


_CONTROLS = TypeAdapter(Annotated[tuple[_Control, ...], Field(min_length=1, max_length=_MOST_CONTROLS)])


class RemoteControls:
    """A RemoteAddOn: this engine's sessions with the ControlNets of a job of the other worker."""

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
    """What the other worker is told of these."""
    said = tuple(
        _Control(
            name=control.name,
            height=control.height,
            width=control.width,
            halves=tuple(control.halves),
            scale=control.scale,
            guess_mode=control.guess_mode,
            digest=control.hosts.digest,
            servers=tuple((server.name, server.address) for server in control.hosts.servers[:_MOST_SERVERS]),
        )
        for control in controls
    )
    images = {str(place): control.image for place, control in enumerate(controls)}
    return OffloadedPart(header=_CONTROLS.dump_json(said), tensors=images)


def read_controls(part: OffloadedPart, halves: Mapping[Half, Embeds]) -> tuple[ControlInput, ...]:
    """What was told. halves: the job's conditions."""
    said = _CONTROLS.validate_json(part.header)
    return tuple(_control(each, part.tensors.get(str(place)), halves) for place, each in enumerate(said))


def _control(said: _Control, image: Tensor | None, halves: Mapping[Half, Embeds]) -> ControlInput:
    if image is None or image.dtype != torch.uint8 or image.dim() != 3 or image.shape[2] != 3:
        raise ValueError(f"the image of ControlNet {said.name} is no uint8 [height, width, 3]")
    if not set(said.halves) <= set(halves):
        raise ValueError(f"ControlNet {said.name} controls a half whose conditions are not there")
    servers = tuple(ControlServer(name=name, address=address) for name, address in said.servers)
    return ControlInput(
        name=said.name,
        image=image,
        height=said.height,
        width=said.width,
        halves={half: halves[half] for half in said.halves},
        scale=said.scale,
        guess_mode=said.guess_mode,
        hosts=ControlHosts(digest=said.digest, servers=servers),
    )
