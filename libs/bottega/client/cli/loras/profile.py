"""`bottega loras profile`: how late a LoRA may come into a picture, measured with real pictures."""

from __future__ import annotations

import click

from bottega.client.addons.loras.profiling import LEAST_PROMPTS
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import note, say
from bottega.client.sdk.clients import Client
from bottega.v1.lora_pb2 import StoredLora

_MINIATURE = "miniature"


@click.command("profile")
@click.argument("name")
@click.option("--prompt", "prompts", multiple=True, help="What is drawn; at least four. The embedded model needs none.")
@click.option(
    "--steps",
    multiple=True,
    type=click.IntRange(1, 200),
    help="Of each picture; repeatable. Default: the model's. Other numbers go by the nearest one.",
)
@click.option("--scale", type=float, default=1.0, show_default=True, help="Take the strongest that you draw with.")
@click.option("--model", help="To measure with; default: the one that NAME was made for.")
@address_option
@fleet_option
def command(
    *, name: str, prompts: tuple[str, ...], steps: tuple[int, ...], scale: float, model: str | None, address: str
) -> None:
    """Measure how late the LoRA NAME may come into a picture.

    Draws two pictures of every prompt, with NAME and without: give prompts of the kind that you use it with, its
    trigger words included. The store remembers the step after which the worst picture leads elsewhere (a cosine of the
    latents below .99). Requests that allow approximations begin at once and make so many steps without NAME, at most,
    where it is not at the worker yet.
    """
    with connect(address) as client:
        drawn = prompts or _captions(client, client.lora(name))
        counts: tuple[int | None, ...] = tuple(dict.fromkeys(steps)) or (None,)
        for count in counts:
            note(f"drawing {len(drawn)} prompts with two seeds, with {name} and without ...")
            measured = client.profile_lora(
                name,
                drawn,
                scale=scale,
                num_inference_steps=count,
                model=model,
                on_prompt=lambda step: note(f"  step {step}"),
            )
            say(f"{name}: may be late until step {measured.max_step} of {measured.num_inference_steps}")
            if not measured.max_step:
                note("It changes the picture from the first step on, so every request waits until it is loaded.")


def _captions(client: Client, lora: StoredLora) -> tuple[str, ...]:
    """Of scenes of the embedded model, where the LoRA is for that one."""
    from bottega.miniature.scenes import caption, held_out_scenes

    if lora.base != _MINIATURE or _MINIATURE not in {model.name for model in client.models()}:
        raise click.UsageError(f"give at least {LEAST_PROMPTS} prompts: bottega loras profile {lora.name} --prompt ...")
    words = "".join(f", {word}" for word in lora.trigger_words)
    return tuple(caption(scene) + words for scene in held_out_scenes(LEAST_PROMPTS, things=1))
