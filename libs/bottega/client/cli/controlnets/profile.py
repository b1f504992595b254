"""`bottega controlnets profile`: whether a ControlNet's residuals may be one step old, measured with real pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from bottega.client.addons.controlnets.types import MeasuredProfile, ProfileCase
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import note, say
from bottega.client.sdk.clients import Client
from bottega.planning import LEAST_SIMILARITY

_MINIATURE = "miniature"
# Of the embedded model's own scenes; measured, four differ in the fourth decimal.
_SCENES = 4


@click.command("profile")
@click.argument("name")
@click.argument("images", nargs=-1, metavar="[IMAGE]...", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt", default="", help="What is drawn with each IMAGE; default: nothing in particular.")
@click.option("--steps", type=click.IntRange(2, 200), help="Of each picture; default: the model's. Take your fewest.")
@click.option("--model", help="To measure with; default: the only one that is served.")
@address_option
@fleet_option
def command(
    *, name: str, images: Sequence[Path], prompt: str, steps: int | None, model: str | None, address: str
) -> None:
    """Measure how similar the residuals of the ControlNet NAME are from step to step.

    Draws a picture with each control IMAGE; a handful of the kind that you use is enough. The embedded model's own
    ControlNets need none. The servers that host NAME remember the worst picture's cosine. From .99 on, requests that
    allow approximations go on with the residuals of the step before, where they would wait for their own.
    """
    with connect(address) as client:
        cases = [ProfileCase(prompt=prompt, image=image) for image in images] or [*_scenes(client, name, model)]
        note(f"drawing {len(cases)} pictures ...")
        measured = client.profile_controlnet(
            name, cases, num_inference_steps=steps, model=model, on_picture=lambda found: note(f"  {found:.4f}")
        )
    _report(name, measured)


def _scenes(client: Client, name: str, model: str | None) -> Iterator[ProfileCase]:
    """Of the embedded model, for its own ControlNets."""
    import random

    from bottega.miniature.scenes import DRAWN, caption, held_out_scenes, random_layout

    served = [one.name for one in client.models() if model in (None, one.name)]
    if served != [_MINIATURE] or name not in DRAWN:
        raise click.UsageError(
            f"give control images such as {name} is used with: bottega controlnets profile {name} IMAGE..."
        )
    rng = random.Random(0)
    for scene in held_out_scenes(_SCENES, things=1):
        yield ProfileCase(prompt=caption(scene), image=DRAWN[name](random_layout(scene, rng)))


def _report(name: str, measured: MeasuredProfile) -> None:
    profile, servers = measured.profile, ", ".join(measured.servers)
    steps = profile.num_inference_steps
    say(f"{name}: {profile.similarity:.4f} from step to step, of {steps}; {servers} will remember it")
    if profile.similarity >= LEAST_SIMILARITY:
        note(f"Requests of {steps} steps and more that allow approximations (no seed, or --fidelity balanced) may use")
        note("residuals one step old, where they would have to wait for them. Their provenance says when they did.")
    else:
        note(f"Below {LEAST_SIMILARITY:g}: every step still waits for its own residuals.")
