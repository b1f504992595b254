"""`bottega cache profile` and `bottega cache warm`, which draw the prompts of a file."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import click
from google.protobuf import json_format

from bottega.client.addons.cache.cli import print_profiles
from bottega.client.addons.cache.profiling import (
    MOST_DRAWS,
    MOST_PAIRS,
    CacheMeasurement,
    MeasuredCache,
    estimate_drawing,
)
from bottega.client.addons.cache.samples import (
    ALPHAS,
    EMBEDDED_MODEL,
    PromptPair,
    miniature_pairs,
    pairs_of_file,
    skip_profile,
    thin_out,
    use_of,
)
from bottega.client.cli.addons import generation_parts
from bottega.client.cli.generation_options import generation_options
from bottega.client.cli.options import address_option, connect, fleet_option
from bottega.client.cli.terminal import (
    confirm,
    duration_text,
    fail,
    is_interactive,
    new_console,
    note,
    say,
    text_column,
)
from bottega.client.files import write_whole
from bottega.client.sdk.clients import Client
from bottega.client.types.options import GenerationOptions
from bottega.errors import InvalidRequest, NotFinite
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
def profile(
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
            pairs=pairs or _miniature_pairs(client, model, most, clip),
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
        _write_profile(output, measured.profile)
    _report(measured, model or _MODEL)


def _announce(wanted: CacheMeasurement, client: Client) -> None:
    drawing = estimate_drawing(wanted, client.fleet())
    again = " at most" if wanted.samples else ""
    how_long = f", about {duration_text(drawing.seconds)}" if drawing.seconds is not None else ""
    note(f"{len(set(wanted.pairs))} pairs of prompts:{again} {drawing.pictures} pictures to draw{how_long}")


def _miniature_pairs(client: Client, model: str | None, most: int, clip: Path | None) -> list[PromptPair]:
    """Pairs of the embedded model's grammar, where it is what is measured."""
    served = [one.name for one in client.models() if model in (None, one.name)]
    if served != [EMBEDDED_MODEL]:
        told = "--prompts FILE" if clip else "--prompts FILE and --clip FOLDER"
        raise click.UsageError(f"only the embedded model is measured without: bottega cache profile {told}")
    return miniature_pairs(most)


def _write_profile(output: Path, profile: CacheProfile) -> None:
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


# Of a file: half a day of the smallest model.
_MOST_PROMPTS = 100_000
# Plain lines go to logs: ten a file say enough.
_LINES = 10
_PROMPT = "spec.prompt"


class _Outcome(StrEnum):
    DRAWN = "drawn"
    THERE = "drawn before"
    FAILED = "failed"


@click.command("warm")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--at-once", type=click.IntRange(1, 64), default=4, show_default=True, help="Requests under way.")
@generation_options
@address_option
def warm(*, file: Path, at_once: int, address: str, **given: Any) -> None:
    """Draw each prompt of FILE, one a line, so that requests like them may start from its latents.

    The other options are those of `bottega generate`: requests start only from latents that were drawn with the same
    parameters as their own. Without --seed it is 0, so that to do it again costs nothing where the gateway still has
    the results: what was interrupted is begun anew. The first prompt is drawn twice, because a cache records a kind of
    request from its second one on.
    """
    if given["approximate_cache"] is False or given["cache_entry"]:
        raise click.UsageError("with --no-cache or --cache-entry nothing would be recorded; leave it out")
    options = _options(given)
    prompts = _read(file)
    with connect(address) as client, _showing(len(prompts)) as show:
        counts = _draw_all(client, prompts, options, at_once=at_once, show=show)
    listed = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _Outcome if counts[outcome])
    say(f"{len(prompts)} prompt{'' if len(prompts) == 1 else 's'}: {listed}")
    sys.exit(1 if counts[_Outcome.FAILED] else 0)


def _options(given: dict[str, Any]) -> GenerationOptions:
    options: GenerationOptions = {}
    for part in generation_parts():
        part.merge(options, given, None)
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    return cast("GenerationOptions", {"seed": 0, "identical_results": True} | options | chosen)


def _read(file: Path) -> list[str]:
    """Its prompts, each once, in their order. Ends the command where there are none."""
    lines = read_prompt_file(file).splitlines()
    prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not prompts or len(prompts) > _MOST_PROMPTS:
        said = f"at most {_MOST_PROMPTS} prompts are drawn" if prompts else "it is empty"
        fail(f"{file} cannot be drawn: {said}", status=2)
    return prompts


def _draw_all(
    client: Client,
    prompts: Sequence[str],
    options: GenerationOptions,
    *,
    at_once: int,
    show: Callable[[int], None],
) -> Counter[_Outcome]:
    """Raises what is no fault of a single prompt; what has not begun then is not drawn."""
    counts = Counter([_draw_first(client, prompts[0], options)])
    show(1)
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for outcome in _in_turn(pool, lambda prompt: _draw(client, prompt, options), prompts[1:], at_once):
                counts[outcome] += 1
                show(counts.total())
        except BaseException:
            client.close()  # cancels what is being drawn, so that nobody waits for it
            raise
    return counts


def _in_turn(
    pool: ThreadPoolExecutor, draw: Callable[[str], _Outcome], prompts: Sequence[str], at_once: int
) -> Iterator[_Outcome]:
    """Outcomes as they come; no more than `at_once` have begun."""
    waiting = iter(prompts)
    running: set[Future[_Outcome]] = {pool.submit(draw, prompt) for prompt in itertools.islice(waiting, at_once)}
    while running:
        done = next(as_completed(running))
        running.remove(done)
        yield done.result()
        running |= {pool.submit(draw, prompt) for prompt in itertools.islice(waiting, 1)}


def _draw_first(client: Client, prompt: str, options: GenerationOptions) -> _Outcome:
    """The request that makes its kind known is not recorded, so a new one is drawn once more."""
    outcome = _draw(client, prompt, options)
    if outcome is _Outcome.DRAWN:
        _draw(client, prompt, options | {"identical_results": False})
    return outcome


def _draw(client: Client, prompt: str, options: GenerationOptions) -> _Outcome:
    try:
        provenance = client.generate(prompt, **options).provenance
    except (InvalidRequest, NotFinite) as error:
        if any(item.field != _PROMPT for item in error.violations):
            raise  # so it is for all of them
        note(f"{prompt}: {'; '.join(item.description for item in error.violations) or error.message}")
        return _Outcome.FAILED
    return _Outcome.THERE if provenance.identical_job else _Outcome.DRAWN


@contextmanager
def _showing(total: int) -> Iterator[Callable[[int], None]]:
    """Gives the function that shows how many are done: a bar on a terminal, some lines elsewhere."""
    console = new_console(stderr=True)
    if not console.is_terminal:
        yield _TenthLines(total).show
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), BarColumn(bar_width=32), text_column("done"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total, done=f"0/{total}")
        yield lambda done: bar.update(task, completed=done, done=f"{done}/{total}")


class _TenthLines:
    """A line for each tenth."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._said = 0

    def show(self, done: int) -> None:
        tenth = done * _LINES // self._total
        if tenth > self._said:
            self._said = tenth
            note(f"{done} of {self._total} prompts")


MOST_BYTES = 64 << 20


def read_prompt_file(file: Path) -> str:
    """Its text, of MOST_BYTES at most. Ends the command where there is none."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}", status=2)
    except UnicodeDecodeError:
        fail(f"{file} is no text in UTF-8", "Give a file with a prompt a line.", status=2)
    if len(data) > MOST_BYTES:
        fail(f"{file} has more than {MOST_BYTES >> 20} MiB", status=2)
    return text
