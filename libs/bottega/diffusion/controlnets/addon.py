"""The ControlNet sessions of one job: begun when its prompt has been encoded, ended with it.

Knows the job's spec and whoever holds sessions; knows no forwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bottega.diffusion.controlnets.provider import ControlHosts, ControlInput, ControlNets, ControlRecord
from bottega.diffusion.engine.encode import Conditions
from bottega.diffusion.engine.events import ControlUse
from bottega.diffusion.engine.request import ActiveControl
from bottega.diffusion.rows import Half
from bottega.diffusion.spec import ControlSpec, ResolvedSpec
from bottega.errors import InternalError, Unavailable


@dataclass(slots=True, kw_only=True, eq=False)
class ControlSessions:
    """Those of one job; without a provider there are none.

    active: by session, what the job's requests are told of it. begun: what it began with. places: of its ControlNet in
    the spec.
    """

    provider: ControlNets | None = None
    active: tuple[ActiveControl, ...] = ()
    begun: tuple[ControlInput, ...] = ()
    places: tuple[int, ...] = ()
    records: tuple[ControlRecord, ...] | None = None

    @property
    def handles(self) -> list[Hashable]:
        """Of the provider."""
        return [control.handle for control in self.active]

    @property
    def opened(self) -> bool:
        """Whether every session can be asked. Raises the BottegaError that one of them failed with."""
        return self.provider is None or self.records is not None or self.provider.opened(self.handles)

    def needed(self, step: int) -> bool:
        """Whether any of them is active at this step."""
        return any(control.first <= step < control.last for control in self.active)

    def over(self, step: int) -> bool:
        """Whether none of them is needed at this step or later."""
        return all(control.last <= step for control in self.active)

    def close(self) -> None:
        """Ends them. Harmless the second time."""
        if self.provider is not None and self.records is None:
            self.records = self.provider.close(self.handles)

    def uses(self, spec: ResolvedSpec) -> tuple[ControlUse, ...]:
        """What the job's ControlNets came to, in the spec's order; those that took no part included."""
        records = dict(zip(self.places, self.records or (), strict=False))
        return tuple(
            _use(spec, control, records.get(place, ControlRecord())) for place, control in enumerate(spec.controlnets)
        )


def open_controls(
    provider: ControlNets | None,
    spec: ResolvedSpec,
    images: Sequence[Tensor],
    conditions: Conditions,
    *,
    from_step: int,
    hosts: Sequence[ControlHosts] = (),
    may_be_stale: bool = False,
) -> ControlSessions:
    """Begins the sessions that the steps from `from_step` on need.

    images: one for each of the spec's ControlNets. hosts: for each, where it is beside here; none where all are here.
    Raises BottegaError where one can never be opened.
    """
    hosts = hosts or [ControlHosts() for _ in images]
    if len(images) != len(spec.controlnets):
        raise InternalError(f"{len(images)} control images came for {len(spec.controlnets)} ControlNets")
    needed = [
        (place, control) for place, control in enumerate(spec.controlnets) if spec.control_steps(control)[1] > from_step
    ]
    if not needed:
        return ControlSessions()
    if provider is None:
        raise Unavailable("this worker has no ControlNets")
    controls = [
        replace(
            _control(spec, control, images[place], conditions),
            hosts=hosts[place],
            may_be_stale=may_be_stale and not control.measured,
        )
        for place, control in needed
    ]
    handles = provider.open(controls)
    active = [
        ActiveControl(
            handle=handle,
            first=spec.control_steps(control)[0],
            last=spec.control_steps(control)[1],
            halves=frozenset(begun.halves),
        )
        for handle, begun, (_, control) in zip(handles, controls, needed, strict=True)
    ]
    places = tuple(place for place, _ in needed)
    return ControlSessions(provider=provider, active=tuple(active), begun=tuple(controls), places=places)


def _control(spec: ResolvedSpec, control: ControlSpec, image: Tensor, conditions: Conditions) -> ControlInput:
    halves = {Half.CONDITIONAL: conditions.conditional}
    if conditions.unconditional is not None and not control.guess_mode:
        halves = {Half.UNCONDITIONAL: conditions.unconditional, **halves}
    return ControlInput(
        name=control.name,
        image=image,
        height=spec.height,
        width=spec.width,
        halves=halves,
        scale=control.controlnet_conditioning_scale,
        guess_mode=control.guess_mode,
        measured=control.measured,
    )


def _use(spec: ResolvedSpec, control: ControlSpec, record: ControlRecord) -> ControlUse:
    begin, end = spec.control_steps(control)
    return ControlUse(
        name=control.name,
        image_digest=control.image_digest,
        begin_step=begin,
        end_step=end,
        scale=control.controlnet_conditioning_scale,
        digest=control.digest,
        waited_s=record.waited_s,
        stale_steps=record.stale_steps,
        pipelined=record.pipelined,
        servers=record.servers,
        similarity=record.similarity,
    )
