"""`bottega cache profile`: from which similarity a cached latent is good enough, measured with real pictures."""

from __future__ import annotations

from pathlib import Path

import click
from google.protobuf import json_format

from bottega.client.addons.cache.profiling import (
    MOST_DRAWS,
    MOST_PAIRS,
    CacheMeasurement,
    MeasuredCache,
    estimate_drawing,
)
from bottega.client.addons.cache.prompt_pairs import (
    EMBEDDED_MODEL,
    PromptPair,
    miniature_pairs,
    pairs_of_file,
    thin_out,
)
from bottega.client.addons.cache.thresholds import ALPHAS, skip_profile, use_of
from bottega.client.cli.cache.profiles import print_profiles
from bottega.client.cli.cache.prompt_file import read_prompt_file
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import confirm, duration_text, fail, is_interactive, note, say
from bottega.client.files import write_whole
from bottega.client.sdk.clients import Client
from bottega.planning.skip_profile import LEAST_SAMPLES, SHARE
from bottega.v1.cache_pb2 import CacheProfile

_MODEL = "the model"
_EVERY = 10
_PAIRS, _DRAWS = click.IntRange(LEAST_SAMPLES, MOST_PAIRS), click.IntRange(1, MOST_DRAWS)


@click.command("profile")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a prompt on each line, as people sent them: each makes a pair with the one before, unless an empty "
    "line is between. The embedded model needs none.",
)
@click.option("--pairs", "most", type=_PAIRS, default=200, show_default=True, help="At most.")
@click.option("--draws", type=_DRAWS, default=2, show_default=True, help="Of each pair, each with other seeds.")
@click.option(
    "--clip",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a Hugging Face CLIP model that scores the pictures. The embedded model has a scorer of its own.",
)
@click.option("--steps", type=click.IntRange(4, 200), help="Denoising steps of each picture (default: the model's).")
@click.option("--model", help="To measure; default: the only one that is served.")
@click.option(
    "--samples",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File in which what was measured is kept as it comes; with it again, the command goes on where it stopped.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write the profile to as well.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_option
@fleet_option
def command(
    *,
    prompts: Path | None,
    most: int,
    draws: int,
    clip: Path | None,
    steps: int | None,
    model: str | None,
    samples: Path | None,
    output: Path | None,
    yes: bool,
    address: str,
) -> None:
    """Measure from which similarity on a cached latent is good enough.

    Draws both prompts of each pair from noise, and the second one also from the latents of the first. From the least
    similarity at which 95 % of the pairs keep their quality (above .9 of it under --fidelity balanced, .8 under fast)
    latents are reused, by the share of the steps that they stand for and by the length of the prompt. The caches of the
    suite keep that as the model's profile, instead of an earlier one. Before it draws, the command says how many
    pictures it needs and about how long they take, and asks.
    """
    with connect(address) as client:
        pairs = thin_out(pairs_of_file(read_prompt_file(prompts)), most) if prompts else ()
        wanted = CacheMeasurement(
            pairs=pairs or _miniature(client, model, most, clip),
            clip=clip,
            draws=draws,
            num_inference_steps=steps,
            model=model,
            samples=samples,
        )
        _announce(wanted, client)
        if not yes:
            if not is_interactive():
                fail("nobody can be asked here whether to draw all that", "Say so with --yes.", status=2)
            confirm("Draw them?")
        measured = client.profile_cache(wanted, on_pair=_tell)
    if output is not None:
        _write(output, measured.profile)
    _report(measured, model or _MODEL)


def _announce(wanted: CacheMeasurement, client: Client) -> None:
    drawing = estimate_drawing(wanted, client.fleet())
    again = " at most" if wanted.samples else ""
    how_long = f", about {duration_text(drawing.seconds)}" if drawing.seconds is not None else ""
    note(f"{len(set(wanted.pairs))} pairs of prompts:{again} {drawing.pictures} pictures to draw{how_long}")


def _miniature(client: Client, model: str | None, most: int, clip: Path | None) -> list[PromptPair]:
    """Pairs of the embedded model's grammar, where it is what is measured."""
    served = [one.name for one in client.models() if model in (None, one.name)]
    if served != [EMBEDDED_MODEL]:
        told = "--prompts FILE" if clip else "--prompts FILE and --clip FOLDER"
        raise click.UsageError(f"only the embedded model is measured without: bottega cache profile {told}")
    return miniature_pairs(most)


def _write(output: Path, profile: CacheProfile) -> None:
    text = json_format.MessageToJson(profile, ensure_ascii=False) + "\n"
    try:
        write_whole(output, text.encode())
    except OSError as error:
        note(f"{output} cannot be written: {error.strerror}; the caches have the profile all the same")


def _tell(done: int, pairs: int) -> None:
    if done % _EVERY == 0 or done == pairs:
        note(f"  {done} of {pairs} pairs")


def _report(measured: MeasuredCache, name: str) -> None:
    if measured.unrecorded:
        note(f"{measured.unrecorded} pairs are missing: their pictures were not recorded.")
    if any(each.thresholds for each in (*measured.profile.balanced, *measured.profile.fast)):
        print_profiles([measured.profile], {measured.profile.model_hash: name})
    for fidelity, alpha in ALPHAS.items():
        _report_use(fidelity, alpha, measured)


def _report_use(fidelity: str, alpha: float, measured: MeasuredCache) -> None:
    use = use_of(skip_profile(measured.samples, alpha), measured.samples)
    starting, saved = sum(use.shares.values()), sum(fraction * share for fraction, share in use.shares.items())
    if not starting:
        say(f"{fidelity}: nothing is reused; no similarity keeps {alpha:g} of the quality in {SHARE:.0%} of the pairs.")
        return
    say(
        f"{fidelity}: of these pairs {starting:.0%} would start from a latent and save {saved:.0%} of all steps; "
        f"mean quality {use.cached:.3f}, from noise {use.uncached:.3f}"
    )
