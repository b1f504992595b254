"""ControlNet servers, as people meet them, and what the doctor says of what they host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bottega import kinds
from bottega.client.addons.addon import ClientAddOn, LeftOutThing
from bottega.client.addons.controlnets.hosting import controlnets_of
from bottega.client.types.checks import CheckResult, ok, warn
from bottega.v1.fleet_pb2 import ListMembersResponse

# ControlNets that a line has room for.
_MOST_NAMES = 8


def _check_fleet(fleet: ListMembersResponse) -> Iterator[CheckResult]:
    nets = controlnets_of(fleet)
    if servers := sum(member.registration.kind == kinds.CONTROLNET for member in fleet.members):
        names = sorted({net.name for net in nets})
        listed = ", ".join(names[:_MOST_NAMES]) or "no ControlNet"
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield ok(f"{servers} ControlNet server{'' if servers == 1 else 's'} joined, with {listed}{more}")
    for name in sorted({net.name for net in nets if not net.models}):
        yield warn(f"no model that is served can be drawn with ControlNet {name}", f"bottega controlnets where {name}")
    versions = Counter((net.name, net.base) for net in nets)
    for name in sorted({name for (name, _), count in versions.items() if count > 1}):
        yield warn(
            f"ControlNet {name} is served in more than one version", f"Keep one: bottega controlnets where {name}"
        )


def _misfits(fleet: ListMembersResponse) -> Iterator[LeftOutThing]:
    bases = sorted({model.base for member in fleet.members for model in member.registration.models if model.base})
    for net in controlnets_of(fleet):
        if not net.models:
            reason = f"it fits no model that is served: its shapes are {net.base}, theirs {', '.join(bases)}"
            yield LeftOutThing(service=net.hosts[0].name, name=net.name, reason=reason)


ADD_ON = ClientAddOn(
    kind=kinds.CONTROLNET,
    title="ControlNet server",
    hosted_title="ControlNets",
    check_fleet=_check_fleet,
    misfits=_misfits,
)
