"""Measures how similar a ControlNet's residuals are from step to step, with pictures that the running suite draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from bottega.client.addons.controlnets.types import MeasuredProfile, ProfileCase, ResidualProfile
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.types.control import ControlNet
from bottega.client.types.messages import as_list
from bottega.client.types.picture import Picture
from bottega.errors import InternalError, InvalidRequest, NoControlNet, Violation


async def measure_residuals(
    client: AsyncGatewayClient,
    name: str,
    cases: Iterable[ProfileCase],
    *,
    num_inference_steps: int | None,
    model: str | None,
    on_picture: Callable[[float], None],
) -> MeasuredProfile:
    """Draw one picture after the other, and measure how similar the residuals of its steps are.

    Args:
        on_picture: Called with the measurement of each picture.

    Raises:
        InvalidRequest: There are no cases, or a picture has fewer than two steps.
        NoControlNet: The servers do not all host the same ControlNet.
        BottegaError: Drawing failed.
    """
    found: list[tuple[float, Picture]] = []
    for seed, case in enumerate(_checked(cases)):
        net = ControlNet(name, case.image, measure_similarity=True)
        picture = await client.generate(
            case.prompt, seed=seed, model=model, num_inference_steps=num_inference_steps, controlnets=[net]
        )
        if len(picture.provenance.controlnets) != 1:
            raise InternalError(f"the picture's provenance has no entry for {name} by itself")
        use = picture.provenance.controlnets[0]
        if use.similarity is None:
            raise _broken("num_inference_steps", "two steps are needed, to compare them")
        found.append((use.similarity, picture))
        on_picture(use.similarity)
    if not found:
        raise _broken("cases", "at least one is needed")
    versions = {(picture.provenance.controlnets[0].digest, picture.provenance.model_hash) for _, picture in found}
    if len(versions) > 1:
        raise NoControlNet(f"{name} or the model was replaced between two pictures: measure again")
    picture = found[0][1]
    pictures = tuple(similarity for similarity, _ in found)
    profile = ResidualProfile(
        model_hash=picture.provenance.model_hash,
        num_inference_steps=picture.provenance.parameters.num_inference_steps,
        similarity=min(pictures),
    )
    return MeasuredProfile(digest=picture.provenance.controlnets[0].digest, profile=profile, pictures=pictures)


def _checked(cases: object) -> Iterator[ProfileCase]:
    """Raises InvalidRequest for what is none of them."""
    for case in as_list(cases, name="cases", what="ProfileCase"):
        if not isinstance(case, ProfileCase):
            raise _broken("cases", f"must be a list of ProfileCase; got one {type(case).__name__}")
        yield case


def _broken(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {rule}", violations=[Violation(field=field, description=rule)])
