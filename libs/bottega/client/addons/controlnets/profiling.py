"""Measures how similar a ControlNet's residuals are from step to step, and has its servers remember it.

Draws pictures as everybody does, on whatever workers and servers there are. Knows no gateway's calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bottega.client.addons.controlnets.hosting import ResidualProfile, controlnet_server
from bottega.client.types.control import ControlNet, ImageSource
from bottega.client.types.messages import filled, items_of
from bottega.client.types.picture import Picture
from bottega.errors import ControlNetNotFound, InternalError, InvalidRequest, ModelNotFound, NoControlNet, Violation
from bottega.v1 import controlnet_pb2, fleet_pb2
from bottega.v1.generation_pb2 import ControlNetUse
from bottega.v1.image_pb2 import Model

# A server writes a file.
_NOTE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCase:
    """One picture to measure with: what to draw, and the control image."""

    prompt: str
    image: ImageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """What was measured, of the ControlNet with that hash. pictures: of each, the mean cosine of its steps.

    servers: those that have noted it.
    """

    digest: str
    profile: ResidualProfile
    pictures: tuple[float, ...]
    servers: tuple[str, ...] = ()


class GenerateCall(Protocol):
    """AsyncClient.generate."""

    def __call__(
        self,
        prompt: str,
        *,
        seed: int,
        model: str | None,
        num_inference_steps: int | None,
        controlnets: Sequence[ControlNet],
    ) -> Awaitable[Picture]: ...


async def measure(
    draw: GenerateCall,
    name: str,
    cases: Iterable[ProfileCase],
    *,
    num_inference_steps: int | None,
    model: str | None,
    on_picture: Callable[[float], None],
) -> MeasuredProfile:
    """One picture after the other. on_picture: told what was measured with each.

    Raises InvalidRequest without cases, or where a picture has no two steps; NoControlNet where the servers do not all
    host the same; and what drawing raises.
    """
    found: list[tuple[ControlNetUse, Picture]] = []
    for seed, case in enumerate(_checked(cases)):
        net = ControlNet(name, case.image, measure_similarity=True)
        picture = await draw(
            case.prompt, seed=seed, model=model, num_inference_steps=num_inference_steps, controlnets=[net]
        )
        if len(picture.provenance.controlnets) != 1:
            raise InternalError(f"the picture's provenance does not say what became of {name} alone")
        use = picture.provenance.controlnets[0]
        if not use.HasField("similarity"):
            raise _broken("num_inference_steps", "two steps are needed, to compare them")
        found.append((use, picture))
        on_picture(use.similarity)
    if not found:
        raise _broken("cases", "at least one is needed")
    if len({(use.digest, picture.provenance.model_hash) for use, picture in found}) > 1:
        raise NoControlNet(f"{name} or the model was replaced between two pictures: measure again")
    use, picture = found[0]
    pictures = tuple(use.similarity for use, _ in found)
    profile = ResidualProfile(
        model_hash=picture.provenance.model_hash,
        num_inference_steps=picture.provenance.parameters.num_inference_steps,
        similarity=min(pictures),
    )
    return MeasuredProfile(digest=use.digest, profile=profile, pictures=pictures)


async def note(
    fleet: fleet_pb2.ListMembersResponse, name: str, profile: ResidualProfile, *, digest: str | None
) -> tuple[str, ...]:
    """Has every ControlNet server that hosts the ControlNet remember its profile; says which those are.

    digest: of the version that was measured; None is whatever each of them has under that name. Raises
    ControlNetNotFound where no server hosts it, and what a server refuses it with.
    """
    hosts = [
        (member.registration, net.digest)
        for member in fleet.members
        if member.registration.kind == fleet_pb2.SERVICE_KIND_CONTROLNET
        for net in member.load.controlnets
        if net.name == name and digest in (None, net.digest)
    ]
    if not hosts:
        raise ControlNetNotFound(f"no ControlNet server hosts {name}: a profile is of use for servers only")
    noted = filled(
        controlnet_pb2.ResidualProfile(model_hash=profile.model_hash),
        num_inference_steps=profile.num_inference_steps,
        similarity=profile.similarity,
    )
    for server, hosted in hosts:
        request = controlnet_pb2.SetProfileRequest(name=name, digest=hosted, profile=noted)
        async with controlnet_server(server) as stub:
            await stub.SetProfile(request, timeout=_NOTE_S)
    return tuple(server.name for server, _ in hosts)


def hash_of(models: Sequence[Model], name: str | None) -> str:
    """model_hash of a served model; None is the only one. Raises ModelNotFound."""
    found = [model for model in models if name in (None, model.name)]
    if len(found) != 1:
        served = ", ".join(model.name for model in models) or "none"
        raise ModelNotFound(f"say which model; served: {served}", metadata={"served": served})
    return found[0].model_hash


def noted_by(measured: MeasuredProfile, servers: tuple[str, ...]) -> MeasuredProfile:
    """With the servers that have noted it."""
    return replace(measured, servers=servers)


def _checked(cases: object) -> Iterator[ProfileCase]:
    """Raises InvalidRequest for what is none of them."""
    for case in items_of(cases, name="cases", what="ProfileCase"):
        if not isinstance(case, ProfileCase):
            raise _broken("cases", f"must be a list of ProfileCase; got one {type(case).__name__}")
        yield case


def _broken(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {rule}", violations=[Violation(field=field, description=rule)])
